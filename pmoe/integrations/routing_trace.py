"""Routing traces: the experts that the gates of a run chose in every call, in memory or in files.

In memory, a trace is a dict from the name of a layer to the list of the layer's calls, each (T, K) int64. On
disk it is a folder with a file for each rank, so ranks write without waiting for each other. A file begins
with a line of JSON:

    {"format": 1, "layers": {"layers.0.moe": 64, ...}}     number of experts by layer name

A record follows for each call of a layer: three int64 (number of the layer, T, K), and T * K experts, as
uint16 if all layers have at most 65,536 experts, else as int32. All numbers are little-endian. If a run ends
in the middle of a record, the records before it can be read.

Letters: T tokens of a call, K experts of a token.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pmoe.arguments import check_int, check_module, check_path
from pmoe.call.shape_run import is_shape_run
from pmoe.checkpointing.replay import is_second_pass
from pmoe.gates.base import Routing
from pmoe.gates.hook import GateHook
from pmoe.integrations.model_layers import layers_of
from pmoe.layer import MoELayer

FORMAT = 1
"""The version of the files. It grows by 1 whenever they change."""


def _file(folder: str | os.PathLike[str], rank: int) -> Path:
    """Returns the path of a rank's file in the folder of a trace."""
    return Path(folder) / f"rank_{rank:05d}.routing"


def _dtype(num_experts: list[int]) -> np.dtype[Any]:
    """Returns the integer type in which a trace file stores the indices of the chosen experts.

    It is uint16 if every index fits, that is if no layer has more than 65,536 experts; else int32.

    num_experts: the number of experts of each layer.
    """
    return np.dtype("<u2" if max(num_experts) <= 1 << 16 else "<i4")


@contextlib.contextmanager
def record_routing(
    model: nn.Module, folder: str | os.PathLike[str] | None = None
) -> Iterator[dict[str, list[Tensor]]]:
    """Returns a context in which the choices of every MoE layer's gate are recorded.

        with pmoe.record_routing(model) as trace:
            old_logits = model(tokens)
        with pmoe.replay_routing(model, trace):
            logits = model(tokens)

    The block's value is the trace, a dict {name of a layer: list with a tensor for each call}. Each tensor is
    (T, K) int64, the K experts of each of T tokens, on the device of the tokens.

    With a folder, each rank writes its choices to a file, which replaces the file of an earlier block. The
    dict stays empty, and `read_routing` returns the trace. On CUDA the host then waits for the device in each
    call.

    Nothing is communicated. Choices are recorded before a capacity drops any. Not recorded are the second
    forward pass of activation checkpointing, and a run in which a pipeline stage only finds its shapes.

    Args:
        model: a model with MoE layers, or a single layer.
        folder: the folder of the trace. It is made if it does not exist. None keeps the trace in memory.

    Raises ValueError if the model has no MoE layer, or if a layer's gate gives tokens different numbers of
    experts or mixes tokens. Raises RuntimeError at the end of the block if a layer ran without its gate, as
    in a model that is compiled with ``backend="pmoe"``.
    """
    check_module(model=model)
    layers = traced_layers(model)
    num_experts = {name: layer.num_experts for name, layer in layers.items()}
    trace: dict[str, list[Tensor]] = {}
    with contextlib.ExitStack() as stack:
        if folder is None:
            trace |= {name: [] for name in layers}
            keepers = [calls.append for calls in trace.values()]
        else:
            check_path(folder=folder)
            keepers = stack.enter_context(_writers(folder, num_experts))
        before = [layer.ran for layer in layers.values()]
        recorders = [
            _Recorder(layer.gate, keep) for layer, keep in zip(layers.values(), keepers, strict=True)
        ]
        for layer, recorder in zip(layers.values(), recorders, strict=True):
            stack.callback(layer.gate.register_forward_hook(recorder).remove)
        yield trace
        for (name, layer), recorder, ran in zip(layers.items(), recorders, before, strict=True):
            if layer.ran is not ran and not recorder.was_called:
                raise RuntimeError(
                    f"layer {name!r} ran, but its gate was not called, so nothing was recorded: "
                    'record a model that is not compiled with backend="pmoe"'
                )


def traced_layers(model: nn.Module) -> dict[str, MoELayer]:
    """Returns the MoE layers of a model by name, if the routing of all of them can be recorded.

    Raises ValueError if there are none, or if a layer's gate gives tokens different numbers of experts or
    mixes tokens.
    """
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) must hold a MoELayer whose routing can be recorded")
    for name, layer in layers.items():
        if getattr(layer.layer_modules.router, "picks_tokens", False):
            raise ValueError(
                f"model has a layer {name!r} whose gate ({type(layer.gate).__name__}) gives tokens different "
                "numbers of experts: record_routing can only record gates with top_k experts for each token"
            )
    return layers


class _Recorder(GateHook):
    """A forward hook of a gate that passes the choices of each call, (T, K), to the function ``keep``.

    There are T tokens with K choices each.

    was_called: whether the gate was called while the hook was registered.
    """

    def __init__(self, gate: nn.Module, keep: Callable[[Tensor], object]) -> None:
        super().__init__(gate)
        self.was_called = False
        self._keep = keep

    def __call__(self, gate: nn.Module, inputs: Any, routing: Routing) -> None:
        if not self.is_own(gate):
            return
        self.was_called = True
        if not (is_second_pass() or is_shape_run()):
            self._keep(routing.expert.detach())


@contextlib.contextmanager
def _writers(
    folder: str | os.PathLike[str], num_experts: Mapping[str, int]
) -> Iterator[list[Callable[[Tensor], None]]]:
    """Opens this rank's file of a trace for a with-block, and yields a function for each layer.

    The function appends the choices of a call to the file: (T, K), K experts for each of T tokens.

    folder: the folder of the trace.
    num_experts: the number of experts by layer name.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    dtype = _dtype(list(num_experts.values()))
    with _file(folder, dist.get_rank() if dist.is_initialized() else 0).open("wb") as file:
        file.write(json.dumps({"format": FORMAT, "layers": dict(num_experts)}).encode() + b"\n")

        def write(expert_TK: Tensor, number: int) -> None:
            choices = expert_TK.cpu().numpy()
            file.write(np.array([number, *choices.shape], "<i8").tobytes() + choices.astype(dtype).tobytes())
            file.flush()

        yield [functools.partial(write, number=number) for number in range(len(num_experts))]


def write_routing(
    folder: str | os.PathLike[str], trace: Mapping[str, Sequence[Tensor]], num_experts: Mapping[str, int]
) -> None:
    """Writes a trace of this rank to a folder, for `read_routing`.

    folder: the folder of the trace.
    trace: for each layer name, one tensor (T, K) for each call: the K experts of each of T tokens.
    num_experts: the number of experts of each of these layers.

    Raises OSError if the file cannot be written.
    """
    with _writers(folder, {name: num_experts[name] for name in trace}) as writers:
        for write, calls in zip(writers, trace.values(), strict=True):
            for expert_TK in calls:
                write(expert_TK)


def read_routing(folder: str | os.PathLike[str], rank: int = 0) -> dict[str, list[Tensor]]:
    """Returns the choices that `record_routing` wrote: for each layer name, a list with its calls.

    A call is (T, K) int64: the K experts of each of T tokens. `replay_routing` takes the dict, and
    `pmoe.gates.ReplayGate` the list of a layer.

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
