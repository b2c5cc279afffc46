"""Mistakes in what is predicted and chosen: costs, times, bytes, degrees."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

COST_MODEL = "pmoe/planner/cost_model.py"
DEGREE = "pmoe/planner/degree_search.py"
CHOICES = "tests/gloo/test_best_choices.py"

PLANNER = (
    Plant(
        name="table-ii-of-communicate",
        breaks="sending T_DI again is half as dear as Table II says",
        file=COST_MODEL,
        old='        sent += 1.0 if restore.dispatched == "communicate" else 0.0\n',
        new='        sent += 0.5 if restore.dispatched == "communicate" else 0.0\n',
        tests="tests/unit/test_cost_model.py",
    ),
    Plant(
        name="interference-of-another-lane",
        breaks="copies beside computing are slowed as beside messages",
        file=COST_MODEL,
        old='    "eta_comm": (COPY, (COMMUNICATE, COPY)),\n    "eta_comp": (COPY, (COMPUTE, COPY)),\n',
        new='    "eta_comp": (COPY, (COMMUNICATE, COPY)),\n    "eta_comm": (COPY, (COMPUTE, COPY)),\n',
        tests="tests/unit/test_cost_model.py",
    ),
    Plant(
        name="lanes-that-never-queue",
        breaks="the simulator runs tasks of one lane side by side",
        file="pmoe/planner/simulator.py",
        old="        start = lane_free.get(task.lane, 0.0)\n",
        new="        start = 0.0\n",
        tests="tests/unit/test_planner.py",
    ),
    Plant(
        name="slowed-lanes-at-full-speed",
        breaks="of a task that others slow down too much is done",
        file="pmoe/planner/simulator.py",
        old="                running[lane] = (task, left - step * speed.get(lane, 1.0))\n",
        new="                running[lane] = (task, left - step)\n",
        tests="tests/unit/test_fsmoe_table5.py",
    ),
    Plant(
        name="buffers-die-a-task-early",
        breaks="a buffer is given back while its last reader runs",
        file="tests/paper_memory.py",
        old="    during = tuple(living(at, at) for at in range(len(tasks)))\n",
        new="    during = tuple(living(at, at + 1) for at in range(len(tasks)))\n",
        tests="tests/unit/test_memory_model.py",
    ),
    Plant(
        name="bound-of-balanced-routing",
        breaks="the memory bound forgets rows that no cutting avoids",
        file="pmoe/planner/rows_per_pass.py",
        old="        received = min(received, max(slot_rows, sources * _most_of_chunk(call, cuts)))\n",
        new="        received = min(received, slot_rows)\n",
        tests="tests/unit/test_footprint.py -k no_cutting_avoids",
    ),
    Plant(
        name="arena-of-forward-alone",
        breaks="the prediction of backward takes forward's slots",
        file="pmoe/planner/memory.py",
        old='    backward_held = _held(sizes, rows=backward, direction="backward",',
        new='    backward_held = _held(sizes, rows=forward, direction="forward",',
        tests="tests/unit/test_footprint.py",
    ),
    Plant(
        name="ranges-over-gaps",
        breaks="a batch size between two answers is given the lower one's",
        file="pmoe/planner/granularity.py",
        old="        return below if below == above else None\n",
        new="        return below\n",
        tests="tests/unit/test_granularity.py",
    ),
    Plant(
        name="key-without-users-settings",
        breaks="a user's gates of one class share what was learnt, however many rows they make",
        file="pmoe/choose/search.py",
        old="options_in_words(modules, of_users=True)",
        new="options_in_words(modules)",
        tests="tests/unit/test_learnt_key.py",
    ),
    Plant(
        name="kept-degrees-of-another-rank",
        breaks="each rank takes its own file of what trials found",
        file="pmoe/choose/search.py",
        old='    key, tables = from_first(ranks, sent, stage="sharing what trials found")\n',
        new="    tables = _kept(kept_path(key), key, candidates=range(1, 17))\n",
        tests="tests/gloo/test_learnt.py -k only_another",
    ),
    Plant(
        name="case-3-without-the-node",
        breaks="FSMoE's third case forgets gathering and scattering",
        file=DEGREE,
        old="        2 * r * a2a + ag + rs,\n",
        new="        2 * r * a2a,\n",
        tests="tests/unit/test_pipeline_degree.py",
    ),
    Plant(
        name="node-lane-without-its-sums",
        breaks="where the intra-node lane is busiest, summing among the ranks of an expert is free",
        file=DEGREE,
        old="        2 * a2a + r * (ag + rs),\n",
        new="        2 * a2a + r * ag,\n",
        tests="tests/unit/test_pipeline_degree.py",
    ),
    Plant(
        name="gradients-before-they-are-made",
        breaks="a layer carries gradients that backward has not made yet",
        file="pmoe/planner/gradient_partition.py",
        old="    rooms = [min(spare[at:]) for at in range(len(spare))]",
        new="    rooms = [max(spare[at:]) for at in range(len(spare))]",
        tests="tests/unit/test_gradient_partition.py",
    ),
    Plant(
        name="dearest-pair",
        breaks="memory_reuse=True takes the pair that Eq. 10 finds slowest",
        file="pmoe/planner/priced_choices.py",
        old="            self._pairs[key] = cheapest\n",
        new="            self._pairs[key] = max(seconds, key=seconds.__getitem__)\n",
        tests=f"{CHOICES} -k suits",
    ),
    Plant(
        name="slowest-degree",
        breaks="pipeline=True records the n of most seconds",
        file="pmoe/choose/search.py",
        old="    best = known.record(max_tokens, step_seconds)\n",
        new="    best = known.record(max_tokens, {d: 1 / s for d, s in step_seconds.items()})\n",
        tests=f"{CHOICES} -k trials",
    ),
    Plant(
        name="degrees-of-the-other-pass",
        breaks="forward's trials choose backward's n and the other way round",
        file="pmoe/choose/search.py",
        old="    combined = PassDegrees(fastest_forward.forward, fastest_backward.backward)\n",
        new="    combined = PassDegrees(fastest_backward.backward, fastest_forward.forward)\n",
        tests=f"{CHOICES} -k trials",
    ),
    Plant(
        name="means-of-trials",
        breaks="one trial that something else slowed decides on n",
        file="pmoe/measure/timing.py",
        old="        [statistics.median(map(seconds, part)) for part in zip(*samples, strict=True)]\n",
        new="        [statistics.fmean(map(seconds, part)) for part in zip(*samples, strict=True)]\n",
        tests=f"{CHOICES} -k trials",
    ),
    Plant(
        name="least-bytes-of-a-budget",
        breaks="of what fits a budget the smallest is taken, however slow",
        file="pmoe/planner/priced_choices.py",
        old="    return min(fitting, key=PRICE)\n",
        new="    return min(fitting, key=lambda each: (each.memory.promised, each.seconds))\n",
        tests=f"{CHOICES} -k budget",
    ),
    Plant(
        name="slowest-solved-degree",
        breaks='pipeline="solve" takes the slowest n for both passes',
        file="pmoe/choose/solve.py",
        old="        best = min(DEGREES, key=step)\n",
        new="        best = max(DEGREES, key=step)\n",
        tests="tests/gloo/test_flexible.py -k solved_degrees_follow",
    ),
    Plant(
        name="weights-read-for-nothing",
        breaks="chunks do not read the experts' weights anew: sixteen are as good as two",
        file="pmoe/planner/layer_seconds.py",
        old="        Kind.COMPUTE: profile.products(rows * of_row, weights * (hidden + active)),\n",
        new="        Kind.COMPUTE: profile.compute(rows * of_row),\n",
        tests="tests/unit/test_chosen_degrees.py",
    ),
    Plant(
        name="all-rows-travel",
        breaks="the solver has all rows wait for messages, and takes more chunks than are worth it",
        file="pmoe/planner/layer_sizes.py",
        old="        return 1 / self.num_ranks if self.bypass_local and self.esp_size == 1 else 0.0\n",
        new="        return 0.0\n",
        tests="tests/unit/test_chosen_degrees.py",
    ),
)
