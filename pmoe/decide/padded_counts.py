"""Row counts of a layer with ``pad_to_capacity``: computed from the number of tokens, not exchanged.

Every rank sends every expert the same number of rows, the capacity. If fewer rows were routed to an expert,
zeros are added; if more were routed, the last ones are dropped:

    capacity 3, 2 experts     expert 0       expert 1
    rows that were routed     a b            c d e f
    rows that are sent        a b 0          c d e        f is dropped, 0 is padding

The host needs no value from the device to send these rows, so the host does not wait, and a CUDA graph can
hold the call.

All ranks must have the same number of tokens. The ranks compare that number, and report faults (wrong input
or routing on one rank). On the CPU they do so in every call. On CUDA the host would have to wait, so they do
it only

- in the first call with each `PaddedCallKey`: number of tokens, dtype, and whether gradients are needed;
- in a call in which activation checkpointing routes the same tokens a second time.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.call.routed import CheckedRouting, RoutedBatch
from pmoe.call.sizes import splits_of
from pmoe.choose.choose import choose
from pmoe.comm.counts import CountsExchange, Fault, RankCounts
from pmoe.decide.exact_counts import LoadedExchange, in_chunks
from pmoe.decide.fused_choice import defer_routing, find_steps, kernels_runner, may_fuse
from pmoe.decide.route import needs_gradients, route_batch, run_gate
from pmoe.engine.passes.base import Inputs
from pmoe.engine.plan.make_plan import SortedSlots
from pmoe.engine.variants.padding import PaddedCallKey, check_same_calls, make_padding
from pmoe.gates.base import Routing
from pmoe.kernels.flashdmoe import RoutingInput
from pmoe.kernels.route import DeferredRouting
from pmoe.ordering.sorted import Tokens


class PaddedCounts:
    """The row counts of a layer with ``pad_to_capacity``: every count equals the capacity.

    The call runs in chunks (micro-batches), or by the persistent kernel. The class implements `CountsSource`,
    the interface of all sources of row counts.

    call     the call
    routed   the call's tokens with their routing
    """

    call: Call
    routed: RoutedBatch

    def __init__(self, call: Call) -> None:
        """Routes the call, unless the persistent kernel may compute the call and its routing.

        In that case the tensors of the routing have no values until the kernel is launched.
        """
        self.call = call
        modules = call.modules
        self._deferred: DeferredRouting | None = None
        self._padded_rows: tuple[SortedSlots, Tensor] | None = None
        self._degrees: tuple[int, ...] = ()
        self._solves = modules.options.solves
        self.routed = route_batch(call, self._ask_gate)
        self._device = self.routed.x_TM.device
        self._key = PaddedCallKey(
            num_tokens=self.routed.num_tokens,
            needs_grad=needs_gradients(call, self.routed.x_TM, *modules.gate.parameters()),
            dtype=self.routed.dtype,
        )
        self._pad_for(modules.counted_degrees)

    def _ask_gate(self, call: Call, x_TM: Tensor, rows_dtype: torch.dtype) -> CheckedRouting:
        """Returns the gate's routing, or tensors without values that the persistent kernel fills later.

        call: the call.
        x_TM: (T, M), the rows of T tokens with M = d_model columns.
        rows_dtype: the dtype of the rows that reach the experts.
        """
        if may_fuse(call.scheduled, x_TM.device, rows_dtype):
            self._deferred = defer_routing(call, x_TM)
        if self._deferred is None:
            return run_gate(call, x_TM, rows_dtype)
        weight_TK, expert_TK, *_, l_aux = self._deferred.routes
        return CheckedRouting(routing=Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux))

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Checks that all ranks make the same call. Chooses the persistent kernel, or n and the restore pair.

        All ranks must have the same number of tokens. n is the number of chunks. The restore pair says how
        backward gets two activations back: the rows that the experts received, and their hidden activation.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.

        Raises ValueError on every rank if the ranks have different numbers of tokens.
        """
        own_modules = self.call.modules
        _compare(self.call, self.routed, self._key)
        if may_fuse(self.call.scheduled, self._device, self.routed.dtype):
            cells = replace(self._host_counts, max_tokens=self._key.num_tokens, max_rows=0)
            steps = find_steps(own_modules, inputs, cells)
            if steps is not None:
                return AgreedChoice(steps=steps)

        def rows_for(degrees: tuple[int, ...]) -> tuple[RankCounts, SortedSlots]:
            self._pad_for(degrees)
            orders, _ = self._padded(modules)
            return self._device_counts, orders

        counts, orders = rows_for(self._degrees)
        choice = choose(own_modules, counts, inputs, orders, rows_for=rows_for if self._solves else None)
        if self._solves:
            own_modules.cache.counted = choice.degrees
        return AgreedChoice(choice=choice)

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns the decision to run in chunks of padded rows, or by the persistent kernel.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        agreed: the choice that `agree` returned: the persistent kernel, or n and the restore pair.
        """
        if agreed.choice is None:
            return self._by_kernels(inputs, agreed)
        self._pad_for(agreed.choice.degrees)
        orders, kept_E = self._padded(modules)
        return in_chunks(
            self,
            inputs,
            orders,
            self._device_counts,
            agreed.choice,
            max_tokens=self._key.num_tokens,
            kept_device_E=kept_E,
        )

    def _by_kernels(self, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns the decision to run by the persistent kernel, which counts its own rows within capacity.

        inputs: the rows and parameters of the call.
        agreed: the result of `agree`, with the operators that launch the kernel.
        """
        assert agreed.steps is not None
        splits = self._splits
        kept_E = torch.empty(splits.num_experts, dtype=torch.int32, device=self._device)
        chosen = RoutingInput(
            expert_TK=self.routed.routing.expert,
            deferred=self._deferred,
            capacity=splits.capacity,
            counts_A=kept_E,
        )
        runner = kernels_runner(self.call.modules, agreed.steps, chosen)
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=HostRowCounts(self._host_counts, self._key.num_tokens, kept_E),
            restore=runner.restore,
        )

    @functools.cached_property
    def _host_counts(self) -> RankCounts:
        """Returns the row counts with all tensors on the host, also the field ``recv_device``."""
        return self._counts_on(torch.device("cpu"))

    @functools.cached_property
    def _device_counts(self) -> RankCounts:
        """Returns the row counts: all tensors on the host, except ``recv_device``, which kernels read.

        ``recv_device`` has the same values as ``recv``, on the device of the rows.
        """
        return self._counts_on(self._device)

    def _counts_on(self, device: torch.device) -> RankCounts:
        """Returns the row counts: how many rows each rank sends to each expert, rows of padding included.

        Because padding counts, the number is the same for all ranks and experts.

        device: the device for the field ``recv_device``, which kernels read. All other tensors are on the
            host.
        """
        splits = self._splits
        # The solver's answer depends on this number of rows. So the number must not depend on the bins, which
        # follow from the solver's answer.
        num_rows = splits.num_experts * splits.capacity if self._solves else splits.num_rows
        max_tokens = -(-num_rows // self.routed.routing.expert.shape[1])
        num_ranks = self.call.modules.ranks.size
        return splits.counts(num_ranks, device, max_tokens=max_tokens, needs_grad=self._key.needs_grad)

    def _pad_for(self, degrees: tuple[int, ...]) -> None:
        """Divides the padded rows into bins, from which chunks are built.

        Padding gives every expert the same number of rows. Each bin has the same number of rows of every
        expert. A chunk consists of whole bins, so the number of bins is a multiple of every n in ``degrees``.

        Only the first call of this method divides the rows. With ``pipeline="solve"`` they are divided again
        if ``degrees`` differ from those before.

        degrees: the numbers of chunks n that may be chosen.
        """
        modules = self.call.modules
        if self._degrees and not (self._solves and set(degrees) != set(self._degrees)):
            return
        self._degrees = degrees
        top_k = self.routed.routing.expert.shape[1]
        self._splits = splits_of(modules, self._key.num_tokens, top_k, degrees)
        self._padded_rows = None
        for counts in ("_host_counts", "_device_counts"):
            vars(self).pop(counts, None)

    def _padded(self, modules: LayerModules) -> tuple[SortedSlots, Tensor]:
        """Pads or drops this rank's rows, so that it has exactly ``capacity`` rows for every expert.

        Returns two values, which are computed once for a call:

        - the padded rows, which can be sorted into chunks;
        - (E,) for each of E experts, the number of its rows that are not padding.

        The method is for calls in chunks. If the routing was left to the persistent kernel, which does not
        compute this call after all, the method also computes the routing.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        """
        if self._padded_rows is None:
            if self._deferred is not None:
                self._deferred.keep()
            splits = self._splits
            orders = SortedSlots(modules, splits.expert_of_rows(self._device), None, Tokens(splits.num_rows))
            orders.padding, kept_E = make_padding(self.routed.routing.expert.long(), splits)
            self._padded_rows = (orders, kept_E)
        return self._padded_rows


def _compare(call: Call, routed: RoutedBatch, key: PaddedCallKey) -> None:
    """Checks that all ranks make the same call of a layer with ``pad_to_capacity``, and exchanges faults.

    All ranks must have the same number of tokens, and all ranks or no ranks must need gradients. On the CPU
    every call is checked. On CUDA the host would wait for the exchange, so only two sorts of calls are
    checked:

    - the first call with these values of ``key``;
    - a call in which activation checkpointing routes the same tokens a second time.

    call: the call.
    routed: the call's tokens with their routing, and the fault of this rank.
    key: the number of tokens and dtype of this rank's call, and whether it needs gradients.

    Raises ValueError on every rank if ranks have different numbers of tokens, or if only some ranks need
    gradients. Raises FaultError on every rank if any rank reports a fault.
    """
    modules = call.modules
    known_keys = modules.cache.padded_kinds
    device = routed.x_TM.device
    is_again = routed.gated.is_again
    compares = compares_always(device)
    if routed.failure is not None and known_keys and not compares:
        # On CUDA this rank may be the only one to start an exchange: the other ranks skip the exchange if
        # they have compared a call with their number of tokens before. So this rank raises by itself.
        raise routed.failure
    if key in known_keys and not (compares or is_again):
        return
    if modules.ranks.size > 1 or is_again:

        def begin(fault: Tensor | Fault) -> CountsExchange:
            return key.exchange(
                modules.grid,
                modules.options.num_experts,
                device,
                fault,
                modules.traffic,
                training=call.layer.training,
            )

        check_same_calls(LoadedExchange(modules, routed, begin).finish())
    if len(known_keys) >= 256:  # all ranks know the same keys, so all ranks forget them at the same call
        known_keys.clear()
    known_keys.add(key)


def compares_always(device: torch.device) -> bool:
    """Returns whether ranks compare their numbers of tokens in every call: on the CPU, but not on CUDA.

    This is about layers with ``pad_to_capacity``. On CUDA each comparison would make the host wait for the
    device, so ranks compare only the first call of each kind (`PaddedCallKey`).
    """
    return device.type != "cuda"
