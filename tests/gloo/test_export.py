"""Exports of a model whose experts are spread over ranks: the same bits, bounded parts, ranks in step."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import pmoe
from pmoe.comm.ranks import Ranks
from pmoe.convert import from_pmoe
from pmoe.training import export
from tests.gloo.kit import error_of
from tests.pool import ranks

M, H, E = 6, 8, 8


class Block(nn.Module):
    """A model with the names of a Hugging Face model."""

    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm = nn.Linear(M, M).double()
        self.mlp = nn.ModuleList(
            pmoe.MoELayer(M, H, E, 2, group=group, dtype=torch.float64, **options) for _ in range(2)
        )


LAYOUTS: dict[str, dict[str, Any]] = {
    "qwen-moe": {"expert": "swiglu", "bias": False, "shared_expert": 4, "shared_gate": True},
    "deepseek": {"expert": "swiglu", "bias": False, "gate": "deepseek"},
    "mixtral-stacked": {"expert": "swiglu", "bias": False},
    "fairseq": {"expert": "ffn"},
}


def wanted(layout: str) -> dict[str, Tensor]:
    """Returns the tensors of the whole model, converted on one rank."""
    whole = Block(Ranks.single(), **LAYOUTS[layout])
    found = {f"norm.{name}": value for name, value in whole.norm.state_dict().items()}
    for at, layer in enumerate(whole.mlp):
        found |= from_pmoe(layer.state_dict(), layout, prefix=f"mlp.{at}.")
    return found


def spread(world: int, esp: int, how: str, **options: Any) -> Block:
    """Returns the model with its experts over all ranks: as it is built, or parallelized."""
    if how == "built":
        return Block(None, **options)
    if how == "esp":
        mesh = init_device_mesh("cpu", (world // esp, esp), mesh_dim_names=("ep", "esp"))
    else:
        mesh = init_device_mesh("cpu", (world // esp, esp), mesh_dim_names=("dp", "ep"))
    return pmoe.parallelize(Block(Ranks.single(), **options), mesh)


def job(rank: int, world: int, layout: str, how: str, max_bytes: int) -> None:
    model = spread(world, min(world, 2), how, **LAYOUTS[layout])
    expected = wanted(layout)
    largest = 0
    broadcast = dist.broadcast

    def watched(tensor: Tensor, **options: Any) -> Any:
        nonlocal largest
        largest = max(largest, tensor.numel() * tensor.itemsize)
        return broadcast(tensor, **options)

    seen: dict[str, list[tuple[int | None, Tensor]]] = {}
    with mock.patch.object(dist, "broadcast", watched):
        for name, expert, tensor in pmoe.export_weights(model, layout, max_bytes=max_bytes):
            seen.setdefault(name, []).append((expert, tensor.clone()))
    assert seen.keys() == expected.keys()
    assert largest <= max_bytes
    for name, parts in seen.items():
        numbers = [expert for expert, _ in parts]
        if len(parts) > 1:
            assert numbers == list(range(E)), name
            assert torch.equal(torch.stack([tensor for _, tensor in parts]), expected[name]), name
        else:
            assert torch.equal(parts[0][1], expected[name]), name
            if "experts." in name and "shared" not in name:
                assert numbers == [int(name.split("experts.")[1].split(".")[0])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_gets_the_bits_of_the_whole_model_in_bounded_parts(world: int, layout: str) -> None:
    for max_bytes in (2 * H * M * 8, 4 * H * M * 8 * 2 + 8):
        ranks(world).run(job, layout, "built", max_bytes)


@pytest.mark.parametrize("how", ["esp", "copies"])
@pytest.mark.parametrize("layout", ["qwen-moe", "fairseq"])
def test_parallelized_models_are_exported_whole(layout: str, how: str) -> None:
    ranks(4).run(job, layout, how, 1 << 20)


def fsdp_job(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    model = pmoe.parallelize(Block(Ranks.single(), **LAYOUTS["qwen-moe"]), mesh)
    fully_shard(model, mesh=mesh, ignored_params=pmoe.expert_parameters(model))
    expected = wanted("qwen-moe")
    seen = {name: tensor for name, _, tensor in pmoe.export_weights(model, "qwen-moe", dtype=torch.float32)}
    assert seen.keys() == expected.keys()
    assert all(torch.equal(seen[name], value.float()) for name, value in expected.items())


def test_a_dense_part_that_is_sharded_is_exported_whole_and_cast() -> None:
    ranks(2).run(fsdp_job)


# ---- files


def file_job(rank: int, world: int, layout: str, folder: str) -> None:
    from safetensors.torch import load_file

    model = spread(world, min(world, 2), "esp" if world > 1 else "built", **LAYOUTS[layout])
    limit = 3000
    pmoe.save_weights(model, Path(folder) / "out", layout, max_shard_bytes=limit + 4000, max_bytes=limit)
    dist.barrier()
    path = Path(folder) / "out"
    index = json.loads((path / export.INDEX).read_text())
    expected = wanted(layout)
    loaded: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors = load_file(file)
        assert sum(value.numel() * value.itemsize for value in tensors.values()) <= limit + 4000
        assert all(index["weight_map"][name] == file.name for name in tensors)
        loaded |= tensors
    assert len(list(path.glob("*.safetensors"))) > 1
    assert loaded.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    assert not (Path(folder) / "out.partial").exists()


@pytest.mark.parametrize("layout", ["qwen-moe", "mixtral-stacked"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_files_have_the_whole_model_in_shards(world: int, layout: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(world).run(file_job, layout, folder)


def broken_job(rank: int, world: int, folder: str, fault: str) -> tuple[str, list[str]]:
    model = spread(world, 2, "built", **LAYOUTS["qwen-moe"])
    path = Path(folder) / "out"
    options: dict[str, Any] = {"max_bytes": 2000}
    if fault == "tensor":
        options["max_shard_bytes"] = 300
    if fault == "exists" and rank == 0:
        path.mkdir(exist_ok=True)
    dist.barrier()
    patch = mock.patch("safetensors.torch.save_file", side_effect=OSError("disk full"))
    if fault == "disk":
        options["max_shard_bytes"] = 3000
    with patch if fault == "disk" else mock.MagicMock():
        error = error_of(lambda: pmoe.save_weights(model, path, "qwen-moe", **options))
    dist.barrier()
    return error, sorted(one.name for one in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("fault", "message", "left"),
    [
        ("disk", "disk full", []),
        ("tensor", "max_shard_bytes (300) must be at least", []),
        ("exists", "must not exist", ["out"]),
    ],
)
def test_an_export_that_fails_leaves_nothing_half_written(fault: str, message: str, left: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = ranks(2).run(broken_job, folder, fault)
    assert message in results[0][0]
    assert "rank 0" in results[1][0], results
    assert all(names == left for _, names in results)


# ---- ranks out of step


def stop_job(rank: int, world: int, taken: int) -> str:
    model = spread(world, 2, "built", **LAYOUTS["qwen-moe"])

    def run() -> None:
        for at, _ in enumerate(pmoe.export_weights(model, "qwen-moe", max_bytes=2000)):
            if rank == 1 and at == taken:
                break

    error = error_of(run)
    dist.barrier()  # the ranks are in step again
    return error


@pytest.mark.parametrize("taken", [0, 20])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_stops_early_stops_the_others(world: int, taken: int) -> None:
    errors = ranks(world).run(stop_job, taken)
    assert errors[1] == ""
    assert all("rank 1 stopped the export" in error for rank, error in enumerate(errors) if rank != 1)


def unstarted_job(rank: int, world: int) -> str:
    model = spread(world, 2, "built", **LAYOUTS["qwen-moe"])
    items = pmoe.export_weights(model, "qwen-moe")
    if rank == 0:
        items.close()
        return ""
    return error_of(lambda: list(items))


def test_an_export_that_never_started_is_stopped_too() -> None:
    errors = ranks(2).run(unstarted_job)
    assert "rank 0 stopped the export" in errors[1]


def other_job(rank: int, world: int) -> str:
    options = LAYOUTS["qwen-moe"] if rank == 0 else LAYOUTS["deepseek"] | {"gate": "topk"}
    model = Block(Ranks.single(), **options)
    return error_of(lambda: pmoe.export_weights(model, "qwen-moe"))


def test_ranks_with_other_models_are_named() -> None:
    errors = ranks(2).run(other_job)
    assert all("must be the same on every rank of an export" in error for error in errors)
