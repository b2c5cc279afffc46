"""State dicts of other systems' MoE layers into pmoe's and back, bit for bit: `to_pmoe` and `from_pmoe`.

docs/weights.md says where each of the `LAYOUTS` was read, and what it was tested on.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any, Literal

import torch
from torch import Tensor

from pmoe.arguments import check_int, check_kind, check_one_of, check_tensors, list_of

AXES = {
    "gate.weight": "E M", "gate.bias": "E", "gate.logit_bias": "E", "shared_gate.weight": "1 M",
    "experts.w1": "X fH M", "experts.w2": "X M H", "experts.b1": "X fH", "experts.b2": "X M",
    "shared_expert.w1": "S fh M", "shared_expert.w2": "S M h",
    "shared_expert.b1": "S fh", "shared_expert.b2": "S M",
}  # fmt: skip
"""Dimensions of pmoe's tensors. E experts in all, X of a state dict, M = d_model, H = d_hidden. f = 2 where
experts are gated, for the gate's rows and the other factor's, else 1. S = 1 shared expert, of h columns."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a system has the tensors of one MoE layer.

    names: by pmoe's name. {e} is the number of an expert, which has its own tensor. Two names, with a space
        between, are for the gate's rows and for the other factor's.
    axes: dimensions that are not those of `AXES`; behind "|" the order of their numbers, if it is another.
    gated: whether experts are gated; None where they may be.
    local: whether each rank numbers its experts from 0.
    count: a tensor that holds E.
    """

    names: Mapping[str, str]
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gated: bool | None = None
    local: bool = False
    count: str = ""

    def keys(self, name: str, experts: Iterable[int]) -> list[str]:
        """The tensors that are pmoe's one together."""
        numbers = [*experts] if "{e}" in self.names[name] else [0]
        return [part.replace("{e}", str(e)) for part in self.names[name].split() for e in numbers]

    def order(self, name: str) -> tuple[str, list[str]]:
        """The axes of all these tensors, in the order of their numbers; and the dimensions of each."""
        found, own = self.names[name], AXES[name]
        between = "f" * (" " in found) + "X" * ("{e}" in found) + "S" * (found != name and "S" in own)
        text, _, order = self.axes.get(name, own).partition("|")
        dims = text.translate(dict.fromkeys(map(ord, between))).split()
        return between + (order or "".join(dims)), dims


def _sizes_of(axes: Iterable[str], sizes: Mapping[str, int]) -> list[int]:
    return [math.prod(sizes[axis] for axis in dimension) for dimension in axes]


# ---- the systems

LayoutName = Literal[
    "mixtral",
    "qwen-moe",
    "deepseek",
    "mixtral-stacked",
    "qwen-moe-stacked",
    "deepseek-stacked",
    "gpt-oss",
    "megatron-sequential",
    "megatron-te-grouped",
    "megatron-grouped",
    "deepspeed-moe",
    "tutel",
    "tutel-llama",
    "fairseq",
]
"""What `to_pmoe` and `from_pmoe` take: the keys of `LAYOUTS`."""

_STATED = json.loads(files("pmoe").joinpath("layouts.json").read_text(encoding="utf-8"))
LAYOUTS: Mapping[LayoutName, Layout] = {name: Layout(**fields) for name, fields in _STATED.items()}
"""By the name that `to_pmoe` and `from_pmoe` take."""

Place = tuple[Layout, str, str]
"""A layout, what messages call it, and what its names begin with."""
PMOE: Place = Layout(names={name: name for name in AXES}), "pmoe", ""

Found = tuple[dict[str, Tensor], list[int], dict[str, int]]
"""Tensors as pmoe has them, the numbers of their experts, and the size of each axis."""


# ---- the two directions


@torch.no_grad()
def to_pmoe(
    state: Mapping[str, Any],
    layout: LayoutName,
    *,
    prefix: str = "",
    experts: Iterable[int] | None = None,
    names: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """The state dict of a `MoELayer` with the weights of another system's MoE layer, the same to the bit.

    Args:
        state: tensors by their names there. Those whose names do not begin with ``prefix`` are not looked at.
        layout: a key of `LAYOUTS`.
        prefix: of the layer in its model, "model.layers.0.mlp." say.
        experts: the numbers of X of the E experts, which the result has; None for all. ``state`` has these
            alone, as a rank's has, or all E; these alone in "megatron-grouped" and "tutel-llama".
        names: texts in the layout's names, and what yours have instead. DeepSpeed's experts are your own
            modules: {"dense_h_to_4h": "fc1", "dense_4h_to_h": "fc2"}, say.

    Returns ``gate.weight`` (E, M), ``experts.w1`` (X, H, M), or (X, 2H, M) where experts are gated,
    ``experts.w2`` (X, M, H), and biases, a bias of the router and a shared expert where ``state`` has them.
    They share no memory with it.

    Raises ValueError with the tensor, its shape and the rule where one is missing, has no place in the
    layout, or is of another shape, type or device than the others say; TypeError for what is no tensor.
    """
    return _read(state, experts, _place(layout, prefix, names))[0]


@torch.no_grad()
def from_pmoe(
    state: Mapping[str, Any],
    layout: LayoutName,
    *,
    prefix: str = "",
    experts: Iterable[int] | None = None,
    names: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """The reverse of `to_pmoe`: another system's tensors, of the state dict of a `MoELayer`.

    ``state`` has ``gate.weight`` (E, M) and so on; the result has the layout's names behind ``prefix``. Other
    arguments are as in `to_pmoe`. Raises ValueError, too, for what the layout has no place for.
    """
    place = _place(layout, prefix, names)
    return _written(_read(state, experts, PMOE), place)


def _place(layout: LayoutName, prefix: str, names: Mapping[str, str] | None) -> Place:
    check_one_of("layout", layout, tuple(LAYOUTS))
    check_kind(str, "a text", prefix=prefix)
    check_kind((Mapping, type(None)), "None or a dict of texts", names=names)
    found = LAYOUTS[layout]
    for text, other in (names or {}).items():
        check_kind(str, "texts for texts", **{"names": text, f"names[{text!r}]": other})
        renamed = {own: each.replace(text, other) for own, each in found.names.items()}
        parts = [part for each in renamed.values() for part in each.split()]
        if renamed == found.names or len({*parts}) < len(parts):
            raise ValueError(f"names ({text!r}) must be in names of layout {layout!r}, and keep them apart")
        found = dataclasses.replace(found, names=renamed)
    return found, f"layout {layout!r}", prefix


def _read(state: Mapping[str, Any], experts: Iterable[int] | None, place: Place) -> Found:
    """Checks all of ``state`` before it puts anything together."""
    layout, told, prefix = place
    check_kind(Mapping, "a state dict", state=state)
    check_kind(str, "a text", **{f"key {key!r} of state": key for key in state})
    # Transformer Engine's _extra_state holds no weights.
    names = [key for key in state if key.startswith(prefix) and not key.endswith("_extra_state")]
    check_tensors(None, **{key: state[key] for key in names})
    held = {key.removeprefix(prefix): state[key] for key in names}
    router, count = layout.names["gate.weight"], held.pop(layout.count, None)
    if router not in held or held[router].dim() != 2 or not held[router].numel():
        shape = tuple(held[router].shape) if router in held else f"not there behind prefix {prefix!r}"
        raise ValueError(f"state must have {prefix}{router} ({shape}) of shape (E, M), by {told}")
    num_experts, d_model = held[router].shape
    if count is not None and count.tolist() != num_experts:
        raise ValueError(f"{prefix}{layout.count} ({count.tolist()}) must be {num_experts}, as {router} says")
    chosen, has_all = _numbers(experts, num_experts), _has_all(held, layout, num_experts)
    there = [*range(num_experts if has_all else len(chosen))] if has_all or layout.local else chosen
    rule = f"by {told} with experts {there}"

    keys = {name: layout.keys(name, there) for name in layout.names}
    used = {"experts.w1", "experts.w2", *(name for name in keys if not held.keys().isdisjoint(keys[name]))}
    used |= {name[:-1] + i for name in used if name[-1] in "12" for i in "12"}  # both or none
    keys = {name: each for name, each in keys.items() if name in used}
    owners = {key: name for name, each in keys.items() for key in each}
    for key in (key for key in owners if key not in held):
        raise ValueError(f"state must have {prefix}{key}, of pmoe's {owners[key]}, {rule}")
    for key in (key for key in held if key not in owners):
        raise ValueError(f"{prefix}{key} of shape {tuple(held[key].shape)} must not be in state, {rule}")
    sizes = {"1": 1, "S": 1, "E": num_experts, "M": d_model, "X": len(there), "h": 1}
    numel = {name: held[each[0]].numel() * len(each) for name, each in keys.items()}
    for axis, name, num in (("H", "experts.w2", len(there)), ("h", "shared_expert.w2", 1)):
        sizes[axis] = max(1, numel.get(name, 0) // (d_model * num))
    is_gated = numel["experts.w1"] > numel["experts.w2"] if layout.gated is None else layout.gated
    sizes["f"] = 2 if is_gated else 1
    for key in sorted(owners, key=lambda key: not owners[key].endswith("w2")):  # by which others are measured
        value, first = held[key], held[keys[owners[key]][0]]
        kind = f"of shape {tuple(value.shape)}, {value.dtype}, {value.device}"
        shape = tuple(_sizes_of(layout.order(owners[key])[1], sizes))
        wanted = f"of shape {shape}, {first.dtype}, {first.device}"
        if kind != wanted or not value.is_floating_point() or hasattr(value, "to_local"):
            kind = f"{type(value).__name__} {kind}"
            raise ValueError(f"{prefix}{key} ({kind}) must be a plain tensor {wanted}, {rule}")

    found = {}
    for name, each in keys.items():
        (axes, _), own = layout.order(name), AXES[name].replace(" ", "")
        tensor = torch.stack([held[key] for key in each]).reshape(_sizes_of(axes, sizes))
        tensor = tensor.permute([axes.index(axis) for axis in own])
        tensor = tensor.reshape(_sizes_of(AXES[name].split(), sizes))
        found[name] = (tensor[chosen] if has_all and "X" in own else tensor).contiguous()
    return found, chosen, sizes | {"X": len(chosen)}


def _numbers(experts: Iterable[int] | None, num_experts: int) -> list[int]:
    numbers = [*range(num_experts)] if experts is None else list_of("experts", experts)
    for each in numbers:
        check_int(experts=each)
    if not numbers or len({*numbers}) < len(numbers) or not {*numbers} <= {*range(num_experts)}:
        raise ValueError(f"experts ({numbers}) must be different numbers from 0 to {num_experts - 1}")
    return [int(each) for each in numbers]


def _has_all(held: Mapping[str, Tensor], layout: Layout, num_experts: int) -> bool:
    """Whether all E experts are there. Where they are no dimension of their own, the shape does not say."""
    keys, (_, dims) = layout.keys("experts.w2", range(num_experts)), layout.order("experts.w2")
    if dims[0] == "X":
        return keys[0] in held and held[keys[0]].shape[:1] == (num_experts,)
    return "{e}" in layout.names["experts.w2"] and all(key in held for key in keys)


def _written(read: Found, place: Place) -> dict[str, Tensor]:
    """Checks that the layout has a place for everything first."""
    (found, experts, sizes), (layout, told, prefix) = read, place
    for name, tensor in found.items():
        if name not in layout.names:
            places = ", ".join(layout.names)
            raise ValueError(f"{name} of shape {tuple(tensor.shape)} must be one of {places}, by {told}")
    if layout.gated not in (None, sizes["f"] == 2):
        shape, rows = tuple(found["experts.w1"].shape), f"{2 if layout.gated else 1} * {sizes['H']} rows"
        raise ValueError(f"experts.w1 of shape {shape} must have {rows}, by {told}")
    made = {prefix + layout.count: torch.tensor(sizes["E"])} if layout.count else {}
    for name, tensor in found.items():
        (axes, dims), own = layout.order(name), AXES[name].replace(" ", "")
        keys = layout.keys(name, range(len(experts)) if layout.local else experts)
        tensor = tensor.reshape(_sizes_of(own, sizes)).permute([own.index(axis) for axis in axes])
        for key, each in zip(keys, tensor.reshape(len(keys), *_sizes_of(dims, sizes)), strict=True):
            made[prefix + key] = each.clone(memory_format=torch.contiguous_format)
    return made
