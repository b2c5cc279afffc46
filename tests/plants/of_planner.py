"""Mistakes in what is predicted and chosen: costs, times, bytes, degrees."""

from __future__ import annotations

from tests.plants.plant import Plant

COST_MODEL = "pmoe/planner/cost_model.py"
DEGREE = "pmoe/planner/pipeline_degree.py"

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
        old="                return self.sigma_mem, 1.0, self.eta_comp\n",
        new="                return self.sigma_mem, 1.0, self.eta_comm\n",
        tests="tests/unit/test_cost_model.py",
    ),
    Plant(
        name="lanes-that-never-queue",
        breaks="the simulator runs tasks of one lane side by side",
        file="pmoe/planner/simulator.py",
        old="        start = max(ready, lane_free.get(task.lane, 0.0))\n",
        new="        start = ready\n",
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
        file="pmoe/planner/pass_rows.py",
        old="    received = min(sources * own, max(slot_rows, sources * finest))\n",
        new="    received = min(sources * own, slot_rows)\n",
        tests="tests/unit/test_footprint.py",
    ),
    Plant(
        name="arena-of-forward-alone",
        breaks="the prediction of backward takes forward's slots",
        file="pmoe/planner/memory.py",
        old='    backward_slots = _arena(sizes, backward, "backward", restore, rearranged)\n',
        new='    backward_slots = _arena(sizes, forward, "forward", restore, rearranged)\n',
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
        file="pmoe/layer/searched.py",
        old="options_in_words(parts, of_users=True)",
        new="options_in_words(parts)",
        tests="tests/unit/test_learnt_key.py",
    ),
    Plant(
        name="kept-degrees-of-another-rank",
        breaks="each rank takes its own file of what trials found",
        file="pmoe/runners/searched.py",
        old='    key, tables = from_first(ranks, sent, stage="sharing what trials found")\n',
        new="    tables = _kept(kept_path(key), key, candidates=range(1, 17))\n",
        tests="tests/gloo/test_learnt.py -k only_another",
    ),
    Plant(
        name="cached-answers-that-fell",
        breaks="answers that a new measurement contradicts stay",
        file="pmoe/planner/granularity.py",
        old="        if self.ranges.contradictions > before:",
        new="        if self.ranges.contradictions < before:",
        tests="tests/unit/test_granularity.py",
    ),
    Plant(
        name="case-3-without-the-node",
        breaks="FSMoE's third case forgets gathering and scattering",
        file=DEGREE,
        old="            return 2 * r * a2a + ag + rs\n",
        new="            return 2 * r * a2a\n",
        tests="tests/unit/test_pipeline_degree.py",
    ),
    Plant(
        name="node-lane-without-its-sums",
        breaks="where the intra-node lane is busiest, summing among the ranks of an expert is free",
        file=DEGREE,
        old="            return 2 * a2a + r * (ag + rs)\n",
        new="            return 2 * a2a + r * ag\n",
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
)
