"""Adapters of experts in PEFT's files: PEFT reads and writes them, and files that do not fit are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe
from pmoe.convert import from_pmoe
from tests.kit import one_thread  # noqa: F401
from tests.reference import relative_error

M, H, E, K, R = 6, 4, 4, 2, 2


class Stacked(nn.Module):
    """Experts as Hugging Face's models have them since transformers 5: one tensor for all."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = transposed
        shapes = ((E, M, 2 * H), (E, H, M)) if transposed else ((E, 2 * H, M), (E, M, H))
        self.gate_up_proj = nn.Parameter(torch.zeros(shapes[0], dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.zeros(shapes[1], dtype=torch.float64))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        if self.is_transposed:
            gate, up = (x @ self.gate_up_proj[expert]).unflatten(-1, (H, 2)).unbind(-1)
            return (F.silu(gate) * up) @ self.down_proj[expert]
        gate, up = F.linear(x, self.gate_up_proj[expert]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj[expert])


class Expert(nn.Module):
    """One expert with three matrices."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        for name, (rows, columns) in zip(names, ((H, M), (H, M), (M, H)), strict=True):
            self.add_module(name, nn.Linear(columns, rows, bias=False, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        y: Tensor = down(F.silu(gate(x)) * up(x))
        return y


class Listed(nn.ModuleList):
    """Experts that are modules, as in models before transformers 5."""

    def __init__(self, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        super().__init__([Expert(names) for _ in range(E)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        y: Tensor = self[expert](x)
        return y


class Block(nn.Module):
    def __init__(self, experts: nn.Module, router: str) -> None:
        super().__init__()
        self.experts = experts
        self.add_module(router, nn.Linear(M, E, bias=False, dtype=torch.float64))
        self.router_name = router

    def forward(self, x: Tensor) -> Tensor:
        score = self.get_submodule(self.router_name)(x).softmax(-1)
        weight, chosen = score.topk(K)
        weight = weight / weight.sum(-1, keepdim=True)
        rows = [
            sum(w * self.experts(x[t], int(e)) for w, e in zip(weight[t], chosen[t], strict=True))
            for t in range(len(x))
        ]
        return torch.stack(rows)


class Foreign(nn.Module):
    """The model that PEFT knows: two layers, beside a projection with the name of an expert's."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        names = ("w1", "w3", "w2") if layout == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        stacked = layout.endswith("-stacked") or layout == "gpt-oss"
        self.layers = nn.ModuleList()
        for _ in range(2):
            experts = Stacked(layout == "gpt-oss") if stacked else Listed(names)
            self.layers.append(
                nn.ModuleDict({"mlp": Block(experts, "router" if layout == "gpt-oss" else "gate")})
            )
        self.gate_proj = nn.Linear(M, M, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


class Own(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        given = {"expert": "swiglu", "bias": False, "dtype": torch.float64, "pipeline": 2}
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": pmoe.MoELayer(M, H, E, K, **{**given, **options})}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)
        return x


LAYOUTS = ["qwen-moe", "mixtral", "deepseek", "qwen-moe-stacked", "mixtral-stacked", "gpt-oss"]


def pair(layout: Any) -> tuple[Own, Foreign]:
    """Two models that compute the same."""
    own, foreign = Own(), Foreign(layout)
    state = {
        key: value
        for at, layer in enumerate(own.layers)
        for key, value in from_pmoe(layer["mlp"].state_dict(), layout, prefix=f"layers.{at}.mlp.").items()
    }
    missing, unexpected = foreign.load_state_dict(state, strict=False)
    assert all("gate_proj." in key and "experts" not in key for key in missing) and not unexpected
    return own, foreign


def fill(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "adapters" in name or "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)


def rows() -> Tensor:
    return torch.randn(7, M, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("targets", [("w1", "w2"), ("w1",), ("w2",)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_peft_reads_the_files_and_computes_the_same(
    layout: Any, targets: tuple[str, ...], tmp_path: Path
) -> None:
    own, foreign = pair(layout)
    before = own(rows())
    pmoe.add_lora(own, rank=R, alpha=3, targets=targets)
    fill(own)
    pmoe.save_lora(own, tmp_path / "adapter", layout, base_model="some/model")
    read = peft.PeftModel.from_pretrained(foreign, str(tmp_path / "adapter"))
    wanted = own(rows())
    assert relative_error(wanted, before) > 1e-3
    assert relative_error(read(rows()), wanted) <= 1e-12
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors"}
    names = {name for name, _ in read.named_parameters() if "lora_" in name}
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(names)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_of_peft_are_read_back(layout: Any, tmp_path: Path) -> None:
    """In a layout with a tensor for each expert, gate_proj and up_proj have an A each: the rank doubles."""
    own, foreign = pair(layout)
    stacked = layout.endswith("-stacked") or layout == "gpt-oss"
    if stacked:
        given: dict[str, Any] = {
            "target_modules": [],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        }
    else:
        given = {"target_modules": r".*experts\.\d+\..*"}
    adapted = peft.get_peft_model(foreign, peft.LoraConfig(r=R, lora_alpha=5, use_rslora=True, **given))
    fill(adapted)
    adapted.save_pretrained(str(tmp_path))
    adapters = pmoe.load_lora(own, tmp_path, layout)
    assert own.layers[0]["mlp"].experts.adapter("default").rank == (R if stacked else 2 * R)
    assert relative_error(own(rows()), adapted(rows())) <= 1e-12
    assert {id(p) for p in adapters.parameters()} <= {id(p) for p in own.parameters()}


@pytest.mark.parametrize("layout", ["qwen-moe", "qwen-moe-stacked", "gpt-oss"])
def test_what_was_saved_is_read_back_bit_for_bit(layout: Any, tmp_path: Path) -> None:
    for at, shared in enumerate((False, True)):
        own = Own()
        pmoe.add_lora(own, rank=R, alpha=2.5, shared=shared)
        fill(own)
        pmoe.save_lora(own, tmp_path / str(at), layout)
        other = Own()
        pmoe.add_lora(other, rank=R, shared=shared, name="second")
        pmoe.load_lora(other, tmp_path / str(at), layout, name="second")
        assert other.layers[0]["mlp"].experts.adapter("second").alpha == 2.5
        found = dict(pmoe.lora_adapters(other, "second").named_parameters())
        for name, value in pmoe.lora_adapters(own).named_parameters():
            assert torch.equal(found[name.replace("default", "second")], value), name


def test_names_of_layers_can_be_changed_both_ways(tmp_path: Path) -> None:
    own = Own()
    pmoe.add_lora(own, rank=R, alpha=3)
    fill(own)

    def rename(name: str) -> str:
        return f"model.{name}".replace(".mlp.", ".block_sparse_moe.")

    pmoe.save_lora(own, tmp_path / "a", "mixtral", rename=rename)
    names = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.block_sparse_moe.experts.3.w3.lora_B.weight" in names
    other = Own()
    pmoe.load_lora(other, tmp_path / "a", "mixtral", rename=rename)
    assert torch.equal(other(rows()), own(rows()))
    with pytest.raises(ValueError, match=r"such as base_model.model.layers.0.mlp.experts.0.w1.lora_A.weight"):
        pmoe.load_lora(Own(), tmp_path / "a", "mixtral")


def test_files_of_peft_before_the_shapes_were_turned_are_read(tmp_path: Path) -> None:
    """PEFT 0.18 took the first dimension of a weight for its input; here H = M, so shapes do not tell."""
    own = Own()
    pmoe.add_lora(own, rank=R, alpha=3)
    fill(own)
    pmoe.save_lora(own, tmp_path / "new", "qwen-moe-stacked")
    new = load_file(tmp_path / "new" / "adapter_model.safetensors")
    old = {}
    for key in new:
        if key.endswith("lora_A.weight"):
            other = key.replace("lora_A", "lora_B")
            old[key] = new[other].unflatten(1, (R, E)).permute(2, 1, 0).flatten(0, 1).contiguous()
            old[other] = new[key].unflatten(0, (E, R)).permute(2, 1, 0).flatten(1, 2).contiguous()
    folder = tmp_path / "old"
    folder.mkdir()
    save_file(old, folder / "adapter_model.safetensors")
    config = json.loads((tmp_path / "new" / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "peft_version": "0.18.1"}))
    other = Own()
    pmoe.load_lora(other, folder, "qwen-moe-stacked")
    assert torch.equal(other(rows()), own(rows()))


def test_a_square_weight_is_read_by_the_version_of_the_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = pmoe.MoELayer(4, 2, E, K, expert="swiglu", bias=False, dtype=torch.float64)  # w1 is (E, 4, 4)
    pmoe.add_lora(layer, rank=R, targets="w1")
    fill(layer)
    pmoe.save_lora(layer, tmp_path / "a", "qwen-moe-stacked")
    path = tmp_path / "a" / "adapter_config.json"
    config = json.loads(path.read_text())
    outputs = []
    x = torch.randn(5, 4, dtype=torch.float64)
    for version in ("0.21.2", None, "0.18.0"):
        path.write_text(json.dumps({**config, "peft_version": version}))
        pmoe.load_lora(layer, tmp_path / "a", "qwen-moe-stacked", name=f"of_{str(version).replace('.', '_')}")
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])


# ---- wrong files and models


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    own = Own()
    pmoe.add_lora(own, rank=R, alpha=3)
    pmoe.save_lora(own, tmp_path / "adapter", "qwen-moe-stacked")
    return tmp_path / "adapter"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"use_dora \(True\) of .* must be False"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights \('pissa'\) of .* must be True"),
        ({"rank_pattern": {"a": 3}}, r"rank_pattern \({'a': 3}\)"),
        ({"peft_type": "LOHA"}, r"peft_type \('LOHA'\)"),
        ({"bias": "all"}, r"bias \('all'\)"),
        ({"r": 3}, r"and must have \(12, 6\) and \(8, 12\) for rank 3 and 4 experts"),
        ({"r": None}, r"r \(None\) and lora_alpha \(3\) of .* must be numbers above 0"),
        ({"lora_alpha": "x"}, r"r \(2\) and lora_alpha \('x'\)"),
        ({"target_parameters": None}, r"name them in target_parameters \(None\)"),
        (
            {"target_parameters": ["experts.down_proj"]},
            r"lora_A.weight, which belongs to no expert|shapes .* and must have",
        ),
    ],
)
def test_other_configurations_are_named(change: dict[str, Any], message: str, saved: Path) -> None:
    path = saved / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    own = Own()
    with pytest.raises(ValueError, match=message):
        pmoe.load_lora(own, saved, "qwen-moe-stacked")
    assert not hasattr(own.layers[0]["mlp"].experts, "adapters")


def test_damaged_and_missing_files_are_named(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"must have adapters of experts, such as .*experts.0.gate_proj"):
        pmoe.load_lora(Own(), saved, "qwen-moe")
    matrices = saved / "adapter_model.safetensors"
    content = matrices.read_bytes()
    for damaged in (content[:-8], content[:5], b""):
        matrices.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"adapter_model.safetensors must be a file of safetensors"):
            pmoe.load_lora(Own(), saved, "qwen-moe-stacked")
    matrices.unlink()
    with pytest.raises(ValueError, match=r"must hold adapter_config.json and adapter_model.safetensors"):
        pmoe.load_lora(Own(), saved, "qwen-moe-stacked")
    (saved / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config.json must be a configuration of PEFT"):
        pmoe.load_lora(Own(), saved, "qwen-moe-stacked")
    with pytest.raises(ValueError, match=r"folder \(.*nothing\) must hold"):
        pmoe.load_lora(Own(), saved / "nothing", "qwen-moe-stacked")


def test_an_adapter_of_another_rank_or_of_other_layers_is_named(saved: Path) -> None:
    own = Own()
    pmoe.add_lora(own, rank=1)
    fill(own)
    before = own(rows())
    with pytest.raises(
        ValueError, match=r"adapter of layers.0.mlp \(rank 1, targets w1, w2\) must be as that"
    ):
        pmoe.load_lora(own, saved, "qwen-moe-stacked")
    assert torch.equal(own(rows()), before)
    small = Own()
    del small.layers[1]
    with pytest.raises(ValueError, match=r"has base_model.model.layers.1.*belongs to no expert of the model"):
        pmoe.load_lora(small, saved, "qwen-moe-stacked")
    large = Own()
    large.layers.append(nn.ModuleDict({"mlp": pmoe.MoELayer(M, H, E, K, expert="swiglu", bias=False)}))
    with pytest.raises(ValueError, match=r"must have base_model.model.layers.2.*, of layers.2.mlp"):
        pmoe.load_lora(large, saved, "qwen-moe-stacked")
    shared = Own()
    pmoe.add_lora(shared, rank=R, shared=True)
    filled = Own()
    pmoe.add_lora(filled, rank=R)
    fill(filled)
    pmoe.save_lora(filled, saved.parent / "filled", "qwen-moe-stacked")
    with pytest.raises(ValueError, match=r"is shared by all experts, but w1 of the files differs"):
        pmoe.load_lora(shared, saved.parent / "filled", "qwen-moe-stacked")


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    own = Own()
    with pytest.raises(ValueError, match="name .None. must be given where no adapter is in use"):
        pmoe.save_lora(own, tmp_path / "a", "qwen-moe")
    pmoe.add_lora(own, rank=R)
    with pytest.raises(ValueError, match="layout .* must be one of mixtral"):
        pmoe.save_lora(own, tmp_path / "a", "tutel")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rename \(3\) must be None or a function"):
        pmoe.save_lora(own, tmp_path / "a", "qwen-moe", rename=3)  # type: ignore[arg-type]
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there. must not exist"):
        pmoe.save_lora(own, tmp_path / "there", "qwen-moe")
    pmoe.remove_lora(own.layers[1]["mlp"])
    pmoe.add_lora(own.layers[1]["mlp"], rank=1)
    with pytest.raises(ValueError, match=r"adapter of layers.1.mlp .*must be as that of layers.0.mlp"):
        pmoe.save_lora(own, tmp_path / "a", "qwen-moe")
    plain = pmoe.MoELayer(M, H, E, K)
    pmoe.add_lora(plain, rank=R)
    with pytest.raises(ValueError, match=r"layout \('qwen-moe'\) must fit model: its experts are not gated"):
        pmoe.save_lora(plain, tmp_path / "a", "qwen-moe")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
