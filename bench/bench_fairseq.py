"""What share of a fairseq training step does the plugin's own code take, without MoELayer?

fairseq trains a language model on generated batches (the task dummy_lm). A stopwatch credits all time of a
step to one of three owners: the plugin's functions, MoELayer.forward, and fairseq for the rest. All of
backward is in the rest, because the plugin's only code in backward is that of three sums.

It runs on two ranks in the environment of the fairseq tests:

    OMP_NUM_THREADS=1 .venv-fairseq/bin/python -m torch.distributed.run --standalone --nproc-per-node 2 \
        bench/bench_fairseq.py
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.timing import table, write_json
from pmoe.integrations.fairseq import USER_DIR
from pmoe.integrations.fairseq.shim import allow_fairseq_defaults

GOAL = 0.02
"""Largest share of a step that the plugin may take."""

PLUGIN, LAYER, FAIRSEQ = "plugin", "MoELayer.forward", "fairseq"


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


def train(args: argparse.Namespace, stopwatch: Stopwatch) -> None:
    allow_fairseq_defaults()
    import fairseq.benchmark.dummy_lm  # noqa: F401
    import fairseq_cli.train

    watch_all(stopwatch)
    width, command = str(args.d_model), sys.argv
    sizes = f"""--decoder-layers {args.layers} --decoder-embed-dim {width} --decoder-input-dim {width}
        --decoder-output-dim {width} --decoder-ffn-embed-dim {4 * args.d_model} --decoder-attention-heads 8
        --tokens-per-sample 256 --batch-size {args.tokens // 256} --dict-size 8000"""
    sys.argv = f"""fairseq-train --user-dir {USER_DIR} --task dummy_lm --arch transformer_lm_pmoe {sizes}
        --criterion cross_entropy_pmoe --cpu --distributed-backend gloo --ddp-backend legacy_ddp
        --moe-num-experts {args.experts} --moe-top-k 2 --moe-pipeline 2 --optimizer adam --lr 0.0001
        --clip-norm 1.0 --dropout 0 --max-update {args.warmup + args.steps} --num-workers 0
        --disable-validation --no-save --log-interval 1 --log-format simple""".split()
    fairseq_cli.train.cli_main()
    sys.argv = command


def report(args: argparse.Namespace, steps: list[dict[tuple[str, str], float]]) -> None:
    """Prints medians over steps: the seconds of each function, and the plugin's share of a step."""
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
        f"{len(steps)} steps of {args.tokens} tokens a rank: median {step_ms:.0f} ms, the plugin "
        f"{own_ms:.1f} ms, {100 * share:.2f} % (goal: at most {100 * GOAL:.0f} %; "
        f"least {100 * min(shares):.2f} %, most {100 * max(shares):.2f} %)"
    )
    if args.out is not None:
        options = {name: value for name, value in vars(args).items() if name != "out"}
        write_json(args.out / "fairseq.json", setting=options, share=share, shares=shares, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4, help="every second one with experts")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank and step, a multiple of 256")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--out", type=Path, default=None, help="folder for fairseq.json")
    args = parser.parse_args()
    stopwatch = Stopwatch()
    train(args, stopwatch)
    if os.environ.get("RANK", "0") == "0":
        report(args, stopwatch.steps[args.warmup :])


if __name__ == "__main__":
    main()
