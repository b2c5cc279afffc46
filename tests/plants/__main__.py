"""See `tests.plants`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.plants.all_plants import PLANTS
from tests.plants.plant import run

words = sys.argv[1:]
missed = 0
for plant in PLANTS:
    if words and not any(word in plant.name for word in words):
        continue
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = run(plant, Path(folder))
            told = outcome.by if outcome.found else "NOT FOUND by " + plant.tests
            missed += not outcome.found
        except (AssertionError, ValueError) as error:
            told, missed = f"NOT RUN: {error}", missed + 1
            print(f"{plant.name:32} {told}", flush=True)
            continue
    print(f"{plant.name:32} {outcome.seconds:5.1f} s  {told}", flush=True)
sys.exit(1 if missed else 0)
