"""Saves adapters of experts (LoRA) in PEFT's files, which vLLM reads too, and loads such files.

    adapter_config.json          rank, alpha, and which weights of the model are adapted
    adapter_model.safetensors    the matrices A and B

The layout of the model's experts says what a matrix is called and how it is stored. Names begin with
"base_model.model." and the name of the layer in the model:

    each expert has its own tensors:

        A of w1   experts.3.gate_proj.lora_A.weight   (R, I)
                  experts.3.up_proj.lora_A.weight     (R, I), the same values
        B of w1   experts.3.gate_proj.lora_B.weight   (H, R), rows of the gate projection
                  experts.3.up_proj.lora_B.weight     (H, R), rows of the up projection

    one tensor has a weight of all experts (layouts "...-stacked" and "gpt-oss"), and w1 and w2 are adapted:

        A of w1   experts.base_layer.lora_A.weight    (E R, I), expert after expert
        B of w1   experts.base_layer.lora_B.weight    (O, R E), column r E + e is column r of expert e's B
        A of w2   experts.lora_A.weight               (E R, I), expert after expert

If one tensor has a weight of all experts, PEFT puts a module around the experts for each adapted weight. The
module of w2 is around the module of w1, which is its "base_layer". If only one of the weights is adapted,
there is only one module, and no "base_layer" in the names.

Letters: E experts of all ranks, R rank of the adapter, I input and O output features of a weight, H hidden
columns. A is (E, R, I) and B is (E, O, R) in pmoe.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_kind, check_one_of, check_path
from pmoe.comm.agreement import all_fail_together, check_same
from pmoe.comm.failures import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.convert import LAYOUTS, Layout
from pmoe.experts.columns import joined_columns, own_columns
from pmoe.experts.dtensor_layout import hold_own_parts
from pmoe.experts.lora import WEIGHTS, Adapter, LoraExperts
from pmoe.experts.operands import local_part
from pmoe.experts.stacked import UNCUT, StackedExperts, part_of_cut
from pmoe.layer import MoELayer
from pmoe.training.checkpoint_state import unwrapped
from pmoe.training.export import Rename, complete_folder
from pmoe.training.lora import (
    DEFAULT,
    adapted_layers,
    add_lora,
    all_moe_layers,
    check_adapter_name,
    lora_adapters,
)
from pmoe.training.sharded_experts import whole_value

LoraLayoutName = Literal[
    "mixtral", "qwen-moe", "deepseek", "mixtral-stacked", "qwen-moe-stacked", "deepseek-stacked", "gpt-oss"
]
"""The layouts in which PEFT knows the experts: those of Hugging Face's models."""

CONFIG = "adapter_config.json"
MATRICES = "adapter_model.safetensors"
LARGEST = 1 << 31
"""A rank or an alpha of at least this size counts as a mistake."""

PREFIX = "base_model.model."
"""The beginning of all names in PEFT's files."""

PEFT_VERSION = "0.19.1"
"""The first release of PEFT whose adapters of a stacked weight (E, O, I) have A for I and B for O.

I is the number of input features, and O the number of output features. Earlier releases had A for O and B for
I.
"""

DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""The dtypes of matrices that `load_lora` accepts."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False, None),
    "use_rslora": (False, True, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    # With other values ("pissa", "olora", "corda", "loftq"), PEFT changes not only adapters but also weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""The values that `load_lora` accepts for each field of PEFT's configuration.

A field that the configuration lacks counts as the first of its values.
"""


@dataclass(frozen=True)
class _Form:
    """The form of an adapter in PEFT's files: the names and shapes of its matrices.

    layout: the names of the experts' weights in the model.
    targets: the adapted weights, some of "w1" and "w2".
    num_experts: number of experts of all ranks.
    """

    layout: Layout
    targets: tuple[str, ...]
    num_experts: int

    @property
    def is_stacked(self) -> bool:
        """Whether one tensor has the weights of all experts."""
        return "{e}" not in self.layout.names["experts.w1"]

    def modules(self, weight: str) -> list[str]:
        """Returns the names of PEFT's modules that hold the matrices of the weight "w1" or "w2".

        If every expert has its own tensor, w1 has two modules for each expert. The list has first the modules
        of all gate projections, then those of all up projections.
        """
        if self.is_stacked:
            owner = self.layout.names[f"experts.{weight}"].rpartition(".")[0]
            return [f"{owner}.base_layer" if weight == "w1" and len(self.targets) == 2 else owner]
        keys = self.layout.keys(f"experts.{weight}", range(self.num_experts))
        return [key.removesuffix(".weight") for key in keys]

    def keys(self, layer: str, weight: str, letter: str, rename: Rename | None) -> list[str]:
        """Returns the names under which the file stores the matrices A, or B, of one weight.

        layer: the layer's name in the model.
        weight: "w1" or "w2".
        letter: "A" or "B".
        rename: changes each name of the model to the name in the file; None changes nothing.
        """
        names = (f"{layer}.{module}.lora_{letter}.weight".lstrip(".") for module in self.modules(weight))
        return [PREFIX + _renamed(name, rename) for name in names]

    def interleaves(self, weight: str) -> bool:
        """Returns whether rows of the gate and up projections alternate in a weight of gated experts.

        Otherwise all rows of the gate projection come first.
        """
        _, dims = self.layout.order(f"experts.{weight}")
        return "Hf" in dims

    def begins_with_inputs(self, weight: str) -> bool:
        """Returns whether a stacked weight has shape (E, I, O) in the model, not (E, O, I)."""
        _, dims = self.layout.order(f"experts.{weight}")
        return dims[1] == {"w1": "M", "w2": "H"}[weight]

    def stored(self, weight: str, down_ERI: Tensor, up_EOR: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the stored matrices A and B of a weight, in the order of their names in the file (`keys`).

        down_ERI, up_EOR: A and B of all experts.
        """
        if self.interleaves(weight):
            up_EOR = up_EOR.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if self.is_stacked:
            return [down_ERI.flatten(0, 1)], [up_EOR.permute(1, 2, 0).flatten(1, 2)]
        halves = up_EOR.chunk(2, 1) if weight == "w1" else (up_EOR,)
        return [*down_ERI] * len(halves), [one for half in halves for one in half]

    def read(
        self, weight: str, down: Sequence[Tensor], up: Sequence[Tensor], rank: int
    ) -> tuple[Tensor, Tensor]:
        """Returns A and B of all experts, (E, r, I) and (E, O, r), from the stored matrices.

        In the files, the gate and the up projection (the two halves of w1) may have a matrix A each. If the
        two matrices differ, r is twice the rank: the result has both, and each half of B has zeros in the
        columns of the other half's A. Otherwise r is the rank.

        weight: "w1" or "w2".
        down, up: the stored matrices A and B, in the order of their names in the file (`keys`).
        rank: the rank of the stored adapter.
        """
        if self.is_stacked:
            down_ERI = down[0].unflatten(0, (self.num_experts, rank))
            up_EOR = up[0].unflatten(1, (rank, self.num_experts)).permute(2, 0, 1)
        else:
            downs = torch.stack([*down]).chunk(len(down) // self.num_experts)
            ups = torch.stack([*up]).chunk(len(up) // self.num_experts)
            down_ERI, up_EOR = downs[0], torch.cat(ups, 1)
            if len(downs) == 2 and not torch.equal(*downs):
                down_ERI = torch.cat(downs, 1)
                zeros = torch.zeros_like(ups[0])
                up_EOR = torch.cat(
                    [torch.cat([ups[0], zeros], 2), torch.cat([torch.zeros_like(ups[1]), ups[1]], 2)], 1
                )
        if self.interleaves(weight):
            up_EOR = up_EOR.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return down_ERI, up_EOR


# ---- saving


def save_lora(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: LoraLayoutName,
    *,
    name: str | None = None,
    base_model: str | None = None,
    rename: Rename | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the adapters of a model's experts in PEFT's files, which PEFT and vLLM read.

    Args:
        model: the model, with adapters of `pmoe.add_lora`. Its experts may be spread over ranks.
        folder: the folder, which must not exist. It gets its name when both files are complete.
        layout: how the experts are stored in the model that will get the adapters. With a layout whose name
            ends with "-stacked", or "gpt-oss", the files are those of PEFT's ``target_parameters``. With
            other layouts each expert has its own matrices, as vLLM takes them for most models.
        name: the name of the adapter; None saves the active adapter, which the layers use.
        base_model: the name or path of the model without adapters, for the configuration.
        rename: a function from the name of a matrix in the model, such as
            "model.layers.0.moe.experts.3.up_proj.lora_A.weight", to its name in the other model; None keeps
            the names.
        group: the ranks that save together, of which rank 0 writes; None is the default group.

    An adapter that experts share is written for each of them. Adapters of dense layers are not written: PEFT
    saves those. Collective: every rank of the group must call it.

    Raises ValueError or TypeError on every rank, before anything is written, if a layer has no such adapter,
    if the adapters of two layers differ in rank, alpha or the adapted weights, if experts do not fit the
    layout, or if layout, name or adapters differ between ranks. Raises ImportError without safetensors,
    OSError if a file cannot be written.
    """
    ranks = Ranks(group)
    with all_fail_together(ranks, stage="planning to save adapters"):
        _check_arguments(folder, layout, rename)
        check_kind((str, type(None)), "None or a text", base_model=base_model, name=name)
        if ranks.rank == 0 and Path(folder).exists():
            raise ValueError(f"folder ({folder}) must not exist: give each adapter a folder of its own")
        adapters = adapted_layers(model, name)
        first = next(iter(adapters.values()))[1]
        for layer_name, (layer, adapter) in adapters.items():
            _check_gated(layer_name, layer, layout)
            of_layer = (adapter.rank, adapter.alpha, adapter.targets)
            if of_layer != (first.rank, first.alpha, first.targets):
                raise ValueError(
                    f"the adapter of {layer_name} (rank, alpha, targets: {of_layer}) must be as that of "
                    f"{next(iter(adapters))}, {(first.rank, first.alpha, first.targets)}: PEFT's files have "
                    "one rank for all layers"
                )
    # The ranks gather each matrix. With other adapters they would mix them, or wait for each other.
    own_adapters = [
        f"{_name_of(layer, adapter)!r} of {layer_name}: rank {adapter.rank}, alpha {adapter.alpha}, "
        f"{adapter.targets}"
        for layer_name, (layer, adapter) in adapters.items()
    ]
    check_same(
        ranks,
        {"save_lora's layout": layout, "the saved adapters": own_adapters},
        stage="comparing the adapters to save",
        cure="Pass the same model, layout and name on every rank, or call pmoe.use_lora on every rank",
    )
    hold_own_parts(model)
    matrices: dict[str, Tensor] = {}
    for layer_name, (layer, adapter) in adapters.items():
        form = _Form(LAYOUTS[layout], adapter.targets, layer.num_experts)
        own_name = _name_in_model(model, layer_name, layer)
        for weight in adapter.targets:
            down, up = (_of_all_experts(layer, adapter, f"{weight}_{letter}", ranks) for letter in "AB")
            if ranks.rank == 0:
                for letter, parts in zip("AB", form.stored(weight, down, up), strict=True):
                    keys = form.keys(own_name, weight, letter, rename)
                    matrices |= {
                        key: part.cpu().clone(memory_format=torch.contiguous_format)
                        for key, part in zip(keys, parts, strict=True)
                    }
    with all_fail_together(ranks, stage="writing adapters"):
        if ranks.rank == 0:
            from safetensors.torch import save_file

            form = _Form(LAYOUTS[layout], first.targets, 1)
            with complete_folder(Path(folder)) as partial:
                save_file(matrices, partial / MATRICES, metadata={"format": "pt"})
                text = json.dumps(_config(form, first, base_model), indent=2, sort_keys=True)
                (partial / CONFIG).write_text(text + "\n", encoding="utf-8")


def _name_of(layer: MoELayer, adapter: Adapter) -> str:
    """Returns the name of one of a layer's adapters."""
    experts = layer.layer_modules.experts
    assert isinstance(experts, LoraExperts)
    return next(name for name, one in experts.adapters.items() if one is adapter)


def _config(form: _Form, adapter: Adapter, base_model: str | None) -> dict[str, Any]:
    """Returns the content of PEFT's configuration file for an adapter.

    form: the names and shapes of the adapter's matrices in the files.
    adapter: the adapter.
    base_model: the name or path of the model without adapters; None if it is not known.
    """
    names = [form.layout.names[f"experts.{weight}"] for weight in adapter.targets]
    if form.is_stacked:
        target_modules: str | list[str] = []
        target_parameters = names
    else:
        modules = [part.removesuffix(".weight") for name in names for part in name.split()]
        experts = re.escape(modules[0].partition("{e}")[0])
        ends = "|".join(re.escape(module.partition("{e}.")[2]) for module in modules)
        target_modules = rf".*\.{experts}\d+\.({ends})"
        target_parameters = []
    alpha = adapter.alpha
    return {
        "peft_type": "LORA", "peft_version": PEFT_VERSION, "task_type": None, "inference_mode": True,
        "base_model_name_or_path": base_model, "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha, "lora_dropout": 0.0, "bias": "none",
        "fan_in_fan_out": False, "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "target_modules": target_modules, "target_parameters": target_parameters or None,
    }  # fmt: skip


def _of_all_experts(layer: MoELayer, adapter: Adapter, matrix: str, ranks: Ranks) -> Tensor:
    """Returns a matrix of an adapter for all E experts, (E, ...). A collective.

    layer: the layer, over whose ranks the adapter is spread.
    adapter: the adapter.
    matrix: the name of the matrix, such as "w1_A".
    ranks: the ranks of the model, for errors.
    """
    value = whole_value(adapter.get_parameter(matrix), adapter.copy_parts.get(matrix, UNCUT))
    dim = adapter.hidden_dims()[matrix]
    with at_stage("gathering adapters", ranks):
        if dim is not None:
            value = joined_columns(_of_all_ranks(value, layer.grid.esp), dim, _halves(layer, matrix))
        if adapter.shared:
            return value.expand(layer.num_experts, *value.shape)
        return torch.cat(_of_all_ranks(value, layer.grid.ep))


def _of_all_ranks(value: Tensor, ranks: Ranks) -> list[Tensor]:
    """Returns the values of all ranks, in order of the ranks. A collective.

    value: this rank's value. It has the same shape on all ranks.
    """
    if ranks.size == 1:
        return [value]
    parts = [torch.empty_like(value) for _ in range(ranks.size)]
    dist.all_gather(parts, value.contiguous(), group=ranks.group)
    return parts


def _halves(layer: MoELayer, matrix: str) -> int:
    """Returns how many blocks of hidden columns an adapter's matrix has: 2 in B of a gated w1, else 1.

    layer: the layer.
    matrix: the name of the matrix, such as "w1_B".
    """
    experts = layer.layer_modules.experts
    assert isinstance(experts, StackedExperts)
    return experts.hidden_factor if matrix == "w1_B" else 1


# ---- loading


def load_lora(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: LoraLayoutName,
    *,
    name: str = DEFAULT,
    rename: Rename | None = None,
) -> nn.Module:
    """Loads adapters of experts from PEFT's files, which `save_lora`, PEFT or another tool wrote.

    Args:
        model: the model. Its experts may be spread over ranks. If its layers have no adapter of this name,
            `pmoe.add_lora` makes one with the rank, alpha and targets of the files.
        folder: the folder with the two files, which every rank reads.
        layout: how the experts are stored in the model of the files.
        name: the name of the adapter. The layers may already have an adapter of this name.
        rename: a function from the name of a matrix in the model to its name in the files; None keeps the
            names.

    Matrices of modules outside of experts are ignored: PEFT loads those. In a layout with a tensor for each
    expert, the two halves of w1 (gate_proj, up_proj) may have different matrices A. The adapter then has
    twice the rank.

    Returns the loaded adapters as one module (`pmoe.lora_adapters`). Collective: every rank must call it.

    Raises ValueError or TypeError on every rank, before anything is changed, in these cases:

    - the files are damaged;
    - the files lack matrices of a layer of the model, or have matrices of experts of other layers;
    - the model has an adapter of this name already, with another rank or other targets;
    - the files use something that pmoe's adapters do not have (DoRA, biases, several ranks in one adapter).

    Raises OSError if the files cannot be read, ImportError without safetensors.
    """
    layers = dict(all_moe_layers(model))
    ranks = max((layer.ranks for layer in layers.values()), key=lambda ranks: ranks.size)
    with all_fail_together(ranks, stage="reading adapters"):
        _check_arguments(folder, layout, rename)
        check_adapter_name(name)
        config = _read_config(Path(folder) / CONFIG)
        stored = _read(model, layers, Path(folder) / MATRICES, layout, config, rename)
        for layer_name, layer in layers.items():
            adapters = getattr(layer.layer_modules.experts, "adapters", {})
            if name in adapters:
                _check_fits(layer_name, adapters[name], stored)
    has_none = not any(name in getattr(one.layer_modules.experts, "adapters", {}) for one in layers.values())
    if has_none:
        add_lora(model, rank=stored.rank, alpha=stored.alpha, targets=stored.targets, name=name)
    hold_own_parts(model)
    with torch.no_grad():
        for layer_name, (layer, adapter) in adapted_layers(model, name).items():
            adapter.alpha = stored.alpha
            own = slice(layer.first_expert, layer.first_expert + layer.num_local_experts)
            for weight in stored.targets:
                for letter, value in zip("AB", stored.of_layer[layer_name][weight], strict=True):
                    matrix = f"{weight}_{letter}"
                    part = value[0] if adapter.shared else value[own]
                    dim = adapter.hidden_dims()[matrix]
                    if dim is not None:
                        part = own_columns(part, dim, _halves(layer, matrix), layer.shard)
                    part = part_of_cut(part, adapter.copy_parts.get(matrix, UNCUT))
                    local_part(adapter.get_parameter(matrix)).copy_(part)
    return lora_adapters(model, name)


@dataclass(frozen=True)
class _Stored:
    """The adapters in PEFT's files, of all layers.

    rank: the rank. It is twice the rank in the files if the two halves of w1 have different matrices A.
    alpha: the number with which alpha / rank is the factor of B @ A.
    targets: the adapted weights, some of "w1" and "w2".
    of_layer: by the name of the layer in the model and by weight, A (E, rank, I) and B (E, O, rank).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    of_layer: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]]


def _read_config(path: Path) -> dict[str, Any]:
    """Returns PEFT's configuration, a dict.

    Raises ValueError if the file is missing or damaged, or if it describes adapters that pmoe does not have.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"folder ({path.parent}) must hold {CONFIG} and {MATRICES}: no {path}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a configuration of PEFT: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must be a configuration of PEFT, a dict")
    for field, allowed in NEUTRAL.items():
        value = config.get(field, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{field} ({value!r}) of {path} must be {allowed[0]!r}: adapters of pmoe have nothing else"
            )
    rank = config.get("r")
    alpha: Any = config.get("lora_alpha")
    is_number = type(alpha) in (int, float) and 0 < alpha < LARGEST
    if type(rank) is not int or not 0 < rank < LARGEST or not is_number:
        raise ValueError(f"r ({rank!r}) and lora_alpha ({alpha!r}) of {path} must be numbers above 0")
    parameters = config.get("target_parameters")
    if parameters is not None and not isinstance(parameters, list):
        raise ValueError(f"target_parameters ({parameters!r}) of {path} must be None or a list of names")
    return config


def _read(
    model: nn.Module,
    layers: Mapping[str, MoELayer],
    path: Path,
    layout: LoraLayoutName,
    config: Mapping[str, Any],
    rename: Rename | None,
) -> _Stored:
    """Reads the matrices of all layers from the file, and returns them with the adapter's rank and alpha.

    model: the model with the layers.
    layers: the model's MoE layers by name.
    path: the file of matrices.
    layout: how the experts are stored in the model of the file.
    config: the content of PEFT's configuration.
    rename: changes each name of the model to the name in the file; None changes nothing.

    Raises ValueError if the file lacks a matrix of these layers, or has a matrix of other experts, or a
    matrix of a wrong shape or dtype.
    """
    from safetensors import SafetensorError, safe_open

    rank = config["r"]
    alpha = float(config["lora_alpha"]) * (math.sqrt(rank) if config.get("use_rslora") else 1)
    if not path.is_file():
        raise ValueError(f"folder ({path.parent}) must hold {CONFIG} and {MATRICES}: no {path}")
    read: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    used: set[str] = set()
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for layer_name, layer in layers.items():
                _check_gated(layer_name, layer, layout)
            first_name, first = next(iter(layers.items()))
            both = _Form(LAYOUTS[layout], WEIGHTS, first.num_experts)
            targets = _targets(both, _name_in_model(model, first_name, first), names, config, rename)
            for layer_name, layer in layers.items():
                form = _Form(LAYOUTS[layout], targets, layer.num_experts)
                own_name = _name_in_model(model, layer_name, layer)
                read[layer_name] = {}
                for weight in targets:
                    keys = [form.keys(own_name, weight, letter, rename) for letter in "AB"]
                    _check_names(path, keys[0] + keys[1], names, f"{layer_name} in layout {layout!r}")
                    used.update(*keys)
                    down, up = ([file.get_tensor(key) for key in part] for part in keys)
                    _check_shapes(path, keys, layer, weight, form, down, up, rank)
                    if _is_of_old_peft(form, layer, weight, down[0], config):
                        down, up = _of_old_peft(down[0], up[0], layer.num_experts, rank)
                    read[layer_name][weight] = form.read(weight, down, up, rank)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} must be a file of safetensors: {error}") from None
    left = sorted(key for key in names - used if ".experts." in key)
    if left:
        raise ValueError(
            f"{path} has {left[0]}, which belongs to no expert of the model's layers "
            f"({', '.join(layers)}): rename= changes names of layers"
        )
    largest = max((pair[0].shape[1] for of in read.values() for pair in of.values()), default=rank)
    wide = {
        name: {weight: _padded(*pair, largest) for weight, pair in of_layer.items()}
        for name, of_layer in read.items()
    }
    return _Stored(rank=largest, alpha=alpha * largest / rank, targets=targets, of_layer=wide)


def _targets(
    form: _Form, layer_name: str, names: Container[str], config: Mapping[str, Any], rename: Rename | None
) -> tuple[str, ...]:
    """Returns which of the weights "w1" and "w2" have matrices in the files. Raises ValueError if none has.

    form: the names and shapes of the matrices in the files, for an adapter of both weights.
    layer_name: the name of the model's first MoE layer.
    names: the names of all matrices in the file.
    config: the content of PEFT's configuration.
    rename: changes each name of the model to the name in the file; None changes nothing.
    """
    keys = {weight: form.keys(layer_name, weight, "A", rename)[0] for weight in WEIGHTS}
    if form.is_stacked:
        adapted = {str(one).rpartition(".")[2] for one in config.get("target_parameters") or ()}
        own = {weight: form.layout.names[f"experts.{weight}"].rpartition(".")[2] for weight in WEIGHTS}
        targets = tuple(weight for weight in WEIGHTS if own[weight] in adapted)
    else:
        targets = tuple(weight for weight in WEIGHTS if keys[weight] in names)
    if not targets:
        raise ValueError(
            f"the files must have adapters of experts, such as {keys['w1']}, and in a stacked layout name "
            f"them in target_parameters ({config.get('target_parameters')}): rename= changes names of layers"
        )
    return targets


def _check_names(path: Path, keys: Sequence[str], names: Container[str], owner: str) -> None:
    """Raises ValueError if the file lacks a matrix.

    path: the file, for the message.
    keys: the names of the matrices of a weight.
    names: the names of all matrices in the file.
    owner: the layer and the layout, in words.
    """
    missing = [key for key in keys if key not in names]
    if missing:
        raise ValueError(f"{path} must have {missing[0]}, of {owner}: rename= changes names of layers")


def _check_shapes(
    path: Path,
    keys: Sequence[Sequence[str]],
    layer: MoELayer,
    weight: str,
    form: _Form,
    down: Sequence[Tensor],
    up: Sequence[Tensor],
    rank: int,
) -> None:
    """Raises ValueError if the shape of a stored matrix does not fit the layer and the adapter's rank.

    path: the file, for the message.
    keys: the names of the matrices ``down`` and ``up`` in the file.
    layer: the layer.
    weight: "w1" or "w2".
    form: the names and shapes of the adapter's matrices in the file.
    down, up: the stored matrices A and B of the weight.
    rank: the adapter's rank, the inner dimension of the product up * down.
    """
    _, out_features, in_features = _shapes(layer)[weight]
    each = form.num_experts * rank if form.is_stacked else rank
    rows = out_features // (len(down) // form.num_experts) if not form.is_stacked else out_features
    wanted = [((each, in_features), (rows, each))]
    if form.is_stacked and not form.begins_with_inputs(weight):
        wanted.append(((each, out_features), (in_features, each)))  # PEFT before PEFT_VERSION
    for key_down, key_up, one, other in zip(*keys, down, up, strict=True):
        found = (tuple(one.shape), tuple(other.shape))
        if not {one.dtype, other.dtype} <= DTYPES:
            raise ValueError(
                f"{key_down} and {key_up} of {path} ({one.dtype}, {other.dtype}) must be matrices of "
                "float16, bfloat16, float32 or float64"
            )
        if found not in wanted:
            raise ValueError(
                f"{key_down} and {key_up} of {path} have shapes {found[0]} and {found[1]}, and must have "
                f"{wanted[0][0]} and {wanted[0][1]} for rank {rank} and {form.num_experts} experts"
            )


def _is_of_old_peft(
    form: _Form, layer: MoELayer, weight: str, down: Tensor, config: Mapping[str, Any]
) -> bool:
    """Returns whether a stacked adapter was written by a release of PEFT before `PEFT_VERSION`.

    The old releases took the output features of a weight (E, O, I) for its input features:

                  A           B
        old       (E R, O)    (I, R E)
        since     (E R, I)    (O, R E)

    If O = I, the shapes are the same. The function then reads PEFT's version in the configuration. It returns
    False for adapters that are not stacked, and for weights (E, I, O), whose adapters did not change.

    form: the form of the adapter.
    layer: the layer of the weight.
    weight: "w1" or "w2".
    down: the matrix A of the file.
    config: the content of the configuration.
    """
    _, out_features, in_features = _shapes(layer)[weight]
    if not form.is_stacked or form.begins_with_inputs(weight):
        return False
    if out_features != in_features:
        return down.shape[1] == out_features
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", str(config.get("peft_version") or PEFT_VERSION))
    version = tuple(map(int, numbers.groups())) if numbers else (0,)
    return version < tuple(map(int, PEFT_VERSION.split(".")))


def _of_old_peft(down: Tensor, up: Tensor, num_experts: int, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """Converts stacked matrices of PEFT before `PEFT_VERSION` to the matrices that newer releases write.

    Old releases changed the weight of expert e by the transpose of B[e] @ A[e].

    down, up: (E R, O) and (I, R E), the old matrices A and B.
    num_experts, rank: E and R.
    """
    new_down = up.unflatten(1, (rank, num_experts)).permute(2, 1, 0).flatten(0, 1)
    new_up = down.unflatten(0, (num_experts, rank)).permute(2, 1, 0).flatten(1, 2)
    return [new_down], [new_up]


def _padded(down_ERI: Tensor, up_EOR: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns A, (E, rank, I), and B, (E, O, rank), padded with zeros, so that B @ A does not change.

    down_ERI, up_EOR: A and B, with a rank of at most ``rank``.
    """
    missing = rank - down_ERI.shape[1]
    if not missing:
        return down_ERI, up_EOR
    return nn.functional.pad(down_ERI, (0, 0, 0, missing)), nn.functional.pad(up_EOR, (0, missing))


# ---- checks


def _check_arguments(folder: object, layout: str, rename: object) -> None:
    """Raises an error for wrong arguments, and ImportError without safetensors."""
    check_path(folder=folder)
    check_one_of("layout", layout, get_args(LoraLayoutName))
    if rename is not None and not callable(rename):
        raise TypeError(f"rename ({rename!r}) must be None or a function from names to names")
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"PEFT's files need safetensors (pip install safetensors): {error}") from None


def _renamed(name: str, rename: Rename | None) -> str:
    """Returns the name of a matrix in the file. Raises TypeError if ``rename`` returns no text."""
    if rename is None:
        return name
    try:
        renamed: object = rename(name)
    except (TypeError, ValueError) as error:
        raise TypeError(f"rename must return a name, but raised for {name!r}: {error}") from error
    if not isinstance(renamed, str):
        raise TypeError(f"rename must return a name, but returned {renamed!r} for {name!r}")
    return renamed


def _check_gated(layer_name: str, layer: MoELayer, layout: LoraLayoutName) -> None:
    """Raises ValueError if the experts of a layer are not gated, because all layouts are of gated experts."""
    experts = layer.layer_modules.experts
    if not isinstance(experts, StackedExperts) or experts.hidden_factor != 2:
        raise ValueError(f"layout ({layout!r}) must fit {layer_name}: its experts are not gated (swiglu)")


def _check_fits(layer_name: str, adapter: Adapter, stored: _Stored) -> None:
    """Raises ValueError if the adapters in the files cannot be loaded into an adapter.

    The adapters in the files must have the same rank and change the same weights as the adapter. If all
    experts share the adapter, the files must have the same matrices for all experts.

    layer_name: the name of the adapter's layer, for the message.
    adapter: the adapter.
    stored: the adapters in the files.
    """
    if (adapter.rank, adapter.targets) != (stored.rank, stored.targets):
        raise ValueError(
            f"the adapter of {layer_name} (rank {adapter.rank}, targets {', '.join(adapter.targets)}) must "
            f"be as that of the files, of rank {stored.rank} and targets {', '.join(stored.targets)}: call "
            "pmoe.remove_lora(model, name) first, or load it by another name"
        )
    if adapter.shared:
        for weight, (down_ERI, up_EOR) in stored.of_layer[layer_name].items():
            for value in (down_ERI, up_EOR):
                if not (value == value[:1]).all():
                    raise ValueError(
                        f"the adapter of {layer_name} is shared by all experts, but {weight} of the files "
                        "differs between experts: call pmoe.remove_lora(model, name) first"
                    )


def _shapes(layer: MoELayer) -> Mapping[str, tuple[int, int, int]]:
    """Returns the shape (E_local, O, I) of each weight of a layer's experts, with all hidden columns."""
    experts = layer.layer_modules.experts
    assert isinstance(experts, StackedExperts)
    return experts.whole_shapes()


def _name_in_model(model: nn.Module, layer_name: str, layer: MoELayer) -> str:
    """Returns the name of a layer in the model without wrappers; "" for a model that is itself a layer.

    PEFT is a wrapper, too.
    """
    if layer is model:
        return ""
    return unwrapped(model, layer_name).removeprefix(PREFIX)
