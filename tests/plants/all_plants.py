"""All plants, by what they break."""

from __future__ import annotations

from tests.plants.of_engine import ENGINE
from tests.plants.of_experts import EXPERTS
from tests.plants.of_gates import GATES
from tests.plants.of_kernels import KERNELS
from tests.plants.of_planner import PLANNER
from tests.plants.of_ranks import RANKS
from tests.plants.of_schedule import SCHEDULE
from tests.plants.of_training import TRAINING

PLANTS = (*SCHEDULE, *ENGINE, *RANKS, *GATES, *EXPERTS, *PLANNER, *TRAINING, *KERNELS)
