"""Uses of pmoe.BoundedSteps with layers over bounded programs, each compared with training without a bound.

Both runs compute in float64, by the same function. The reference has plain layers on the engine, and a loop
that calls ``run`` and the optimizer. Ranks are processes over gloo. On one rank nothing is bounded.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.experts.marks import is_expert
from tests.gloo.kit import error_of
from tests.gloo.test_bounded_layers import BY_PROGRAMS
from tests.pool import GROUP_TIMEOUT_SECONDS, Pool, ranks
from tests.programs import CpuBackend, on_cpu
from tests.reference import differing

M, EXPERTS, TOP_K, TOKENS = 8, 8, 2, 16


class Model(nn.Module):
    """Two MoE layers with a dropout and a linear layer between them. Rows of the first hardly fit."""

    def __init__(self, slack: tuple[float, float] = (1.0, 4.0)) -> None:
        super().__init__()
        options: dict[str, Any] = {"pipeline": 2, "memory_reuse": "S4", "dtype": torch.float64}
        self.first = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, slack=slack[0], **options)
        self.dropout = nn.Dropout(0.1)
        self.linear = nn.Linear(M, M, dtype=torch.float64)
        self.second = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, slack=slack[1], **options)
        for layer in (self.first, self.second):
            with torch.no_grad():
                layer.gate.weight.copy_(8 * torch.eye(EXPERTS, M))  # column e of a token leads to expert e

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.dropout(self.first(x))
        return hidden + self.second(x + 0.01 * self.linear(hidden))


class Twice(Model):
    """The first layer is called twice in a pass, the second time with rows for other experts."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return super().forward(x) + self.first(x.roll(3, dims=1) + 0.01 * hidden)


class Taught(Model):
    """A pass also calls the first layer without autograd, as distillation does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.first(x)
        return super().forward(x) + target


class Frozen(Model):
    """Only the linear layer is trained, after the first MoE layer.

    off_on: the ranks that call the MoE layer without autograd, although the other ranks do not.
    """

    off_on: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and dist.get_rank() not in self.off_on):
            hidden = self.first(x)
        return self.linear(hidden)  # type: ignore[no-any-return]


def batch(rank: int, index: int, tokens: int = TOKENS, *, skewed: bool = False) -> Tensor:
    """(T, M): tokens for experts in turn; in a skewed batch for the first two experts."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    token = torch.arange(tokens)
    x = torch.rand(tokens, M, generator=generator, dtype=torch.float64)
    experts = 2 if skewed else EXPERTS
    x[token, (token + rank) % experts] += 3
    x[token, (token + rank + 1) % experts] += 2
    return x


class Training:
    """A training run, with or without a bound.

    values: what the run has computed beside the model's parameters and the optimizer's state.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        bounded: bool,
        *,
        model: Model | None = None,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.world = world
        self.bounded = bounded
        torch.manual_seed(5)
        self.model = model or Model()
        self.kind = kind
        self.options = {"lr": 0.02, "fused": True, **options}
        self.max_norm: float | None = None
        self.values: dict[str, Tensor] = {}
        self.repeated = 0
        self.begin(self.model)

    def begin(self, model: Model) -> None:
        """Makes a new optimizer for a model, and a new BoundedSteps."""
        self.model = model
        self.optimizer = self.kind(model.parameters(), **self.options)
        self.steps: Any = None
        if self.bounded:
            for layer in model.modules():
                if isinstance(layer, pmoe.MoELayer):
                    layer.switches = BY_PROGRAMS
            self.steps = pmoe.BoundedSteps(model, self.optimizer, self.run)

    def run(self, parts: list[Tensor]) -> Tensor:
        """Computes the gradients of all parts of a batch. Returns the loss."""
        self.optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x in parts:
            x.grad = None
            loss = self.model(x).square().sum() / 16 + 0.01 * self.model.first.l_aux
            loss.backward()
            total += loss.detach()
        for parameter in self.model.parameters():
            if not is_expert(parameter) and parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad)
        if self.max_norm is not None:
            pmoe.clip_grad_norm_(self.model, self.max_norm)
        return total

    def step(self, *parts: Tensor) -> None:
        if self.steps is not None:
            self.steps.step(list(parts))
        else:
            self.run(list(parts))
            self.optimizer.step()

    def finish(self) -> None:
        if self.steps is not None:
            self.steps.finish()
            self.repeated = self.steps.repeated

    def evaluate(self, name: str, x: Tensor) -> None:
        self.model.eval()
        with torch.no_grad():
            self.values[name] = self.model(x).clone()
        self.model.train()

    def make_steps(self, indices: range, overflowing: Container[int]) -> None:
        """Makes a step for each index. In the steps of some indices, rank 0 exceeds the bound."""
        for index in indices:
            self.step(self.batch(index, on=(0,) if index in overflowing else ()))

    def batch(self, index: int, tokens: int = TOKENS, *, on: tuple[int, ...] = ()) -> Tensor:
        """Returns this rank's batch. on: the ranks on which it is skewed."""
        return batch(self.rank, index, tokens, skewed=self.rank in on)

    def state(self) -> dict[str, Tensor]:
        self.finish()
        values = {name: value.clone() for name, value in self.model.state_dict().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            values |= {f"{index} {name}": value.double() for name, value in slots.items()}
        return {**values, **self.values, "random": torch.rand(1, dtype=torch.float64)}


def ranks_without_tokens(make: Callable[..., Training]) -> Training:
    """All ranks but the first have no tokens in any step; in the third step no rank has one."""
    training = make()
    for index in range(5):
        training.step(training.batch(index, TOKENS * (training.rank == 0 and index != 2)))
    return training


def a_rank_whose_tokens_come_late(make: Callable[..., Training]) -> Training:
    """The last rank has no tokens until the fourth step. They then are more than those of the others."""
    training = make()
    for index in range(6):
        is_last = training.rank == training.world - 1
        training.step(training.batch(index, TOKENS * 2 * (index > 2) if is_last else TOKENS))
    return training


def a_checkpoint_after_an_overflow(make: Callable[..., Training]) -> Training:
    """The last step before the checkpoint overflows. A new model is trained from the checkpoint."""
    training = make()
    training.make_steps(range(4), (3,))
    training.finish()
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    repeated = training.repeated
    torch.manual_seed(9)
    training.begin(Model())
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    training.make_steps(range(4, 7), (5,))
    training.finish()
    training.repeated += repeated
    return training


def values_loaded_after_an_overflow(make: Callable[..., Training]) -> Training:
    """Loading replaces the step that overflowed, also in the middle of training."""
    training = make()
    training.step(training.batch(0))
    training.finish()
    saved = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    training.make_steps(range(1, 3), (2,))
    training.model.load_state_dict(saved[0])
    training.optimizer.load_state_dict(saved[1])
    torch.manual_seed(11)
    training.make_steps(range(3, 6), (4,))
    return training


def only_the_second_layer_overflows(make: Callable[..., Training]) -> Training:
    torch.manual_seed(5)
    training = make(model=Model(slack=(4.0, 1.0)))
    training.make_steps(range(5), (1, 3))
    return training


def parts_of_which_one_overflows(make: Callable[..., Training]) -> Training:
    """Gradients of three parts are added, each with other numbers of tokens."""
    training = make()
    for index in range(4):
        training.step(
            training.batch(index),
            training.batch(index + 20, 12, on=(0,) if index in (1, 2) else ()),
            training.batch(index + 40, 5),
        )
    return training


def gradients_are_clipped(make: Callable[..., Training]) -> Training:
    """The norm of a dropped step would scale gradients differently."""
    training = make()
    training.max_norm = 0.05
    training.make_steps(range(5), (1, 4))
    return training


def evaluation_between_steps(make: Callable[..., Training]) -> Training:
    """Batches of the evaluation overflow, too, and are larger."""
    training = make()
    for index in range(5):
        training.step(training.batch(index, on=(0,) if index in (1, 3) else ()))
        training.finish()
        training.evaluate(f"evaluation {index}", training.batch(index + 60, 3 * TOKENS, on=(0,)))
    return training


def other_batch_sizes(make: Callable[..., Training]) -> Training:
    training = make()
    for index, tokens in enumerate((16, 4, 40, 1, 7, 41, 16)):
        training.step(training.batch(index, tokens + training.rank))
    return training


def frozen_experts(make: Callable[..., Training]) -> Training:
    """One matrix, then all experts of a layer, then none are frozen. Batches overflow in each phase."""
    training = make()
    experts = training.model.first.experts
    for index in range(8):
        experts.requires_grad_(index not in (4, 5))
        experts.w1.requires_grad_(index not in (2, 3, 4, 5))
        training.step(training.batch(index, on=(0,) if index in (1, 3, 5, 7) else ()))
    return training


def modules_in_evaluation_mode(make: Callable[..., Training]) -> Training:
    """The dropout is turned off after a step that overflows, and on again after another one."""
    training = make()
    for index in range(6):
        training.model.dropout.train(index not in (2, 3))
        training.step(training.batch(index, on=(0,) if index in (1, 3) else ()))
    return training


def a_copy_of_the_model(make: Callable[..., Training]) -> Training:
    """The copy is evaluated, while the model is trained, and is then trained itself."""
    training = make()
    training.make_steps(range(3), (1,))
    training.finish()
    repeated = training.repeated
    model = training.model
    copied = copy.deepcopy(model)
    for index in range(3, 5):
        training.step(training.batch(index, on=(0,) if index == 4 else ()))
        training.model = copied
        training.evaluate(f"copy {index}", training.batch(index + 60, on=(0,)))
        training.model = model
    training.finish()
    training.values |= {f"model {name}": value.clone() for name, value in model.state_dict().items()}
    repeated += training.repeated - repeated
    if training.steps is not None:
        training.steps.remove()
    training.begin(copied)
    training.make_steps(range(5, 8), (6,))
    training.finish()
    training.repeated += repeated
    return training


def an_exception_on_all_ranks(make: Callable[..., Training]) -> Training:
    """A user's forward raises before and after the layers' calls. Training goes on with the next batch."""
    training = make()
    raises: list[str] = []

    def before(*_: object) -> None:
        if "before" in raises:
            raise ValueError("before")

    def after(*_: object) -> None:
        if "after" in raises:
            raise ValueError("after")

    training.model.register_forward_pre_hook(before)
    training.model.register_forward_hook(after)
    for index, where in enumerate(("", "", "before", "", "after", "", "")):
        raises[:] = [where]
        x = training.batch(index, on=(0,) if index in (1, 3, 4) else ())
        if where:
            with pytest.raises(ValueError, match=where):
                training.step(x)
            raises.clear()
            torch.manual_seed(index)
        else:
            training.step(x)
    return training


def a_layer_called_twice(make: Callable[..., Training]) -> Training:
    torch.manual_seed(5)
    training = make(model=Twice())
    training.make_steps(range(5), (1, 3))
    return training


def a_call_without_autograd_in_a_step(make: Callable[..., Training]) -> Training:
    torch.manual_seed(5)
    training = make(model=Taught())
    training.make_steps(range(5), (1, 3))
    return training


def each_step_overflows(make: Callable[..., Training]) -> Training:
    training = make()
    training.make_steps(range(5), range(1, 5))
    return training


def an_optimizer_without_skipping(make: Callable[..., Training]) -> Training:
    training = make(kind=torch.optim.SGD, momentum=0.9)
    training.make_steps(range(5), (1, 4))
    return training


def options_that_change(make: Callable[..., Training]) -> Training:
    """slack, the number of chunks, and the restore pair are set between steps, on all ranks."""
    training = make()
    for index in range(8):
        if index == 2:
            training.model.first.slack = 2.0
        if index == 4:
            training.model.first.pipeline = 4
        if index == 6:
            training.model.first.memory_reuse = pmoe.Restore("keep", "keep")
        training.step(training.batch(index, on=(0,) if index % 2 else ()))
    return training


def steps_made_again(make: Callable[..., Training]) -> Training:
    """The object is removed, and made again after exact steps."""
    training = make()
    for index in range(6):
        if index in (2, 4) and training.bounded:
            training.finish()
            if index == 2:
                training.steps.remove()
                training.steps = None
            else:
                training.steps = pmoe.BoundedSteps(training.model, training.optimizer, training.run)
        training.step(training.batch(index, on=(0,) if index in (1, 3, 5) else ()))
    return training


def two_models_in_turn(make: Callable[..., Training]) -> Training:
    first = make()
    second = make(model=Model(slack=(1.5, 4.0)))
    for index in range(5):
        first.step(first.batch(index, on=(0,) if index == 1 else ()))
        second.step(second.batch(index + 30, on=(0,) if index == 3 else ()))
    values = second.state()
    del values["random"]
    first.values |= {f"second {name}": value for name, value in values.items()}
    return first


def inputs_that_need_gradients_on_one_rank(make: Callable[..., Training]) -> Training:
    """All parameters are frozen but those of the linear layer, and the first rank's input needs gradients."""
    training = make()
    for layer in (training.model.first, training.model.second):
        layer.requires_grad_(False)
    for index in range(6):
        x = training.batch(index, on=(0,) if index == 4 else ())
        if index >= 2 and training.rank == 0:
            x.requires_grad_()
        training.step(x)
        training.finish()
        if x.grad is not None:
            training.values[f"gradient {index}"] = x.grad.clone()
    return training


def autograd_off_on_one_rank(make: Callable[..., Training]) -> Training:
    """The layer is frozen, so no rank runs its backward pass. The ranks know both modes, with other sizes."""
    torch.manual_seed(5)
    model = Frozen()
    model.first.requires_grad_(False)
    training = make(model=model)
    for index in range(9):
        if index == 2:
            training.finish()
            training.evaluate("evaluation", training.batch(60, 2 * TOKENS))
        model.off_on = (1,) if index in (3, 6) else ()
        if index == 6:  # outside of a step
            training.values["output"] = model(training.batch(61, 3 * TOKENS)).detach()
            model.off_on = ()
        training.step(training.batch(index, on=(0,) if index in (1, 7) else ()))
    return training


USES: dict[str, Callable[[Callable[..., Training]], Training]] = {
    use.__name__: use
    for use in (
        ranks_without_tokens,
        a_rank_whose_tokens_come_late,
        a_checkpoint_after_an_overflow,
        values_loaded_after_an_overflow,
        only_the_second_layer_overflows,
        parts_of_which_one_overflows,
        gradients_are_clipped,
        evaluation_between_steps,
        other_batch_sizes,
        frozen_experts,
        modules_in_evaluation_mode,
        a_copy_of_the_model,
        an_exception_on_all_ranks,
        a_layer_called_twice,
        a_call_without_autograd_in_a_step,
        each_step_overflows,
        an_optimizer_without_skipping,
        options_that_change,
        steps_made_again,
        two_models_in_turn,
        inputs_that_need_gradients_on_one_rank,
        autograd_off_on_one_rank,
    )
}


def job(rank: int, world: int, name: str) -> tuple[list[str], int]:
    """Returns the values that differ from those without a bound, and the repeated steps."""
    found = []
    for bounded in (False, True):

        def make(bounded: bool = bounded, **options: Any) -> Training:
            return Training(rank, world, bounded, **options)

        with on_cpu(CpuBackend(seed=rank)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = USES[name](make)
            found.append(training.state())
    expected, result = found
    assert set(result) == set(expected)
    return differing(result, expected), training.repeated


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_use_trains_as_without_a_bound(world: int, name: str) -> None:
    for wrong, repeated in ranks(world).run(job, name):
        assert not wrong
        # On one rank all rows fit. On more than two, other batches may fit, too.
        assert world != 2 or (repeated > 0) == (name != "ranks_without_tokens")


RAISES = ("before the layers", "between the layers", "before backward")


def raising_job(rank: int, world: int, where: str) -> tuple[list[str], float]:
    """Returns the errors of two steps, in the first of which rank 1's own code raises; and its seconds."""
    with on_cpu(CpuBackend(seed=rank)):
        training = Training(rank, world, True)
        model = training.model
        raises = False

        def check(*_: object) -> None:
            if raises and rank == 1:
                raise ValueError("no data")

        place: nn.Module = model.dropout if where == "between the layers" else model
        if where == "before backward":
            model.register_forward_hook(check)
        else:
            place.register_forward_pre_hook(check)
        for index in range(2):
            training.step(training.batch(index))
        raises = True
        dist.barrier()
        began = time.monotonic()
        told = [error_of(lambda: training.step(training.batch(2)))]
        seconds = time.monotonic() - began
        raises = False
        told.append(error_of(lambda: training.step(training.batch(3))))
    return told, seconds


@pytest.mark.parametrize("where", RAISES)
def test_an_exception_on_one_rank_ends_the_step_of_all(where: str) -> None:
    with Pool(2) as pool:
        for (first, second), seconds in pool.run(raising_job, where):
            assert "ValueError" in first and "no data" in first
            assert seconds < GROUP_TIMEOUT_SECONDS / 2
            assert "left its process group in the middle of a pass" in second
