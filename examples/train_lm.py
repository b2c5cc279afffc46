"""Trains a small language model with a pmoe.MoELayer in every second block, on text found locally.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py            # experts over two ranks
    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --resume   # after Ctrl-C or a kill
    torchrun --nnodes 1:3 ... examples/train_lm.py --resume if-any --parts 6  # see docs/cluster.md
    python examples/train_lm.py --dense                                      # same active size, no experts

It reads the sources of Python's standard library, or the files that --data names. It writes checkpoints,
metrics.json, curves.png, and the files of `pmoe report` to --out. It uses one GPU a rank if the machine has
GPUs, else the CPU.

This file is the training loop. The others:

    lm_arguments    the command line
    lm_data         the text
    lm_model        the model
    lm_ranks        communication between ranks
    lm_checkpoint   checkpoints
    lm_report       progress bar, curves, metrics
    lm_launch       torchrun without a traceback after Ctrl-C
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lm_arguments import (
    SettingsError,
    check_arguments,
    deciding_settings,
    layer_options,
    parse_arguments,
)
from lm_checkpoint import CheckpointError, is_there, load, save, set_aside
from lm_data import Corpus, DataError, load_corpus, training_offsets, validation_offsets, windows
from lm_model import ByteGPT
from lm_ranks import Ranks, leave, may_restart, share_gradients, squared_norm, start_ranks, stop_ranks
from lm_report import History, Progress, bits, draw_curves, peak_memory_bytes, write_metrics
from torch import Tensor, nn
from torch.nn import functional as F

from pmoe.integrations.logging import StatsWriter
from pmoe.training.parallel import is_expert


class StopRequest:
    """Records Ctrl-C and SIGTERM instead of ending the process.

    The ranks then agree on the step after which they stop. reason: name of the signal, "" before.
    """

    def __init__(self) -> None:
        self.reason = ""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.note)

    def note(self, number: int, frame: object) -> None:
        """Handles the signal."""
        self.reason = signal.Signals(number).name


@dataclass(kw_only=True)
class Run:
    """State of a training run from step to step."""

    arguments: argparse.Namespace
    ranks: Ranks
    corpus: Corpus
    model: ByteGPT
    optimizer: torch.optim.Optimizer
    history: History
    step: int = 0
    seconds: float = 0.0
    """Seconds of the parts of the run before a --resume."""
    began: float = field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Returns the seconds of the run so far, parts before a --resume included."""
        return self.seconds + time.monotonic() - self.began

    def bytes_per_step(self) -> int:
        """Returns the number of bytes that all ranks together train on in one step."""
        return int(self.arguments.batch * self.arguments.context)

    def checkpoints(self) -> Path:
        """Returns the folder of the checkpoints."""
        return Path(self.arguments.out, "checkpoints")

    def settings(self) -> dict[str, Any]:
        """Returns everything that decides the numbers of the run, as plain data."""
        return deciding_settings(self.arguments) | {"text": self.corpus.fingerprint}


def main() -> int:
    """Runs the training and returns the exit code.

    If torchrun restarts failed processes, a run that was stopped early must not exit with 0. When a machine
    joins, torchrun stops the ranks of one machine, and all ranks stop with it. torchrun then starts them
    again only if they failed.
    """
    arguments = parse_arguments()
    stop = StopRequest()
    ranks = start_ranks(arguments.timeout)
    try:
        run = begin(arguments, ranks)
        train(run, stop)
        return os.EX_TEMPFAIL if run.step < arguments.steps and may_restart() else 0
    except (DataError, CheckpointError, SettingsError) as error:
        sys.exit(f"train_lm: {error}" if ranks.rank == 0 else 1)
    finally:
        stop_ranks()


def begin(arguments: argparse.Namespace, ranks: Ranks) -> Run:
    """Returns a run before its first step, or as the last checkpoint has it."""
    check_arguments(arguments, ranks.world)
    model = build_model(arguments, ranks)
    run = Run(
        arguments=arguments,
        ranks=ranks,
        corpus=load_corpus(arguments.data, arguments.context),
        model=model,
        optimizer=build_optimizer(model, arguments),
        history=History(),
    )
    say(ranks, run.corpus.description)
    if arguments.resume == "always" or (arguments.resume and is_there(run.checkpoints(), ranks)):
        restore(run)
    elif ranks.rank == 0 and (aside := set_aside(run.checkpoints())):
        say(ranks, f"an earlier run's checkpoints are now in {aside}")
    ranks.wait()
    return run


def build_model(arguments: argparse.Namespace, ranks: Ranks) -> ByteGPT:
    """Builds the model from one seed, so that all ranks together hold the parameters of one process.

    Dense parameters are the same on all ranks; experts are the ranks' parts of all experts.
    """
    torch.manual_seed(arguments.seed)
    sizes = ("d_model", "d_hidden", "layers", "heads", "context", "num_experts", "top_k")
    own = {name: getattr(arguments, name) for name in (*sizes, "dense")}
    try:
        model = ByteGPT(**own, **layer_options(arguments))
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return model.to(ranks.device)


def build_optimizer(model: ByteGPT, arguments: argparse.Namespace) -> torch.optim.AdamW:
    """Returns AdamW with weight decay on matrices only.

    b1 and b2 of the experts have two dimensions, but they are stacked biases and do not decay.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.dim() > 1 and not name.endswith((".b1", ".b2"))
        (matrices if is_matrix else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": arguments.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.95), fused=True)


def restore(run: Run) -> None:
    """Loads the last checkpoint into the run."""
    saved = load(run.checkpoints(), run.model, run.optimizer, run.settings(), run.ranks)
    run.step = saved["step"]
    run.seconds = saved["seconds"]
    run.history = History(**saved["history"])
    say(run.ranks, f"resumed after step {run.step} on {run.ranks.world} rank(s)")


def save_checkpoint(run: Run) -> None:
    """Writes a checkpoint of the run."""
    extra = {"seconds": run.elapsed(), "history": asdict(run.history)}
    save(run.checkpoints(), run.step, run.model, run.optimizer, run.settings(), extra, run.ranks)


def train(run: Run, stop: StopRequest) -> None:
    """Trains until the last step, or until any rank is asked to stop. Then it saves and reports."""
    every = max(1, run.arguments.steps // 100)
    with StatsWriter(run.arguments.out, run.model, every=every, settings=run.settings()) as writer:
        take_steps(run, stop, writer)
    report(run, stop.reason or "another rank")


def take_steps(run: Run, stop: StopRequest, writer: StatsWriter) -> None:
    """Runs the loop over steps: trains, logs, evaluates and saves."""
    arguments, ranks, history = run.arguments, run.ranks, run.history
    progress = Progress(
        done=run.step,
        steps=arguments.steps,
        bytes_per_step=run.bytes_per_step(),
        device=ranks.device,
        show=ranks.rank == 0,
    )
    stopped = False
    while run.step < arguments.steps and not stopped:
        began = time.monotonic()
        if arguments.time_limit and run.elapsed() > arguments.time_limit:
            stop.reason = stop.reason or "--time-limit"
        result = train_step(run, bool(stop.reason))
        run.step += 1
        stopped = result.stop
        record(run, result)
        writer.step(
            run.step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=learning_rate(run.step - 1, arguments),
        )
        progress.update(run.step, result.loss, time.monotonic() - began)
        if run.step % arguments.eval_every == 0 and run.step < arguments.steps:
            loss = evaluate(run, arguments.eval_bytes)
            history.valid_bytes.append(run.step * run.bytes_per_step())
            history.valid_loss.append(loss)
            writer.note(valid_loss=loss)
            progress.note(f"step {run.step}: validation loss {loss:.4f}, {bits(loss):.4f} bits/byte")
        if stopped or run.step % arguments.checkpoint_every == 0 or run.step == arguments.steps:
            save_checkpoint(run)
    progress.close()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of a step, the same on all ranks.

    loss: mean over the ranks.
    gradient_norm: norm of the whole model's gradient, before clipping.
    stop: True if any rank was asked to stop.
    """

    loss: float
    gradient_norm: float
    stop: bool


def train_step(run: Run, stop_here: bool) -> StepResult:
    """Runs one step on all ranks. If ``stop_here`` is True on any rank, ``stop`` is True on all."""
    arguments, ranks, model = run.arguments, run.ranks, run.model
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(run.step, arguments)
    loss = backward(run)
    share_gradients(model, ranks)

    parameters = list(model.parameters())
    experts = [parameter for parameter in parameters if is_expert(parameter)]
    others = [parameter for parameter in parameters if not is_expert(parameter)]
    square = squared_norm(others, ranks.device) / ranks.world + squared_norm(experts, ranks.device)
    stop = torch.tensor(float(stop_here), device=ranks.device)
    numbers = torch.stack([loss, square, stop]).double()
    ranks.sum(numbers)  # all small numbers share one reduction, and the host waits for it once
    mean_loss, square_sum, stops = numbers.tolist()
    norm = math.sqrt(square_sum)
    if not math.isfinite(norm + mean_loss):
        raise FloatingPointError(
            f"step {run.step + 1}: loss {mean_loss}, gradient norm {norm}; try a smaller --lr"
        )
    if norm > arguments.clip:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # Scales all gradients in one operation. torch has no public function for it.
        torch._foreach_mul_(gradients, arguments.clip / norm)  # pyright: ignore[reportPrivateImportUsage]
    run.optimizer.step()
    return StepResult(loss=mean_loss, gradient_norm=norm, stop=stops > 0)


def backward(run: Run) -> Tensor:
    """Leaves this rank's part of the gradients of the batch's mean loss in .grad.

    Returns this rank's part of the mean loss, a scalar: the slice's mean, divided by the number of ranks. The
    loss is divided before backward, because it is one number. `share_gradients` then sums the gradients, and
    need not divide all of them.
    """
    arguments, ranks = run.arguments, run.ranks
    text = run.corpus.train
    offsets = training_offsets(
        len(text), arguments.context, arguments.batch, seed=arguments.seed, step=run.step
    )
    parts = ranks.slice(offsets).chunk((arguments.parts or ranks.world) // ranks.world)
    run.optimizer.zero_grad()
    total = torch.zeros((), device=ranks.device)
    num_parts = len(parts) * ranks.world
    for part in parts:
        loss = mean_loss(run, text, part) / num_parts
        (loss + arguments.aux_weight / num_parts * run.model.auxiliary_loss()).backward()
        total += loss.detach()
    return total


def mean_loss(run: Run, text: Tensor, offsets: Tensor) -> Tensor:
    """Returns the cross-entropy in nats a byte, a scalar, of the windows that begin at the offsets."""
    device = run.ranks.device
    inputs, targets = (part.to(device) for part in windows(text, offsets, run.arguments.context))
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = run.model(inputs)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def learning_rate(step: int, arguments: argparse.Namespace) -> float:
    """Returns the learning rate of a step: a linear warmup, then a cosine down to a tenth."""
    if step < arguments.warmup:
        return float(arguments.lr * (step + 1) / arguments.warmup)
    done = (step - arguments.warmup) / max(1, arguments.steps - arguments.warmup)
    return float(arguments.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


@torch.no_grad()
def evaluate(run: Run, num_bytes: int) -> float:
    """Returns the mean loss of about ``num_bytes`` held-out bytes.

    The windows do not depend on the number of ranks.
    """
    arguments, ranks, text = run.arguments, run.ranks, run.corpus.valid
    offsets = validation_offsets(len(text), arguments.context, arguments.batch, num_bytes)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    run.model.eval()
    for batch in offsets.split(arguments.batch):
        total += mean_loss(run, text, ranks.slice(batch))
    run.model.train()
    return float(ranks.sum(total).item() / ranks.world / (len(offsets) / arguments.batch))


def record(run: Run, result: StepResult) -> None:
    """Adds the result of a step to the curves."""
    history = run.history
    seen = run.step * run.bytes_per_step()
    history.train_bytes.append(seen)
    history.train_loss.append(result.loss)
    history.gradient_norm.append(result.gradient_norm)


def report(run: Run, stopped_by: str) -> None:
    """Evaluates a complete run, writes metrics.json and curves.png, and prints the results.

    stopped_by: what stopped the run early, for the message.
    """
    arguments, ranks = run.arguments, run.ranks
    complete = run.step == arguments.steps
    summary: dict[str, Any] = {
        "steps": run.step,
        "train_bytes": run.step * run.bytes_per_step(),
        "ranks": ranks.world,
    }
    if complete:
        summary["valid_loss"] = evaluate(run, arguments.final_eval_bytes)
        summary["valid_bits_per_byte"] = bits(summary["valid_loss"])
    summary["seconds"] = run.elapsed()
    summary["peak_memory_bytes"] = ranks.largest(peak_memory_bytes(ranks.device))
    if ranks.rank == 0:
        write_metrics(arguments.out / "metrics.json", run.settings(), summary, run.history)
        draw(run, summary)
    if complete:
        say(
            ranks,
            f"done: {run.step} steps, {summary['train_bytes'] / 1e6:.2f} MB of training bytes, "
            f"validation loss {summary['valid_loss']:.4f} nats, "
            f"{summary['valid_bits_per_byte']:.4f} bits/byte, "
            f"{summary['seconds']:.0f} s, peak memory {summary['peak_memory_bytes'] / 2**20:.0f} MiB a rank",
        )
    else:
        say(
            ranks,
            f"stopped by {stopped_by} after step {run.step} of {arguments.steps}; --resume continues there",
        )


def draw(run: Run, summary: dict[str, Any]) -> None:
    """Writes curves.png and prints where it is."""
    path = run.arguments.out / "curves.png"
    title = f"{'dense' if run.arguments.dense else 'mixture of experts'}, {run.ranks.world} rank(s)"
    try:
        draw_curves(path, run.history, title, summary.get("valid_loss"))
    except ImportError:
        say(run.ranks, "no curves.png: matplotlib is not installed")
    else:
        program = "pmoe" if shutil.which("pmoe") else f"{sys.executable} -m pmoe"  # a venv need not be active
        say(run.ranks, f"curves in {path}; {program} report {run.arguments.out} makes a page")


def say(ranks: Ranks, text: str) -> None:
    """Prints a line on rank 0."""
    if ranks.rank == 0:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave(main())
