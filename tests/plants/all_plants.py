"""All plants, by what they break, and the level of the tests at which each is found."""

from __future__ import annotations

from tests.plants import (
    of_engine,
    of_experts,
    of_gates,
    of_kernels,
    of_planner,
    of_program,
    of_ranks,
    of_references,
    of_schedule,
    of_training,
)
from tests.plants.plant import Plant

LEVEL_OF: dict[Plant, str] = {
    **dict.fromkeys(of_schedule.SCHEDULE, of_schedule.LEVEL),
    **dict.fromkeys(of_engine.ENGINE, of_engine.LEVEL),
    **dict.fromkeys(of_program.PROGRAM, of_program.LEVEL),
    **dict.fromkeys(of_ranks.RANKS, of_ranks.LEVEL),
    **dict.fromkeys(of_gates.GATES, of_gates.LEVEL),
    **dict.fromkeys(of_experts.EXPERTS, of_experts.LEVEL),
    **dict.fromkeys(of_planner.PLANNER, of_planner.LEVEL),
    **dict.fromkeys(of_training.TRAINING, of_training.LEVEL),
    **dict.fromkeys(of_references.REFERENCES, of_references.LEVEL),
    **dict.fromkeys(of_kernels.KERNELS, of_kernels.LEVEL),
}
PLANTS = tuple(LEVEL_OF)
