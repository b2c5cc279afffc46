"""Mistakes between ranks: counts, faults, agreement, collectives."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

COUNTS = "pmoe/comm/counts.py"

RANKS = (
    Plant(
        name="fault-flag-forgotten",
        breaks="a fault is known to the rank that has it, and the others go on",
        file=COUNTS,
        old="        codes = headers[:, 1].tolist()\n",
        new="        codes = [c * (r == self._ranks.rank) for r, c in enumerate(headers[:, 1].tolist())]\n",
        tests="tests/gloo/test_faults.py -k fault",
    ),
    Plant(
        name="counts-taken-before-the-exchange",
        breaks="a rank takes the rows that it sends for those that it gets",
        file=COUNTS,
        old="            recv=arrived,\n",
        new="            recv=own,\n",
        tests="tests/gloo/test_specification.py",
    ),
    Plant(
        name="slot-rows-rounded-down",
        breaks="a slot holds a row less than the slack allows",
        file=COUNTS,
        old="    return math.ceil(max_tokens * (slack * top_k / n))\n",
        new="    return int(max_tokens * (slack * top_k / n))\n",
        tests="tests/unit/test_reuse_schedule.py",
    ),
    Plant(
        name="chunks-cut-at-the-limit",
        breaks="a chunk that just fits its slot is cut again",
        file=COUNTS,
        old="(largest[chunks] > limit).any()",
        new="(largest[chunks] >= limit).any()",
        tests="tests/gloo/test_reuse.py -k skew",
    ),
    Plant(
        name="too-few-bins",
        breaks="a batch whose rows all go to one rank cannot be cut fine enough",
        file=COUNTS,
        old="    while bins * min(slack, 1.0) < finest * num_ranks and 2 * bins <= max_bins(num_experts):\n",
        new="    while bins * min(slack, 1.0) < finest and 2 * bins <= max_bins(num_experts):\n",
        tests="tests/unit/test_reuse_schedule.py",
    ),
    Plant(
        name="host-shortage-unheard",
        breaks="a rank without host memory sends its rows again, and the others do not",
        file=COUNTS,
        old="                agreed[HEADER] = recv_FWE.sum() > slots.host_rows\n",
        new="                agreed[HEADER] = 0\n",
        tests="tests/gloo/test_reuse.py -k cannot_offload",
    ),
    Plant(
        name="own-rows-relayed",
        breaks="rows that stay are counted among those that pass through",
        file=COUNTS,
        old="[without_own(counts, self._ranks.rank, self.num_staying) for counts in rows]",
        new="rows",
        tests="tests/gloo/test_flexible.py -k hierarchical",
    ),
    Plant(
        name="own-rows-counted-as-sent",
        breaks="bytes of rows that stay count as traffic",
        file="pmoe/comm/base.py",
        old="self.traffic.add(rows, rows.shape[0] - send_rows[self.ranks.rank])",
        new="self.traffic.add(rows, rows.shape[0])",
        tests="tests/gloo/test_behaviour.py -k exactly_the_rows",
    ),
    Plant(
        name="two-nodes-swapped",
        breaks="the second step of the 2D all-to-all sends rows by place, not by node",
        file="pmoe/comm/hierarchical_2d.py",
        old="[i * nodes + b for b in mates for i in places]",
        new="[i * nodes + b for i in places for b in mates]",
        tests="tests/gloo/test_collectives.py -k any_counts",
    ),
    Plant(
        name="largest-of-this-rank",
        breaks="ranks decide from numbers of their own",
        file="pmoe/comm/agreement.py",
        old="        reduce_to_largest(agreed, ranks.group)\n",
        new="",
        tests="tests/gloo/test_agree.py",
    ),
    Plant(
        name="failed-peers-unheard",
        breaks="a rank does not look whether the one that it waits for has failed",
        file="pmoe/comm/failures.py",
        old="    if not store.check([_any_failed(record)]):\n",
        new="    if store.check([_any_failed(record)]):\n",
        tests="tests/gloo/test_told.py",
    ),
    Plant(
        name="other-copies-frozen",
        breaks="copies of experts of which one is frozen are not told of each other",
        file="pmoe/training/gradient_mean.py",
        old="differ = largest(self.ranks, device, [not is_same for is_same in are_same], stage=stage)\n",
        new="differ = [float(not is_same) for is_same in are_same]\n",
        tests="tests/gloo/test_parallelize_experts.py -k frozen_on_some",
    ),
    Plant(
        name="shards-swapped",
        breaks="of two ranks inside a node each takes the other's rows for its own",
        file="pmoe/comm/expert_sharding.py",
        old="            own, received = (second, first) if esp.rank else (first, second)\n",
        new="            own, received = (first, second) if esp.rank else (second, first)\n",
        tests="tests/gloo/test_flexible.py -k sharded_experts_equal",
    ),
    Plant(
        name="copied-experts-pass",
        breaks="a loop that broadcasts all parameters leaves every rank with the same experts",
        file="pmoe/decide/rank_consistency.py",
        old="    elif are_same and not (were_same or all_changed_or_none):",
        new="    elif are_same and were_same and not all_changed_or_none:",
        tests="tests/gloo/test_wrapped.py",
    ),
    Plant(
        name="copied-later-untold",
        breaks="experts that become equal after the first call are not told by statistics",
        file="pmoe/decide/rank_consistency.py",
        old="    return not are_same",
        new="    return are_same",
        tests="tests/gloo/test_wrapped.py -k statistics",
    ),
    Plant(
        name="copies-of-experts-refused",
        breaks="a wrapper over ranks that hold the same experts is refused as one over ranks that do not",
        file="pmoe/experts/wrapper_checks.py",
        old="len(ranks & own) > 1 if ranks",
        new="len(ranks) > 1 if ranks",
        tests="tests/gloo/test_wrapped.py",
    ),
    Plant(
        name="unsharded-fsdp-passes",
        breaks="the older FSDP averages experts' gradients where it keeps them whole",
        file="pmoe/experts/wrapper_checks.py",
        old="base is not None and is_flattened(base)",
        new='getattr(base, "_padded_unsharded_size", None) is not None',
        tests="tests/gloo/test_wrapped.py -k took_for_copies",
    ),
)
