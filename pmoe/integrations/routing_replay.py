"""Router replay: runs a model so that tokens go to recorded experts, not to those of its gates.

In reinforcement learning, a training step should send a token to the same experts as the policy that
generated the token. But the router has been trained since, or the training engine rounds differently than the
inference engine. There are two kinds of replay. R2 replays the routing that the training engine computed with
the old policy. R3 (arXiv 2510.11370) replays the routing that the inference engine computed. A replayed call
has three steps:

    gate                       computes its scores as in any call
    forward hook of the gate   replaces the chosen experts by recorded ones, and asks the gate for their
                               weights (`pmoe.Gate.weights_of`), so gradients flow to the scores of this call
    everything after the gate  runs as in any call

Letters: T tokens of a call, K experts of a token, L layers of an inference engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pmoe.arguments import check_int, check_kind, check_module, check_tensors, is_int, list_of
from pmoe.call.shape_run import is_shape_run
from pmoe.checkpointing.contexts import routing_is_kept
from pmoe.checkpointing.replay import hidden_from_checkpoints, is_second_pass, may_run_again
from pmoe.checkpointing.routing_check import routing_hash
from pmoe.comm.agreement import gathered
from pmoe.comm.ranks import Ranks
from pmoe.gates.base import Gate, Routing
from pmoe.gates.hook import GateHook
from pmoe.integrations.model_layers import layers_of
from pmoe.integrations.routing_trace import traced_layers
from pmoe.layer import MoELayer

LIVE = -1
"""Expert number in a trace for a token that is not replayed: the gate chooses its experts."""


@contextlib.contextmanager
def replay_routing(
    model: nn.Module,
    trace: Mapping[str, Sequence[Tensor]],
    *,
    mask: Sequence[Tensor] | None = None,
) -> Iterator[None]:
    """Returns a context in which the tokens of every MoE layer go to recorded experts.

        with pmoe.record_routing(model) as trace:
            old_logits = model(tokens)
        with pmoe.replay_routing(model, trace):
            loss_of(model(tokens), old_logits).backward()

    The i-th call of a layer in the block uses the i-th entry of the layer's list in the trace. So the
    micro-batches of a step can be recorded in one block and replayed in one block. The routing weights of the
    replayed experts come from the scores that the gate computes in this call, and gradients flow to these
    scores. Losses such as l_aux, and the load that `DeepSeekGate` counts, are computed from the experts that
    the gate would have chosen itself.

    If an activation checkpoint runs a layer again in backward, the second pass uses the same recorded experts
    as the first. If the backward pass is outside of the block, use `pmoe.checkpoint_contexts`.

    Every rank of a layer must enter the block, with a trace of its own tokens. The ranks compare their
    numbers of calls when they enter; nothing else is communicated.

    Args:
        model: a model with MoE layers, or a single layer.
        trace: a dict {name of a layer: list with the experts of each call, (T, K): K for each of T tokens},
            from `record_routing`, `read_routing` or `engine_routing`. The experts are integers of any dtype
            on any device. A token with K entries of -1 is not replayed: the gate chooses its experts.
            The names must be those of the model's layers.
        mask: for each call, (T,) bool: False for tokens that are not replayed in any layer, for example
            because they belong to the prompt. None replays all tokens.

    Raises ValueError on every rank when the block is entered, if

    - the trace does not have exactly the layers of the model;
    - a token has another number of experts than top_k, an expert twice, or an expert that does not exist;
    - ranks have traces with different numbers of calls;
    - a gate cannot give weights to experts that it did not choose.

    A call raises ValueError if no recorded call is left for it, if the recorded call has another number of
    tokens, or if an `ExternalGate` has no ``weights_of`` in this call. The end of the block raises ValueError
    if fewer calls were made than were recorded.
    """
    check_module(model=model)
    replays: list[_Replay] = []
    failure: Exception | None = None
    try:
        replays = _replays(model, trace, mask)
    except (TypeError, ValueError) as error:
        failure = error
    _compare_ranks(model, replays, failure)
    with contextlib.ExitStack() as stack:
        for one in replays:
            stack.callback(one.layer.gate.register_forward_hook(one).remove)
        yield
    for one in replays:
        one.check_end()


class _Replay(GateHook):
    """A forward hook of a layer's gate that replaces the chosen experts of each call by recorded ones.

    name: the name of the layer.
    layer: the layer.
    calls: for each recorded call, K experts of each of its T tokens, (T, K) integers; -1 for tokens that are
        not replayed.
    mask: for each recorded call, (T,) bool, False for tokens that are not replayed; None if all are.
    num_done: number of calls that were replayed so far.
    """

    def __init__(self, name: str, layer: MoELayer, calls: list[Tensor], mask: list[Tensor] | None) -> None:
        super().__init__(layer.gate)
        self.name = name
        self.layer = layer
        self.calls = calls
        self.mask = mask
        self.num_done = 0
        # For each first pass of an activation checkpoint, the hash of its scores and the number of the call.
        # The number is None for a run in which a pipeline stage only finds its shapes.
        self._seen: list[tuple[Tensor, int | None]] = []

    def __call__(self, gate: nn.Module, inputs: Any, routing: Routing) -> Routing:
        """Returns the routing of a call with the recorded experts, and the weights that the gate gives them.

        gate: the gate that was called.
        inputs: an argument of every forward hook; not used.
        routing: the routing that the gate has computed.

        Raises ValueError if there is no recorded call, or if the recorded call has another number of tokens.
        """
        if not self.is_own(gate):
            return routing
        with hidden_from_checkpoints():  # a second pass of checkpointing must not expect them again
            at = self._again(routing) if is_second_pass() else self._first(routing)
            if at is None:
                return routing
            expert_TK = self._experts(at, routing.expert)
        router = self.layer.layer_modules.router
        assert isinstance(router, Gate)
        return replace(routing, expert=expert_TK, weight=router.weights_of(routing, expert_TK))

    def _first(self, routing: Routing) -> int | None:
        """Returns the index of the recorded call to replay in a forward pass that runs for the first time.

        `_again` is for second passes of activation checkpointing.

        Recorded calls are replayed in order. Returns None, and nothing is replayed, while a stage of
        torch.distributed.pipelining runs only to find out the shapes of its tensors.

        routing: the routing that the gate has computed. Its hash is kept if a second pass may follow.
        """
        at = None if is_shape_run() else self.num_done
        if may_run_again(self.layer) and not routing_is_kept():
            self._seen.append((_hash_of(routing), at))
        if at is None:
            return None
        if at == len(self.calls):
            raise ValueError(
                f"trace[{self.name!r}] has {at} calls, but the layer is called once more: record as many "
                "calls as are replayed"
            )
        self.num_done += 1
        return at

    def _again(self, routing: Routing) -> int | None:
        """Returns the index of the recorded call to replay in the second pass of activation checkpointing.

        Second passes come in any order. Each is matched to its first pass by the gate's scores, which are
        equal bit for bit in both passes. The host waits for the device.

        routing: the routing that the gate has computed in the second pass.

        Raises ValueError if no first pass had these scores, or if several had them but used different
        recorded experts.
        """
        mark = _hash_of(routing)
        marks = torch.stack([mark, *(hash_ for hash_, _ in self._seen)])
        is_same = (marks[1:] == mark).tolist()
        fitting = [at for (_, at), fits in zip(self._seen, is_same, strict=True) if fits]
        numbers = [at for at in fitting if at is not None]
        if fitting and not numbers:
            return None
        if not numbers or not all(self._equal(numbers[0], at) for at in numbers):
            found = "several calls with different routes" if numbers else "no call"
            raise ValueError(
                f"layer {self.name!r} is recomputed by an activation checkpoint with the scores of {found} "
                "of this replay_routing block: pass context_fn=pmoe.checkpoint_contexts to the checkpoint, "
                "which keeps the routing"
            )
        return numbers[0]

    def _equal(self, one: int, other: int) -> bool:
        """Returns whether two recorded calls have the same experts and masks.

        one, other: the indices of the two calls.
        """
        same_masks = self.mask is None or torch.equal(self.mask[one], self.mask[other])
        return same_masks and torch.equal(self.calls[one], self.calls[other])

    def _experts(self, at: int, live_TK: Tensor) -> Tensor:
        """Returns the experts of a call, (T, K) int64: the recorded ones for tokens that are replayed.

        Tokens that are not replayed get the gate's own choices. There are T tokens with K experts each.

        at: the index of the recorded call.
        live_TK: (T, K) int64, the gate's own choices.

        Raises ValueError if the recorded call has another shape.
        """
        recorded_TK = self.calls[at]
        if recorded_TK.shape != live_TK.shape:
            raise ValueError(
                f"trace[{self.name!r}][{at}] has experts of {recorded_TK.shape[0]} tokens, but the call has "
                f"{live_TK.shape[0]}: replay the calls in the order in which they were recorded, with the "
                "same tokens"
            )
        recorded_TK = recorded_TK.to(live_TK.device, torch.int64, non_blocking=True)
        is_live_TK = recorded_TK == LIVE
        if self.mask is not None:
            is_live_TK = is_live_TK | ~self.mask[at].to(live_TK.device).unsqueeze(1)
        return torch.where(is_live_TK, live_TK, recorded_TK)

    def check_end(self) -> None:
        """Raises ValueError if fewer calls were made in the block than were recorded."""
        if self.num_done < len(self.calls):
            raise ValueError(
                f"trace[{self.name!r}] has {len(self.calls)} calls, but the layer was called "
                f"{self.num_done} times: replay as many calls as were recorded"
            )


def _hash_of(routing: Routing) -> Tensor:
    """Returns a hash of a gate's scores, or of its chosen experts if it has no scores: an int64 scalar."""
    scores = routing.expert if routing.logits is None else routing.logits.detach()
    bits = scores.contiguous().view(torch.int64 if scores.itemsize == 8 else torch.int32)
    return routing_hash(routing.expert.shape[0], (bits,))


# ---- checks when a block is entered


def _replays(
    model: nn.Module, trace: Mapping[str, Sequence[Tensor]], mask: Sequence[Tensor] | None
) -> list[_Replay]:
    """Checks the arguments of `replay_routing`, and returns the hook for each layer's gate.

    Raises ValueError or TypeError if the trace or the mask does not fit the model.
    """
    check_kind(Mapping, "a dict of lists, such as record_routing gives", trace=trace)
    layers = traced_layers(model)
    for name in layers.keys() - trace.keys():
        raise ValueError(f"trace has no layer {name!r}; it has {_listed(trace)}, the model {_listed(layers)}")
    for name in trace.keys() - layers.keys():
        raise ValueError(
            f"trace has a layer {name!r}, but the model has {_listed(layers)}. For a part of it, such as "
            "a pipeline stage, pass the part of the trace with the names of its layers"
        )
    masks = None if mask is None else [_mask(at, one) for at, one in enumerate(list_of("mask", mask))]
    replays = []
    for name, layer in layers.items():
        router = layer.layer_modules.router
        can_weigh = isinstance(router, Gate) and type(router).weights_of is not Gate.weights_of
        if not can_weigh or router.decides_capacity:
            raise ValueError(
                f"model has a layer {name!r} whose gate ({type(router).__name__}) cannot give weights to "
                "experts that it did not choose: its class must override pmoe.Gate.weights_of, and must not "
                "decide the capacity"
            )
        what = f"trace[{name!r}]"
        calls = [_call(f"{what}[{at}]", one, layer) for at, one in enumerate(list_of(what, trace[name]))]
        if masks is not None and [len(one) for one in masks] != [len(one) for one in calls]:
            raise ValueError(
                f"mask (of {[len(one) for one in masks]} tokens) must have a value for each token of "
                f"{what} ({[len(one) for one in calls]} tokens), call by call"
            )
        replays.append(_Replay(name, layer, calls, masks))
    return replays


def _listed(names: Mapping[str, object]) -> str:
    """Returns the names of layers as a text for an error message."""
    return ", ".join(map(repr, names)) or "none"


def _mask(at: int, mask: Any) -> Tensor:
    """Checks the mask of one call, and returns it: (T,) bool, with an element for each of T tokens.

    at: the index of the call, for errors.

    Raises TypeError or ValueError if it is no bool tensor with one dimension.
    """
    check_tensors(1, **{f"mask[{at}]": mask})
    if mask.dtype != torch.bool:
        raise TypeError(f"mask[{at}] of dtype {mask.dtype} must be bool: False where the gate routes")
    checked: Tensor = mask
    return checked


def _call(what: str, expert_TK: Any, layer: MoELayer) -> Tensor:
    """Checks the recorded experts of one call, and returns them: (T, K) integers, K for each of T tokens.

    what: the place of the recorded experts in the trace, for errors.
    expert_TK: the recorded experts, as the user passed them.
    layer: the layer that was called.

    Raises TypeError or ValueError unless each token has K different experts of the layer, or K times -1. With
    -1 the token is not replayed.
    """
    check_integers(what, expert_TK, 2)
    wide_TK = expert_TK.long()
    if expert_TK.shape[1] != layer.top_k:
        raise ValueError(
            f"{what} of shape {tuple(expert_TK.shape)} must have top_k ({layer.top_k}) experts of each token"
        )
    is_live_TK = wide_TK == LIVE
    is_known_TK = (wide_TK >= 0) & (wide_TK < layer.num_experts)
    if not bool((is_live_TK.all(1) | is_known_TK.all(1)).all()):
        raise ValueError(
            f"{what} must have experts from 0 to {layer.num_experts - 1}, or only -1 for a token that the "
            f"gate routes; it has numbers from {int(wide_TK.min())} to {int(wide_TK.max())}"
        )
    ascending_TK = wide_TK.sort(1).values
    twice_T = ((ascending_TK.diff(dim=1) == 0) & (ascending_TK[:, 1:] != LIVE)).any(1)
    if bool(twice_T.any()):
        token = int(twice_T.nonzero()[0])
        raise ValueError(
            f"{what} must have different experts for a token, but token {token} has "
            f"{wide_TK[token].tolist()}: padding, and layers without experts, must be -1"
        )
    checked: Tensor = expert_TK
    # A tensor of inference mode cannot be saved for backward.
    return checked.clone() if checked.is_inference() else checked


def check_integers(what: str, value: Any, dims: int) -> None:
    """Raises TypeError or ValueError unless a value is a tensor of integers with ``dims`` dimensions.

    what: the value's name, for errors.
    """
    check_tensors(dims, **{what: value})
    if value.is_floating_point() or value.dtype == torch.bool:
        raise TypeError(f"{what} of dtype {value.dtype} must hold experts, as integers")


def _compare_ranks(model: nn.Module, replays: Sequence[_Replay], failure: Exception | None) -> None:
    """Raises an error on every rank if the trace is wrong on any rank, or if the numbers of calls differ.

    A collective of each group of ranks that shares a layer of the model. Ranks have different tokens, but
    must make equally many calls.

    model: the model.
    replays: the hooks of this rank; empty if its trace is wrong.
    failure: the error in this rank's trace; None if there is none.
    """
    counts = {one.name: len(one.calls) for one in replays}
    for ranks in _groups(model):
        known = (kind for kind in (TypeError, ValueError) if isinstance(failure, kind))
        report = None if failure is None else (next(known), str(failure))
        for rank, (error, others) in enumerate(gathered(ranks, (report, counts), stage="comparing traces")):
            if failure is not None:
                continue  # the other groups' collectives must run before the error is raised
            if error is not None:
                failure = error[0](f"rank {rank}: {error[1]}")
            elif others != counts:
                failure = ValueError(
                    f"trace (calls by layer: {counts} on rank {ranks.rank}) must have as many calls on every "
                    f"rank, but rank {rank} has {others}"
                )
    if failure is not None:
        raise failure


def _groups(model: nn.Module) -> list[Ranks]:
    """Returns the groups of ranks over which layers of a model are spread, in the order of the layers.

    Each group is listed once. Groups of a single rank are left out.
    """
    groups = {tuple(layer.ranks.members): layer.ranks for layer in layers_of(model).values()}
    return [ranks for ranks in groups.values() if ranks.size > 1]


# ---- traces of inference engines


def engine_routing(
    calls: Sequence[Tensor | Sequence[Tensor]],
    layers: Sequence[str | None],
    *,
    num_tokens: Sequence[int | Sequence[int]] | None = None,
) -> dict[str, list[Tensor]]:
    """Converts the routing that an inference engine reports to a trace for `replay_routing`.

        routes = torch.tensor(output.routed_experts)  # of vLLM: (tokens - 1, layers, top_k)
        names = [f"model.layers.{i}.mlp" for i in range(48)]
        trace = pmoe.engine_routing([routes], names, num_tokens=[len(token_ids)])

    Args:
        calls: for each call of the training, the K experts of each of its T tokens in each of the engine's L
            layers: (T, L, K), integers of any dtype. If a call has several sequences, one after the other, it
            may be a list of such tensors.
        layers: the name in the model of each of the engine's L layers. None leaves a layer out, for example a
            layer without experts, a layer of another pipeline stage, or a layer that predicts a further
            token.
        num_tokens: for each call the number of tokens that it has in training, or a list with the number of
            tokens of each of its sequences. The engine may have routed fewer tokens, because it does not
            route the last token that it generates. The missing tokens are not replayed: the gate chooses
            their experts. None means that the engine has routed all tokens.

    The result is a dict {name of a layer: list with an int64 tensor (T, K) for each call}. Layers are matched
    by name, not by number, so a layer cannot get the routing of another one by mistake.

    Raises ValueError or TypeError if shapes, names or numbers of tokens do not fit each other.
    """
    names = list_of("layers", layers)
    check_kind((str, type(None)), "the name of a layer, or None", **_numbered("layers", names))
    kept = [name for name in names if name is not None]
    if not kept or len({*kept}) < len(kept):
        raise ValueError(f"layers ({names}) must have at least one name, and each name once")
    given = list_of("calls", calls)
    if not given:
        raise ValueError("calls (0 of them) must have the experts of at least one call")
    lengths: list[Any] = [None for _ in given] if num_tokens is None else list_of("num_tokens", num_tokens)
    if len(lengths) != len(given):
        raise ValueError(
            f"num_tokens (of {len(lengths)} calls) must have one entry for each of the {len(given)} calls"
        )
    trace: dict[str, list[Tensor]] = {name: [] for name in kept}
    for at, (call, length) in enumerate(zip(given, lengths, strict=True)):
        expert_TLK = _call_of_engine(at, call, length, len(names))
        for layer, name in enumerate(names):
            if name is not None:
                trace[name].append(expert_TLK[:, layer].contiguous())
    return trace


def _numbered(what: str, values: Sequence[Any]) -> dict[str, Any]:
    """Returns the values of an argument by the names that they have in error messages.

    Example: what "layers" and values ("a", "b") -> {"layers[0]": "a", "layers[1]": "b"}.

    what: the name of the argument, such as "layers".
    values: its values, in order.
    """
    return {f"{what}[{at}]": value for at, value in enumerate(values)}


def _call_of_engine(at: int, call: Any, length: Any, num_layers: int) -> Tensor:
    """Returns the experts of one call, (T, L, K) int64, with -1 for tokens that the engine did not route.

    Letters: T tokens of the call, L layers of the engine, K experts of each token.

    at: the index of the call, for errors.
    call: (T, L, K) integers, or a list of such tensors, one for each sequence.
    length: the number of tokens that the call has in training, or a list with the number of tokens of each
        sequence. It may be larger than the number of tokens that the engine has routed. None if the engine
        has routed all tokens.
    num_layers: L.

    Raises ValueError or TypeError if shapes or numbers of tokens do not fit each other.
    """
    sequences = [call] if isinstance(call, Tensor) else list_of(f"calls[{at}]", call)
    wanted: list[Any] = [None for _ in sequences]
    if length is not None:
        wanted = [length] if is_int(length) else list_of(f"num_tokens[{at}]", length)
    if not sequences or len(wanted) != len(sequences):
        raise ValueError(
            f"num_tokens[{at}] (of {len(wanted)} sequences) must have one number for each of the "
            f"{len(sequences)} sequences in calls[{at}]"
        )
    parts = []
    for number, (expert_TLK, num_tokens) in enumerate(zip(sequences, wanted, strict=True)):
        what = f"calls[{at}]" if isinstance(call, Tensor) else f"calls[{at}][{number}]"
        check_integers(what, expert_TLK, 3)
        if expert_TLK.shape[1] != num_layers:
            raise ValueError(
                f"{what} of shape {tuple(expert_TLK.shape)} has {expert_TLK.shape[1]} layers, but layers has "
                f"{num_layers} entries: name each layer of the engine, or None to leave it out"
            )
        missing = 0
        if num_tokens is not None:
            check_int(0, **{f"num_tokens[{at}]": num_tokens})
            missing = num_tokens - expert_TLK.shape[0]
        if missing < 0:
            raise ValueError(
                f"num_tokens[{at}] ({num_tokens}) must be at least the {expert_TLK.shape[0]} tokens of {what}"
            )
        parts.append(torch.nn.functional.pad(expert_TLK.long(), (0, 0, 0, 0, 0, missing), value=LIVE))
    if len({part.shape[2] for part in parts}) > 1:
        raise ValueError(f"calls[{at}] must have as many experts of a token in every sequence")
    return torch.cat(parts)
