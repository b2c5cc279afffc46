"""Shared parts of the memory benchmarks: the paper's models, one measured step, the bytes of its tensors.

The setting is the paper's, on one rank: one expert, top-1, no bias, float32. Bytes are counted by the
allocator's own events on the CPU, and by `torch.cuda.max_memory_allocated` on CUDA (`bench.allocations`).

Letters: B tokens, M = d_model, H = d_hidden, n micro-batches.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import pmoe
from bench.allocations import OTHER, Allocations, StepMemory, mark, moment, step_memory, watched
from bench.timing import OUT
from pmoe import MoELayer, Restore
from pmoe.comm.ranks import Ranks
from pmoe.experts.base import ExpertRows
from pmoe.papers.assumptions import printed
from pmoe.papers.mpipemoe_memory import activations, model_states, saved_each
from pmoe.planner.memory import GRADIENTS
from pmoe.schedule.restore import ALL_PAIRS, STRATEGIES

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Model:
    """Sizes of a model of the paper.

    num_experts: E of all ranks in the paper. The benchmarks have one expert on each rank.
    """

    d_model: int
    d_hidden: int
    num_experts: int


MODELS = {name: Model(sizes["M"], sizes["H"], 64) for name, sizes in printed("mpipemoe table 3").items()}
"""Models of MPipeMoE's Table III, the smallest first."""


def parse_model(text: str) -> tuple[str, Model]:
    """Returns (name, sizes) of a model.

    text: a name of `MODELS`, or sizes such as 768x3072: d_model and d_hidden.
    """
    if text in MODELS:
        return text, MODELS[text]
    d_model, cross, d_hidden = text.partition("x")
    if not (cross and d_model.isdigit() and d_hidden.isdigit() and int(d_model) and int(d_hidden)):
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {', '.join(MODELS)}, or such as 768x3072")
    return text, Model(int(d_model), int(d_hidden), 1)


def parse_tokens(text: str) -> int:
    """Returns a number of tokens. Example: 4k -> 4096."""
    digits = text.removesuffix("k")
    if not digits.isdigit() or not int(digits):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of tokens, such as 512 or 4k")
    return int(digits) * (1024 if text.endswith("k") else 1)


def parse_degree(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def parse_pair(text: str) -> Restore:
    pairs = [pair for pair in ALL_PAIRS if text in (str(pair), pair.strategy)]
    if not pairs:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be one of {', '.join(STRATEGIES)} or {', '.join(map(str, ALL_PAIRS))}"
        )
    return pairs[0]


def arguments(description: str, *, models: Sequence[str], tokens: Sequence[str], n: Sequence[int]) -> Any:
    """Returns a parser with the options of all memory benchmarks."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=parse_model, nargs="+", default=[parse_model(m) for m in models])
    parser.add_argument("--tokens", type=parse_tokens, nargs="+", default=[parse_tokens(t) for t in tokens])
    # --degrees is for torchrun, which takes --n for an abbreviation of an option of its own.
    parser.add_argument("--n", "--degrees", type=parse_degree, nargs="+", default=list(n))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for JSON and PNG")
    return parser


def pair_name(reuse: Restore | bool) -> str:
    if isinstance(reuse, bool):
        return "no rings" if not reuse else "chosen"
    return str(reuse) + (f" {reuse.strategy}" if reuse.strategy else "")


def tokens_name(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def one_expert(model: Model, n: int, reuse: Restore | bool, device: str = "cpu") -> MoELayer:
    """Returns the paper's layer: one expert a rank, top-1, no bias, float32."""
    torch.manual_seed(0)
    experts = Ranks().size
    return MoELayer(
        model.d_model, model.d_hidden, experts, bias=False, pipeline=n, memory_reuse=reuse, device=device
    )


def one_step(layer: MoELayer, tokens: int) -> StepMemory:
    """Measures the bytes of one forward and one backward pass.

    x, y, dy and dx stay allocated to the end and are counted. A step with few tokens runs before, so that
    memory that is allocated only once exists. With several ranks, several steps run and the smallest result
    is returned, because counts may be too high (`bench.allocations`).
    """

    def inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
        like = layer.gate.weight
        torch.manual_seed(layer.ranks.rank)  # so that every measurement has the same routing
        x = torch.randn(num_tokens, layer.d_model, device=like.device, dtype=like.dtype, requires_grad=True)
        return x, torch.randn_like(x)

    step_memory(layer, lambda: inputs(16))
    gc.collect()
    steps = [step_memory(layer, lambda: inputs(tokens)) for _ in range(1 if layer.ranks.size == 1 else 5)]
    return min(steps, key=lambda step: step.without_gradients)


def yardstick_bytes(tokens: int, model: Model) -> int:
    """Returns the bytes that a pipeline without reuse needs by the paper's equations.

    They are Eq. 1, with the gate of one expert, and the activations and buffers of Eq. 4.
    """
    B, M, H = tokens, model.d_model, model.d_hidden
    return FLOAT_BYTES * (model_states(M, H, 1) + 2 * activations(B, M, H))


def saving_bytes(tokens: int, model: Model, n: int) -> float:
    """Returns the bytes that reuse saves by Eq. 6: those of Eq. 5 for activations, and as many for
    buffers.
    """
    return FLOAT_BYTES * 2 * saved_each(tokens, model.d_model, model.d_hidden, n)


def measured_total(layer: MoELayer, step: StepMemory) -> int:
    """Returns measured bytes: parameters, gradients, Adam's two moments, and the peak of everything else."""
    parameters = sum(parameter.nbytes for parameter in layer.parameters())
    return 4 * parameters + step.without_gradients


def predicted_total(layer: MoELayer, tokens: int) -> int:
    """Returns the bytes of `measured_total` as the layer predicts them, for the rows of its last batch."""
    parameters = sum(parameter.nbytes for parameter in layer.parameters())
    # The layer's prediction does not count x and dy.
    inputs = 2 * tokens * layer.d_model * layer.gate.weight.element_size()
    return 4 * parameters + inputs + layer.predict_memory(tokens, layer.row_counts).promised


def available_bytes() -> int:
    """Returns the bytes of the machine's memory that are available to new processes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


# ---- which tensor the bytes are of

PARTS = (
    "x and dy",
    "kept T_DI",
    "kept T_M",
    "forward slots",
    "backward slots",
    "output",
    "dx",
    GRADIENTS,
    OTHER,
)
"""Parts of a step's memory, in the order in which pictures stack them, the lowest first."""


@contextlib.contextmanager
def parts_named(layer: MoELayer) -> Iterator[dict[str, str]]:
    """Within this context, names ring slots and kept tensors when they are allocated (`mark`).

    Yields a dict. The caller sets it to the pass that runs, such as {"pass": "forward"}.
    """
    now = {"pass": "forward"}
    slots = pmoe.pool(layer.gate.weight.device).device
    take, compute = slots.take, layer.experts.compute

    def marked_take(*args: Any, **options: Any) -> Tensor:
        memory = take(*args, **options)
        mark(memory, f"{now['pass']} slots")
        return memory

    def marked_compute(expert_rows: ExpertRows, *args: Any, **options: Any) -> Any:
        result, hidden = compute(expert_rows, *args, **options)
        mark(expert_rows.rows_NM, "kept T_DI")  # unless it lies in a slot, which has its name already
        for tensor in () if hidden is None else hidden.tensors:
            mark(tensor, "kept T_M")
        return result, hidden

    with (
        mock.patch.object(slots, "take", marked_take),
        mock.patch.object(layer.experts, "compute", marked_compute),
    ):
        yield now


def named_step(layer: MoELayer, tokens: int) -> Allocations:
    """Runs one step, and returns its allocations, each with the name of its part (`PARTS`)."""
    one_step(layer, min(tokens, 16))
    layer.zero_grad(set_to_none=True)
    with parts_named(layer) as now, watched(layer.gate.weight.device.type) as seen:
        x = torch.randn(tokens, layer.d_model, device=layer.gate.weight.device, requires_grad=True)
        dy = torch.randn_like(x)
        mark(x, "x and dy")
        mark(dy, "x and dy")
        moment("forward")
        y = layer(x)
        mark(y, "output")
        now["pass"] = "backward"
        moment("backward")
        y.backward(dy)
        moment("end")
        mark(x.grad, "dx")
        for parameter in layer.parameters():
            mark(parameter.grad, GRADIENTS)
    layer.zero_grad(set_to_none=True)
    assert {allocation.name for allocation in seen.records} <= set(PARTS)
    return seen
