"""Options that cannot work, with what must be said of each, and others that must work."""

from __future__ import annotations

from pathlib import Path

from pmoe.integrations.fairseq.options import PLACES, layer_options
from tests.fairseq.environment import LANGUAGE_MODEL

EVERY_OPTION = [text for option in (*PLACES, *layer_options()) for text in (option.flag, option.default)]
NO_OPTIMIZER = "--lr-scheduler fixed"
"""The case of a command without --optimizer."""
EXPERTS = ["--moe-num-experts", "4", "--moe-top-k", "2"]

# What is added to a command that works, and what the message must say.
ON_ONE_RANK: dict[str, str] = {
    "--moe-num-experts none": r"--moe-num-experts \(none\) must be given",
    "--moe-top-k 5": r"top_k \(5\) must be at most num_experts \(4\)",
    "--moe-top-k 1.5": r"top_k \(1.5\) must be an int",
    "--moe-freq 3": r"--moe-freq \(3\) must be at most --decoder-layers \(2\)",
    "--moe-decoder-freq 3": r"--moe-decoder-freq \(3\) must be at most --decoder-layers \(2\)",
    "--moe-freq 0": r"--moe-freq \(0\) must be at least 1",
    "--moe-freq often": r"--moe-freq \(often\) must be a number of layers",
    "--moe-gate best": r"gate \('best'\) must be a module or one of .*topk",
    "--moe-gate hash": r"--moe-gate \(hash\) must be another: .* token ids",
    "--moe-gate expert_choice": r"\(expert_choice\) must be another in a decoder",
    "--moe-memory-reuse S9": r"memory_reuse \('S9'\) must be .*S1",
    "--moe-memory-reuse keep/forget": r"\(keep/forget\) .*hidden \('forget'\) must be one of",
    "--moe-pipeline 32 --moe-pipeline-backward 9": r"pipeline_backward \(9\) must divide pipeline \(32\)",
    "--moe-memory-budget 1GiB --moe-send-once true": r"'1GiB'\) must be left out where rows travel once",
    "--moe-shared-gate true": r"shared_gate \(True\) must be False without a shared_expert",
    "--activation-fn tanh": r"--activation-fn \(tanh\) must be one of relu, gelu",
    "--activation-dropout 0.1": r"--activation-dropout \(0.1\) must be left out",
    "--decoder-layerdrop 0.1": r"--decoder-layerdrop \(0.1\) must be left out: every rank must run the same",
    "--quant-noise-pq 0.1": r"--quant-noise-pq \(0.1\) must be left out",
    "--base-layers 1": r"--base-layers \(1\) must be left out",
    "--scale-fc": r"--scale-fc \(True\) must be left out",
    "--criterion cross_entropy": r"--criterion \(cross_entropy\) must be cross_entropy_pmoe",
    "--moe-aux-weight -1": r"--moe-aux-weight \(-1.0\) must be at least 0",
    "--fp16": r"--fp16 must be left out on the CPU",
    "--amp": r"--amp must be left out on the CPU",
    "--zero-sharding os": r"--zero-sharding \(os\) must be left out",
    "--use-bmuf": r"--use-bmuf \(True\) must be left out",
    "--store-ema": r"--store-ema \(True\) must be left out",
    "--arch transformer_lm": r"--criterion \(cross_entropy_pmoe\) must be one of fairseq's .*no experts",
}
ON_TWO_RANKS: dict[str, str] = {
    "--moe-num-experts 3": r"--moe-\* options.*num_experts \(3\) must be divisible by .* \(2\)",
    "--moe-expert-parallel false": r"--moe-expert-parallel \(false\) must be true",
    "--moe-expert-parallel-size 3": r"--moe-expert-parallel-size \(3\) must divide .* ranks \(2\)",
    "--moe-expert-parallel-size few": r"--moe-expert-parallel-size \(few\) must divide",
    "--moe-capacity-factor 2 --moe-pad-to-capacity true": r"--moe-pad-to-capacity \(true\) must be false",
    "--ddp-backend pytorch_ddp": r"--ddp-backend \(pytorch_ddp\) must be legacy_ddp",
    NO_OPTIMIZER: r"--optimizer \(none\) must be given",
    "--optimizer adafactor": r"--optimizer \(adafactor\) must be another, such as adam",
}
ACCEPTED = (
    [*EVERY_OPTION, *EXPERTS],
    ["--moe-gate", "deepseek", "--moe-shared-expert", "16", "--moe-shared-gate", "true"],
    ["--moe-expert", "swiglu", "--moe-memory-reuse", "communicate/recompute", "--checkpoint-activations"],
)


def some_of(cases: dict[str, str]) -> list[str]:
    """Each takes half a second of a processor: these run always, the others in ``make test-all``."""
    return list(cases)[::5]


def others_of(cases: dict[str, str]) -> list[str]:
    return [case for case in cases if case not in some_of(cases)]


def refused(case: str, data: Path, folder: Path) -> tuple[str, ...]:
    """The command of a case, which would keep its checkpoints in ``folder``."""
    arguments = [*map(str, (data, *LANGUAGE_MODEL)), "--max-update", "1", "--disable-validation"]
    if case != NO_OPTIMIZER:
        arguments += ["--optimizer", "sgd"]
    arguments += ["--lr", "0.1", "--save-dir", str(folder)]
    if "--arch" in case:
        arguments = _without_moe(arguments)
    return ("train", *arguments, *case.split())


def _without_moe(arguments: list[str]) -> list[str]:
    dropped = {index for index, text in enumerate(arguments) if text.startswith("--moe-")}
    return [text for i, text in enumerate(arguments) if i not in dropped and i - 1 not in dropped]
