"""Mistakes in the kernels' source, which tests compile for the CPU."""

from __future__ import annotations

from tests.levels import MAKE_TEST_ALL
from tests.plants.plant import Plant

LEVEL = MAKE_TEST_ALL

COMET = "tests/unit/test_comet_protocol.py"
DEVICE = "tests/unit/test_program_cuda.py"
HOST = "tests/unit/test_cuda_host.py"
PRODUCTS = "tests/unit/test_kernels_grouped_gemm.py -k emulator_equal"
TURNS = "tests/unit/test_kernels_grouped_gemm.py -k in_turns_in_the_emulator_equal"
FUSED = "tests/unit/test_comet_kernels.py -k plain_loop"
ORDER_SOURCE = "pmoe/kernels/launch_order.py"
ORDER_TEST = "tests/unit/test_launch_order.py"
ROUTE = "tests/unit/test_kernels_route.py -k equal_plain_loops"

KERNELS = (
    Plant(
        name="round-of-the-capture",
        breaks="a graph's launches find the flags of its last replay raised",
        file="pmoe/kernels/heap.py",
        old="            self.round.add_(1)\n",
        new="            pass\n",
        tests="tests/unit/test_heap.py -k stays_beside",
    ),
    Plant(
        name="replays-that-nobody-awaits",
        breaks="a launch may overlap with a graph's replay on another stream",
        file=ORDER_SOURCE,
        old="            recorded = self._replayed\n",
        new="            recorded = None\n",
        tests=ORDER_TEST,
    ),
    Plant(
        name="a-capture-for-the-last-launch",
        breaks="after a capture, a launch waits for a stream on which nothing ran",
        file=ORDER_SOURCE,
        old="        self._captured_stream = stream\n",
        new="        self._captured_stream = self._stream = stream\n",
        tests=ORDER_TEST,
    ),
    Plant(
        name="a-lost-report",
        breaks="a larger heap takes the place of one on which a kernel waited in vain, and no rank raises",
        file="pmoe/comm/heap/providers.py",
        old="    if failures:\n        raise HeapError(",
        new="    if False:\n        raise HeapError(",
        tests="tests/gloo/test_heap.py -k before_a_larger_heap",
    ),
    Plant(
        name="a-context-on-the-way-back",
        breaks="every process of a node makes a context on device 0",
        file="cuda/common/on_device.h",
        old="before != device && has_context(before);",
        new="before != device;",
        tests=f"{HOST} -k without_a_context",
    ),
    Plant(
        name="a-failed-pass-that-nobody-watches",
        breaks="exchanges before an error wait for ever for ranks that never come",
        file="cuda/program/cuda_backend.h",
        old="    try {\n      if (communicator_) communicator_->watch(stream);\n",
        new="    try {\n",
        tests=f"{DEVICE} -k failed_is_watched",
    ),
    Plant(
        name="an-error-of-the-device-that-means-not-yet",
        breaks="a pass on a device that failed is awaited until its time is over",
        file="cuda/program/nccl.h",
        old='    if (state != cudaErrorNotReady) pmoe::check(state, "cudaEventQuery of a pass\'s end");\n',
        new="",
        tests=f"{DEVICE} -k error_of_the_device",
    ),
    Plant(
        name="a-watching-thread-on-device-0",
        breaks="the thread that watches passes makes a context on device 0",
        file="cuda/program/nccl.h",
        old="    const OnDevice on_device(device_);  // a thread begins with device 0\n",
        new="",
        tests=f"{DEVICE} -k its_device_only",
    ),
    Plant(
        name="maps-of-elements",
        breaks="a tensor map's stride is in elements",
        file="cuda/grouped_gemm/launch.cu",
        old="const cuuint64_t strides[2] = {layout.stride * 2,",
        new="const cuuint64_t strides[2] = {layout.stride,",
        tests=f"{HOST} -k numbered",
    ),
    Plant(
        name="a-cooperative-launch-that-is-none",
        breaks="blocks of a fused kernel may wait for blocks that cannot start",
        file="cuda/common/prepared.h",
        old="    if (grid_.together) {",
        new="    if (grid_.together && false) {",
        tests=f"{HOST} -k resident",
    ),
    Plant(
        name="signal-of-a-failed-rank",
        breaks="a rank that gave up still announces rows",
        file="cuda/peers/protocol.h",
        old="  if (has_failed(watch)) return;\n  store_release_system",
        new="  store_release_system",
        tests=f"{COMET} -k does_not_come",
    ),
    Plant(
        name="a-round-too-early",
        breaks="a flag of the round before counts for this one",
        file="cuda/peers/protocol.h",
        old="  return static_cast<int32_t>(value - wanted) >= 0;\n",
        new="  return static_cast<int32_t>(value - wanted) >= -1;\n",
        tests=f"{COMET} -k rounds_are_right",
    ),
    Plant(
        name="order-by-rank",
        breaks="rows of experts do not lie behind those of the experts before",
        file="cuda/comet/order.h",
        old="      for (int l = 0; l < ranks_; ++l) first_[l * experts_ + e] += before;\n",
        new="      for (int l = 1; l < ranks_; ++l) first_[l * experts_ + e] += before;\n",
        tests=f"{COMET} -k plain_sort",
    ),
    Plant(
        name="fence-left-out",
        breaks="a bulk read is not ordered behind what was announced",
        file="cuda/comet/hopper.cuh",
        old="      // The lanes have read flags: other ranks have written the rows. This fence orders\n"
        "      // the bulk loads that follow after those writes.\n"
        "      if constexpr (peers::kPlant != peers::Plant::kNoProxyFence) fence_proxy_async_global();\n",
        new="",
        tests="tests/unit/test_comet_kernels.py -k plain_loop",
    ),
    Plant(
        name="every-lane-gives-up-its-best-score",
        breaks="a lane whose best expert was not chosen loses it for the token's next choices",
        file="cuda/route/whole_warp.cuh",
        old="    if (index != chosen) continue;\n",
        new="",
        tests=ROUTE,
    ),
    Plant(
        name="any-of-equal-scores",
        breaks="of a lane's experts with equal scores not the first one is chosen",
        file="cuda/route/whole_warp.cuh",
        old="          rank[i] = larger(first, second);\n"
        "          rank[i + kApart] = smaller(first, second);\n",
        new="          const bool swaps = second >> 32 > first >> 32;\n"
        "          rank[i] = swaps ? second : first;\n"
        "          rank[i + kApart] = swaps ? first : second;\n",
        tests=ROUTE,
    ),
    Plant(
        name="experts-whose-scores-agree-in-the-upper-bits",
        breaks="of scores that agree in their upper bits the lower expert is chosen, not the higher score",
        file="cuda/route/merge.cuh",
        old="  if (ballot(is_unclear && exists) != 0) return false;\n",
        new="",
        tests=ROUTE,
    ),
    Plant(
        name="merged-lists-in-one-direction",
        breaks="two lists that are sorted alike are merged as if the second one were turned round",
        file="cuda/route/merge.cuh",
        old="  const int turned = of_token >> (kLevel + 1) & 1 ? ~of_token : of_token;\n",
        new="  const int turned = of_token;\n",
        tests=ROUTE,
    ),
    # Two blocks of a cluster whose tiles lie side by side: each loads half of A for both.
    Plant(
        name="half-of-a-in-the-others-place",
        breaks="each block of a pair puts its half of A where the other's belongs",
        file="cuda/grouped_gemm/hopper.cuh",
        old="uint8_t* half = a + rank * (kBytesA / 2);",
        new="uint8_t* half = a + (1 - rank) * (kBytesA / 2);",
        tests=PRODUCTS,
    ),
    Plant(
        name="the-same-half-of-a-twice",
        breaks="both blocks of a pair load the first half of A",
        file="cuda/grouped_gemm/hopper.cuh",
        old="depth, begin + tile.row + rank * (kRows / 2), 3);",
        new="depth, begin + tile.row, 3);",
        tests=PRODUCTS,
    ),
    Plant(
        name="half-of-a-expected",
        breaks="a stage of a pair counts as full when half of A has come",
        file="cuda/grouped_gemm/hopper.cuh",
        old="    mbarrier_arrive_expect(full, kBytesA + Memory::kBytesB);",
        new="    mbarrier_arrive_expect(full, kBytesA / loader.p.blocks_across + Memory::kBytesB);",
        tests=PRODUCTS,
    ),
    # Two warpgroups of a block take turns: each consumes every second tile of one ring.
    Plant(
        name="stages-released-by-both-warpgroups",
        breaks="a stage counts as empty when both warpgroups have released it, but one multiplies it",
        file="cuda/grouped_gemm/hopper_turns.cuh",
        old="init_barriers(shared, 1, p.blocks_across, 1, turns::kWarps);",
        new="init_barriers(shared, 1, p.blocks_across, 1);",
        tests=TURNS,
    ),
    Plant(
        name="a-stage-released-before-its-products",
        breaks="a stage is loaded again while a product may still read it",
        file="cuda/grouped_gemm/hopper_turns.cuh",
        old="        wgmma_wait<1>();\n        release(previous);\n",
        new="        release(previous);\n        wgmma_wait<1>();\n",
        tests=TURNS,
    ),
    Plant(
        name="an-exchange-of-both-warpgroups",
        breaks="two warps, one of each warpgroup, convert their tiles in the same buffer",
        file="cuda/grouped_gemm/hopper_turns.cuh",
        old="shared.exchange[0] + buffer);",
        new="shared.exchange[self / 32 % kWarps]);",
        tests=TURNS,
    ),
    Plant(
        name="a-position-kept-elsewhere",
        breaks="a warp does not find its position in the walk after a store",
        file="cuda/grouped_gemm/hopper_turns.cuh",
        old="write(&shared.kept[self / 32].num_read, walk.num_read());",
        new="write(&shared.kept[0].num_read, walk.num_read());",
        tests=TURNS,
    ),
    Plant(
        name="the-others-stages-not-passed",
        breaks="a warpgroup takes stages of the ring that hold the other's tiles",
        file="cuda/grouped_gemm/hopper_turns.cuh",
        old="Ring<kStages>::after((walk.num_read() - 1) *",
        new="Ring<kStages>::after(walk.num_read() / 2 *",
        tests=TURNS,
    ),
    Plant(
        name="a-tile-begun-before-the-last-has-come",
        breaks="a warpgroup waits for a parity that an earlier phase of the stage has, too",
        file="cuda/grouped_gemm/hopper_turns.cuh",
        old="      mbarrier_wait(&shared.loaded[(t - 1) % 2], (t - 1) / 2 % 2);",
        new="      static_cast<void>(t);",
        tests=TURNS,
    ),
    Plant(
        name="one-block-of-a-fused-pair",
        breaks="the barriers of a pair of fused blocks count the arrivals of one",
        file="cuda/comet/hopper.cuh",
        old="hopper::init_barriers(shared.gemm, 1, p.blocks_across, 1);",
        new="hopper::init_barriers(shared.gemm, 1, 1, 1);",
        tests=FUSED,
    ),
    Plant(
        name="rows-of-the-other-not-awaited",
        breaks="a block whose tile is beyond the columns does not await the rows that it loads for the other",
        file="cuda/comet/hopper.cuh",
        old="await_rows(f.rank, board, tile.expert, begin, begin + rows, lane, 32);",
        new="await_rows(f.rank, board, tile.expert, begin, begin + (tile.rows ? rows : 0), lane, 32);",
        tests=FUSED,
    ),
    Plant(
        name="half-of-the-rows-awaited",
        breaks="a block awaits only the rows of its own half of A",
        file="cuda/comet/hopper.cuh",
        old="const int rows = smaller(hopper::kRows, tile.group_rows - tile.row);",
        new="const int rows = smaller(hopper::kRows / f.problem.blocks_across, tile.group_rows - tile.row);",
        tests=FUSED,
    ),
    Plant(
        name="a-tile-of-the-next-chunk",
        breaks="the second block of a pair computes a tile beyond its chunk, which counts twice",
        file="cuda/comet/hopper.cuh",
        old="return tile.column >= smaller(begin + own.chunk_columns, own.columns);",
        new="return tile.column >= smaller(begin + own.columns, own.columns);",
        tests=FUSED,
    ),
    Plant(
        name="a-slot-that-is-still-read",
        breaks="a bulk load fills a slot that a bulk store still reads",
        file="cuda/comet/bulk.cuh",
        old="      bulk_wait_read<kStoring>();\n",
        new="",
        tests=FUSED,
    ),
    Plant(
        name="a-fused-pair-of-which-one-communicates",
        breaks="of a cluster one block computes and the other communicates",
        file="cuda/comet/launch.cu",
        old="f.rank.communicating % 2 == 0 &&",
        new="true &&",
        tests=f"{HOST} -k go_in_pairs",
    ),
)
