"""bench/bench_main_job.py: all models have the loss of pmoe's, and each is timed."""

from __future__ import annotations

import pytest

from tests import fresh

TINY = """--d-model 16 --d-hidden 32 --layers 2 --heads 2 --context 16 --batch 4 --num-experts 4""".split()  # noqa: SIM905
SCRIPT = f"""
from bench import bench_main_job as job
from bench.links import INFINITE, launch

arguments = job.parse_arguments({TINY})
if __name__ == "__main__":
"""


@pytest.mark.slow
def test_the_models_of_one_rank_have_the_same_loss_and_are_timed() -> None:
    out = fresh.run(SCRIPT + "    print(*job.on_one_rank(arguments, 2), sep=',')")
    assert out.splitlines()[-1].startswith("pmoe,plain,transformers eager,transformers grouped_mm")


@pytest.mark.slow
def test_the_models_of_two_ranks_have_the_same_loss_and_a_bound() -> None:
    run = "    print(launch(2, job.on_two_ranks, 'modelled', INFINITE, (arguments, 2))[0]['bound'] > 0)"
    assert fresh.run(SCRIPT + run).splitlines()[-1] == "True"
