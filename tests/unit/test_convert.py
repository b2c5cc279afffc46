"""State dicts of other systems: each layout written by hand, both directions bit for bit, and what is
refused.

tests/convert and test_convert_transformers.py do the same for layers that the packages themselves made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import pmoe
from pmoe.convert import AXES, LAYOUTS, from_pmoe, to_pmoe

E, M, H, SHARED = 4, 6, 8, 10
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "weights.md").read_text(encoding="utf-8")

State = dict[str, Tensor]


def random_bits(*shape: int) -> Tensor:
    """Returns float32 values of random bits, so that NaNs with a payload, infinities and denormals occur."""
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32).view(torch.float32)


def same_bits(a: State, b: State) -> bool:
    pairs = [(a[key], b[key]) for key in a.keys() & b.keys()]
    as_ints = [
        [each.view(torch.int32) if each.is_floating_point() else each for each in pair] for pair in pairs
    ]
    return a.keys() == b.keys() and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in as_ints)


def numbered(pattern: str, experts: Iterable[int], *shape: int) -> dict[str, tuple[int, ...]]:
    return {pattern.format(e=e): shape for e in experts}


def gated_files(gate: str, up: str, down: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors by name, with one tensor for each expert, as in files of Hugging Face."""
    return {
        "gate.weight": (E, M),
        **numbered(f"experts.{{e}}.{gate}.weight", range(E), H, M),
        **numbered(f"experts.{{e}}.{up}.weight", range(E), H, M),
        **numbered(f"experts.{{e}}.{down}.weight", range(E), M, H),
    }


STACKED = {"gate.weight": (E, M), "experts.gate_up_proj": (E, 2 * H, M), "experts.down_proj": (E, M, H)}
QWEN = {
    "shared_expert.gate_proj.weight": (SHARED, M),
    "shared_expert.up_proj.weight": (SHARED, M),
    "shared_expert.down_proj.weight": (M, SHARED),
    "shared_expert_gate.weight": (1, M),
}
DEEPSEEK = {
    "gate.e_score_correction_bias": (E,),
    "shared_experts.gate_proj.weight": (SHARED, M),
    "shared_experts.up_proj.weight": (SHARED, M),
    "shared_experts.down_proj.weight": (M, SHARED),
}
MEGATRON = {
    "router.weight": (E, M),
    "router.expert_bias": (E,),
    "shared_experts.linear_fc1.weight": (2 * SHARED, M),
    "shared_experts.linear_fc2.weight": (M, SHARED),
    "shared_experts.gate_weight": (1, M),
}
SEQUENTIAL, DEEPSPEED = "experts.local_experts.{e}.", "deepspeed_moe.experts.deepspeed_experts.{e}."

SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "mixtral": gated_files("w1", "w3", "w2"),
    "qwen-moe": {**gated_files("gate_proj", "up_proj", "down_proj"), **QWEN},
    "deepseek": {**gated_files("gate_proj", "up_proj", "down_proj"), **DEEPSEEK},
    "mixtral-stacked": STACKED,
    "qwen-moe-stacked": {**STACKED, **QWEN},
    "deepseek-stacked": {**STACKED, **DEEPSEEK},
    "gpt-oss": {
        "router.weight": (E, M),
        "router.bias": (E,),
        "experts.gate_up_proj": (E, M, 2 * H),
        "experts.gate_up_proj_bias": (E, 2 * H),
        "experts.down_proj": (E, H, M),
        "experts.down_proj_bias": (E, M),
    },
    "megatron-sequential": {
        **MEGATRON,
        **numbered(SEQUENTIAL + "linear_fc1.weight", range(E), 2 * H, M),
        **numbered(SEQUENTIAL + "linear_fc2.weight", range(E), M, H),
    },
    "megatron-te-grouped": {
        **MEGATRON,
        **numbered("experts.linear_fc1.weight{e}", range(E), 2 * H, M),
        **numbered("experts.linear_fc2.weight{e}", range(E), M, H),
    },
    "megatron-grouped": {**MEGATRON, "experts.weight1": (M, E * 2 * H), "experts.weight2": (E * H, M)},
    "deepspeed-moe": {
        "deepspeed_moe.gate.wg.weight": (E, M),
        **numbered(DEEPSPEED + "dense_h_to_4h.weight", range(E), H, M),
        **numbered(DEEPSPEED + "dense_4h_to_h.weight", range(E), M, H),
        **numbered(DEEPSPEED + "dense_h_to_4h.bias", range(E), H),
        **numbered(DEEPSPEED + "dense_4h_to_h.bias", range(E), M),
    },
    "tutel": {
        "_num_global_experts": (),
        "gates.0.wg.weight": (E, M),
        "experts.batched_fc1_w": (E, H, M),
        "experts.batched_fc2_w": (E, H, M),
        "experts.batched_fc1_bias": (E, H),
        "experts.batched_fc2_bias": (E, M),
    },
    "tutel-llama": {
        "_num_global_experts": (),
        "gates.0.wg.weight": (E, M),
        **{f"experts.W_fc{i}": (E * M * H,) for i in (1, 2, 3)},
    },
    "fairseq": {
        "gate.wg.weight": (E, M),
        **numbered("experts.{e}.fc1.weight", range(E), H, M),
        **numbered("experts.{e}.fc2.weight", range(E), M, H),
        **numbered("experts.{e}.fc1.bias", range(E), H),
        **numbered("experts.{e}.fc2.bias", range(E), M),
    },
}
"""Shapes of all experts' tensors by system, as the systems' own code has them."""


def whole(layout: str) -> State:
    torch.manual_seed(0)
    made = {name: random_bits(*shape) for name, shape in SHAPES[layout].items()}
    return made | ({"_num_global_experts": torch.tensor(E)} if layout.startswith("tutel") else {})


def part_of(state: State, experts: list[int]) -> State:
    """Returns a state dict of pmoe's layer with only some of its experts."""
    return {name: each[experts] if name.startswith("experts.") else each for name, each in state.items()}


# ---- what is where, by the slowest obvious loop


@pytest.mark.parametrize("layout", SHAPES)
def test_an_expert_of_pmoe_computes_what_the_systems_own_formula_says(layout: str) -> None:
    theirs = {name: torch.randn(each.shape) if each.dim() else each for name, each in whole(layout).items()}
    ours, x_TM = to_pmoe(theirs, layout), torch.randn(3, M)
    for e in range(E):
        torch.testing.assert_close(plain_expert(ours, e, x_TM), FORMULAS[layout](theirs, e, x_TM))


def plain_expert(ours: State, e: int, x: Tensor) -> Tensor:
    hidden = x @ ours["experts.w1"][e].T
    hidden = hidden + ours["experts.b1"][e] if "experts.b1" in ours else hidden
    gate, *up = hidden.split(H, -1)
    y: Tensor = torch.nn.functional.silu(gate) * (up[0] if up else 1) @ ours["experts.w2"][e].T
    return y + ours["experts.b2"][e] if "experts.b2" in ours else y


def linear(theirs: State, name: str, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, theirs[f"{name}.weight"], theirs.get(f"{name}.bias"))


def gated(gate: str, up: str, down: str) -> Any:
    def formula(theirs: State, e: int, x: Tensor) -> Tensor:
        names = [f"experts.{e}.{each}" for each in (gate, up, down)]
        hidden = torch.nn.functional.silu(linear(theirs, names[0], x)) * linear(theirs, names[1], x)
        return linear(theirs, names[2], hidden)

    return formula


def stacked(theirs: State, e: int, x: Tensor) -> Tensor:
    return after(x @ theirs["experts.gate_up_proj"][e].T) @ theirs["experts.down_proj"][e].T


def after(hidden: Tensor) -> Tensor:
    """Applies the nonlinearity to the hidden activation of gated experts, or of others.

    The gate's columns come first; silu of them multiplies the other columns.
    """
    gate, *up = hidden.split(H, -1)
    return torch.nn.functional.silu(gate) * (up[0] if up else 1)


def two(first: str, second: str) -> Any:
    def formula(theirs: State, e: int, x: Tensor) -> Tensor:
        return linear(theirs, second.format(e=e), after(linear(theirs, first.format(e=e), x)))

    return formula


def interleaved(theirs: State, e: int, x: Tensor) -> Tensor:
    hidden = x @ theirs["experts.gate_up_proj"][e] + theirs["experts.gate_up_proj_bias"][e]
    active = torch.nn.functional.silu(hidden[:, ::2]) * hidden[:, 1::2]
    return active @ theirs["experts.down_proj"][e] + theirs["experts.down_proj_bias"][e]


def te_grouped(theirs: State, e: int, x: Tensor) -> Tensor:
    hidden = after(x @ theirs[f"experts.linear_fc1.weight{e}"].T)
    return hidden @ theirs[f"experts.linear_fc2.weight{e}"].T


def grouped(theirs: State, e: int, x: Tensor) -> Tensor:
    w1, w2 = theirs["experts.weight1"].view(E, M, -1), theirs["experts.weight2"].view(E, -1, M)
    return after(x @ w1[e]) @ w2[e]


def tutel(theirs: State, e: int, x: Tensor) -> Tensor:
    hidden = x @ theirs["experts.batched_fc1_w"].permute(0, 2, 1)[e] + theirs["experts.batched_fc1_bias"][e]
    return after(hidden) @ theirs["experts.batched_fc2_w"][e] + theirs["experts.batched_fc2_bias"][e]


def tutel_llama(theirs: State, e: int, x: Tensor) -> Tensor:
    gate, up = (theirs[f"experts.W_fc{i}"].view(E, M, H)[e] for i in (1, 2))
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ theirs["experts.W_fc3"].view(E, H, M)[e]


FORMULAS = {
    "mixtral": gated("w1", "w3", "w2"),
    **dict.fromkeys(("qwen-moe", "deepseek"), gated("gate_proj", "up_proj", "down_proj")),
    **dict.fromkeys(("mixtral-stacked", "qwen-moe-stacked", "deepseek-stacked"), stacked),
    "gpt-oss": interleaved,
    "megatron-sequential": two(SEQUENTIAL + "linear_fc1", SEQUENTIAL + "linear_fc2"),
    "megatron-te-grouped": te_grouped,
    "megatron-grouped": grouped,
    "deepspeed-moe": two(DEEPSPEED + "dense_h_to_4h", DEEPSPEED + "dense_4h_to_h"),
    "tutel": tutel,
    "tutel-llama": tutel_llama,
    "fairseq": two("experts.{e}.fc1", "experts.{e}.fc2"),
}
"""The computation of each system with the tensors of one expert; every activation is silu."""


# ---- both ways


def test_every_layout_is_written_here_by_hand() -> None:
    assert SHAPES.keys() == LAYOUTS.keys() == FORMULAS.keys()


@pytest.mark.parametrize("layout", SHAPES)
def test_a_state_dict_comes_back_bit_for_bit_behind_its_prefix(layout: str) -> None:
    theirs = {f"layers.0.{name}": each for name, each in whole(layout).items()}
    others = {"layers.1.gate.weight": torch.ones(1), "norm": torch.ones(1)}
    ours = to_pmoe(theirs | others, layout, prefix="layers.0.")
    assert same_bits(from_pmoe(ours, layout, prefix="layers.0."), theirs)


@pytest.mark.parametrize("layout", SHAPES)
def test_a_ranks_experts_come_from_a_whole_state_dict_and_from_its_own(layout: str) -> None:
    theirs, experts = whole(layout), [2, 3]
    ours = to_pmoe(theirs, layout)
    own = part_of(ours, experts)
    of_rank = from_pmoe(ours, layout, experts=experts)
    assert same_bits(of_rank, from_pmoe(own, layout, experts=experts))
    assert same_bits(to_pmoe(of_rank, layout, experts=experts), own)
    if layout not in (
        "megatron-grouped",
        "tutel-llama",
    ):  # whose shapes do not say how many experts there are
        assert same_bits(to_pmoe(theirs, layout, experts=experts), own)
    first = next(
        name for name in of_rank if "experts" in name and "shared" not in name and "_num" not in name
    )
    number = re.search(r"experts\.(\d)|weight(\d)$", first.replace("deepspeed_experts", "experts"))
    is_global = layout in ("mixtral", "qwen-moe", "deepseek")
    if number and layout != "megatron-grouped":
        assert next(filter(None, number.groups())) == ("2" if is_global else "0")


@pytest.mark.parametrize("layout", ["megatron-sequential", "megatron-te-grouped"])
def test_megatrons_experts_may_have_biases_and_be_plain(layout: str) -> None:
    layer = pmoe.MoELayer(M, H, num_experts=E, top_k=2, bias=True).state_dict()
    layer["gate.logit_bias"] = torch.randn(E)
    theirs = from_pmoe(layer, layout)
    biases = {name: each.shape for name, each in theirs.items() if "linear_fc1" in name and "bias" in name}
    assert [*biases.values()] == [(H,)] * E and theirs["router.bias"].shape == (E,)
    assert same_bits(to_pmoe(theirs, layout), layer)


@pytest.mark.parametrize("gate", ["topk", "deepseek"])
def test_a_layer_loads_what_comes_and_gives_it_back(gate: str) -> None:
    made = pmoe.gates.GATES[gate](M, E, 2)
    layer = pmoe.MoELayer(
        M, H, num_experts=E, top_k=2, gate=made, expert="swiglu", bias=False, shared_expert=SHARED
    )
    state, layout = layer.state_dict(), "deepseek" if gate == "deepseek" else "qwen-moe"
    theirs = from_pmoe(state, layout)
    layer.load_state_dict(to_pmoe(theirs, layout))
    assert same_bits(layer.state_dict(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_every_type_is_kept_and_a_router_may_have_another(dtype: torch.dtype) -> None:
    theirs = {name: torch.randn(each.shape).to(dtype) for name, each in whole("qwen-moe").items()}
    theirs["gate.weight"] = theirs["gate.weight"].float()
    ours = to_pmoe(theirs, "qwen-moe")
    assert ours["experts.w1"].dtype == dtype and ours["gate.weight"].dtype == torch.float32
    back = from_pmoe(ours, "qwen-moe")
    assert all(torch.equal(back[name].float(), each.float()) for name, each in theirs.items())


def test_the_result_shares_no_memory_and_has_no_graph() -> None:
    for layout in SHAPES:
        theirs = {name: each.requires_grad_(each.dim() > 0) for name, each in whole(layout).items()}
        ours = to_pmoe(theirs, layout)
        held = [each.untyped_storage().data_ptr() for each in theirs.values()]
        for made in (ours, from_pmoe(ours, layout)):
            found = [each.untyped_storage().data_ptr() for each in made.values()]
            assert len({*found, *held}) == len(found) + len(held)
            assert not any(each.requires_grad or not each.is_contiguous() for each in made.values())
            held += found


def test_names_of_a_users_own_experts_stand_for_the_layouts() -> None:
    names = {"dense_h_to_4h": "fc1", "dense_4h_to_h": "fc2"}
    theirs = whole("deepspeed-moe")
    renamed = {
        k.replace("dense_h_to_4h", "fc1").replace("dense_4h_to_h", "fc2"): v for k, v in theirs.items()
    }
    ours = to_pmoe(renamed, "deepspeed-moe", names=names)
    assert same_bits(ours, to_pmoe(theirs, "deepspeed-moe"))
    assert same_bits(from_pmoe(ours, "deepspeed-moe", names=names), renamed)


# ---- what is refused


def refusal(state: Any, layout: str = "mixtral", back: bool = False, **options: Any) -> str:
    before = dict(state)
    with pytest.raises(ValueError) as error:
        (from_pmoe if back else to_pmoe)(state, layout, **options)
    assert state == before
    return str(error.value)


@pytest.mark.parametrize("layout", SHAPES)
def test_each_missing_unknown_or_wrongly_shaped_tensor_is_named(layout: str) -> None:
    theirs, prefix = whole(layout), "moe."
    theirs = {prefix + name: each for name, each in theirs.items()}
    for name, each in theirs.items():
        lacking = {key: value for key, value in theirs.items() if key != name}
        alone = {"gate.weight", "router.expert_bias", "router.bias", "gate.e_score_correction_bias"}
        alone |= {"shared_expert_gate.weight", "shared_experts.gate_weight", "_num_global_experts"}
        if name.removeprefix(prefix) not in alone:
            assert name in refusal(lacking, layout, prefix=prefix)
        if each.dim():
            message = refusal({**theirs, name: random_bits(*each.shape, 2)}, layout, prefix=prefix)
            assert name in message and str((*each.shape, 2)) in message
            is_alone = layout != "tutel-llama" and not layout.endswith("grouped")
            longer = random_bits(each.shape[0] + 1, *each.shape[1:])
            message = refusal({**theirs, name: longer}, layout, prefix=prefix)
            assert not is_alone or "of shape" in message or "must" in message
    message = refusal({**theirs, "moe.lora_A": random_bits(3, 5)}, layout, prefix=prefix)
    assert "moe.lora_A of shape (3, 5) must not be in state" in message and layout in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gate.weight": random_bits(E)}, "gate.weight ((4,)) of shape (E, M)"),
        ({"gate.weight": random_bits(E, 0)}, "gate.weight ((4, 0)) of shape (E, M)"),
        ({"experts.2.w3.weight": random_bits(H, M + 1)}, "experts.2.w3.weight (Tensor of shape (8, 7)"),
        (
            {"experts.2.w3.weight": random_bits(H, M).double()},
            "must be a plain tensor of shape (8, 6), torch.float32",
        ),
        ({"experts.2.w3.weight": torch.ones(H, M).int()}, "torch.int32"),
        ({"experts.2.w3.weight": torch.ones(H, M, device="meta")}, "meta"),
        (
            {"experts.4.w1.weight": random_bits(H, M)},
            "experts.4.w1.weight of shape (8, 6) must not be in state",
        ),
    ],
)
def test_one_wrong_tensor_is_refused_with_its_shape_and_the_rule(change: State, words: str) -> None:
    assert words in refusal({**whole("mixtral"), **change})


def test_matrices_that_do_not_go_together_are_refused() -> None:
    theirs = whole("mixtral")
    for e in range(E):
        theirs[f"experts.{e}.w2.weight"] = random_bits(M, H + 1)
    message = refusal(theirs)
    assert "experts.0.w1.weight (Tensor of shape (8, 6)" in message and "of shape (9, 6)" in message
    odd = {**whole("gpt-oss"), "experts.gate_up_proj": random_bits(E, M, 15)}
    assert "experts.gate_up_proj" in refusal(odd, "gpt-oss")
    biases = {**whole("gpt-oss"), "experts.gate_up_proj_bias": random_bits(E, H)}
    assert "experts.gate_up_proj_bias (Tensor of shape (4, 8)" in refusal(biases, "gpt-oss")


def test_a_part_of_the_experts_is_refused_unless_it_is_said() -> None:
    theirs = from_pmoe(to_pmoe(whole("mixtral"), "mixtral"), "mixtral", experts=[2, 3])
    assert "experts.0.w1.weight" in refusal(theirs)
    assert "experts.0.w1.weight" in refusal(theirs, experts=[0, 1])
    stacks = from_pmoe(to_pmoe(whole("tutel"), "tutel"), "tutel", experts=[2, 3])
    assert "experts.batched_fc2_w (Tensor of shape (2, 8, 6)" in refusal(stacks, "tutel")
    assert "_num_global_experts (5) must be 4" in refusal(
        {**stacks, "_num_global_experts": torch.tensor(5)}, "tutel", experts=[2, 3]
    )


@pytest.mark.parametrize("experts", [[], [0, 0], [4], [-1], range(5)])
def test_experts_must_be_different_numbers_of_experts(experts: Any) -> None:
    assert "experts (" in refusal(whole("mixtral"), experts=experts)


def test_what_a_layout_has_no_place_for_is_refused() -> None:
    plain = pmoe.MoELayer(M, H, num_experts=E, top_k=2, bias=True).state_dict()
    gated = pmoe.MoELayer(M, H, num_experts=E, top_k=2, expert="swiglu", bias=False).state_dict()
    both = pmoe.MoELayer(M, H, num_experts=E, top_k=2, expert="swiglu", bias=True).state_dict()
    assert "experts.b1 of shape (4, 16) must be one of" in refusal(both, "mixtral", back=True)
    unbiased = {name: each for name, each in plain.items() if ".b" not in name}
    message = refusal(unbiased, "mixtral", back=True)
    assert "experts.w1 of shape (4, 8, 6) must have 2 * 8 rows, in layout 'mixtral'" in message
    assert "experts.w1 of shape (4, 16, 6) must have 1 * 8 rows" in refusal(gated, "tutel", back=True)
    noisy = pmoe.MoELayer(M, H, num_experts=E, top_k=2, gate="noisy_topk", bias=False).state_dict()
    assert "gate.noise_weight" in refusal(noisy, "megatron-sequential", back=True)
    biased = {**gated, "gate.bias": torch.zeros(E)}
    assert "gate.bias of shape (4,) must be one of" in refusal(biased, "mixtral", back=True)
    assert "shared_gate.weight" in refusal(to_pmoe(whole("qwen-moe"), "qwen-moe"), "deepseek", back=True)


def test_arguments_that_are_none_are_refused() -> None:
    theirs = whole("mixtral")
    assert "layout ('megatron') must be one of mixtral" in refusal(theirs, "megatron")
    assert "names ('dense') must occur in names of layout 'mixtral'" in refusal(theirs, names={"dense": "fc"})
    renamed = {"dense_h_to_4h": "fc", "dense_4h_to_h": "fc"}
    assert "keep them apart" in refusal(whole("deepspeed-moe"), "deepspeed-moe", names=renamed)
    for same in ({"w3": "w1"}, {"w1": "w3", "w2": "w1"}):
        assert "keep them apart" in refusal(theirs, names=same)
    with pytest.raises(TypeError, match="key 0 of state"):
        to_pmoe({**theirs, 0: theirs["gate.weight"]}, "mixtral")
    with pytest.raises(TypeError, match="state"):
        to_pmoe(pmoe.MoELayer(M, H, num_experts=E), "mixtral")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"experts\.0\.w1\.weight"):
        to_pmoe({**theirs, "experts.0.w1.weight": [1.0]}, "mixtral")
    split = {**theirs, "experts.1.w2.weight": Split(theirs["experts.1.w2.weight"])}
    assert "experts.1.w2.weight (Split" in refusal(split)


@pytest.mark.parametrize("d_model, d_hidden", [(8, 8), (8, 4), (4, 8)])
def test_sizes_that_make_stacks_square_change_no_axis(d_model: int, d_hidden: int) -> None:
    """Converters that guess axes from shapes read such stacks transposed (transformers 47031)."""
    w1 = torch.arange(E * 2 * d_hidden * d_model, dtype=torch.float32).view(E, 2 * d_hidden, d_model)
    w2 = torch.arange(E * d_model * d_hidden, dtype=torch.float32).view(E, d_model, d_hidden)
    own = {"gate.weight": torch.randn(E, d_model), "experts.w1": w1, "experts.w2": w2}
    gate, up = w1.chunk(2, dim=1)
    files = from_pmoe(own, "mixtral")
    assert torch.equal(files["experts.1.w1.weight"], gate[1])
    assert torch.equal(files["experts.1.w3.weight"], up[1])
    assert torch.equal(files["experts.1.w2.weight"], w2[1])
    stacked = from_pmoe(own, "mixtral-stacked")
    assert torch.equal(stacked["experts.gate_up_proj"], w1)
    assert torch.equal(stacked["experts.down_proj"], w2)
    in_turn = from_pmoe(own, "gpt-oss")
    assert torch.equal(in_turn["experts.gate_up_proj"][:, :, 0::2], gate.transpose(1, 2))
    assert torch.equal(in_turn["experts.gate_up_proj"][:, :, 1::2], up.transpose(1, 2))
    assert torch.equal(in_turn["experts.down_proj"], w2.transpose(1, 2))
    assert same_bits(to_pmoe(files, "mixtral"), own)
    assert same_bits(to_pmoe(stacked, "mixtral-stacked"), own)
    assert same_bits(to_pmoe(in_turn, "gpt-oss"), own)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantised_weights_are_refused_with_a_cure(dtype: torch.dtype) -> None:
    """Weights in float8 passed, and a layer then loaded them without their scales."""
    theirs = {name: each.to(dtype) if "w1" in name else each for name, each in whole("mixtral").items()}
    scales = {f"{name}_scale_inv": torch.ones(1) for name in theirs}
    for state in (theirs, {**theirs, **scales}):
        message = refusal(state)
        assert f"experts.0.w1.weight ({dtype}) must have at least 16 bits" in message
        assert "dequantize=True" in message


def test_the_prefix_of_a_layer_in_a_whole_model_is_named() -> None:
    theirs = {
        f"model.layers.{at}.mlp.{name}": each for at in (2, 3) for name, each in whole("mixtral").items()
    }
    for prefix in ("", "model.layers.2.mlp", "model.layers.1."):
        assert "pass prefix='model.layers.2.mlp.'" in refusal(theirs, prefix=prefix)
    assert (
        to_pmoe(theirs, "mixtral", prefix="model.layers.2.mlp.").keys()
        == to_pmoe(whole("mixtral"), "mixtral").keys()
    )


class Split(Tensor):
    """Stands for a DTensor whose parts are on several ranks."""

    def to_local(self) -> None:
        pass


# ---- the page


def test_the_page_has_every_layout_and_every_name() -> None:
    for layout, found in LAYOUTS.items():
        row = next(line for line in PAGE.splitlines() if f"`{layout}`" in line)
        assert row.startswith("|"), row
        matrices = {own: name for own, name in found.names.items() if ".b" not in own}  # biases lie beside
        for name in [*matrices.values(), *(found.names[own] for own in ("gate.bias",) if own in found.names)]:
            for part in name.split():
                last = part.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
                assert last in PAGE, (layout, part)


def test_the_axes_are_those_of_a_layer() -> None:
    layer = pmoe.MoELayer(
        M, H, num_experts=E, top_k=2, expert="swiglu", shared_expert=SHARED, shared_gate=True
    )
    sizes = {"1": 1, "S": 1, "E": E, "X": E, "M": M, "H": H, "fH": 2 * H, "h": SHARED, "fh": 2 * SHARED}
    for name, each in layer.state_dict().items():
        assert tuple(each.shape) == tuple(sizes[axis] for axis in AXES[name].split()), name
