"""Row counts of a layer whose calls may run as compiled programs: all ranks exchange the counts.

A program is a pass that was compiled into a list of kernel launches and collectives, which C++ code issues.
After the exchange the ranks agree on the programs (`pmoe.decide.program_choice`). A call that cannot run as
programs is run by the engine, in the same chunks.
"""

from __future__ import annotations

from pmoe.call.decision import AgreedChoice, Decision
from pmoe.call.modules import LayerModules
from pmoe.decide.exact_counts import ExactCounts
from pmoe.decide.program_choice import agreed_programs
from pmoe.decide.solver_counts import SolverCounts
from pmoe.engine.passes.base import Inputs
from pmoe.runners.program import ProgramRunner


class ProgramCounts(ExactCounts):
    """Gets the row counts of a layer whose calls may run as programs, by an exchange among all ranks.

    A program is a pass that was compiled into a list of kernel launches and collectives. The class counts
    rows as `ExactCounts` does. In addition, the ranks agree on the programs that run the call.
    """

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        return _with_programs(super().agree(modules, inputs), modules, inputs)

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        return _by_programs(super().decision(modules, inputs, agreed), agreed)


class ProgramSolverCounts(SolverCounts):
    """Gets the row counts of a layer with ``pipeline="solve"`` whose calls may run as programs.

    A program is a pass that was compiled into a list of kernel launches and collectives. The class counts
    rows as `SolverCounts` does. In addition, the ranks agree on the programs that run the call.
    """

    def agree(self, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
        return _with_programs(super().agree(modules, inputs), modules, inputs)

    def decision(self, modules: LayerModules, inputs: Inputs, agreed: AgreedChoice) -> Decision:
        return _by_programs(super().decision(modules, inputs, agreed), agreed)


def _with_programs(agreed: AgreedChoice, modules: LayerModules, inputs: Inputs) -> AgreedChoice:
    """Returns ``agreed`` with the programs that run the call, if all ranks have them. Collective.

    agreed: the row counts and the choice of chunks. A call of few rows has no chunks, and gets no programs.
    modules: the modules of the layer, with the experts that were really called.
    inputs: the rows and parameters of the call.
    """
    if agreed.choice is None:
        return agreed
    assert agreed.counts is not None
    return agreed._replace(programs=agreed_programs(modules, inputs, agreed.counts, agreed.choice))


def _by_programs(decision: Decision, agreed: AgreedChoice) -> Decision:
    """Returns a decision to run the call by its programs; ``decision`` itself if it has no programs."""
    plan = decision.plan
    if agreed.programs is None or plan is None:
        return decision
    assert len(plan.forward.chunks) == len(plan.backward.chunks) and not plan.forward.has_drops
    counts = decision.counts.shared.joined(len(plan.forward.chunks))
    runner = ProgramRunner(
        programs=agreed.programs,
        modules=plan.modules,
        restore=plan.restore,
        plan=plan,
        send_nWE=counts.send.contiguous(),
        recv_nWE=counts.recv.contiguous(),
    )
    return decision._replace(runner=runner)
