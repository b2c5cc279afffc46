"""Exports on one rank: wrong arguments, names, and files that transformers reads."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import pmoe
from tests.kit import one_thread  # noqa: F401

M, H, E = 8, 16, 4


def model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    given = {"expert": "swiglu", "bias": False}
    return nn.ModuleDict({"mlp": pmoe.MoELayer(M, H, E, 2, **{**given, **options}), "head": nn.Linear(M, 3)})


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({}, {"layout": "no such"}, r"layout \('no such'\) must be one of"),
        ({}, {"max_bytes": 1000}, r"max_bytes \(1000\) must be at least 1024, the bytes of w1 of one expert"),
        ({"bias": True}, {}, r"mlp.experts.b1 .* has no place in layout 'qwen-moe'"),
        ({"expert": "ffn"}, {}, r"layout \('qwen-moe'\) must fit layer 'mlp': its experts are gated"),
        ({}, {"layout": "megatron-grouped"}, r"layout \('megatron-grouped'\) must keep experts apart"),
        ({}, {"rename": lambda name: "x"}, r"rename must keep names apart, but .* both become 'x'"),
        ({"gate": "noisy_topk"}, {}, "mlp.gate.noise_weight .* has no place in layout"),
    ],
)
def test_what_cannot_be_exported_is_named(options: Any, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pmoe.export_weights(model(**options), **{"layout": "qwen-moe", **arguments})


def test_experts_that_are_modules_are_refused() -> None:
    layer = pmoe.MoELayer(M, H, E, expert=lambda **_: nn.Linear(M, M))
    with pytest.raises(TypeError, match=r"a layer '' whose experts \(ModuleExperts\) must be plain stacked"):
        pmoe.export_weights(layer, "qwen-moe")


def test_names_are_changed_as_asked() -> None:
    names = [
        name for name, _, _ in pmoe.export_weights(model(), "qwen-moe", rename=lambda name: f"model.{name}")
    ]
    assert names[:3] == ["model.head.weight", "model.head.bias", "model.mlp.gate.weight"]
    assert "model.mlp.experts.3.down_proj.weight" in names
    assert len(names) == 3 + 3 * E


def test_each_stacked_tensor_comes_in_parts_with_the_number_of_the_expert() -> None:
    moe = model()
    parts = [
        (expert, tensor)
        for name, expert, tensor in pmoe.export_weights(moe, "qwen-moe-stacked")
        if name == "mlp.experts.gate_up_proj"
    ]
    assert [expert for expert, _ in parts] == list(range(E))
    assert torch.equal(torch.stack([tensor for _, tensor in parts]), moe["mlp"].experts.w1)


def test_columns_of_gpt_oss_lie_in_turn() -> None:
    moe = pmoe.MoELayer(M, H, E, 2, expert="swiglu")
    from pmoe.convert import from_pmoe

    expected = from_pmoe(moe.state_dict(), "gpt-oss")
    found: dict[str, list[torch.Tensor]] = {}
    for name, expert, tensor in pmoe.export_weights(moe, "gpt-oss"):
        found.setdefault(name, []).append(tensor)
        assert (expert is None) == name.startswith("router")
    for name, value in expected.items():
        whole = found[name][0] if name.startswith("router") else torch.stack(found[name])
        assert torch.equal(whole, value), name


@pytest.mark.parametrize("what", ["weights", "adapters"])
def test_an_export_that_is_killed_leaves_no_folder_and_the_next_is_whole(what: str, tmp_path: Path) -> None:
    whole = model()
    if what == "adapters":
        pmoe.add_lora(whole, rank=2)
    save = {"weights": pmoe.save_weights, "adapters": pmoe.save_lora}[what]
    writes = "pmoe.training.export.json.dumps"  # of the last file, when the first is on the disk
    child = os.fork()
    if child == 0:
        with mock.patch(writes, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)):
            save(whole, tmp_path / "out", "qwen-moe")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    save(whole, tmp_path / "out", "qwen-moe")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".safetensors", ".json"}


@pytest.mark.slow
def test_transformers_reads_the_files(tmp_path: Path) -> None:
    """A model of transformers, with a MoELayer in place of each MoE block, is saved and read again."""
    transformers = pytest.importorskip("transformers")
    from pmoe.convert import to_pmoe

    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=M, intermediate_size=H, moe_intermediate_size=H, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=4, num_experts=E, num_experts_per_tok=2,
        norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(0)
    whole = transformers.Qwen3MoeForCausalLM(config).eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = whole(ids).logits
    for at, block in enumerate(whole.model.layers):
        layer = pmoe.MoELayer(M, H, E, 2, expert="swiglu", bias=False)
        state = {f"mlp.{name}": value for name, value in block.mlp.state_dict().items()}
        layer.load_state_dict(to_pmoe(state, "qwen-moe-stacked", prefix="mlp."))
        whole.model.layers[at].mlp = layer
    pmoe.save_weights(whole, tmp_path / "out", "qwen-moe", max_shard_bytes=8000)
    config.save_pretrained(tmp_path / "out")
    files = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(files.values())) > 1
    again = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-6)
