"""All steps of the ladder, in order. F1 to F7 are findings of the review before the first run on a GPU."""

from __future__ import annotations

from tests.gpu.ladder.step import Step

HERE = "tests.gpu.ladder."
GEMM = "cuda/grouped_gemm/"
HOPPER, AMPERE = "sm_90a", "sm_80"


def first_steps() -> list[Step]:
    return [
        Step(
            name="copy", run=HERE + "first:check_copies", usual=8, seconds=30,
            means="torch and this driver do not work together: nothing of pmoe has run yet",
            look="nvidia-smi, python -m torch.utils.collect_env; the driver's and torch's CUDA versions",
        ),
        Step(
            name="extension", run=HERE + "first:check_extension", needs=("copy",), seconds=60,
            means="the driver takes none of the extension's code, or it was not built for this GPU",
            look="pmoe kernels; pmoe/kernels/extension.py, path(); setup.py's architectures",
        ),
    ]  # fmt: skip


def tile_steps(path: str) -> list[Step]:
    hopper = path == HOPPER
    kernel, maps = f"{GEMM}{'hopper' if hopper else 'ampere'}.cuh", f"{GEMM}launch.cu, encode_maps()"
    where = f"{kernel}; {maps}; cuda/common/device_ptx.cuh, descriptors" if hopper else f"{kernel}, ldmatrix"
    means = "one block reads an operand wrongly: the permutation's name, if it has one, is in the message"
    return [
        Step(
            name=f"{path}: a tile, {form}", run=f"{HERE}tiles:check_tile {path} {form}",
            needs=("extension",), hopper=hopper, means=means, look=where,
        )
        for form in ("forward", "input", "weight")
    ]  # fmt: skip


def product_steps(path: str) -> list[Step]:
    """On what one block alone does right."""
    hopper, forward, weight = path == HOPPER, f"{path}: a tile, forward", f"{path}: a tile, weight"
    source = f"{GEMM}{'hopper_block' if hopper else 'ampere'}.cuh"
    forms = ("forward", "input", "weight") if hopper else ()
    pairs = [
        Step(
            name=f"{path}: two blocks share B, or A, {form}", run=f"{HERE}tiles:check_pairs {path} {form}",
            needs=(f"{path}: a tile, {form}",), hopper=True, usual=10,
            means="a block alone is right, two of a cluster are not: multicast, or a barrier's arrivals",
            look=f"{GEMM}hopper.cuh, cluster barriers and multicast masks; ring.h; F6",
        )
        for form in forms
    ]  # fmt: skip
    beside = [
        Step(
            name=f"{path}: tiles stored as boxes", run=f"{HERE}boxes:check_boxes {path}",
            needs=tuple(each.name for each in pairs), hopper=True, usual=10,
            means="tiles that threads store are right, those that the accelerator stores are not: its maps, "
            "the fence before it, or the rows of the next expert; or a weight gradient gathers wrong rows",
            look=f"{GEMM}boxes.cuh; {GEMM}launch.cu, encode_results(); tma_store_2d of common/hopper_ptx.cuh"
            f"; {GEMM}hopper.cuh, load_rows_of_b_by_copies()",
        ),
        Step(
            name=f"{path}: two warpgroups take turns", run=f"{HERE}tiles:check_turns {path}",
            needs=(f"{path}: tiles stored as boxes",), hopper=True,
            means="both warpgroups on one tile are right, in turns they are not: stages of the ring, or its "
            "barriers' arrivals",
            look=f"{GEMM}hopper_turns.cuh, multiply(); wgmma_m64n128k16 of cuda/common/hopper_ptx.cuh",
        ),
    ] if hopper else []  # fmt: skip
    return [
        *pairs,
        *beside,
        Step(
            name=f"{path}: gathers", run=f"{HERE}tiles:check_gathers {path}", needs=(forward,),
            hopper=hopper, means="rows in place are right, rows by slot are not",
            look=f"{GEMM}gather.cuh (cp.async, and the swizzle it writes by itself); {source}",
        ),
        Step(
            name=f"{path}: epilogues", run=f"{HERE}epilogues:check_epilogues {path}",
            needs=(forward, f"{path}: a tile, input", weight), hopper=hopper,
            means="sums are right, what becomes of them is not: the message names which result",
            look=f"{GEMM}epilogue.h, exchange.cuh; {source}; F7",
        ),
        Step(
            name=f"{path}: a thread without a context", run=f"{HERE}first:check_thread {path}",
            needs=(forward,), hopper=hopper,
            means="a launch from a new thread fails: autograd's threads are such",
            look="cuda/common/on_device.h, OnDevice; F1",
        ),
    ]  # fmt: skip


def moving_steps() -> list[Step]:
    return [
        Step(
            name="routing", run=f"{HERE}moving:check_routing {AMPERE}", needs=("extension",),
            means="experts, positions, counts or weights are wrong: the message names which",
            look="cuda/route/choose.cuh (experts, weights), place.cuh (positions, counts); F2 where it hung",
        ),
        Step(
            name="permutes, messages and row counts", run=f"{HERE}rounded:check_moves {AMPERE}",
            needs=("extension",),
            means="rows, sums, dots, rows in e4m3, or orders of rows are wrong: the message names the launch",
            look="cuda/permute/kernel.cuh; cuda/wire/kernel.cuh, cuda/common/e4m3.h; cuda/counts/kernel.cuh; "
            "a product in e4m3 or mxfp8: pmoe/kernels/scaled_products, launch_scaled() and layouts.py",
        ),
    ]  # fmt: skip


def fused_steps() -> list[Step]:
    alone = "cuda/comet/bulk.cuh (-DPMOE_LANE_COPIES), dispatch.cuh, combine.cuh, launch.cu"
    steps = [
        Step(
            name="COMET, one rank", run=HERE + "worlds:check_world 1", needs=("routing",),
            usual=12, seconds=60,
            means="the fused kernels are wrong without any peer; a hang: roles of a launch wait in vain",
            look=f"{alone} (may_pair_blocks: its launch is cooperative, and of clusters); "
            "pmoe/kernels/comet/operators.py; F5 where the first launch hung",
        )
    ]  # fmt: skip
    steps += [
        Step(
            name=f"COMET, {ranks} virtual ranks", run=f"{HERE}worlds:check_world {ranks}",
            needs=(steps[-1].name,) if ranks == 2 else ("COMET, 2 virtual ranks",), usual=12, seconds=60,
            means="one rank is right, several are not: flags, grants or slots between ranks",
            look="cuda/peers/protocol.h, watch.h; cuda/comet/order.h, rank.h; F3; HeapError: rank, flag",
        )
        for ranks in (2, 4)
    ]  # fmt: skip
    steps += [
        Step(
            name=f"FlashDMoE, {ranks} virtual ranks" if ranks > 1 else "FlashDMoE, one rank",
            run=f"{HERE}persistent:check_passes {ranks}",
            needs=("sm_80: a tile, forward",) if ranks == 1 else ("FlashDMoE, one rank",),
            usual=12, seconds=60,
            means="a persistent kernel is wrong, alone or among ranks; a hang: an actor waits in vain",
            look="cuda/flashdmoe/scheduler.h, subscriber.h, processor.cuh; hopper.cuh where sm_90a runs; "
            "HeapError names rank and task",
        )
        for ranks in (1, 2)
    ]  # fmt: skip
    return steps


NCCL_MEANS = {
    "zero_rows": (
        "NCCL, or torch's splits, do not take messages without rows",
        "pmoe/comm/base.py, FlatAllToAll.exchange(): a rank without rows must still call",
    ),
    "first_use": (
        "a communicator made in the middle of a step waits for what waits for it",
        "pmoe/comm/ranks.py, pmoe/comm/topology.py: use each group once when the layer is made; F5",
    ),
    "streams": (
        "a work's wait() or an event behind it does not order streams as the engine assumes",
        "pmoe/engine/lanes/cuda.py, CudaLanes.run()",
    ),
    "rotating_slots": (
        "a slot is written while it is read, or memory is given away too early",
        "pmoe/engine/lanes/cuda.py; pmoe/engine/buffers/arena.py, DevicePool; record_stream",
    ),
    "aborted": (
        "after an abort the device, or another group, does not work",
        "torch's ProcessGroupNCCL.abort(); pmoe promises nothing after an abort if this fails",
    ),
    "missing_peer": (
        "a rank that stays away is not told as an error by the group's timeout",
        "TORCH_NCCL_BLOCKING_WAIT, TORCH_NCCL_ASYNC_ERROR_HANDLING; docs/troubleshooting.md",
    ),
}


def nccl_steps(ranks: int) -> list[Step]:
    """ranks: that many, on a GPU each where there are enough, else on shared ones."""
    several = ranks > 1
    names = [each for each in NCCL_MEANS if several or each != "missing_peer"]
    titles = {each: each.replace("_", " ") for each in names}
    needs: dict[int, dict[str, tuple[str, ...]]] = {
        1: dict.fromkeys(names, ("copy",)),
        2: dict.fromkeys(names, ("copy", "NCCL, 1 rank: zero rows")),
        4: {each: ("copy", f"NCCL, 2 ranks: {titles[each]}") for each in names},
    }
    return [
        Step(
            name=f"NCCL, {ranks} rank{'s' if several else ''}: {titles[each]}",
            run=f"{HERE}nccl:check {each} {ranks}", needs=needs[ranks][each],
            usual=14 if several else 9, seconds=60 if several else 20,
            means=NCCL_MEANS[each][0],
            look=NCCL_MEANS[each][1] + ("; pmoe/comm/shared_gpu.py on one GPU" if several else ""),
        )
        for each in names
    ]  # fmt: skip


def all_steps() -> list[Step]:
    return [
        *first_steps(),
        *(step for path in (HOPPER, AMPERE) for step in tile_steps(path)),
        *(step for path in (HOPPER, AMPERE) for step in product_steps(path)),
        *moving_steps(),
        *fused_steps(),
        *nccl_steps(1),
        *nccl_steps(2),
        *nccl_steps(4),
    ]
