"""Row counts of calls by pass programs under `pmoe.BoundedSteps`: the host reads no count.

A program is a pass that was compiled into a list of kernel launches and collectives. A bounded program has
room for ``slack`` times the rows of balanced routing in each chunk (`pmoe.program.bounded.RowBounds`). Its
rows travel over heaps, without padding. A call is bounded if the device compares its rows with this room
(`pmoe.decide.bounded_calls`). Because the host reads no row count, a CUDA graph can hold a bounded call.

    first call of a kind    the ranks exchange row counts, and the call runs by programs with exact counts.
                            The ranks agree on the bound of later calls
    later calls             the ranks gather all counts on the device. If the rows of any rank do not fit, all
                            ranks drop all rows, and 1 is added to `RowBound.exceeded`
"""

from __future__ import annotations

import weakref

from torch import Tensor

from pmoe.call.call import Call
from pmoe.call.decision import AgreedChoice, CountsSource, Decision, HostRowCounts
from pmoe.call.modules import LayerModules
from pmoe.call.row_bound import AgreedBound, BoundedRows, CallKind, ProgramBound, RowBound
from pmoe.comm.counts import RankCounts
from pmoe.comm.heap.program_heap import open_program_heap
from pmoe.decide.bounded_calls import (
    BoundedSource,
    bound_of_call,
    kind_of,
    kind_refusal,
    kind_with,
    meet_at_change,
    warn_of_mixed_calls,
    warn_unbounded,
    was_bounded,
)
from pmoe.decide.program_choice import MOST_ROWS, ProgramsKey, key_of, layer_refusal
from pmoe.decide.program_counts import ProgramCounts
from pmoe.engine.autograd import Runner
from pmoe.engine.passes.base import Inputs
from pmoe.program.backend import Programs
from pmoe.program.bounded import RowBounds, rows_on_device
from pmoe.runners.bounded_program import BoundedProgramRunner, NoGradientsProgramRunner


def bounded_program_source(call: Call, bound: RowBound) -> CountsSource | None:
    """Routes a call of a layer with programs under `pmoe.BoundedSteps`. Returns the source of its row counts.

    call: the call. Programs take its layer (`pmoe.decide.program_choice.takes_layer`).
    bound: the layer's bound.

    Returns None if no call of this layer can be bounded: without a warning if the layer has a single rank,
    otherwise with one warning for each reason (`program_bound_refusal`). All ranks get the same answer if
    they make calls of the same kinds.
    """
    modules = call.modules
    if modules.ranks.size == 1:
        return None  # all rows of a single rank fit
    why = program_bound_refusal(modules)
    if why is not None:
        warn_unbounded(why)
        return None
    if call.replay.is_replay:
        is_bounded = was_bounded(call)
    else:
        agreed = bound_of_call(call, bound)
        # A closed heap is not opened again: the ranks make a new one in a call that exchanges row counts.
        is_bounded = agreed is not None and agreed.is_repeatable and _suits(modules, agreed)
    meet_at_change(call, bound, is_bounded)
    return BoundedProgramCounts(call, bound) if is_bounded else FirstBoundedProgramCounts(call, bound)


def program_bound_refusal(modules: LayerModules) -> str | None:
    """Returns why no call of a layer with programs can be bounded; None if its calls can.

    All ranks get the same answer.

    modules: the modules and options of the layer.
    """
    options = modules.options
    why = modules.refusal("bounded programs") or layer_refusal(modules)
    if why is not None:
        return why
    if not options.switches.program_heaps:
        return (
            "rows of its programs travel by NCCL (program_heaps=False), and the host tells NCCL how many: "
            "set program_heaps=True"
        )
    if modules.leaves_choice_open:
        return (
            f"pipeline ({options.pipeline!r}) and memory_reuse ({options.restore}) leave a choice to the "
            'host: set pipeline to a number of chunks, and memory_reuse to one pair, such as "S4"'
        )
    if options.pipeline_backward not in (None, options.fixed_degree):
        return (
            f"both passes must have the same chunks: pipeline_backward ({options.pipeline_backward}) must be "
            f"left out, or equal pipeline ({options.pipeline})"
        )
    return None


def program_graph_refusal(
    modules: LayerModules, bound: RowBound, x_TM: Tensor, needs_grad: bool
) -> str | None:
    """Returns why a CUDA graph cannot hold a call by bounded programs; None if it can.

    modules: the modules and options of the layer.
    bound: the layer's bound.
    x_TM: (T, M), the rows of T tokens with M = d_model columns.
    needs_grad: whether autograd on this rank needs gradients of the call.
    """
    why = program_bound_refusal(modules) or kind_refusal(modules, bound, x_TM, needs_grad)
    if why is None and not _suits(modules, bound.agreed[kind_with(modules, x_TM)]):
        why = (
            "the experts, the gate, pipeline, memory_reuse or slack were changed after the last call of its "
            "kind: make one more call before the capture"
        )
    return why


def _bounds_for(modules: LayerModules, max_tokens: int) -> RowBounds:
    """Returns the most rows of each chunk for which a layer with programs has room.

    modules: the modules and options of the layer. The options fix the number of chunks.
    max_tokens: the most tokens of a rank.
    """
    chunks = modules.options.fixed_degree
    assert chunks is not None
    return RowBounds.of(
        max_tokens=max_tokens,
        top_k=modules.options.top_k,
        slack=modules.options.slack,
        chunks=chunks,
        ranks=modules.ranks.size,
        local_experts=modules.experts.num_local_experts,
    )


def _suits(modules: LayerModules, agreed: AgreedBound) -> bool:
    """Returns whether a bound is that of the layer's present modules and options.

    A user may have replaced or set them since the ranks agreed. All ranks get the same answer.
    """
    if not isinstance(agreed, ProgramBound) or not agreed.key.suits(modules):
        return False
    is_same_room = agreed.bounds == _bounds_for(modules, agreed.max_tokens)
    return is_same_room and agreed.restore == modules.pairs[0]


class FirstBoundedProgramCounts(ProgramCounts):
    """Gets a call's row counts by an exchange, after which the ranks agree on a bound for later calls.

    The class is for four kinds of calls:

    - the first call of each kind (`CallKind`);
    - the next call after heaps were closed, or the layer's modules or options were changed;
    - calls that `pmoe.BoundedSteps` repeats because their rows did not fit;
    - calls outside of its steps.
    """

    def __init__(self, call: Call, bound: RowBound) -> None:
        self._bound = bound
        self._kind = kind_of(call)
        super().__init__(call)

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        agreed = super().agree(modules, inputs)
        if agreed.programs is not None and agreed.counts is not None and self._kind is not None:
            key = key_of(modules, inputs.x_TM, inputs.weight_TK)
            self._agree_on_bound(self._kind, agreed.counts, agreed.programs, key)
        return agreed

    def _agree_on_bound(
        self, kind: CallKind, counts: RankCounts, programs: Programs, key: ProgramsKey
    ) -> None:
        """Stores the room that later calls of a kind have for their rows. All ranks store the same numbers.

        The room of a kind of calls never shrinks: a later call may again have as many tokens as the largest
        call before, or need gradients. If the programs cannot be bounded, a warning says why, once. Nothing
        is stored if autograd is on in some ranks' call and off in others': each rank would store another
        kind.

        kind: the kind of the call.
        counts: the row counts, after the ranks have exchanged them.
        programs: the programs that run the call.
        key: the key of ``programs``.
        """
        modules = self.call.modules
        if modules.ranks.grad_modes_differ:
            warn_of_mixed_calls()
            return
        known = self._bound.agreed.get(kind)
        max_tokens = counts.max_tokens
        needs_grad = counts.needs_grad
        if known is not None:
            max_tokens = max(max_tokens, known.max_tokens)
            needs_grad = needs_grad or known.needs_grad
        bounds = _bounds_for(modules, max_tokens)
        why = programs.backend.bounded_refusal(programs.communicator) or _rows_refusal(bounds)
        if why is not None:
            warn_unbounded(why)
            return
        heap = open_program_heap(modules.ranks, programs.device)
        self._bound.agree(
            kind,
            ProgramBound(
                programs=programs,
                key=key,
                bounds=bounds,
                restore=modules.pairs[0],
                heap=None if heap is None else weakref.ref(heap),
                max_tokens=max_tokens,
                needs_grad=needs_grad,
            ),
            may_run_again=self.call.may_run_again,
        )


def _rows_refusal(bounds: RowBounds) -> str | None:
    """Returns why programs have too many rows to be bounded; None if they have not."""
    most_rows = bounds.chunks * (bounds.received + bounds.sent + bounds.stays)
    if most_rows <= MOST_ROWS:
        return None
    return (
        f"indices of rows are int32: slack makes room for {most_rows} rows, at most {MOST_ROWS}; lower "
        "slack, or call the layer with fewer tokens"
    )


class BoundedProgramCounts(BoundedSource):
    """The row counts of a bounded call, which stay on the device. Implements `CountsSource`.

    The device compares the rows of every rank with the bound on which the ranks agreed in an earlier call.
    """

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        """Gathers the row counts of all ranks on the device, and computes which rows exist. Collective.

        modules: the layer's modules, with the experts to compute.
        inputs: the rows and parameters of the call.

        Raises RuntimeError on all ranks if the programs cannot read the gate's routing weights.
        """
        agreed = self.agreed_bound()
        assert isinstance(agreed, ProgramBound) and self.routed.routing.keep is None
        if key_of(modules, inputs.x_TM, inputs.weight_TK) != agreed.key:
            raise RuntimeError(
                f"gate ({type(self.call.modules.gate).__name__}) returned other routing weights than before "
                f"({tuple(inputs.weight_TK.shape)}, {inputs.weight_TK.dtype}), for which the programs of "
                "BoundedSteps were not compiled: call the layer once outside of BoundedSteps.step"
            )
        ranks = self.call.modules.ranks
        chunks = agreed.bounds.chunks
        gathered = self.gather(agreed, chunks)
        rows = rows_on_device(
            self.routed.routing.expert,
            gathered.all_WnE,
            agreed.bounds,
            ranks.rank,
            is_allowed=gathered.is_allowed,
        )
        self.bound.exceeded.add_(rows.fits.logical_not())
        counts_WnPE = gathered.all_WnE.view(ranks.size, chunks, ranks.size, -1)
        return AgreedChoice(
            programs=agreed.programs,
            bounded=BoundedRows(
                fits=rows.fits,
                send_nPE=gathered.own_nE.view(chunks, ranks.size, -1),
                recv_nPE=counts_WnPE[:, :, ranks.rank].transpose(0, 1),
                bound=agreed,
                lacks_gradients=gathered.lacks_gradients,
                device_rows=rows,
            ),
        )

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        """Returns the decision to run by bounded programs, which compute nothing if the rows do not fit.

        modules: the layer's modules, with the experts to compute. A tool such as PEFT may have replaced the
            layer's own experts by these.
        inputs: the rows and parameters of the call.
        agreed: the result of `agree`.
        """
        rows = agreed.bounded
        assert rows is not None and rows.device_rows is not None
        bound = rows.bound
        assert isinstance(bound, ProgramBound)
        runner: Runner = BoundedProgramRunner(
            programs=bound.programs,
            modules=modules,
            restore=bound.restore,
            bounds=bound.bounds,
            device_rows=rows.device_rows,
        )
        if rows.lacks_gradients:
            runner = NoGradientsProgramRunner(runner)
        counts = self.rank_counts(rows)
        return Decision(
            call=self.call,
            routed=self.routed,
            inputs=inputs,
            runner=runner,
            counts=HostRowCounts(counts, counts.max_tokens),
            restore=bound.restore,
            degree=bound.bounds.chunks,
        )
