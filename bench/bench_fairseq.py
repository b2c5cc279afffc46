"""What do --moe-pipeline true --moe-memory-reuse true cost in fairseq, and what does the plugin's own code?

fairseq trains a language model on generated lines in batches of up to --max-tokens tokens, so each step has
another size of batch. The same steps run three times: with one chunk and no reuse (plain), with exactly
--moe-pipeline true --moe-memory-reuse true (automatic), and as plain once more, because the speed of a
machine drifts. A last training counts the bytes of a few automatic steps.

A stopwatch credits all time of a step to one of three owners: the plugin's functions, MoELayer.forward, and
fairseq for the rest. All of backward is in the rest, because the plugin's only code in backward is that of
three sums.

It runs on two ranks in the environment of the fairseq tests:

    OMP_NUM_THREADS=1 .venv-fairseq/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
        bench/bench_fairseq.py
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.allocations import freed_late, watched
from bench.timing import table, write_json
from pmoe.integrations.fairseq import USER_DIR
from pmoe.integrations.fairseq.shim import allow_fairseq_defaults

GOAL = 0.02
"""Largest share of a step that the plugin may take."""

PLUGIN, LAYER, FAIRSEQ = "plugin", "MoELayer.forward", "fairseq"

AUTOMATIC = "--moe-pipeline true --moe-memory-reuse true"
PLAIN = "--moe-pipeline 1 --moe-memory-reuse false"

PEAK_STEPS = 10
"""Number of automatic steps whose bytes are counted. Among them are batches as large as the first."""

CHOOSING = 0.05
"""A step counts as one that measures if choosing takes more than these seconds. A look-up takes far less."""


@dataclass
class Recorded:
    """What the steps of one training did on this rank.

    tokens: tokens of the batch of each step, without padding.
    losses: sum of the losses of all ranks, by step.
    choosing: seconds in which the step chose numbers of chunks and restore pairs, by trials or otherwise.
    searches: number of searches for a number of chunks.
    peaks: the most bytes that a step had allocated at once, by step; empty if they are not counted.
    """

    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    choosing: list[float] = field(default_factory=list)
    searches: int = 0
    peaks: list[int] = field(default_factory=list)


class Stopwatch:
    """Measures the seconds of each step by owner and function.

    The time of a watched function that another watched function calls counts for the called one only.
    """

    def __init__(self) -> None:
        self.steps: list[dict[tuple[str, str], float]] = []
        self._running: list[tuple[str, str]] = []
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._since = 0.0

    def watch(self, owner: str, place: Any, name: str, label: str) -> None:
        """Replaces the function ``name`` of a class or module by a timed one.

        owner: who is credited: the plugin, MoELayer or fairseq.
        place: the class or module.
        label: name of the function in the report.
        """
        function = vars(place)[name]
        is_class_method = isinstance(function, classmethod)
        inner: Callable[..., Any] = function.__func__ if is_class_method else function

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._running.append((owner, label))
            try:
                return inner(*args, **kwargs)
            finally:
                self._switch()
                self._running.pop()
                if not self._running:
                    self.steps.append(dict(self._seconds))
                    self._seconds.clear()

        setattr(place, name, classmethod(timed) if is_class_method else timed)

    def _switch(self) -> None:
        """Credits the time since the last call of this method to the function that ran during it."""
        now = time.perf_counter()
        if self._running:
            self._seconds[self._running[-1]] += now - self._since
        self._since = now


def watch_all(stopwatch: Stopwatch) -> None:
    """Watches all functions of the plugin that a step runs, and functions of others that these call."""
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion
    from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
    from fairseq.optim import FairseqOptimizer

    from pmoe import MoELayer
    from pmoe.integrations.fairseq import criterions, models, plugin

    base = plugin.MoETrainer.__base__
    watched = (
        (FAIRSEQ, base, "train_step", "step"),
        (FAIRSEQ, TransformerDecoderLayerBase, "forward", "layers"),
        (FAIRSEQ, CrossEntropyCriterion, "forward", "model and loss"),
        (FAIRSEQ, CrossEntropyCriterion, "reduce_metrics", "metrics"),
        (FAIRSEQ, FairseqOptimizer, "clip_grad_norm", "clipping"),
        (LAYER, MoELayer, "forward", "experts"),
        (PLUGIN, models.MoEDecoderLayer, "forward", "layer: passes the auxiliary loss on"),
        (PLUGIN, models, "_keep_loss", "layer: keeps it"),
        (PLUGIN, models.FeedForwardExperts, "forward", "layer: leaves padding out"),
        (PLUGIN, criterions.WithAuxiliaryLoss, "forward", "criterion"),
        (PLUGIN, criterions.WithAuxiliaryLoss, "with_experts", "criterion: auxiliary loss and load"),
        (PLUGIN, criterions.WithAuxiliaryLoss, "reduce_metrics", "criterion: metrics"),
        (PLUGIN, plugin.MoETrainer, "clip_grad_norm", "trainer: asks for clipping"),
        (PLUGIN, plugin.MoETrainer, "with_experts", "trainer: experts' gradients scaled, their norm"),
        (PLUGIN, plugin.MoETrainer, "train_step", "trainer"),
    )
    for owner, place, name, label in watched:
        stopwatch.watch(owner, place, name, label)


class Recorder:
    """Records the steps of trainings. ``now`` is the present training; with ``counts``, bytes are counted."""

    def __init__(self) -> None:
        from pmoe.choose import open_choice, search
        from pmoe.integrations.fairseq.plugin import MoETrainer

        self.now = Recorded()
        self.counts = False
        train_step = MoETrainer.train_step
        reduce_stats = MoETrainer._reduce_and_log_stats
        choose = open_choice.choose_among
        find = search.search

        def step(trainer: Any, samples: Any, raise_oom: bool = False) -> Any:
            self.now.tokens.append(samples[0]["ntokens"] if samples[0] else 0)
            self.now.choosing.append(0.0)
            if not self.counts:
                return train_step(trainer, samples, raise_oom)
            with freed_late(0.03), watched() as seen:
                logged = train_step(trainer, samples, raise_oom)
            self.now.peaks.append(seen.peak_bytes())
            return logged

        def reduced(trainer: Any, outputs: Any, size: Any, norm: Any = None) -> Any:
            self.now.losses.append(sum(float(output["loss"]) for output in outputs))
            return reduce_stats(trainer, outputs, size, norm)

        def searching(*args: Any, **options: Any) -> Any:
            self.now.searches += 1
            return find(*args, **options)

        def choosing(*args: Any) -> Any:
            start = time.perf_counter()
            choice = choose(*args)
            self.now.choosing[-1] += time.perf_counter() - start
            return choice

        MoETrainer.train_step = step  # type: ignore[method-assign]
        MoETrainer._reduce_and_log_stats = reduced
        search.search = searching
        open_choice.choose_among = choosing


def write_lines(folder: Path, num_tokens: int) -> Path:
    """Returns a folder with generated data for fairseq: random words in lines of 8 to 255 words.

    The data are the same on every rank.
    """
    import fairseq_cli.preprocess

    draw = random.Random(0)
    lines = []
    remaining = num_tokens
    while remaining > 0:
        length = min(draw.randrange(8, 256), remaining)
        lines.append(" ".join(str(int(draw.paretovariate(0.7)) % 8000) for _ in range(length)))
        remaining -= length
    (folder / "train.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    run(
        fairseq_cli.preprocess,
        f"--only-source --trainpref {folder / 'train.txt'} --destdir {folder / 'data'} --nwordssrc 8000",
    )
    return folder / "data"


def run(command: Any, arguments: str) -> None:
    """Runs a command of fairseq with its arguments, separated by spaces."""
    own = sys.argv
    sys.argv = ["fairseq", *arguments.split()]
    try:
        command.cli_main()
    finally:
        sys.argv = own


def train(args: argparse.Namespace, data: Path, flags: str, num_steps: int) -> None:
    """Trains with ``flags`` for the layers with experts."""
    import fairseq_cli.train

    width = str(args.d_model)
    sizes = f"""--decoder-layers {args.layers} --decoder-embed-dim {width} --decoder-input-dim {width}
        --decoder-output-dim {width} --decoder-ffn-embed-dim {4 * args.d_model} --decoder-attention-heads 8
        --sample-break-mode eos --tokens-per-sample 256 --max-tokens {args.max_tokens}"""
    run(
        fairseq_cli.train,
        f"""{data} --user-dir {USER_DIR} --task language_modeling --arch transformer_lm_pmoe {sizes}
        --criterion cross_entropy_pmoe --cpu --distributed-backend gloo --ddp-backend legacy_ddp
        --moe-num-experts {args.experts} --moe-top-k 2 {flags} --optimizer sgd --momentum 0.9 --lr 0.05
        --clip-norm 0.5 --dropout 0 --max-update {num_steps} --num-workers 0
        --valid-subset train --disable-validation --no-save --log-interval 1 --log-format simple""",
    )


@dataclass
class Training:
    """One training: what it recorded, and the seconds of its steps by owner and function."""

    recorded: Recorded
    steps: list[dict[tuple[str, str], float]]

    @property
    def seconds(self) -> list[float]:
        """Seconds of each step."""
        return [sum(step.values()) for step in self.steps]


def train_all(args: argparse.Namespace) -> dict[str, Training]:
    """Trains four times. Returns the trainings by name."""
    allow_fairseq_defaults()
    import pmoe.integrations.fairseq.plugin  # noqa: F401

    stopwatch = Stopwatch()
    recorder = Recorder()
    watch_all(stopwatch)
    num_steps = args.warmup + args.steps
    trainings = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PMOE_CACHE"] = folder  # nothing is known from earlier runs
        world = int(os.environ.get("WORLD_SIZE", "1"))
        data = write_lines(Path(folder), (num_steps + 2) * world * args.max_tokens)
        for name, flags, count in (
            ("plain", PLAIN, num_steps),
            ("automatic", AUTOMATIC, num_steps),
            ("plain again", PLAIN, num_steps),
            ("bytes of automatic", AUTOMATIC, PEAK_STEPS),
        ):
            recorder.now = Recorded()
            recorder.counts = name.startswith("bytes")
            if recorder.counts:
                forget()
            train(args, data, flags, count)
            trainings[name] = Training(recorder.now, stopwatch.steps)
            stopwatch.steps = []
    return trainings


def forget() -> None:
    """Lets pmoe forget what it has measured, so that the next step measures everything again."""
    from pmoe.choose import search
    from pmoe.measure import profile

    search._LEARNED.clear()
    profile.PROFILES.clear()
    for path in Path(os.environ["PMOE_CACHE"]).glob("*.json"):
        path.unlink()


def report(args: argparse.Namespace, trainings: dict[str, Training], peaks: Sequence[Sequence[int]]) -> None:
    """Prints what the flags cost and save, and medians over automatic steps of the plugin's share.

    peaks: by rank, the peak bytes of the steps of "bytes of automatic".
    """
    automatic = trainings["automatic"]
    first, again = trainings["plain"], trainings["plain again"]
    plain_seconds = [(a + b) / 2 for a, b in zip(first.seconds, again.seconds, strict=True)]
    is_later = range(args.warmup, len(plain_seconds))
    choosing = automatic.recorded.choosing
    measuring = [i for i, seconds in enumerate(choosing) if seconds > CHOOSING]
    ratios = [automatic.seconds[i] / plain_seconds[i] for i in is_later if i not in measuring]
    losses = zip(automatic.recorded.losses, first.recorded.losses, strict=True)
    summary = {
        "steps": len(plain_seconds),
        "tokens": [min(automatic.recorded.tokens), max(automatic.recorded.tokens)],
        "searches for a number of chunks": automatic.recorded.searches,
        "steps that measure": measuring,
        "seconds of choosing": sum(choosing),
        "choosing / plain step": sum(choosing) / statistics.median(plain_seconds),
        "later steps, automatic / plain": statistics.median(ratios),
        "plain again / plain": statistics.median([again.seconds[i] / first.seconds[i] for i in is_later]),
        "loss, largest relative difference": max(abs(a / b - 1) for a, b in losses),
        "first step's peak / largest later": [first / max(later) for first, *later in peaks],
    }
    print(f"{AUTOMATIC} beside {PLAIN}:")
    for name, value in summary.items():
        print(f"  {name}: {value if not isinstance(value, float) else format(value, '.4g')}")

    steps = automatic.steps[args.warmup :]
    totals = [sum(step.values()) for step in steps]
    rows = []
    for key in sorted({key for step in steps for key in step}, key=lambda key: (key[0] != PLUGIN, key)):
        seconds = [step.get(key, 0.0) for step in steps]
        shares = [one / total for one, total in zip(seconds, totals, strict=True)]
        rows.append(
            {
                "whose": key[0],
                "what": key[1],
                "ms": 1e3 * statistics.median(seconds),
                "% of a step": 100 * statistics.median(shares),
            }
        )
    own = [sum(seconds for (owner, _), seconds in step.items() if owner == PLUGIN) for step in steps]
    shares = [one / total for one, total in zip(own, totals, strict=True)]
    share = statistics.median(shares)
    print(table(rows))
    step_ms, own_ms = 1e3 * statistics.median(totals), 1e3 * statistics.median(own)
    print(
        f"{len(steps)} steps of up to {args.max_tokens} tokens a rank: median {step_ms:.0f} ms, the plugin "
        f"{own_ms:.1f} ms, {100 * share:.2f} % (goal: at most {100 * GOAL:.0f} %; "
        f"least {100 * min(shares):.2f} %, most {100 * max(shares):.2f} %)"
    )
    if args.out is not None:
        options = {name: value for name, value in vars(args).items() if name != "out"}
        write_json(
            args.out / "fairseq.json",
            setting={**options, "flags": AUTOMATIC, "plain": PLAIN},
            automatic=summary,
            seconds={name: training.seconds for name, training in trainings.items()},
            peaks=[list(of_rank) for of_rank in peaks],
            tokens={name: training.recorded.tokens for name, training in trainings.items()},
            share=share,
            shares=shares,
            rows=rows,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="every second one with experts")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=4096, help="most tokens of a batch on a rank")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="folder for fairseq.json")
    args = parser.parse_args()
    trainings = train_all(args)
    own_peaks = trainings["bytes of automatic"].recorded.peaks
    peaks = [own_peaks]
    if dist.is_initialized():
        peaks = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(peaks, own_peaks)
    if os.environ.get("RANK", "0") == "0":
        report(args, trainings, peaks)


if __name__ == "__main__":
    main()
