"""Routing traces: files with the experts that the gates of a run chose in every call.

A trace is a folder with a file for each rank, so ranks write without waiting for each other. A file begins
with a line of JSON:

    {"format": 1, "layers": {"layers.0.moe": 64, ...}}     number of experts by layer name

A record follows for each call of a layer: three int64 (number of the layer, T, K), and T * K experts, as
uint16 if all layers have at most 65,536 experts, else as int32. All numbers are little-endian. If a run ends
in the middle of a record, the records before it can be read.

Letters: T tokens of a call, K experts of a token.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_int, check_module, check_path
from pmoe.gates.base import Routing
from pmoe.integrations.statistics import layers_of

FORMAT = 1
"""The version of the files. It grows by 1 whenever they change."""


def _file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Returns the path of a rank's file."""
    return Path(folder) / f"rank_{rank:05d}.routing"


def _dtype(num_experts: list[int]) -> np.dtype[Any]:
    """Returns the type in which experts are stored, for these numbers of experts."""
    return np.dtype("<u2" if max(num_experts) <= 1 << 16 else "<i4")


@contextlib.contextmanager
def record_routing(model: nn.Module, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Returns a with-block in which the choices of every MoE layer's gate are written to a folder.

        with pmoe.record_routing(model, "trace"):
            train(model)
        calls = pmoe.read_routing("trace")["layers.0.moe"]
        gate = pmoe.gates.ReplayGate(pmoe.gates.TopKGate(1024, 64, 2), calls)  # for a benchmark

    Each rank writes a file of its own, and replaces the one of an earlier block. Nothing is communicated. On
    CUDA the host waits for the device in each call. Choices are recorded before a capacity drops any. A gate
    that activation checkpointing runs again is recorded again; with `pmoe.checkpoint_contexts` it is not.

    Args:
        model: a model with MoE layers, or a single layer.
        folder: the folder of the trace. It is made if it does not exist.

    Raises ValueError if the model has no MoE layer, or one whose gate gives tokens different numbers of
    experts or mixes them.
    """
    check_module(model=model)
    check_path(folder=folder)
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) must hold a MoELayer whose routing can be recorded")
    for name, layer in layers.items():
        if getattr(layer.layer_modules.router, "picks_tokens", False):
            raise ValueError(
                f"model has a layer {name!r} whose gate ({type(layer.gate).__name__}) gives tokens different "
                "numbers of experts: record_routing can only record gates with top_k experts for each token"
            )
    num_experts = {name: layer.num_experts for name, layer in layers.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_file(folder, dist.get_rank() if dist.is_initialized() else 0).open("wb"))
        file.write(json.dumps({"format": FORMAT, "layers": num_experts}).encode() + b"\n")
        for number, layer in enumerate(layers.values()):
            hook = _writer(file, number, _dtype(list(num_experts.values())))
            stack.callback(layer.gate.register_forward_hook(hook).remove)
        yield


def _writer(file: BinaryIO, number: int, dtype: np.dtype[Any]) -> Callable[[nn.Module, Any, Routing], None]:
    """Returns a forward hook of a gate that appends the choices of its call to a file.

    number: the number of the layer.
    dtype: the type in which experts are stored.
    """

    def write(gate: nn.Module, inputs: Any, routing: Routing) -> None:
        expert_TK = routing.expert.detach().cpu().numpy()
        file.write(np.array([number, *expert_TK.shape], "<i8").tobytes() + expert_TK.astype(dtype).tobytes())
        file.flush()

    return write


def read_routing(folder: str | os.PathLike[str], rank: int = 0) -> dict[str, list[Tensor]]:
    """Returns the choices that `record_routing` wrote: by layer name, (T, K) int64 for each of its calls.

    T is the number of tokens of the call, K the number of experts of a token. `pmoe.gates.ReplayGate` takes
    the list of a layer.

    Args:
        folder: the folder of the trace.
        rank: the rank whose file is read.

    Raises ValueError if there is no such file, or if it is not a trace.
    """
    check_path(folder=folder)
    check_int(0, rank=rank)
    path = _file(folder, rank)
    if not path.is_file():
        raise ValueError(f"folder ({folder}) must hold the trace of rank ({rank}): there is no file {path}")
    with path.open("rb") as file:
        layers = _layers_in(file.readline())
        if layers is None:
            raise ValueError(f"folder ({path}) must hold a file of record_routing of format {FORMAT}")
        names = list(layers)
        dtype = _dtype(list(layers.values()))
        calls: dict[str, list[Tensor]] = {name: [] for name in names}
        while len(sizes := file.read(24)) == 24:
            number, num_tokens, top_k = np.frombuffer(sizes, "<i8").tolist()
            size = num_tokens * top_k * dtype.itemsize
            is_possible = num_tokens >= 0 and top_k >= 0 and size <= path.stat().st_size
            if not (0 <= number < len(names) and is_possible):
                raise ValueError(f"folder ({path}) must hold a file of record_routing; a record is damaged")
            if len(data := file.read(size)) < size:
                break
            expert = np.frombuffer(data, dtype).astype(np.int64).reshape(num_tokens, top_k)
            calls[names[number]].append(torch.from_numpy(expert))
    return calls


def _layers_in(first_line: bytes) -> dict[str, int] | None:
    """Returns the number of experts by layer name from the first line of a file; None if it is no trace."""
    try:
        header = json.loads(first_line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        return None
    layers = header.get("layers")
    is_valid = isinstance(layers, dict) and layers and all(type(count) is int for count in layers.values())
    return layers if is_valid else None
