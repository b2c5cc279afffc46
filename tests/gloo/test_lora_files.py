"""Adapters of experts that are spread over ranks: PEFT's files are the same for every number of ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import pmoe
from tests import adapted
from tests.adapted import ALPHA, RANK
from tests.gloo.kit import build, error_of
from tests.kit import tokens
from tests.pool import ranks

LAYOUTS = ("qwen-moe", "qwen-moe-stacked")


def layer_of(world: int, how: str, shared: bool) -> pmoe.MoELayer:
    """A layer whose experts are spread when it is built, or by `pmoe.parallelize` over two dimensions."""
    options: dict[str, Any] = {"expert": "swiglu", "bias": False}
    if how == "built":
        layer = build(**options)
    else:
        layer = adapted.whole_layer(**options)
        pmoe.parallelize(layer, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep")))
    pmoe.add_lora(layer, rank=RANK, alpha=ALPHA, shared=shared)
    return layer


def saving_job(rank: int, world: int, folder: str, how: str, shared: bool) -> None:
    layer = layer_of(world, how, shared)
    adapted.fill(layer.experts.adapter("default"), layer.first_expert)
    for layout in LAYOUTS:
        pmoe.save_lora(layer, Path(folder) / layout, layout)
    other = layer_of(world, how, shared)
    pmoe.remove_lora(other)
    for layout in LAYOUTS:
        if shared:
            pmoe.add_lora(other, rank=RANK, shared=True)
        pmoe.load_lora(other, Path(folder) / layout, layout)
        wanted = dict(pmoe.lora_adapters(layer).named_parameters())
        for name, value in pmoe.lora_adapters(other).named_parameters():
            assert torch.equal(*(getattr(one, "_local_tensor", one) for one in (value, wanted[name]))), name
        x = tokens(5, rank)
        assert torch.equal(other(x), layer(x))
        pmoe.remove_lora(other)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("world", "how"), [(2, "built"), (4, "built"), (4, "parallelized")])
def test_files_do_not_depend_on_the_ranks_and_are_read_back(world: int, how: str, shared: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(world).run(saving_job, folder, how, shared)
        alone = adapted.whole_layer(expert="swiglu", bias=False)
        pmoe.add_lora(alone, rank=RANK, alpha=ALPHA, shared=shared)
        adapted.fill(alone.experts.adapter("default"))
        for layout in LAYOUTS:
            pmoe.save_lora(alone, Path(folder) / f"{layout} alone", layout)
            for file in ("adapter_config.json", "adapter_model.safetensors"):
                of_ranks, of_one = (Path(folder) / name / file for name in (layout, f"{layout} alone"))
                assert of_ranks.read_bytes() == of_one.read_bytes()


def differing_job(rank: int, world: int, folder: str) -> list[str]:
    """Saves other adapters on each rank, by mistake, and returns the errors."""
    layer = build(expert="swiglu", bias=False)
    for name in ("first", "second"):
        pmoe.add_lora(layer, rank=RANK, name=name)
    names = ("first", "second")
    by_name = error_of(lambda: pmoe.save_lora(layer, f"{folder}/a", "qwen-moe", name=names[rank]))
    layout = LAYOUTS[rank]
    by_layout = error_of(lambda: pmoe.save_lora(layer, f"{folder}/a", layout, name="first"))
    pmoe.use_lora(layer, names[rank])
    active = error_of(lambda: pmoe.save_lora(layer, f"{folder}/a", "qwen-moe"))
    return [by_name, by_layout, active]


def test_other_adapters_on_one_rank_are_named_on_all_and_not_mixed() -> None:
    """Ranks gather each matrix. One file would get the experts of two adapters."""
    with tempfile.TemporaryDirectory() as folder:
        for by_name, by_layout, active in ranks(2).run(differing_job, folder):
            for error in (by_name, active):
                assert error.startswith("ValueError: the saved adapters must be the same on every rank")
                assert "rank 0: [\"'first' of model: rank" in error
                assert "rank 1: [\"'second' of model: rank" in error
            rule = "ValueError: save_lora's layout must be the same on every rank, and differs: "
            assert by_layout.startswith(f"{rule}rank 0: qwen-moe; rank 1: qwen-moe-stacked. Pass the same")
        assert not any(Path(folder).iterdir())


def fault_job(rank: int, world: int, folder: str, fault: str) -> tuple[str, list[str]]:
    layer = build(expert="swiglu", bias=False)
    path = Path(folder) / "adapter"
    if fault == "other rank":
        small = build(expert="swiglu", bias=False)
        pmoe.add_lora(small, rank=1)
        pmoe.save_lora(small, path, "qwen-moe")
        pmoe.add_lora(layer, rank=RANK)
        dist.barrier()
        error = error_of(lambda: pmoe.load_lora(layer, path, "qwen-moe"))
    elif fault == "one rank's file":
        dist.barrier()
        error = error_of(lambda: pmoe.load_lora(layer, path if rank else __file__, "qwen-moe"))
        assert not hasattr(layer.experts, "adapters")
    else:
        pmoe.add_lora(layer, rank=RANK)
        patch = mock.patch("safetensors.torch.save_file", side_effect=OSError("disk full"))
        with patch if fault == "disk" else mock.MagicMock():
            where = path if fault == "disk" or rank else folder
            error = error_of(lambda: pmoe.save_lora(layer, where, "qwen-moe"))
    dist.barrier()
    return error, sorted(one.name for one in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("fault", "message", "left"),
    [
        ("disk", "disk full", []),
        ("exists", "must not exist", []),
        ("other rank", "must be as that of the files, of rank 1", ["adapter"]),
        ("one rank's file", "must hold adapter_config.json", []),
    ],
)
def test_what_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    fault: str, message: str, left: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = ranks(2).run(fault_job, folder, fault)
    assert any(message in error for error, _ in results), results
    assert all(error for error, _ in results), results
    assert all(names == left for _, names in results)
