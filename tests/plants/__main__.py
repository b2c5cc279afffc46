"""See `tests.plants`."""

from __future__ import annotations

import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.plants.all_plants import LEVEL_OF, PLANTS
from tests.plants.plant import Plant, run


def told(plant: Plant) -> tuple[bool, str]:
    """Whether it was found, and a line about it."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = run(plant, LEVEL_OF[plant], Path(folder))
        except (AssertionError, ValueError) as error:
            return False, f"{plant.name:32} NOT RUN: {error}"
    by = outcome.by if outcome.found else f"NOT FOUND by {plant.tests}"
    return outcome.found, f"{plant.name:32} {outcome.seconds:5.1f} s  {by}"


words = sys.argv[1:]
chosen = [plant for plant in PLANTS if not words or any(word in plant.name for word in words)]
missed = 0
with ThreadPoolExecutor(os.cpu_count() or 1) as several:
    for found, line in several.map(told, chosen):
        missed += not found
        print(line, flush=True)
sys.exit(1 if missed else 0)
