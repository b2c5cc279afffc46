"""Mistakes in running a schedule: waits, buffers, rows and their order, what forward leaves for backward."""

from __future__ import annotations

from tests.levels import MAKE_TEST
from tests.plants.plant import Plant

LEVEL = MAKE_TEST

PASSES = "pmoe/engine/passes/base.py"
BACKWARD = "pmoe/engine/passes/backward.py"
LANES = "pmoe/engine/lanes/base.py"
CUDA_LANES = "pmoe/engine/lanes/cuda.py"
OFFLOADED = "pmoe/engine/variants/offload.py"
CUT = "pmoe/engine/plan/make_plan.py"
STREAMS = "tests/gloo/test_streams.py"
SPECIFICATION = "tests/gloo/test_specification.py"

ENGINE = (
    Plant(
        name="cpu-wait-dropped",
        breaks="on the CPU a task starts before what it waits for has ended",
        file=LANES,
        old="            if name in self._works:\n                self._wait(name)\n",
        new="            pass\n",
        tests=SPECIFICATION,
    ),
    Plant(
        name="stream-wait-skipped",
        breaks="a stream does not wait for events of other lanes",
        file=CUDA_LANES,
        old="            stream.wait_event(self._events[name])\n",
        new="            pass\n",
        tests=f"{STREAMS} -k test_streams_never_race",
    ),
    Plant(
        name="stream-wait-of-own-lane",
        breaks="events of the own lane are awaited instead of those of others",
        file="pmoe/schedule/tasks.py",
        old="if awaited.lane is task.lane or ended",
        new="if awaited.lane is not task.lane or ended",
        tests=f"{STREAMS} -k test_streams_never_race",
    ),
    Plant(
        name="finish-the-wrong-way-round",
        breaks="other lanes wait for computing at the end, and computing for none of them",
        file=CUDA_LANES,
        old="                self._stream[Lane.COMPUTE].wait_stream(stream)\n",
        new="                stream.wait_stream(self._stream[Lane.COMPUTE])\n",
        tests=f"{STREAMS} -k test_streams_never_race",
    ),
    Plant(
        name="host-memory-while-it-is-read",
        breaks="copies out overwrite host memory that another stream's pass still reads",
        file=CUDA_LANES,
        old="            self._stream[Lane.COPY_OUT].wait_stream(copies_in)\n",
        new="            pass\n",
        tests=f"{STREAMS} -k two_streams or on_two_streams",
    ),
    Plant(
        name="an-error-abandons-nothing",
        breaks="after an error buffers are freed that copies and messages still use",
        file="pmoe/engine/lanes/run.py",
        old="        lanes.abandon()\n        raise\n",
        new="        raise\n",
        tests=f"{STREAMS} -k an_error",
    ),
    Plant(
        name="sends-on-after-a-failure",
        breaks="what follows a failed exchange is sent to peers that are still at that one",
        file="pmoe/engine/lanes/threads.py",
        old="            self._has_failed = True\n            self.fail(task, error)\n",
        new="            self.fail(task, error)\n",
        tests="tests/unit/test_lanes.py",
    ),
    Plant(
        name="arena-never-given-back",
        breaks="a pass keeps its slots for ever",
        file=PASSES,
        old="            self.arena.close()\n",
        new="            pass\n",
        tests="tests/unit/test_footprint.py -k layers_without_rings",
    ),
    Plant(
        name="host-blocks-not-joined",
        breaks="host memory that was given back stays in pieces",
        file="pmoe/engine/buffers/host_pool.py",
        old="            if sum(joined[-1]) == piece_start:\n",
        new="            if sum(joined[-1]) < piece_start:\n",
        tests="tests/unit/test_reuse_host.py",
    ),
    Plant(
        name="held-host-blocks-handed-out",
        breaks="memory that a graph still holds goes to the next pass",
        file="pmoe/engine/buffers/host_pool.py",
        old="            if _holders(block) > _NONE:\n",
        new="            if _holders(block) > _NONE + 2:\n",
        tests="tests/unit/test_pool.py -k graph",
    ),
    Plant(
        name="gelu-of-every-shape",
        breaks="each number of rows leaves a compiled kernel in memory",
        file="pmoe/experts/ffn.py",
        old="    if tensors[0].is_cuda or rows < 16 or not rows & (rows - 1):\n",
        new="    if rows:\n",
        tests="tests/unit/test_pool.py -k numbers",
    ),
    Plant(
        name="dropped-slots-read-rubbish",
        breaks="the row of dropped slots is not zero",
        file=PASSES,
        old="            if pass_plan.has_drops:\n                home[-1].zero_()\n",
        new="",
        tests=f"{SPECIFICATION} -k every_restore_pair",
    ),
    Plant(
        name="dropped-slots-read-another-row",
        breaks="a dropped slot adds the last row that came home to its token",
        file=PASSES,
        old="            row_SK = row_SK.clamp(max=home.shape[0] - 1)\n",
        new="            row_SK = row_SK.clamp(max=home.shape[0] - 2)\n",
        tests="tests/unit/test_layer.py",
    ),
    Plant(
        name="regroup-reversed",
        breaks="results leave in the inverse of the order in which rows came",
        file=PASSES,
        old="        leaving_NM.index_copy_(0, regroup, rows_NM)\n",
        new="        torch.index_select(rows_NM, 0, regroup, out=leaving_NM)\n",
        tests=SPECIFICATION,
    ),
    Plant(
        name="n-of-backward-ignored",
        breaks="backward runs the schedule of forward's number of chunks",
        file=PASSES,
        old='    n = len((plan.forward if direction == "forward" else plan.backward).chunks)\n',
        new="    n = len(plan.forward.chunks)\n",
        tests="tests/unit/test_reuse.py",
    ),
    Plant(
        name="relayed-counts-of-dispatch",
        breaks="combine takes dispatch's counts of rows that pass through",
        file=PASSES,
        old="leaving, chunk.recv_rows, self.combine_output(i), chunk.send_rows, chunk.relayed[1]\n",
        new="leaving, chunk.recv_rows, self.combine_output(i), chunk.send_rows, chunk.relayed[0]\n",
        tests="tests/gloo/test_flexible.py -k hierarchical",
    ),
    Plant(
        name="hidden-made-again-of-modules-that-changed-it",
        breaks="T_M that does not fit on the host is recomputed from an input that was spoilt",
        file=OFFLOADED,
        old="if kept.recipe is None or not (self.plan.rearranged or changed):",
        new="if True:",
        tests="tests/unit/test_reuse_host.py",
    ),
    Plant(
        name="host-bytes-counted-for-ever",
        breaks="what T_DI has been given is still kept free for it",
        file=OFFLOADED,
        old="            self.host_bytes_due -= aligned(rows_NM.nbytes)\n",
        new="",
        tests="tests/unit/test_reuse_host.py",
    ),
    Plant(
        name="weights-of-forwards-chunks",
        breaks="backward takes routing weights in forward's order where its chunks differ",
        file=BACKWARD,
        old="            if plan.joined is not None:\n",
        new="            if plan.joined is not None and False:\n",
        tests=f"{SPECIFICATION} -k other_chunks",
    ),
    Plant(
        name="weights-return-before-the-last-chunk",
        breaks="gradients of routing weights travel before all chunks have made theirs",
        file=BACKWARD,
        old="        if self.chunks_done == len(self.pass_plan.chunks):\n",
        new="        if self.chunks_done == 1:\n",
        tests=SPECIFICATION,
    ),
    Plant(
        name="hook-gradients-of-the-last-chunk",
        breaks="gradients of callbacks' parameters are those of one chunk",
        file="pmoe/engine/variants/callbacks.py",
        old="                self.grad_hooks[j] = gradient if total is None else total + gradient\n",
        new="                self.grad_hooks[j] = gradient\n",
        tests="tests/unit/test_callbacks.py",
    ),
    Plant(
        name="rows-of-other-chunks",
        breaks="backward takes rows of the wrong chunk of forward",
        file="pmoe/engine/plan/regroup_chunks.py",
        old="            chunk_runs = runs.setdefault(chunk, [])\n",
        new="            chunk_runs = runs.setdefault(len(joined), [])\n",
        tests="tests/unit/test_reuse.py",
    ),
    Plant(
        name="forward-index-reversed",
        breaks="weights are looked up by the inverse of the index",
        file="pmoe/engine/plan/regroup_chunks.py",
        old="    return shift.repeat_interleave(rows, output_size=num_rows) + ",
        new="    return -shift.repeat_interleave(rows, output_size=num_rows) + ",
        tests=f"{SPECIFICATION} -k other_chunks",
    ),
    Plant(
        name="bypass-of-rank-0",
        breaks="every rank takes rank 0's rows for those that stay",
        file="pmoe/comm/counts.py",
        old="    counts[:, rank][..., :num_staying] = 0\n",
        new="    counts[:, 0] = 0\n",
        tests=SPECIFICATION,
    ),
    Plant(
        name="regroup-of-two-sources",
        breaks="rows of two sources are taken to be in expert order",
        file=CUT,
        old="    return len(come_W) - come_W.count(0) > 1\n",
        new="    return len(come_W) - come_W.count(0) > 2\n",
        tests=SPECIFICATION,
    ),
    Plant(
        name="pieces-joined-at-the-end",
        breaks="the first piece has one chunk and the last all others",
        file=CUT,
        old="    return torch.cat([counts_nE[:joined].sum(0, keepdim=True), counts_nE[joined:]])\n",
        new="    return torch.cat([counts_nE[: m - 1], counts_nE[m - 1 :].sum(0, keepdim=True)])\n",
        tests=SPECIFICATION,
    ),
    Plant(
        name="hash-truncated",
        breaks="of routing that is decided again a hash of 8 bits is compared",
        file="pmoe/checkpointing/routing_check.py",
        old="            total = mixed if total is None else total + mixed\n",
        new="            total = (mixed if total is None else total + mixed) & 255\n",
        tests="tests/unit/test_recompute_changed.py",
    ),
    Plant(
        name="hash-without-places",
        breaks="tokens that change places are not noticed",
        file="pmoe/checkpointing/routing_check.py",
        old="hashed((place << 24) ^ numbers,",
        new="hashed(numbers,",
        tests="tests/unit/test_recompute_changed.py",
    ),
)
