"""The lines under a heading of docs/stacks.md, run on some ranks. $PMOE_HEADING is the heading."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.convert.compare import M, T, group
from tests.snippets import ROOT, blocks


def lines_of(heading: str) -> str:
    page = ROOT / "docs" / "stacks.md"
    start = page.read_text(encoding="utf-8").splitlines().index(f"## {heading}") + 1
    return next(block.text for block in blocks(page) if block.line > start)


def for_deepspeed() -> dict[str, Any]:
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # it would compile that
    return {}


def for_lightning() -> dict[str, Any]:
    """Returns the names that the page says to import."""
    names = {"torch": torch, "dist": dist}
    for module, imported in (
        ("pmoe", None),
        ("lightning.pytorch", ("LightningModule", "Trainer")),
        ("pmoe.integrations.lightning", ("SpreadDDPStrategy",)),
        ("torch.utils.data", ("DataLoader", "TensorDataset")),
        ("torch.distributed.device_mesh", ("init_device_mesh",)),
    ):
        found = importlib.import_module(module)
        names |= {module: found} if imported is None else {name: getattr(found, name) for name in imported}
    return names


def for_megatron() -> dict[str, Any]:
    """Returns the user's configuration and input. `on_megatron` says what stands in for a GPU."""
    on_megatron = importlib.import_module("tests.convert.on_megatron")
    ranks = dist.get_world_size()
    on_megatron.parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    on_megatron.moe_utils.te_general_gemm = None
    util = on_megatron.grouped_gemm_util
    util.ops, util.grouped_gemm_is_available = on_megatron.LoopOverExperts, lambda: True
    util.assert_grouped_gemm_is_available = lambda: None
    return {"config": on_megatron.config_of(ranks), "x": torch.randn(T, 1, M)}


def for_torchtitan() -> dict[str, Any]:
    """Returns the user's configuration and input."""
    on_torchtitan = importlib.import_module("tests.convert.on_torchtitan")
    config = on_torchtitan.block_config(on_torchtitan.routed_config())
    return {"config": config, "x": torch.randn(2, T // 2, M)}


PREPARED = {
    "DeepSpeed": for_deepspeed,
    "Lightning": for_lightning,
    "Megatron-Core": for_megatron,
    "torchtitan": for_torchtitan,
}


def main(rank: int, ranks: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), GROUP_RANK="0")
    os.environ.update(LOCAL_WORLD_SIZE=str(ranks), TORCHELASTIC_RUN_ID="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    heading = os.environ["PMOE_HEADING"]
    exec(compile(lines_of(heading), heading, "exec", dont_inherit=True), PREPARED[heading]())
    print(f"the lines of {heading} ran")


if __name__ == "__main__":
    with group() as (rank, ranks):
        main(rank, ranks)
