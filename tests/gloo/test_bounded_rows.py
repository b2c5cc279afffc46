"""pmoe.BoundedSteps with layers whose rows are bounded by ``slack``: no padding, and no counts on the host.

The reference is the same model, trained in a plain loop. `tests.plain_steps` takes the place of the
persistent kernels, so values are compared in float64.
"""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe import warn
from pmoe.comm import failures
from pmoe.comm.ranks import Ranks
from pmoe.decide.bounded_counts import graph_refusal
from pmoe.experts.marks import is_expert
from tests.gloo.kit import counted_collectives
from tests.plain_steps import PlainSteps, plain_steps, steps_in_a_heap, using
from tests.pool import SHORT_TIMEOUT_SECONDS, Pool, ranks
from tests.reference import differing

M, EXPERTS, TOP_K, TOKENS, BATCHES = 8, 8, 2, 16, 8
OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, fused=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
}


class Model(nn.Module):
    """Two MoE layers, a dropout, and a module with buffers that each forward pass changes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, slack=1.0, **options)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(M, dtype=torch.float64)
        self.second = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, slack=4.0, **options)
        with torch.no_grad():
            self.first.gate.weight.copy_(8 * torch.eye(EXPERTS, M))  # column e of a token leads to expert e

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + self.dropout(self.first(x))
        return hidden + self.second(self.norm(hidden) if len(x) else hidden)


def build(**options: Any) -> Model:
    torch.manual_seed(5)
    return Model(**options)


def tokens_of(rank: int, world: int, index: int, grows: bool) -> int:
    """Each rank has another number of tokens, and the last rank has none in every third batch.

    grows: whether batch 4 has more tokens than those before it.
    """
    if rank == world - 1 and index % 3 == 2:
        return 0
    return TOKENS - rank + 2 * TOKENS * (grows and index % 60 == 4)


def batch(rank: int, world: int, index: int, skewed: bool, grows: bool) -> Tensor:
    """(T, M): tokens for experts in turn, or for a skewed batch for those of the first two experts."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    token = torch.arange(tokens_of(rank, world, index, grows))
    x = torch.rand(len(token), M, generator=generator, dtype=torch.float64)
    x[token, (token + rank) % (2 if skewed else EXPERTS)] += 3
    x[token, (token + rank + 1) % (2 if skewed else EXPERTS)] += 2
    return x


def run_step(model: Model, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> None:
    """Sets gradients to zero, adds those of all parts, and reduces those that do not belong to experts."""
    optimizer.zero_grad()
    for x in parts:
        (model(x).square().sum() / 16 + 0.01 * model.first.l_aux).backward()
    for parameter in model.parameters():
        if not is_expert(parameter):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


def state(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns copies of parameters, buffers, the optimizer's tensors, and the next random number."""
    values = {name: value.double().clone() for name, value in model.state_dict().items()}
    for index, slots in optimizer.state_dict()["state"].items():
        values |= {f"{index} {name}": value.double().clone() for name, value in slots.items()}
    return {**values, "random": torch.rand(1, dtype=torch.float64)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """skewed: batches whose rows go mostly to experts 0 and 1, and the ranks on which they do."""

    skewed: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kind: str = "fused AdamW"
    num_parts: int = 1
    grows: bool = False

    @property
    def repeated(self) -> int:
        return len(self.skewed) + self.grows


def train(rank: int, world: int, case: Case, bounded: bool) -> tuple[dict[str, Tensor], int, list[list[str]]]:
    """Returns the state after training, the number of repeated steps, and the collectives of each step."""
    model = build(fused="persistent" if bounded else False)
    optimizer = OPTIMIZERS[case.kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, x)) if bounded else None
    calls = []
    for index in range(BATCHES):
        last = case.num_parts - 1
        is_skewed = rank in case.skewed.get(index, ())
        parts = [
            batch(rank, world, index + 60 * part, is_skewed and part == last, case.grows)
            for part in range(case.num_parts)
        ]
        with counted_collectives() as collectives:
            if steps is None:
                run_step(model, optimizer, parts)
                optimizer.step()
            else:
                steps.step(parts)
        calls.append(collectives)
        scheduler.step()
    if steps is not None:
        steps.finish()
    return state(model, optimizer), 0 if steps is None else steps.repeated, calls


def job(rank: int, world: int, case: Case) -> tuple[list[str], int, list[list[str]]]:
    expected, _, _ = train(rank, world, case, False)
    with using(steps_in_a_heap), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*falls back.*")
        result, repeated, calls = train(rank, world, case, True)
    assert set(result) == set(expected)
    wrong = differing(result, expected)
    return wrong, repeated, calls


ONE, SEVERAL = {3: (1,)}, {3: (0,), 4: (0, 1), 6: (1,), 7: (0,)}
CASES = {
    "several steps, the last among them": Case(skewed=SEVERAL),
    "no step": Case(),
    "one rank in one step": Case(skewed=ONE),
    "two parts of a batch": Case(skewed=SEVERAL, num_parts=2),
    "an optimizer that the host stops": Case(skewed=SEVERAL, kind="AdamW"),
    "more tokens than before": Case(skewed=ONE, grows=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_values_are_those_of_training_without_a_bound(world: int, name: str) -> None:
    case = CASES[name]
    for wrong, repeated, calls in ranks(world).run(job, case):
        assert not wrong
        assert repeated == case.repeated
        # A step that is neither the first nor repeated: each layer's call gathers counts once.
        assert calls[1].count("all_gather_into_tensor") == 2 * case.num_parts


def test_all_ranks_drop_their_rows_together() -> None:
    """Rows of three ranks do not fit into the heap of rank 0, and `steps_in_a_heap` would notice them."""
    for wrong, repeated, _ in ranks(4).run(job, Case(skewed={3: (1, 2, 3)})):
        assert not wrong
        assert repeated == 1


@dataclass(frozen=True, kw_only=True)
class Freezes:
    """frozen: for each step, the ranks on which no parameter needs a gradient. A step without ranks is None:
    an evaluation without autograd, exact and outside of `pmoe.BoundedSteps`."""

    frozen: tuple[tuple[int, ...] | None, ...]


FREEZES = {
    "one rank, around an evaluation": Freezes(frozen=((1,), (1,), None, (1,), (1,), None, (1,))),
    "one rank, between two steps": Freezes(frozen=((), (), (1,), (), None, (1,))),
    "all ranks, and then one": Freezes(frozen=((0, 1), (0, 1), (1,), (1,), None, ())),
}


def frozen_job(rank: int, world: int, case: Freezes) -> tuple[list[str], list[bool]]:
    """Returns what differs from training without a bound, and whether each step exchanged counts exactly."""
    found = []
    exact = []
    for bounded in (False, True):
        with using(plain_steps), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(5)
            fused: Any = "persistent" if bounded else False
            model = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, slack=4.0, fused=fused)
            with torch.no_grad():
                model.gate.weight.copy_(8 * torch.eye(EXPERTS, M))
            scale = nn.Parameter(torch.ones(M, dtype=torch.float64))  # every rank has a gradient
            optimizer = OPTIMIZERS["fused AdamW"]([scale, *model.parameters()])

            def run(
                x: Tensor, model: pmoe.MoELayer = model, scale: Any = scale, optimizer: Any = optimizer
            ) -> None:
                optimizer.zero_grad()
                ((scale * model(x)).square().sum() + 0.01 * model.l_aux).backward()

            steps = pmoe.BoundedSteps(model, optimizer, run) if bounded else None
            values: dict[str, Tensor] = {}
            for index, frozen in enumerate(case.frozen):
                x = batch(rank, world, index, False, False)
                with counted_collectives() as calls:
                    if frozen is None:
                        with torch.no_grad():
                            values[f"output {index}"] = model(x)
                        continue
                    model.requires_grad_(rank not in frozen)
                    if steps is not None:
                        steps.step(x)
                    else:
                        run(x)
                        optimizer.step()
                exact.append("all_gather_into_tensor" not in calls)
            if steps is not None:
                steps.finish()
            found.append(values | {name: value.clone() for name, value in model.named_parameters()})
    expected, result = found
    wrong = differing(result, expected)
    return wrong, exact[len(exact) // 2 :]


@pytest.mark.parametrize("name", FREEZES)
def test_ranks_may_freeze_parameters_of_their_own(name: str) -> None:
    for wrong, exact in ranks(2).run(frozen_job, FREEZES[name]):
        assert not wrong
        assert exact[0] and not any(exact[1:])


def checkpoint_job(rank: int, world: int) -> tuple[list[str], int, list[str]]:
    """Returns what differs from training without a bound, if a checkpoint is around the layer.

    Also the number of repeated steps, and the collectives of a call after `pmoe.BoundedSteps.remove`.
    """
    found = []
    for bounded in (False, True):
        with using(plain_steps), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build(fused="persistent" if bounded else False)
            layer = model.first
            optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())

            def run(x: Tensor, layer: pmoe.MoELayer = layer, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                y = checkpoint(layer, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts)
                (y.square().sum() + 0.01 * layer.l_aux).backward()

            steps = pmoe.BoundedSteps(layer, optimizer, run) if bounded else None
            for index in range(BATCHES):
                x = batch(rank, world, index, rank == 1 and index == 3, False)
                if steps is not None:
                    steps.step(x)
                else:
                    run(x)
                    optimizer.step()
            if steps is not None:
                steps.finish()
                steps.remove()
            with counted_collectives() as calls:
                y = layer(batch(rank, world, BATCHES, True, False))
            y.sum().backward()
            found.append({"y": y.detach()})
            found[-1] |= {name: value.clone() for name, value in layer.named_parameters()}
    expected, result = found
    wrong = differing(result, expected)
    return wrong, 0 if steps is None else steps.repeated, calls


def test_a_checkpoint_may_be_around_the_layer_and_calls_without_bounds_are_exact() -> None:
    for wrong, repeated, calls in ranks(2).run(checkpoint_job):
        assert not wrong
        assert repeated == 1
        assert "all_gather_into_tensor" not in calls


def refusal_job(rank: int, world: int) -> tuple[list[str | None], str]:
    """Returns why a graph cannot hold five calls, and why a bounded layer cannot be spread."""
    with using(plain_steps), warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        layer = build(fused="persistent").first
        steps = pmoe.BoundedSteps(layer, OPTIMIZERS["fused AdamW"](layer.parameters()), layer)
        bound = layer.cache.row_bound
        assert bound is not None
        x = batch(rank, world, 0, False, False)

        def refusal(x: Tensor) -> str | None:
            return graph_refusal(layer.layer_modules, bound, x, layer.layer_modules.asks_for_gradients(x))

        layer.requires_grad_(False)
        with steps.bounded_calls():
            told = [refusal(x)]
        layer(x)
        with steps.bounded_calls():
            layer.requires_grad_(True)
            told += [refusal(x)]
            layer.requires_grad_(False)
            told += [refusal(x), refusal(x.new_ones(33, M))]
            patch.setattr(PlainSteps, "is_repeatable", False)
            told += [refusal(x)]
        own = pmoe.MoELayer(
            M, 8, EXPERTS, TOP_K, dtype=torch.float64, fused="persistent", group=Ranks.single()
        )
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        steps = pmoe.BoundedSteps(own, OPTIMIZERS["AdamW"](own.parameters()), own)
        with pytest.raises(ValueError) as raised:
            own.check_spread(mesh)
        steps.remove()
        own.check_spread(mesh)
    return told, str(raised.value)


def test_a_refusal_says_what_to_do() -> None:
    for told, spread in ranks(2).run(refusal_job):
        assert told == [
            "no call with torch.float64 and has_grad=True was made before: make one, outside of the capture",
            "no rank needed gradients in the calls before: make one that does, outside of the capture",
            None,
            "x has 33 tokens, and the heap has room for 16: call the layer once with as many tokens before "
            "the capture",
            "its heap was closed after the last call of its kind: make one more call before the capture",
        ]
        assert spread == "a layer must be spread before BoundedSteps is made: call remove() on it first"


def fault_job(rank: int, world: int) -> list[str]:
    """Returns the errors of a step in which rank 1 has a wrong input, seen on the device or on the host."""
    told = []
    for wrong in (lambda x: x * torch.nan, lambda x: x[:, 1:]):
        with using(plain_steps), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = build(fused="persistent")
            optimizer = OPTIMIZERS["fused AdamW"](model.parameters())

            def run(x: Tensor, model: Model = model, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                model.first(x).sum().backward()

            steps = pmoe.BoundedSteps(model.first, optimizer, run)
            x = batch(rank, world, 0, False, False)
            steps.step(x)
            try:
                steps.step(wrong(x) if rank == 1 else x)
                steps.finish()
                told.append("")
            except (ValueError, RuntimeError) as error:
                told.append(f"{type(error).__name__}: {error}")
    return told


@pytest.mark.slow
def test_a_wrong_input_of_one_rank_is_named_on_all() -> None:
    with Pool(2) as pool:
        (nan, narrow), (nan_there, narrow_there) = pool.run(fault_job)
    assert "rank 1: " in nan and "finite" in nan and "finite" in nan_there
    assert f"must end in d_model ({M})" in narrow and f"must end in d_model ({M})" in narrow_there


class SilentStore:
    """A store on a rank that has stopped: it never answers."""

    def check(self, *_: object) -> None:
        threading.Event().wait()

    set = get = check


def waiting_job(rank: int, world: int) -> list[str]:
    """Returns the errors of rank 0, which waits for its device: three times, with other causes.

    Its peer does not come to the step; has failed; or has stopped, and the store with it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "timeout_of", lambda _: timedelta(seconds=1))
        told = []
        Ranks().record.place()  # a group is known once its record is asked for
        for turn in range(3):
            dist.barrier()
            if turn == 2:
                patch.setattr(dist.distributed_c10d, "_get_default_store", SilentStore)
            if rank == 1 and turn == 1:
                failures.leave(OSError("no data"), Ranks(), "a training step")
            elif rank == 0:
                with pytest.raises(RuntimeError) as raised:
                    failures.wait_for_device(lambda: False, Ranks(), 5)
                told.append(f"{type(raised.value).__name__}: {raised.value}")
            if turn != 1:
                dist.barrier()
    return told


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_step_on_the_device_is_named() -> None:
    with Pool(2) as pool:
        (absent, failed, stopped), _ = pool.run(waiting_job)
    assert absent.endswith(
        "the device has not finished step 5 after 1 s; rank 1 has not reported that it waits for it"
    )
    assert failed.startswith("PeerError: global rank 1 raised OSError: no data")
    assert stopped.endswith(
        "the device has not finished step 5 after 1 s; the default group's store does not answer: the "
        "process that holds it, often rank 0, may have ended"
    )


def dying_job(rank: int, world: int) -> str:
    """Returns the error of a rank whose peer's process ends in the third step."""
    with using(plain_steps), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(fused="persistent")
        optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
        steps = pmoe.BoundedSteps(model, optimizer, lambda x: run_step(model, optimizer, [x]))
        try:
            for index in range(BATCHES):
                if rank == 1 and index == 2:
                    os._exit(3)
                steps.step(batch(rank, world, index, False, False))
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_a_process_that_ends_in_a_bounded_step_ends_the_others_with_the_stage() -> None:
    with Pool(2, timeout_seconds=SHORT_TIMEOUT_SECONDS) as pool:
        pool.start(dying_job)
        told = pool.answer(0, 60)
    assert "rank 0 of 2 failed in the exchange of bounded row counts of MoELayer" in told
    assert "a peer has died" in told


def unlike_job(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Returns the warnings of a layer that is not bounded, and the collectives of its second step."""
    with using(plain_steps), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn.GIVEN.clear()
        layer = pmoe.MoELayer(M, 8, EXPERTS, TOP_K, dtype=torch.float64, fused="persistent")
        layer.callbacks = (pmoe.Callback(),)
        optimizer = OPTIMIZERS["fused AdamW"](layer.parameters())

        def run(x: Tensor) -> None:
            optimizer.zero_grad()
            layer(x).sum().backward()

        steps = pmoe.BoundedSteps(layer, optimizer, run)
        for index in range(2):
            with counted_collectives() as calls:
                steps.step(batch(rank, world, index, False, False))
        steps.finish()
    return [str(each.message) for each in told if "bound" in str(each.message)], calls


def test_a_layer_that_cannot_be_bounded_reads_its_counts_and_says_so_once() -> None:
    for told, calls in ranks(2).run(unlike_job):
        (message,) = told
        assert message.endswith("a layer, and the host reads row counts, because there are callbacks")
        assert "all_gather_into_tensor" not in calls
