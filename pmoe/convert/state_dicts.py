"""Converts state dicts of other systems' MoE layers to pmoe's and back, bit for bit.

`to_pmoe` reads another system's state dict, `from_pmoe` writes one. Both change the names of tensors, the
order of their axes, and whether all experts are stacked in one tensor. They change no value. A `Layout`
describes a system's state dicts. All layouts are in layouts.json. For each layout, docs/weights.md gives the
source and the tests.
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
"""The axes of each of pmoe's tensors, dimension by dimension; "fH" is one dimension of size f * H.

    E  experts of all ranks         M  d_model
    X  experts in a state dict      H  d_hidden
    S  shared experts: 1            h  hidden columns of the shared expert
    f  2 if experts are gated (rows of the gate projection, then rows of the up projection), 1 otherwise
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Names and shapes of the tensors of one MoE layer in another system's state dicts.

    A letter stands for an axis, as in `AXES`: X experts in a state dict, M = d_model, H = d_hidden. f is 2
    for gated experts (gate projection, then up projection), and 1 for other experts.

    names: maps pmoe's name of a tensor to the system's name. If every expert has a tensor of its own, the
        name contains {e}, which stands for the expert's number. If the gate projection and the up projection
        are two tensors, the value has their two names, separated by a space.
    axes: maps pmoe's name of a tensor to a text that describes the shape of the system's tensor. The text has
        one word for each dimension. A word is one letter, or several letters if the dimension holds several
        axes: in "Hf", f changes fastest. A tensor with the same axes as in `AXES` has no entry.

        Normally the values lie in memory in the order of these letters. If they do not, the text goes on with
        "|" and the letters in the order of memory. An example is "M XfH|XMfH". The shape is "M XfH": a matrix
        with M rows and X * f * H columns. The order in memory is XMfH: X is first, so memory has one (M, fH)
        matrix for each expert, one after another.
    gated: whether the system's experts are gated; None if it has both gated and other experts.
    local: whether each rank numbers its experts from 0.
    count: name of a tensor that holds the number of experts of all ranks; "" if there is none.

    Examples for pmoe's "experts.w1" (X, fH, M):

    - Mixtral has two tensors (H, M) for each expert.
    - gpt-oss has one tensor for all experts, with the axes "X M Hf". Its last dimension has a column of the
      gate projection, then one of the up projection, in turn.
    """

    names: Mapping[str, str]
    axes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gated: bool | None = None
    local: bool = False
    count: str = ""

    def keys(self, name: str, experts: Iterable[int]) -> list[str]:
        """Returns the system's names of the tensors that together make up one of pmoe's tensors.

        name: pmoe's name.
        experts: the indices of the experts, which replace {e} in the system's names.

        Example: for Mixtral's "experts.w1" and experts 0 and 1, four names are returned: "w1" of both
        experts, then "w3" of both.
        """
        numbers = [*experts] if "{e}" in self.names[name] else [0]
        return [part.replace("{e}", str(e)) for part in self.names[name].split() for e in numbers]

    def order(self, name: str) -> tuple[str, list[str]]:
        """Returns the order of the axes in which the system stores the values of one of pmoe's tensors.

        The system may store them in several tensors. Imagine these stacked in one large tensor. Letters stand
        for axes: X experts, f gate and up projection, H = d_hidden, M = d_model (see `AXES`). The result is a
        pair:

        1. The axes of the stack, a text with one letter for each axis, in the order of memory: the last axis
           changes fastest. If the gate and up projections are separate tensors, the stack begins with the
           axis f. If every expert has a tensor of its own, the axis X follows.
        2. The dimensions of a single tensor, a list. "Hf" is one dimension that holds two axes.

        name: pmoe's name.

        Example: "experts.w1" of Mixtral -> ("fXHM", ["H", "M"]), of gpt-oss -> ("XMHf", ["X", "M", "Hf"]).
        """
        layout_name = self.names[name]
        own_axes = AXES[name]
        between = (
            "f" * (" " in layout_name)
            + "X" * ("{e}" in layout_name)
            + "S" * (layout_name != name and "S" in own_axes)
        )
        text, _, order = self.axes.get(name, own_axes).partition("|")
        dims = text.translate(dict.fromkeys(map(ord, between))).split()
        return between + (order or "".join(dims)), dims


def _sizes_of(axes: Iterable[str], sizes: Mapping[str, int]) -> list[int]:
    """Returns the size of each dimension; the size of "fH" is the product of the sizes of f and H.

    axes: the letters of each dimension.
    sizes: the size of each letter.
    """
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
"""The names of the layouts: the keys of `LAYOUTS`."""

_STATED = json.loads(files("pmoe").joinpath("layouts.json").read_text(encoding="utf-8"))
LAYOUTS: Mapping[LayoutName, Layout] = {name: Layout(**fields) for name, fields in _STATED.items()}
"""All layouts that pmoe knows, by name."""

Place = tuple[Layout, str, str]
"""A layout, its name in messages, and the prefix of the layer's tensors in a state dict."""
PMOE: Place = Layout(names={name: name for name in AXES}), "pmoe's layout", ""
"""The layout of pmoe's own state dicts, without a prefix."""

Found = tuple[dict[str, Tensor], list[int], dict[str, int]]
"""A layer in pmoe's layout: its tensors by name, the indices of its experts, the size of each axis."""


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
    """Returns the state dict of a `MoELayer` with the weights of another system's layer, bit for bit.

    Args:
        state: the other system's state dict. Tensors whose names do not begin with ``prefix`` are ignored.
        layout: a key of `LAYOUTS`.
        prefix: beginning of the names of the layer's tensors in its model, for example "model.layers.0.mlp.".
        experts: the indices of the X experts in the result, out of E experts of all ranks; None for all E.
            ``state`` may hold only these X experts, as the state dict of one rank does, or all E. With the
            layouts "megatron-grouped" and "tutel-llama", it must hold only these X experts.
        names: texts to replace in the layout's names, for example {"dense_h_to_4h": "fc1", "dense_4h_to_h":
            "fc2"}. DeepSpeed's layout needs this, because its experts are modules whose parameters a user has
            named.

    The result has these tensors, where M = d_model and H = d_hidden. They share no memory with ``state``.

    - ``gate.weight`` (E, M)
    - ``experts.w1`` (X, H, M); for gated experts (X, 2H, M)
    - ``experts.w2`` (X, M, H)
    - biases of experts, the router's bias and a shared expert, if ``state`` has them

    Raises ValueError if a tensor is missing, has a name that the layout does not know, or does not fit the
    other tensors in shape, dtype or device. The message names the tensor, its shape and the rule. Raises
    TypeError if a value of ``state`` is no tensor.
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
    """Returns another system's state dict with the weights of a `MoELayer`, bit for bit.

    Args:
        state: the state dict of a `MoELayer`: ``gate.weight`` (E, M) and so on, for E experts and M =
            d_model.
        layout: a key of `LAYOUTS`.
        prefix: put in front of the layout's names.
        experts: the indices of the experts in the result; None for all. ``state`` may hold only these
            experts, as the state dict of one rank does, or all.
        names: texts to replace in the layout's names, such as {"dense_h_to_4h": "fc1"}.

    The result shares no memory with ``state``. Raises the errors of `to_pmoe`, and ValueError if the layout
    has no name for one of the layer's tensors.
    """
    place = _place(layout, prefix, names)
    return _written(_read(state, experts, PMOE), place)


def _place(layout: LayoutName, prefix: str, names: Mapping[str, str] | None) -> Place:
    """Checks the arguments ``layout``, ``prefix`` and ``names``, and returns them as one record.

    ``names`` says which texts to replace in the tensor names of the layout: each key is replaced by its
    value.

    Raises TypeError or ValueError for wrong arguments.
    """
    check_one_of("layout", layout, tuple(LAYOUTS))
    check_kind(str, "a text", prefix=prefix)
    check_kind((Mapping, type(None)), "None or a dict of texts", names=names)
    chosen_layout = LAYOUTS[layout]
    for text, other in (names or {}).items():
        check_kind(str, "texts for texts", **{"names": text, f"names[{text!r}]": other})
        renamed = {
            name: stored_name.replace(text, other) for name, stored_name in chosen_layout.names.items()
        }
        parts = [part for stored_name in renamed.values() for part in stored_name.split()]
        if renamed == chosen_layout.names or len({*parts}) < len(parts):
            raise ValueError(
                f"names ({text!r}) must occur in names of layout {layout!r}, and its replacement must keep "
                "them apart"
            )
        chosen_layout = dataclasses.replace(chosen_layout, names=renamed)
    return chosen_layout, f"layout {layout!r}", prefix


def _read(state: Mapping[str, Any], experts: Iterable[int] | None, place: Place) -> Found:
    """Reads the tensors of a layer from a state dict, and returns them in pmoe's layout.

    1. E (experts of all ranks) and d_model are read from the router's shape, the experts' indices from the
       tensors' names.
    2. All tensors of the layer must be there, and no other tensors.
    3. d_hidden is read from the shape of w2. Then the shape, dtype and device of every tensor are checked.
    4. Tensors are stacked and permuted.

    experts: the indices of the experts in the result; None for all.
    place: the state dict's layout, the layout's name for errors, and the prefix of names.

    Raises ValueError or TypeError if a tensor is missing, unknown or of a wrong shape, dtype or device.
    """
    layout, layout_in_words, prefix = place
    check_kind(Mapping, "a state dict", state=state)
    check_kind(str, "a text", **{f"key {key!r} of state": key for key in state})
    # Transformer Engine's _extra_state holds no weights.
    names = [key for key in state if key.startswith(prefix) and not key.endswith("_extra_state")]
    check_tensors(None, **{key: state[key] for key in names})
    tensors = {key.removeprefix(prefix): state[key] for key in names}
    router = layout.names["gate.weight"]
    count = tensors.pop(layout.count, None)
    if router not in tensors or tensors[router].dim() != 2 or not tensors[router].numel():
        shape = tuple(tensors[router].shape) if router in tensors else f"missing; prefix is {prefix!r}"
        # The prefix of the first layer in the state dict of a whole model.
        other = next((key.removesuffix(router) for key in state if key.endswith(f".{router}")), "")
        cure = (
            f": pass prefix={other!r} for the layer that it has there"
            if other and router not in tensors
            else ""
        )
        raise ValueError(
            f"state must have {prefix}{router} ({shape}) of shape (E, M), in {layout_in_words}{cure}"
        )
    for key, value in tensors.items():
        if value.dtype.itemsize == 1 and value.dtype != torch.bool:
            raise ValueError(
                f"{prefix}{key} ({value.dtype}) must have at least 16 bits: a conversion does not multiply "
                "quantised weights by their scales. Load the model in bfloat16 (transformers: "
                "dequantize=True in its quantization_config), and convert that state dict"
            )
    num_experts, d_model = tensors[router].shape
    if count is not None and count.tolist() != num_experts:
        raise ValueError(f"{prefix}{layout.count} ({count.tolist()}) must be {num_experts}, as {router} says")
    chosen = _numbers(experts, num_experts)
    has_all = _has_all(tensors, layout, num_experts)
    numbers = [*range(num_experts if has_all else len(chosen))] if has_all or layout.local else chosen
    rule = f"in {layout_in_words} with experts {numbers}"

    keys = {name: layout.keys(name, numbers) for name in layout.names}
    used = {"experts.w1", "experts.w2", *(name for name in keys if not tensors.keys().isdisjoint(keys[name]))}
    # A layer with w1 must also have w2, and one with b1 also b2; and the other way round.
    used |= {name[:-1] + i for name in used if name[-1] in "12" for i in "12"}
    keys = {name: keys_of_name for name, keys_of_name in keys.items() if name in used}
    owners = {key: name for name, keys_of_name in keys.items() for key in keys_of_name}
    for key in (key for key in owners if key not in tensors):
        raise ValueError(f"state must have {prefix}{key}, of pmoe's {owners[key]}, {rule}")
    for key in (key for key in tensors if key not in owners):
        raise ValueError(f"{prefix}{key} of shape {tuple(tensors[key].shape)} must not be in state, {rule}")
    sizes = {"1": 1, "S": 1, "E": num_experts, "M": d_model, "X": len(numbers), "h": 1}
    numel = {
        name: tensors[keys_of_name[0]].numel() * len(keys_of_name) for name, keys_of_name in keys.items()
    }
    for axis, name, num_stacked in (("H", "experts.w2", len(numbers)), ("h", "shared_expert.w2", 1)):
        sizes[axis] = max(1, numel.get(name, 0) // (d_model * num_stacked))
    is_gated = numel["experts.w1"] > numel["experts.w2"] if layout.gated is None else layout.gated
    sizes["f"] = 2 if is_gated else 1
    # The sizes were computed from w2. So w2 is checked first, and an error about another tensor names the one
    # that does not fit to w2.
    for key in sorted(owners, key=lambda key: not owners[key].endswith("w2")):
        value = tensors[key]
        first = tensors[keys[owners[key]][0]]
        actual = f"of shape {tuple(value.shape)}, {value.dtype}, {value.device}"
        shape = tuple(_sizes_of(layout.order(owners[key])[1], sizes))
        expected = f"of shape {shape}, {first.dtype}, {first.device}"
        if actual != expected or not value.is_floating_point() or hasattr(value, "to_local"):
            actual = f"{type(value).__name__} {actual}"
            raise ValueError(f"{prefix}{key} ({actual}) must be a plain tensor {expected}, {rule}")

    layer = {}
    for name, keys_of_name in keys.items():
        axes, _ = layout.order(name)
        own_axes = AXES[name].replace(" ", "")
        tensor = torch.stack([tensors[key] for key in keys_of_name]).reshape(_sizes_of(axes, sizes))
        tensor = tensor.permute([axes.index(axis) for axis in own_axes])
        tensor = tensor.reshape(_sizes_of(AXES[name].split(), sizes))
        layer[name] = (tensor[chosen] if has_all and "X" in own_axes else tensor).contiguous()
    return layer, chosen, sizes | {"X": len(chosen)}


def _numbers(experts: Iterable[int] | None, num_experts: int) -> list[int]:
    """Returns the indices of the experts in the result, after checking them.

    experts: the caller's indices; None for all.
    num_experts: E, the number of experts of all ranks.

    Raises ValueError unless the indices are one or more different numbers from 0 to E - 1. Raises TypeError
    if an index is no integer.
    """
    numbers = [*range(num_experts)] if experts is None else list_of("experts", experts)
    for number in numbers:
        check_int(experts=number)
    if not numbers or len({*numbers}) < len(numbers) or not {*numbers} <= {*range(num_experts)}:
        raise ValueError(f"experts ({numbers}) must be different numbers from 0 to {num_experts - 1}")
    return [int(number) for number in numbers]


def _has_all(state: Mapping[str, Tensor], layout: Layout, num_experts: int) -> bool:
    """Returns True if a state dict holds all experts, False if only those that the caller asked for.

    The answer is read from tensors' names and shapes. If a layout's names and shapes do not show the number
    of experts, the result is False.

    state: the state dict, without a prefix.
    num_experts: number of experts of all ranks.
    """
    keys = layout.keys("experts.w2", range(num_experts))
    _, dims = layout.order("experts.w2")
    if dims[0] == "X":
        return keys[0] in state and state[keys[0]].shape[:1] == (num_experts,)
    return "{e}" in layout.names["experts.w2"] and all(key in state for key in keys)


def _written(read: Found, place: Place) -> dict[str, Tensor]:
    """Returns the state dict of a layer in the layout of ``place``.

    read: the layer in pmoe's layout: its tensors, the indices of its experts, the size of each axis.
    place: the layout, its name for errors, and the prefix of names.

    Raises ValueError if the layout has no name for a tensor, or if it does not allow the layer's kind of
    experts (gated or not).
    """
    tensors, experts, sizes = read
    layout, layout_in_words, prefix = place
    for name, tensor in tensors.items():
        if name not in layout.names:
            places = ", ".join(layout.names)
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} must be one of {places}, in {layout_in_words}"
            )
    if layout.gated not in (None, sizes["f"] == 2):
        shape = tuple(tensors["experts.w1"].shape)
        rows = f"{2 if layout.gated else 1} * {sizes['H']} rows"
        raise ValueError(f"experts.w1 of shape {shape} must have {rows}, in {layout_in_words}")
    state = {prefix + layout.count: torch.tensor(sizes["E"])} if layout.count else {}
    for name, tensor in tensors.items():
        for key, part in parts_of(
            layout, name, tensor, range(len(experts)) if layout.local else experts, sizes
        ):
            state[prefix + key] = part.clone(memory_format=torch.contiguous_format)
    return state


def parts_of(
    layout: Layout, name: str, tensor: Tensor, experts: Iterable[int], sizes: Mapping[str, int]
) -> list[tuple[str, Tensor]]:
    """Returns the tensors in another system's layout that together hold one of pmoe's tensors.

    Each is a pair (name without prefix, tensor). The tensor may be a view of pmoe's tensor.

    name: pmoe's name.
    tensor: pmoe's tensor, in the shape that `AXES` says.
    experts: the indices of the experts in ``tensor``, for the layout's names.
    sizes: the size of each axis; X is the number of experts in ``tensor``.
    """
    axes, dims = layout.order(name)
    own_axes = AXES[name].replace(" ", "")
    keys = layout.keys(name, experts)
    tensor = tensor.reshape(_sizes_of(own_axes, sizes)).permute([own_axes.index(axis) for axis in axes])
    return list(zip(keys, tensor.reshape(len(keys), *_sizes_of(dims, sizes)), strict=True))
