"""Exports a model's weights, whose experts are spread over ranks, in another system's names and layout.

`export_weights` yields all weights tensor by tensor on every rank, for example to load them into an inference
engine during training. `save_weights` writes them to files. No rank ever holds all experts: experts are sent
from the rank that holds them to all ranks, in parts of at most ``max_bytes``:

    for each layer, for each of w1, w2, b1, b2, for each rank of the mesh dimension "ep":
        with "esp", the ranks that share the experts gather their columns
        the rank broadcasts as many experts as fit
        every rank yields them one by one

Before each part, the ranks tell each other whether any of them has stopped early, so that all stop together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_module, check_one_of, check_path, check_place
from pmoe.comm.agreement import all_fail_together, digest, largest, same
from pmoe.comm.failures import at_stage
from pmoe.comm.ranks import Ranks
from pmoe.convert import LAYOUTS, Layout, LayoutName, parts_of
from pmoe.experts.columns import joined_columns
from pmoe.experts.dtensor_layout import is_gathered
from pmoe.experts.lora import check_no_adapters
from pmoe.experts.operands import local_part
from pmoe.experts.stacked import StackedExperts
from pmoe.layer import MoELayer
from pmoe.text import parse_bytes
from pmoe.training.sharded_experts import whole_parameter

Item = tuple[str, int | None, Tensor]
"""A tensor of an export: its name, the number of its expert (None if it belongs to none), and the tensor."""

Rename = Callable[[str], str]
"""A function from a tensor's name in the model to the name that is exported."""

INDEX = "model.safetensors.index.json"
"""Name of the file that says in which file each tensor is, as transformers writes it."""


def export_weights(
    model: nn.Module,
    layout: LayoutName,
    *,
    max_bytes: int | str = "512MiB",
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    group: dist.ProcessGroup | None = None,
) -> ExportedItems:
    """Returns an iterator over all weights of a model: (name, index of the expert, tensor), on every rank.

        for name, _, tensor in pmoe.export_weights(model, "qwen-moe", dtype=torch.bfloat16):
            engine.load_weights([(name, tensor)])  # vLLM, SGLang

    Every rank gets all tensors, in the same order. At any time, a rank holds at most about three times
    ``max_bytes`` of other ranks' experts. Tensors of the experts are copies; others may be the model's own.

    Args:
        model: the model, without a wrapper such as DistributedDataParallel. Its experts may be spread over
            ranks, before or after `pmoe.parallelize`.
        layout: the names and shapes of the tensors of MoE layers: a key of `pmoe.convert.LAYOUTS`. A layout
            with names for each expert ("qwen-moe", "mixtral", "deepseek") yields whole tensors. A layout with
            stacked names ("qwen-moe-stacked", "gpt-oss") yields each expert's part of the stacked tensor.
        max_bytes: the most bytes of experts that are sent at a time, such as "512MiB".
        dtype: dtype to which floating-point tensors are cast before they are sent; None casts nothing.
        rename: a function from a name in the model, such as "model.layers.0.moe.experts.3.up_proj.weight", to
            the name that is yielded; None keeps the names. Names of tensors inside an MoE layer are those of
            the layout.
        group: the ranks that export together; None is the default group.

    Every rank of the group must call the function, and take all items. If a rank stops early, the others
    raise RuntimeError, with the number of that rank, when they need the next part of the experts. A rank
    stops early by ``close()``, which Python also calls when nothing refers to the iterator any longer, as
    after a ``break``. In code that may raise, use ``contextlib.closing``. If a rank dies, the others raise an
    error within the group's timeout.

    Raises ValueError or TypeError on every rank, before anything is sent, if

    - an argument is wrong, or the model differs between ranks;
    - the layout has no place for a tensor, or two tensors would have one name;
    - experts are modules or parametrized;
    - ``max_bytes`` is smaller than the largest tensor of an expert.
    """
    ranks = Ranks(group)
    with all_fail_together(ranks, stage="planning an export"):
        check_one_of("layout", layout, tuple(LAYOUTS))
        check_module(model=model)
        check_place(None, dtype)
        limit = parse_bytes("max_bytes", max_bytes)
        export = _Export(model, LAYOUTS[layout], layout, limit, dtype, rename, ranks)
        export.check()
    export.compare()
    return ExportedItems(export)


@dataclass(frozen=True)
class _Sizes:
    """The size of each dimension of a layer's tensors, such as the number of experts and d_model.

    by_axis: maps the letter of each dimension to its size. `pmoe.convert.AXES` lists the letters: "M" is
        d_model, for example.
    """

    by_axis: Mapping[str, int]

    @staticmethod
    def of(layer: MoELayer) -> _Sizes:
        """Returns the sizes of a layer with stacked experts (one tensor holds a weight of all of them)."""
        experts = layer.layer_modules.experts
        assert isinstance(experts, StackedExperts)
        hidden = 1
        shared = layer.layer_modules.shared_expert
        if isinstance(shared, StackedExperts):
            hidden = shared.all_hidden
        return _Sizes(
            {"1": 1, "S": 1, "E": layer.num_experts, "M": layer.d_model, "X": 1, "H": experts.all_hidden}
            | {"h": hidden, "f": experts.hidden_factor}
        )


class ExportedItems(Iterator[Item]):
    """The iterator over tensors that `export_weights` returns. `close` ends the export on all ranks."""

    def __init__(self, export: _Export) -> None:
        self._export = export
        self._items = export.items()
        self._is_open = True

    def __next__(self) -> Item:
        try:
            return next(self._items)
        except BaseException:
            self._is_open = False
            raise

    def close(self) -> None:
        """Stops the export, so that the other ranks raise RuntimeError. Does nothing after the last item."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(RuntimeError):
                self._export.meet(stops=True)

    def __del__(self) -> None:
        self.close()


class _Export:
    """One export: the arguments of `export_weights`, their checks, and the sending of the tensors.

    model: the model.
    dtype: dtype to which floating-point tensors are cast; None casts nothing.
    rename: a function from a name in the model to the name that is exported; None keeps the names.
    layout, layout_name: the layout of the exported tensors, and its name for messages.
    limit: the most bytes of experts that are sent at a time.
    ranks: the ranks that export together.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        layout_name: str,
        limit: int,
        dtype: torch.dtype | None,
        rename: Rename | None,
        ranks: Ranks,
    ) -> None:
        self.model = model
        self.layout = layout
        self.layout_name = layout_name
        self.limit = limit
        self.dtype = dtype
        self.rename = rename
        self.ranks = ranks
        self.layers: dict[str, MoELayer] = {
            name: module for name, module in model.named_modules() if isinstance(module, MoELayer)
        }

    # ---- before anything is sent

    @torch.no_grad()
    def check(self) -> None:
        """Raises ValueError or TypeError if this rank cannot export a tensor of the model.

        There are four reasons: experts are not plain stacked experts, the layout has no place for a tensor,
        an expert's tensor is larger than ``max_bytes``, or two tensors have one name.
        """
        if self.rename is not None and not callable(self.rename):
            raise TypeError(f"rename ({self.rename!r}) must be None or a function from names to names")
        names: dict[str, str] = {}
        for name, layer in self.layers.items():
            experts = layer.layer_modules.experts
            check_no_adapters(experts, f"layer {name!r} of the model")
            if not isinstance(experts, StackedExperts) or experts.hidden_dims() is None:
                raise TypeError(
                    f"model has a layer {name!r} whose experts ({type(experts).__name__}) must be plain "
                    "stacked ones: no modules, no parametrizations"
                )
            if layer.d_latent is not None:
                raise ValueError(
                    f"model has a layer {name!r} with d_latent ({layer.d_latent}), for whose projections no "
                    "layout has names: save its state_dict() in pmoe's own names"
                )
            gated = experts.hidden_factor == 2
            if self.layout.gated not in (None, gated):
                kind = "gated" if self.layout.gated else "not gated"
                raise ValueError(
                    f"layout ({self.layout_name!r}) must fit layer {name!r}: its experts are {kind}"
                )
            for own, tensor in self._stacked(layer).items():
                shape = self._whole_shape(layer, own, tensor)
                self._parts(name, f"experts.{own}", torch.empty((1, *shape), device="meta"), 0)
                size = shape.numel() * (self.dtype or tensor.dtype).itemsize
                if size > self.limit:
                    raise ValueError(
                        f"max_bytes ({self.limit}) must be at least {size}, the bytes of {own} of one expert "
                        f"in layer {name!r}"
                    )
        for name, part, shape in self._described():
            if part in names:
                raise ValueError(
                    f"rename must keep names apart, but {names[part]!r} and {name!r} both become {part!r} "
                    f"(shape {tuple(shape)})"
                )
            names[part] = name

    def compare(self) -> None:
        """Raises ValueError on every rank unless all ranks export the same names and shapes. A collective."""
        lines = [f"{part} {tuple(shape)}" for _, part, shape in self._described()]
        lines.append(f"{self.limit} {self.dtype}")
        (is_same,) = same(self.ranks, self._device(), [digest(lines)], stage="comparing exports")
        if not is_same:
            raise ValueError(
                "model, layout, max_bytes, dtype and rename must be the same on every rank of an export"
            )

    def _described(self) -> Iterator[tuple[str, str, torch.Size]]:
        """Yields (name in the model, exported name, shape) of each tensor that the export will yield.

        If the layout has one exported tensor for all experts, only one tuple is yielded for this tensor. It
        describes expert 0 of the model.
        """
        for name, value in self._dense():
            yield name, self.renamed(name), value.shape
        for name, layer in self.layers.items():
            for own, value in self._beside_experts(layer).items():
                like = torch.empty(value.shape, device="meta")
                for key, part in self._parts(name, own, like, None):
                    yield f"{name}.{own}", self.renamed(key), part.shape
            for own, value in self._stacked(layer).items():
                shape = self._whole_shape(layer, own, value)
                like = torch.empty((1, *shape), device="meta")
                for expert in range(layer.num_experts if self._has_names_of_experts(own) else 1):
                    for key, part in self._parts(name, f"experts.{own}", like, expert):
                        yield f"{name}.experts.{own}[{expert}]", self.renamed(key), part.shape

    def _has_names_of_experts(self, own: str) -> bool:
        """Returns whether the layout has one tensor for each expert, rather than one for all experts.

        own: pmoe's name of the tensor: "w1", "w2", "b1" or "b2".
        """
        return "{e}" in self.layout.names[f"experts.{own}"]

    def _device(self) -> torch.device:
        """Returns the device of the model's first parameter; the CPU if the model has no parameters."""
        return next((one.device for one in self.model.parameters()), torch.device("cpu"))

    def renamed(self, name: str) -> str:
        """Returns the name under which a tensor is exported. Raises TypeError if this name is not a text."""
        if self.rename is None:
            return name
        found: object = self.rename(name)
        if not isinstance(found, str):
            raise TypeError(f"rename must return a name, but returned {found!r} for {name!r}")
        return found

    # ---- the tensors of the model

    def _dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters and buffers outside of MoE layers by name, of any shape."""
        inside = tuple(f"{name}." if name else "" for name in self.layers)
        for name, value in self.model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor) and not name.startswith(inside):
                yield name, value.detach()

    def _beside_experts(self, layer: MoELayer) -> dict[str, Tensor]:
        """Returns the tensors of a layer outside of its routed experts, by name, of any shape."""
        state = layer.state_dict(keep_vars=True).items()
        return {
            name: value.detach()
            for name, value in state
            if isinstance(value, Tensor) and not name.startswith("experts.")
        }

    def _stacked(self, layer: MoELayer) -> dict[str, Tensor]:
        """Returns this rank's values of w1, w2, b1 and b2 by name, (E_local, ...) for its E_local experts.

        If FSDP2 shards the experts over the ranks that hold the same experts, the tensors have shapes and
        dtypes only (device "meta"). `_value` gets the values later.
        """
        experts = layer.layer_modules.experts
        assert isinstance(experts, StackedExperts)
        tensors = {name: local_part(getattr(experts, name)).detach() for name in experts.hidden_dims() or {}}
        for name in () if is_gathered(experts) else tensors:
            dim, part = experts.copy_parts[name]
            shape = list(tensors[name].shape)
            shape[dim] *= part.count
            tensors[name] = tensors[name].new_empty(shape, device="meta")
        return tensors

    def _value(self, layer: MoELayer, own: str, value: Tensor) -> Tensor:
        """Returns this rank's value of w1, w2, b1 or b2. A collective if FSDP2 shards the experts.

        layer: the layer.
        own: the name of the tensor: "w1", "w2", "b1" or "b2".
        value: the tensor that `_stacked` returned.
        """
        if not value.is_meta:
            return value
        self.meet()
        return whole_parameter(layer.layer_modules.experts, own)

    @staticmethod
    def _whole_shape(layer: MoELayer, own: str, value: Tensor) -> torch.Size:
        """Returns the shape of a tensor of one expert, with all its hidden columns.

        layer: the layer of the expert.
        own: the name of the tensor: "w1", "w2", "b1" or "b2".
        value: (E_local, ...), this rank's part of the tensor for its E_local experts. If experts are split
            over ranks ("esp"), it has only some of the hidden columns.
        """
        experts = layer.layer_modules.experts
        shape = list(value.shape[1:])
        dim = (experts.hidden_dims() or {})[own]
        if dim is not None:
            shape[dim - 1] *= layer.shard.count
        return torch.Size(shape)

    def _parts(self, layer: str, own: str, tensor: Tensor, expert: int | None) -> list[tuple[str, Tensor]]:
        """Converts one tensor of a layer to the layout. Returns a list of (name, tensor).

        The layout may divide a tensor into several, for example a gated w1. Each name begins with the layer's
        name.

        layer: the name of the layer.
        own: pmoe's name of the tensor, such as "experts.w1".
        tensor: the values, (1, ...) for one expert.
        expert: the expert's index; None if the tensor belongs to no expert.

        Raises ValueError if the layout has no place for the tensor.
        """
        if own not in self.layout.names:
            raise ValueError(
                f"{layer}.{own} of shape {tuple(tensor.shape)} has no place in layout {self.layout_name!r}, "
                f"which has {', '.join(self.layout.names)}"
            )
        sizes = _Sizes.of(self.layers[layer]).by_axis
        numbers = [0] if expert is None else [expert]
        found = []
        for key, part in parts_of(self.layout, own, tensor, numbers, sizes):
            if expert is not None and "{e}" not in self.layout.names[own]:
                _, dims = self.layout.order(own)
                if dims[0] != "X":
                    raise ValueError(
                        f"layout ({self.layout_name!r}) must keep experts apart, to export them one by one"
                    )
                part = part.squeeze(0)
            found.append((f"{layer}.{key}".lstrip("."), part))
        return found

    # ---- sending

    @torch.no_grad()
    def items(self) -> Iterator[Item]:
        """Yields all tensors. Before each part of the experts, the ranks check that no rank has stopped."""
        for name, value in self._dense():
            yield self.renamed(name), None, self._cast(_whole_tensor(value))
        for name, layer in self.layers.items():
            for own, value in self._beside_experts(layer).items():
                for key, part in self._parts(name, own, self._cast(_whole_tensor(value)), None):
                    yield self.renamed(key), None, part.contiguous()
            for own, value in self._stacked(layer).items():
                yield from self._of_experts(name, layer, own, self._cast(self._value(layer, own, value)))
        self.meet()

    def _of_experts(self, name: str, layer: MoELayer, own: str, value: Tensor) -> Iterator[Item]:
        """Yields one weight or bias of all experts of a layer, expert by expert. A collective.

        name: the name of the layer.
        layer: the layer.
        own: the name of the weight or bias: "w1", "w2", "b1" or "b2".
        value: (E_local, ...), this rank's part of the weight or bias, for its E_local experts.
        """
        shape = self._whole_shape(layer, own, value)
        at_a_time = max(self.limit // (shape.numel() * value.itemsize), 1)
        local = layer.num_local_experts
        for owner in range(layer.grid.ep.size):
            for first in range(0, local, at_a_time):
                self.meet()
                count = min(at_a_time, local - first)
                whole = self._sent(layer, own, value[first : first + count], owner, shape)
                for at in range(count):
                    expert = owner * local + first + at
                    for key, part in self._parts(name, f"experts.{own}", whole[at : at + 1], expert):
                        yield self.renamed(key), expert, part.contiguous()

    def _sent(self, layer: MoELayer, own: str, part: Tensor, owner: int, shape: torch.Size) -> Tensor:
        """Sends some experts of one rank to all ranks. Returns their tensors, (count, *shape). A collective.

        layer: the layer.
        own: the name of the tensor: "w1", "w2", "b1" or "b2".
        part: (count, ...), this rank's tensor of ``count`` of its own experts. Every rank passes the experts
            that have the same indices among its own experts, but only the owner's tensor is sent. With expert
            sharding ("esp"), ``part`` has only some of the hidden columns.
        owner: the rank whose experts are sent, by its index in the mesh dimension "ep".
        shape: the shape of the tensor of one whole expert.
        """
        grid = layer.grid
        experts = layer.layer_modules.experts
        assert isinstance(experts, StackedExperts)
        dim = (experts.hidden_dims() or {})[own]
        whole = part.new_empty(part.shape[0], *shape)
        with at_stage("sending experts of an export", self.ranks):
            if owner == grid.ep.rank and grid.esp.size > 1 and dim is not None:
                columns = [torch.empty_like(part) for _ in range(grid.esp.size)]
                dist.all_gather(columns, part.contiguous(), group=grid.esp.group)
                whole.copy_(joined_columns(columns, dim, experts.hidden_factor if dim == 1 else 1))
            elif owner == grid.ep.rank:
                whole.copy_(part)
            if grid.ep.size > 1:
                dist.broadcast(whole, group_src=owner, group=grid.ep.group)
        return whole

    def _cast(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of any shape in the dtype of the export."""
        return tensor.to(self.dtype) if self.dtype is not None and tensor.is_floating_point() else tensor

    def meet(self, stops: bool = False) -> None:
        """Finds out, together with all ranks, whether any rank stops the export early. A collective.

        Raises RuntimeError if another rank stops and this rank does not.

        stops: whether this rank stops.
        """
        told = float(self.ranks.rank + 1 if stops else 0)
        (stopped,) = largest(self.ranks, self._device(), [told], stage="an export")
        if stopped and not stops:
            raise RuntimeError(
                f"rank {int(stopped) - 1} stopped the export before all tensors were sent: every rank must "
                "take all items of export_weights"
            )


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    layout: LayoutName,
    *,
    max_shard_bytes: int | str = "5GB",
    max_bytes: int | str = "512MiB",
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes all weights of a model as safetensors files with an index, for Hugging Face's libraries.

    Rank 0 of the group writes, and holds at most one file's tensors at a time. It writes to a temporary
    folder, which gets the name ``folder`` when all files are complete. So if the export fails or is
    interrupted, there is no folder of this name.

    Args:
        folder: the folder, which must not exist. Files such as config.json are not written.
        max_shard_bytes: the most bytes of tensors in a file, such as "5GB".
        model, layout, max_bytes, dtype, rename, group: the same as in `export_weights`. If the layout stacks
            all experts in one tensor, the whole tensor is written.

    Every rank of the group must call the function.

    Raises on every rank: the errors of `export_weights`; ImportError without safetensors; ValueError if the
    folder exists, or if a tensor is larger than a file may be; OSError if a file cannot be written.
    """
    ranks = Ranks(group)
    with all_fail_together(ranks, stage="opening the folder of an export"):
        check_path(folder=folder)
        limit = parse_bytes("max_shard_bytes", max_shard_bytes)
        try:
            import safetensors.torch  # noqa: F401
        except ImportError as error:
            raise ImportError(f"save_weights needs safetensors (pip install safetensors): {error}") from None
        if ranks.rank == 0 and Path(folder).exists():
            raise ValueError(f"folder ({folder}) must not exist: give each export a folder of its own")
    items = export_weights(model, layout, max_bytes=max_bytes, dtype=dtype, rename=rename, group=group)
    is_stacked = "{e}" not in LAYOUTS[layout].names["experts.w1"]
    with all_fail_together(ranks, stage="writing an export"), contextlib.closing(items):
        if ranks.rank == 0:
            with complete_folder(Path(folder)) as partial:
                _write_files(partial, _joined(items, is_stacked), limit)
        else:
            for _ in items:
                pass


def _whole_tensor(value: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, and any other tensor unchanged. Collective for a DTensor."""
    whole = getattr(value, "full_tensor", None)
    return value if whole is None else whole()


def _joined(items: Iterator[Item], is_stacked: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for each tensor of an export, with the experts' parts stacked if needed.

    items: the items of the export.
    is_stacked: whether the layout has one tensor for all experts. Its parts, one for each expert, are then
        stacked.
    """
    for (name, expert), group in itertools.groupby(items, lambda item: (item[0], item[1] is not None)):
        tensors = [tensor for _, _, tensor in group]
        yield name, torch.stack(tensors) if expert and is_stacked else tensors[0]


@contextlib.contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """Returns a with-block whose value is a temporary folder, to which the caller writes files.

    At the end of the block the temporary folder is renamed to ``folder``; after an error it is removed. So if
    there is a folder of this name, its files are complete.

    folder: the folder, which does not exist yet.
    """
    partial = Path(f"{folder}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # the files of an earlier attempt that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_files(folder: Path, tensors: Iterator[tuple[str, Tensor]], limit: int) -> None:
    """Writes the files of an export, and the index that says which tensor is in which file.

    folder: an empty folder.
    tensors: pairs (name, tensor).
    limit: the most bytes of tensors in a file.

    Raises ValueError if a tensor has more than ``limit`` bytes, OSError if a file cannot be written.
    """
    from safetensors.torch import save_file

    places: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    sizes = [0]
    for name, tensor in tensors:
        size = tensor.numel() * tensor.itemsize
        if size > limit:
            raise ValueError(f"max_shard_bytes ({limit}) must be at least {size}, the bytes of {name}")
        if sizes[-1] and sizes[-1] + size > limit:
            save_file(shard, folder / f"{len(sizes)}", metadata={"format": "pt"})
            shard = {}
            sizes.append(0)
        shard[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        sizes[-1] += size
        places[name] = len(sizes)
    save_file(shard, folder / f"{len(sizes)}", metadata={"format": "pt"})
    files = {at: f"model-{at:05d}-of-{len(sizes):05d}.safetensors" for at in range(1, len(sizes) + 1)}
    for at, file in files.items():
        (folder / f"{at}").rename(folder / file)
    index = {
        "metadata": {"total_size": sum(sizes)},
        "weight_map": {name: files[at] for name, at in places.items()},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
