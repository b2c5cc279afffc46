"""Load-balance losses that do not depend on how a step is divided over ranks and micro-batches.

The load-balance loss of a layer with E experts is E * sum_e f_e * P_e:

    f_e    the fraction of choices that fell on expert e; each token makes K choices
    P_e    the mean over tokens of p_e. For one token, p_e is the score of expert e divided by the sum of the
           scores of all experts

`MoELayer.l_aux` takes f_e and P_e from the tokens of one call on one rank. `BalanceLoss` takes them from
other tokens, which its argument ``over`` names:

    over          f_e from                                   P_e from
    "sequence"    a sequence (DeepSeek-V3, Eq. 17-20)        the same sequence; the losses are then averaged
    "batch"       all tokens of a step (arXiv 2501.11873)    all tokens of the step
    "window"      all tokens of some earlier steps           all tokens of the present step

A step may have several parts: the micro-batches of each rank. Each part computes a loss of its own, and these
losses add up to the loss that one rank would compute for the whole step. For this, a part needs some totals
of the whole step (`StepTotals`), such as the number of all tokens.

Letters: T tokens of a call, K experts of a token, E experts of a layer, B sequences.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import (
    check_count,
    check_flag,
    check_int,
    check_kind,
    check_module,
    check_not_negative,
    check_one_of,
    check_tensors,
    list_of,
    plain_int,
)
from pmoe.call.shape_run import is_shape_run
from pmoe.checkpointing.replay import hidden_from_checkpoints, is_second_pass
from pmoe.comm.agreement import gathered
from pmoe.comm.failures import sum_between_calls
from pmoe.comm.ranks import Ranks
from pmoe.gates.base import Gate, Routing
from pmoe.gates.deepseek import sequence_losses
from pmoe.gates.hook import GateHook
from pmoe.layer import MoELayer
from pmoe.training.attached_loss import AttachedLosses

OverName = Literal["sequence", "batch", "window"]
"""Values of `BalanceLoss`'s argument ``over``."""

SumName = Literal["megatron", "torchtitan", "transformers"]
"""Values of `BalanceLoss`'s argument ``layers``."""


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals of a whole training step, over all its ranks and micro-batches, which a `BalanceLoss` needs.

    num_tokens: number of tokens that each layer gets in the step.
    num_sequences: number of sequences of the step. Losses over sequences need it.
    counts: a dict {name of a layer: (E,) int64, how many choices fell on each of E experts}. Losses over the
        batch need it. None if the counts are not known.

    Raises ValueError or TypeError if a number is no integer of at least 0, or counts are not a dict.
    """

    num_tokens: int
    num_sequences: int = 0
    counts: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        check_int(0, num_tokens=self.num_tokens, num_sequences=self.num_sequences)
        check_kind((Mapping, type(None)), "None or a dict of tensors", counts=self.counts)


@dataclass
class _LayerSums:
    """Sums over the calls of one layer since the last loss. Gradients flow through share, sequences and z.

    share: (E,) for E experts: the expert's share in a token's scores, summed over all tokens. None before the
        first call.
    sequences: scalar, the sum of the losses of sequences; None unless the loss is over sequences.
    z: scalar, the sum over tokens of logsumexp(logits)^2; None without a router z-loss.
    counts: (E,) int64, how many choices fell on each expert.
    num_tokens, num_sequences: how many tokens and sequences the calls had.
    has_constants: whether the scores of some call have no gradients.
    """

    share: Tensor | None = None
    sequences: Tensor | None = None
    z: Tensor | None = None
    counts: Tensor | None = None
    num_tokens: int = 0
    num_sequences: int = 0
    has_constants: bool = False

    def add(self, share: Tensor, sequences: Tensor | None, z: Tensor | None, counts: Tensor) -> None:
        """Adds the sums of one call.

        share: (E,) for E experts: the expert's share in a token's scores, summed over the tokens of the call.
        sequences: scalar, the sum of the losses of the call's sequences; None unless the loss is over
            sequences.
        z: scalar, the sum over tokens of logsumexp(logits)^2; None without a router z-loss.
        counts: (E,) int64, how many choices of the call fell on each expert.
        """
        self.has_constants |= not share.requires_grad
        self.share = share if self.share is None else self.share + share
        self.counts = counts if self.counts is None else self.counts + counts
        if sequences is not None:
            self.sequences = sequences if self.sequences is None else self.sequences + sequences
        if z is not None:
            self.z = z if self.z is None else self.z + z


class BalanceLoss:
    """The load-balance loss of a model's layers, over sequences, the global batch, or a window of steps.

        balance = pmoe.BalanceLoss(model, over="batch")
        for x in batches:
            (task_loss(model(x)) + 0.01 * balance.loss()).backward()
            optimizer.step()

    The object collects the gates' scores by forward hooks, which `remove` removes. Use it instead of the
    layers' ``l_aux``, not in addition. The value and every gradient are the same as if one rank computed the
    loss of the whole step: they do not depend on the number of ranks, on expert parallelism, or on the number
    and sizes of micro-batches. For this, `loss` needs numbers of the whole step:

    - If all forward passes of the step come before `loss`, it has these numbers, and needs no argument.
    - If the backward pass of each micro-batch comes before the next micro-batch, `loss` needs a `StepTotals`,
      with the number of tokens ("window"), the number of sequences ("sequence"), or the counts ("batch"). To
      get the counts, run all forward passes without gradients first, and call `totals`. This costs one more
      forward pass, but no other way is exact, because the loss of the first micro-batch depends on the
      choices of the last one.

    Do not divide the loss by the number of micro-batches: it is already divided by the number of tokens of
    the whole step.

    Args:
        model: a model with MoE layers, or a single layer. To leave layers out, pass an nn.ModuleList of the
            other layers.
        over: "sequence", "batch" or "window".
        layers: how the losses of several layers become one. "megatron" and "torchtitan": their sum.
            "transformers": one loss for the tokens of all layers together, times top_k, as
            ``load_balancing_loss_func`` computes it.
        sequence_length: with "sequence", the number of tokens of each sequence; the last sequence of a call
            may be shorter. None if the method `sequences` sets the lengths.
        window: with "window", the number of earlier steps whose tokens count. In the first step there is no
            earlier step, and all experts count as chosen equally often.
        z_loss_weight: factor of `router_z_loss` in the loss, a mean over the tokens of the step.
        averaged: whether gradients are averaged over the ranks of ``group``, as by DistributedDataParallel,
            FSDP or `pmoe.parallelize`. The loss of a rank is then multiplied by the number of ranks. False if
            gradients are summed.
        group: the ranks that train on different tokens; None is the default group, or this rank alone.

    Every rank of the group must construct the object, with the same layers, and call its methods in the same
    order. Activation checkpointing with use_reentrant=True is refused, because its first pass has no
    gradients. Each call keeps its scores, (T, E) for T tokens and E experts, until backward, even under
    activation checkpointing. All tokens of a sequence must be on one rank. With pipeline parallelism, each
    rank has the loss of its stage's layers only. Use `attach`, so that the backward pass of the stage
    includes this loss.

    Raises ValueError or TypeError if an argument is wrong, if the model has no MoE layers, or if a gate
    cannot be balanced by a loss. Raises on every rank if ranks have different layers or arguments;
    ``sequence_length`` may differ.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        over: OverName = "batch",
        layers: SumName = "megatron",
        sequence_length: int | None = None,
        window: int | None = None,
        z_loss_weight: float = 0.0,
        averaged: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_module(model=model)
        check_one_of("over", over, get_args(OverName))
        check_one_of("layers", layers, get_args(SumName))
        check_not_negative(z_loss_weight=z_loss_weight)
        check_flag("averaged", averaged)
        check_kind((dist.ProcessGroup, type(None)), "None or a process group", group=group)
        if sequence_length is not None:
            check_count(sequence_length=sequence_length)
            if over != "sequence":
                raise ValueError(
                    f"sequence_length ({sequence_length}) must be None unless over is 'sequence'"
                )
        if (window is None) is (over == "window"):
            raise ValueError(f"window ({window}) must be a number of steps if and only if over is 'window'")
        if window is not None:
            check_count(window=window)
        self._ranks = Ranks(group)
        self._layers = _balanced_layers(model)
        sizes = {layer.num_experts for layer in self._layers.values()}
        if layers == "transformers" and (over == "sequence" or len(sizes) > 1):
            raise ValueError(
                "layers ('transformers') takes all layers' tokens together: it must be 'megatron' or "
                "'torchtitan' with over='sequence', and if layers have different numbers of experts "
                f"({sorted(sizes)})"
            )
        experts = {name: layer.num_experts for name, layer in self._layers.items()}
        arguments = {
            "over": over,
            "layers": layers,
            "window": window,
            "z_loss_weight": z_loss_weight,
            "averaged": averaged,
        }
        of_ranks = gathered(self._ranks, (experts, arguments), stage="comparing balanced layers")
        for rank, (other_experts, other_arguments) in enumerate(of_ranks):
            if other_experts != experts:
                raise ValueError(
                    f"model (experts by layer: {experts} on rank {self._ranks.rank}) must have the same "
                    f"layers on every rank of the group, but rank {rank} has {other_experts}"
                )
            for name, value in arguments.items():
                if other_arguments[name] != value:
                    raise ValueError(
                        f"{name} ({value!r} on rank {self._ranks.rank}) must be the same on every rank of "
                        f"the group, but rank {rank} has {other_arguments[name]!r}"
                    )
        self.over = over
        self.layers = layers
        self.z_loss_weight = z_loss_weight
        self.averaged = averaged
        self.sequence_length: int | None = plain_int(sequence_length)
        self._lengths: list[int] | None = None
        self._calls = {name: _LayerSums() for name in self._layers}
        self._of_step: dict[str, Tensor] = {}  # counts of the steps' calls that have a loss, by layer
        self._window: deque[dict[str, Tensor]] = deque(maxlen=plain_int(window))
        self._attached = AttachedLosses()
        self._handles = [
            layer.gate.register_forward_hook(_Collector(layer.gate, functools.partial(self._add, name)))
            for name, layer in self._layers.items()
        ]

    def remove(self) -> None:
        """Removes the hooks from the gates. The object is of no use afterwards."""
        for handle in self._handles:
            handle.remove()
        self._attached.remove()

    @contextlib.contextmanager
    def sequences(self, lengths: Sequence[int]) -> Iterator[None]:
        """Returns a with-block in which calls have sequences of the given lengths, one after the other.

        lengths: the number of tokens of each sequence of a call. They must add up to the tokens of the call.
            Padding that ``layer(x, mask=mask)`` leaves out does not count.

        Raises ValueError unless the object was made with over="sequence" and without ``sequence_length``. A
        call raises ValueError on every rank of the layer if the lengths do not add up to its tokens.
        """
        if self.over != "sequence" or self.sequence_length is not None:
            raise ValueError(
                f"sequences must be used with over='sequence' ({self.over!r}) and without sequence_length "
                f"({self.sequence_length})"
            )
        values = list_of("lengths", lengths)
        for at, length in enumerate(values):
            check_int(1, **{f"lengths[{at}]": length})
        self._lengths = [int(length) for length in values]
        try:
            yield
        finally:
            self._lengths = None

    def totals(self) -> StepTotals:
        """Returns the totals, over all ranks, of all calls since the last `loss` or `totals`.

        The calls do not count for a later `loss`. Run the forward passes of a step without gradients first,
        then call this method, then pass its result to each `loss` of the step:

            with torch.no_grad():
                for x in micro_batches:
                    model(x)
            step = balance.totals()
            for x in micro_batches:
                (task_loss(model(x)) / len(micro_batches) + 0.01 * balance.loss(step)).backward()

        A collective: one all-reduce. Raises ValueError if layers were called for different numbers of tokens.
        """
        return self._reduced(self._taken())

    def loss(self, totals: StepTotals | None = None) -> Tensor:
        """Returns the balance loss of all calls since the last `loss` or `totals`: a differentiable scalar.

        If a step has several `loss` calls, such as one for each micro-batch, their results add up to this
        rank's part of the step's loss. With ``averaged``, the loss of the whole step is the mean of the
        ranks' parts; without it, their sum.

        totals: the numbers of the whole step. None if these calls, on all ranks, are the whole step. Their
            numbers are then summed by one all-reduce, a collective.

        Raises ValueError if the totals lack a number that the loss needs. Raises RuntimeError if there was no
        call, or if some calls ran without gradients.
        """
        check_kind((StepTotals, type(None)), "None or a StepTotals", totals=totals)
        calls = self._taken()
        fault = self._fault_of(calls)
        step = self._reduced(calls, fault) if totals is None else totals
        if fault:
            raise RuntimeError(fault)
        self._check_totals(step)
        for name, of_layer in calls.items():
            assert of_layer.counts is not None
            if self.over == "window":
                earlier = self._of_step.get(name)
                self._of_step[name] = of_layer.counts if earlier is None else earlier + of_layer.counts
        parts = self._pooled(calls, step) if self.layers == "transformers" else self._summed(calls, step)
        return parts * (self._ranks.size if self.averaged else 1)

    def attach(self, y: Tensor, factor: float, totals: StepTotals | None) -> Tensor:
        """Returns a tensor with the values of ``y``. Its backward pass also differentiates factor * `loss`.

        This method is for a stage of torch.distributed.pipelining. There the balance loss cannot be added to
        the task's loss, because another rank computes the task's loss. Call this method once, at the end of
        the stage's ``forward``:

            y = balance.attach(self.layers(x), 0.01 * num_micro_batches, self.step)

        In the example the factor contains the number of micro-batches, because torch's schedules divide
        gradients by this number (``scale_grads=True``). Give each stage a `BalanceLoss` of the stage's own
        layers. Its ``group`` must be the ranks that share the stage. Call `attach` outside of activation
        checkpointing with use_reentrant=True.

        Two kinds of calls attach no loss and return ``y`` itself: calls without gradients, and the run in
        which torch finds the shapes of a stage. After a whole schedule of calls without gradients, `totals`
        returns the totals of these calls.

        Use the result in place of ``y``. If the result is dropped, the loss has no gradients. The next call
        of this method, of `loss` or of `totals`, or the next step of an optimizer, then issues a warning.

        Args:
            y: the output of the stage, of any shape.
            factor: the factor of the loss. With a loss scale, multiply the factor by ``scaler.get_scale()``,
                because the scale of the task's loss does not reach an attached loss.
            totals: the numbers of the whole step, as `loss` takes them. Not None if there are several
                micro-batches.

        Raises the errors of `loss`, TypeError or ValueError for wrong arguments, and RuntimeError inside
        activation checkpointing with use_reentrant=True.
        """
        check_tensors(None, y=y)
        if not y.is_floating_point() or y.layout is not torch.strided:
            raise TypeError(f"y ({y.dtype}, {y.layout}) must be a dense tensor of floating-point numbers")
        check_not_negative(factor=factor)
        check_kind((StepTotals, type(None)), "None or a StepTotals", totals=totals)
        if is_shape_run() and not is_second_pass():
            return y
        if is_second_pass():
            # The first pass of the checkpoint has attached the loss already, and taken the sums of its calls.
            # If the sums are still here, the first pass ran without gradients, and attached nothing.
            if any(calls.has_constants for calls in self._calls.values()):
                raise RuntimeError(
                    "attach must be outside of activation checkpoints with use_reentrant=True, whose first "
                    "pass has no gradients: pass use_reentrant=False"
                )
            return y
        if not torch.is_grad_enabled():
            return y
        with hidden_from_checkpoints():
            return self._attached.attach(y, factor * self.loss(totals))

    def end_step(self) -> None:
        """Ends an optimizer step: adds the step's counts of choices to the window. Only with over="window".

        Call it once in each optimizer step, after the losses. A collective: one all-reduce.

        Raises ValueError unless the loss is over a window. Raises RuntimeError on every rank if the step had
        no `loss` on some rank.
        """
        if self.over != "window":
            raise ValueError(f"end_step must be called with over='window', not {self.over!r}")
        has_loss = bool(self._of_step)
        counts = [
            self._of_step[name] if has_loss else _no_choices(layer) for name, layer in self._layers.items()
        ]
        # A rank without a loss takes part too. If it raised alone, the other ranks would wait for it.
        lacks_loss = torch.tensor([not has_loss], dtype=torch.int64).to(counts[0].device)
        sizes = [layer.num_experts for layer in self._layers.values()]
        *parts, num_lacking = self._all_reduced(torch.cat([*counts, lacks_loss])).split([*sizes, 1])
        if num_lacking.item():
            where = "on another rank" if has_loss else "on this rank"
            raise RuntimeError(
                f"end_step must be called after the losses of a step: {where} the step had no loss()"
            )
        self._window.append(dict(zip(self._layers, parts, strict=True)))
        self._of_step = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the window, to be saved in a checkpoint; {} unless the loss is over a window.

        The window holds the earlier steps that count in the loss. It has a dict for each step: {name of a
        layer: (E,) int64, how many choices fell on each expert}.
        """
        return {"window": [dict(step) for step in self._window]} if self.over == "window" else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the window of steps to one that `state_dict` returned.

        Raises ValueError if the window has other layers than the model, or if only one of the two losses (the
        saved loss and this loss) is over a window.
        """
        check_kind(Mapping, "a state dict", state=state)
        if ("window" in state) is not (self.over == "window"):
            raise ValueError(
                f"state (with {', '.join(map(repr, state)) or 'nothing'}) must have 'window' if and only if "
                f"over ({self.over!r}) is 'window': load the state of a loss with the same over"
            )
        steps = list_of("state['window']", state.get("window", []))
        for step in steps:
            sizes = {name: counts.numel() for name, counts in dict(step).items()}
            if sizes != {name: layer.num_experts for name, layer in self._layers.items()}:
                raise ValueError(f"state (experts by layer: {sizes}) must be of the layers of this model")
        self._window.clear()
        self._window.extend(dict(step) for step in steps)

    # ---- the calls

    def _add(self, name: str, routing: Routing) -> None:
        """Adds the scores and choices of a call to the sums of a layer (`_LayerSums`).

        name: the name of the layer.
        routing: the result of the layer's gate.

        Raises ValueError if the loss is over sequences whose lengths are not known or do not add up.
        """
        calls = self._calls[name]
        router = self._layers[name].layer_modules.router
        assert isinstance(router, Gate)
        share_TE, expert_TK = router.balance_terms(routing)
        num_tokens, num_experts = share_TE.shape
        sequences = None
        if self.over == "sequence":
            lengths = self._lengths_of(num_tokens)
            lengths_B = torch.tensor(lengths, dtype=torch.int64, device=share_TE.device)
            number_B = torch.arange(len(lengths), device=share_TE.device)
            sequence_T = number_B.repeat_interleave(lengths_B, output_size=num_tokens)
            sequences = sequence_losses(share_TE, expert_TK, sequence_T, lengths_B).sum()
            calls.num_sequences += len(lengths)
        z = None
        if self.z_loss_weight and routing.logits is not None:
            z = routing.logits.logsumexp(-1).square().sum()
        chosen = expert_TK.reshape(-1)
        counts_E = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
        counts_E.scatter_add_(0, chosen, torch.ones_like(chosen))
        calls.add(share_TE.sum(0), sequences, z, counts_E)
        calls.num_tokens += num_tokens

    def _lengths_of(self, num_tokens: int) -> list[int]:
        """Returns the number of tokens of each sequence in a call, in the order of the sequences.

        num_tokens: the number of tokens of the call.

        Raises ValueError if the lengths are not known, or do not add up to ``num_tokens``.
        """
        if self.sequence_length is not None:
            whole, rest = divmod(num_tokens, self.sequence_length)
            return [self.sequence_length] * whole + [rest] * (rest > 0)
        if self._lengths is None:
            raise ValueError(
                "sequence_length (None) must be a number, or the call be inside balance.sequences(lengths)"
            )
        if sum(self._lengths) != num_tokens:
            raise ValueError(
                f"lengths (of {len(self._lengths)} sequences, {sum(self._lengths)} tokens) must add up to "
                f"the {num_tokens} tokens of the call"
            )
        return self._lengths

    def _taken(self) -> dict[str, _LayerSums]:
        """Returns each layer's sums over its calls since the last `loss` or `totals`, and resets the sums."""
        self._attached.warn_of_unused()
        calls = self._calls
        self._calls = {name: _LayerSums() for name in calls}
        return calls

    # ---- the numbers of a step

    def _fault_of(self, calls: Mapping[str, _LayerSums]) -> str:
        """Returns the reason why no loss can be computed from these calls on this rank; "" if one can.

        calls: for each layer, by name, the sums over these calls.
        """
        for name, of_layer in calls.items():
            if of_layer.share is None:
                return f"layer {name!r} must be called before loss(): it was not since the last one"
            needs = any(parameter.requires_grad for parameter in self._layers[name].gate.parameters())
            if needs and torch.is_grad_enabled() and of_layer.has_constants:
                return (
                    f"layer {name!r} was called without gradients: call totals() on every rank after forward "
                    "passes under torch.no_grad(), also after those of an evaluation, and give checkpoints "
                    "use_reentrant=False"
                )
        return ""

    def _reduced(self, calls: Mapping[str, _LayerSums], fault: str = "") -> StepTotals:
        """Returns the totals of some calls, summed over all ranks. A collective: one all-reduce.

        calls: for each layer, by name, this rank's sums over these calls.
        fault: why this rank cannot compute its loss; "" if it can.

        Raises RuntimeError on all ranks if any rank has a fault. Raises ValueError if layers were called for
        different numbers of tokens.
        """
        parts = []
        sizes = []
        for name, layer in self._layers.items():
            of_layer = calls[name]
            counts = of_layer.counts
            if counts is None:
                counts = _no_choices(layer)
            numbers = torch.tensor([of_layer.num_tokens, of_layer.num_sequences], dtype=torch.int64)
            parts += [counts, numbers.to(counts.device)]
            sizes += [layer.num_experts, 2]
        parts.append(torch.tensor([bool(fault)], dtype=torch.int64).to(parts[0].device))
        *split, num_faults = self._all_reduced(torch.cat(parts)).split([*sizes, 1])
        if num_faults.item():
            raise RuntimeError(fault or "another rank cannot compute its balance loss: its error says why")
        sums: list[list[int]] = [part.tolist() for part in split[1::2]]
        if any(of_layer != sums[0] for of_layer in sums):
            found = {name: of_layer[0] for name, of_layer in zip(self._layers, sums, strict=True)}
            raise ValueError(
                f"model (tokens by layer: {found}) must give every layer the same tokens: balance layers of "
                "other tokens by a BalanceLoss of their own"
            )
        counts_of = dict(zip(self._layers, split[::2], strict=True))
        return StepTotals(num_tokens=sums[0][0], num_sequences=sums[0][1], counts=counts_of)

    def _all_reduced(self, numbers: Tensor) -> Tensor:
        """Returns the sum over the ranks of a tensor of any shape. A collective."""
        if self._ranks.group is not None:
            sum_between_calls(numbers, self._ranks.group, "summing expert counts")
        return numbers

    def _check_totals(self, totals: StepTotals) -> None:
        """Raises ValueError if the totals lack a number that the loss needs: sequences or counts."""
        if self.over == "sequence" and totals.num_sequences < 1:
            raise ValueError(f"num_sequences ({totals.num_sequences}) must be that of the whole step")
        if self.over == "batch":
            counts = totals.counts
            if counts is None or any(
                name not in counts or tuple(counts[name].shape) != (layer.num_experts,)
                for name, layer in self._layers.items()
            ):
                raise ValueError(
                    "counts must have the choices of each expert in the whole step, by layer: take them from "
                    "balance.totals(), or use over='window' if the step cannot run forward twice"
                )

    def _counts(self, name: str, totals: StepTotals) -> Tensor:
        """Returns how many choices fell on each of a layer's E experts, (E,), in the step or the window.

        With over="window" these are the choices of earlier steps; without earlier steps the result is all
        ones. The loss takes from it the fraction f_e of choices that fell on each expert e.

        name: the name of the layer.
        totals: the numbers of the whole step.
        """
        if self.over == "batch":
            assert totals.counts is not None
            return totals.counts[name]
        layer = self._layers[name]
        if not self._window:
            return torch.ones(layer.num_experts, dtype=torch.int64)
        return torch.stack([step[name] for step in self._window]).sum(0)

    # ---- the sum over layers

    def _summed(self, calls: Mapping[str, _LayerSums], totals: StepTotals) -> Tensor:
        """Returns the part of the step's loss that comes from some calls, a scalar: the sum over all layers.

        The parts of all micro-batches add up to the loss of the step.

        calls: for each layer, by name, the sums over these calls.
        totals: the numbers of tokens, sequences and choices of the whole step, by which the loss is divided.
        """
        losses = []
        for name, of_layer in calls.items():
            assert of_layer.share is not None
            share_E = of_layer.share
            if self.over == "sequence":
                assert of_layer.sequences is not None
                loss = of_layer.sequences / totals.num_sequences
            else:
                counts_E = self._counts(name, totals).to(share_E.device)
                f_E = counts_E.to(share_E.dtype) / counts_E.sum().clamp(min=1)
                loss = (f_E * share_E).sum() * (share_E.shape[0] / max(totals.num_tokens, 1))
            if of_layer.z is not None:
                loss = loss + self.z_loss_weight / max(totals.num_tokens, 1) * of_layer.z
            losses.append(loss)
        return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    def _pooled(self, calls: Mapping[str, _LayerSums], totals: StepTotals) -> Tensor:
        """Returns the part of the step's loss that comes from some calls, as transformers computes the loss.

        The result is a scalar: one loss for the tokens of all layers together, not a sum over layers. The
        parts of all micro-batches add up to the loss of the step.

        calls: for each layer, by name, the sums over these calls.
        totals: the numbers of tokens, sequences and choices of the whole step, by which the loss is divided.
        """
        first = next(iter(calls.values())).share
        assert first is not None
        num_lines = max(totals.num_tokens * len(calls), 1)
        counts_E = torch.stack([self._counts(name, totals).to(first.device) for name in calls]).sum(0)
        top_k = next(iter(self._layers.values())).top_k
        f_E = top_k * counts_E.to(first.dtype) / counts_E.sum().clamp(min=1)
        shares = [
            of_layer.share.to(first.device) for of_layer in calls.values() if of_layer.share is not None
        ]
        loss = (f_E * torch.stack(shares).sum(0)).sum() * (first.shape[0] / num_lines)
        zs = [of_layer.z.to(first.device) for of_layer in calls.values() if of_layer.z is not None]
        return loss + self.z_loss_weight / num_lines * torch.stack(zs).sum() if zs else loss


class _Collector(GateHook):
    """A forward hook of a gate that passes the routing of each call to the function ``add``."""

    def __init__(self, gate: nn.Module, add: Callable[[Routing], object]) -> None:
        super().__init__(gate)
        self._add = add

    def __call__(self, gate: nn.Module, inputs: Any, routing: Routing) -> None:
        if not self.is_own(gate) or is_second_pass() or is_shape_run():
            return
        # These operations are hidden from activation checkpointing, so its second pass does not repeat them.
        # Gradients flow from them to the checkpointed graph through the logits.
        with hidden_from_checkpoints():
            self._add(routing)


def _no_choices(layer: MoELayer) -> Tensor:
    """Returns the counts of choices of a layer that was not called: zeros, (E,) int64 for E experts."""
    device = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
    return torch.zeros(layer.num_experts, dtype=torch.int64, device=device)


def _balanced_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers of a model by name, if all of them can be balanced by a loss.

    Raises ValueError if the model has no MoE layers, or if a gate has no `pmoe.Gate.balance_terms`.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) must hold a MoELayer")
    for name, layer in layers.items():
        router = layer.layer_modules.router
        if not isinstance(router, Gate) or type(router).balance_terms is Gate.balance_terms:
            raise ValueError(
                f"model has a layer {name!r} whose gate ({type(router).__name__}) has no scores to balance "
                "by a loss: pass an nn.ModuleList of the other layers"
            )
    return layers
