"""Layers that transformers made or saved, against pmoe's layers with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.convert import from_pmoe, to_pmoe
from pmoe.experts.swiglu import SwiGLUExperts
from tests.convert.compare import BiasedGate
from tests.tiny_transformers import make_model

M, H, E, K = 32, 24, 8, 2


class ClampedExperts(SwiGLUExperts):
    """Experts with gpt-oss's activation."""

    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        gate_NH, up_NH = hidden_NG.chunk(2, dim=1)
        gate_NH, up_NH = gate_NH.clamp(max=7.0), up_NH.clamp(-7.0, 7.0)
        torch.mul(up_NH + 1, gate_NH * (1.702 * gate_NH).sigmoid(), out=active_NH)


def swiglu(**options: Any) -> dict[str, Any]:
    return {"d_hidden": H, "expert": "swiglu", "bias": False, **options}


def layers() -> dict[str, dict[str, Any]]:
    deepseek = pmoe.gates.DeepSeekGate(M, E, K, num_groups=4, top_groups=2, routed_scaling=2.5)
    gpt_oss = {"d_hidden": 48, "expert": ClampedExperts(M, 48, E, bias=True), "gate": BiasedGate(M, E, K)}
    return {
        "Mixtral": swiglu(d_hidden=48),
        "Qwen2-MoE": swiglu(shared_expert=40, shared_gate=True, normalize_gate=False),
        "Qwen3-MoE": swiglu(),
        "OLMoE": swiglu(d_hidden=48, normalize_gate=False),
        "DeepSeek-V3": swiglu(shared_expert=24, gate=deepseek),
        "gpt-oss": gpt_oss,
    }


LAYOUT = {"Mixtral": "mixtral", "DeepSeek-V3": "deepseek", "gpt-oss": "gpt-oss"}
"""Name of the layout of models; models that are not listed have the layout qwen-moe."""


def last_layer(model: nn.Module) -> tuple[str, nn.Module]:
    return "model.layers.1.mlp.", model.get_submodule("model.layers.1.mlp")


@pytest.mark.slow
@pytest.mark.parametrize("name", layers())
def test_a_layer_of_transformers_and_pmoes_give_the_same_output(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file  # of transformers

    model = make_model(name, "eager").eval()
    prefix, theirs = last_layer(model)
    layout = LAYOUT.get(name, "qwen-moe")
    stacked = layout if name == "gpt-oss" else f"{layout}-stacked"
    layer = pmoe.MoELayer(M, num_experts=E, top_k=K, **layers()[name]).eval()
    state, held = to_pmoe(model.state_dict(), stacked, prefix=prefix), theirs.state_dict()
    layer.load_state_dict(state)
    x = torch.randn(2, 5, M)
    with torch.no_grad():
        y, ours = theirs(x), layer(x)
    y = y if isinstance(y, Tensor) else y[0].view(2, 5, M)
    torch.testing.assert_close(ours, y, rtol=1e-4, atol=1e-5)
    back = from_pmoe(layer.state_dict(), stacked)
    assert back.keys() == held.keys() and all(torch.equal(back[key], each) for key, each in held.items())

    model.save_pretrained(tmp_path)
    file = {key: each for path in tmp_path.glob("*.safetensors") for key, each in load_file(path).items()}
    of_file = "model.layers.1.block_sparse_moe." if name == "Mixtral" else prefix
    again = to_pmoe(file, layout, prefix=of_file)
    assert again.keys() == state.keys() and all(torch.equal(again[key], each) for key, each in state.items())
    written = from_pmoe(again, layout, prefix=of_file)
    assert written.keys() == {key for key in file if key.startswith(of_file)}
    assert all(torch.equal(file[key], each) for key, each in written.items())
