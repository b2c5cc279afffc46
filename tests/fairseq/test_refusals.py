"""Options that cannot work are refused with what to change, on every rank, before a weight is trained or
read."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pmoe.integrations.fairseq.__main__ import main
from pmoe.integrations.fairseq.options import PLACES, layer_options
from tests.fairseq.environment import FOLDER, LANGUAGE_MODEL, logged, run

pytestmark = pytest.mark.timeout(900)

EVERY_OPTION = [text for option in (*PLACES, *layer_options()) for text in (option.flag, option.default)]
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
    "--moe-pipeline 3 --moe-pipeline-backward 2": r"pipeline_backward \(2\) must divide pipeline \(3\)",
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
    "--optimizer adafactor": r"--optimizer \(adafactor\) must be another, such as adam",
}
ACCEPTED = (
    [*EVERY_OPTION, *EXPERTS],
    ["--moe-gate", "deepseek", "--moe-shared-expert", "16", "--moe-shared-gate", "true"],
    ["--moe-expert", "swiglu", "--moe-memory-reuse", "communicate/recompute", "--checkpoint-activations"],
)


@pytest.mark.parametrize(("ranks", "cases"), [(1, ON_ONE_RANK), (2, ON_TWO_RANKS)])
def test_options_that_cannot_work_are_refused_before_training(
    ranks: int, cases: dict[str, str], text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    common = [*map(str, (text, *LANGUAGE_MODEL)), "--max-update", "1", "--disable-validation"]
    works = [*common, "--optimizer", "sgd", "--lr", "0.1", "--save-dir", str(folder)]
    tried = [[*(_without_moe(works) if "--arch" in case else works), *case.split()] for case in cases]
    accepted = [[*works, "--no-save", *case] for case in ACCEPTED] if ranks > 1 else []
    listed = tmp_path / "cases.json"
    listed.write_text(json.dumps(tried + accepted), encoding="utf-8")
    output = run(listed, ranks=ranks, program=("-m", "tests.fairseq.refusals"))
    (line,) = re.findall(r"^OUTCOMES (.*)$", output, re.MULTILINE)
    messages = json.loads(line)
    assert len(messages) == len(tried) + len(accepted)
    wrong = {
        case: message
        for (case, pattern), message in zip(cases.items(), messages, strict=False)
        if not re.search(pattern, message, re.DOTALL)
    }
    assert not wrong, json.dumps(wrong, indent=1)
    assert messages[len(cases) :] == ["trained"] * len(accepted)
    assert not list(folder.glob("*.pt"))


def _without_moe(arguments: list[str]) -> list[str]:
    dropped = {index for index, text in enumerate(arguments) if text.startswith("--moe-")}
    return [text for i, text in enumerate(arguments) if i not in dropped and i - 1 not in dropped]


def test_a_python_without_fairseq_is_told_what_to_install() -> None:
    assert importlib.util.find_spec("fairseq") is None, "it is in .venv-fairseq only"
    with pytest.raises(
        SystemExit, match="fairseq cannot be imported .*pip install --no-deps fairseq==0.12.2"
    ):
        main(["train", "data"])


def test_an_unknown_command_is_refused_and_options_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"command \(trian\) must be options, user-dir or one of train"):
        main(["trian"])
    main(["options"])
    listed = capsys.readouterr().out
    for option in (*PLACES, *layer_options()):
        assert f"{option.flag} ({option.default})" in listed


def test_fairseqs_own_command_takes_the_plugin_by_user_dir(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With Python 3.11 and fairseq 0.12.2, which its own command cannot import there, after two lines that a
    sitecustomize.py may hold."""
    lines = "from pmoe.integrations.fairseq.shim import allow_fairseq_defaults\nallow_fairseq_defaults()\n"
    (tmp_path / "sitecustomize.py").write_text(lines, encoding="utf-8")
    main(["user-dir"])
    user_dir = capsys.readouterr().out.strip()
    steps = ("--optimizer", "adam", "--lr", 0.01, "--max-update", 2, "--disable-validation", "--no-save")
    command = (str(FOLDER / "bin" / "fairseq-train"),)
    given = (text, "--user-dir", user_dir, *LANGUAGE_MODEL, *steps)
    output = run(*given, program=command, PYTHONPATH=str(tmp_path))
    assert "num_updates: 2 >= max_update: 2" in output


@pytest.mark.slow
def test_hydra_train_knows_the_model_and_its_options(text: Path, tmp_path: Path) -> None:
    sizes = {"layers": 2, "embed_dim": 32, "input_dim": 32, "output_dim": 32, "attention_heads": 2}
    model = [f"model.decoder_{name}={size}" for name, size in sizes.items()]
    model += ["model=transformer_lm_pmoe", "model.moe_num_experts=4", "model.moe_top_k=2"]
    data = [
        "task=language_modeling",
        f"task.data={text}",
        "task.tokens_per_sample=32",
        "dataset.batch_size=8",
    ]
    steps = ["optimizer=adam", "optimization.lr=[0.01]", "optimization.max_update=2", "common.cpu=true"]
    rest = ["criterion=cross_entropy_pmoe", "criterion.moe_aux_weight=0.02", "dataset.num_workers=0"]
    rest += [f"checkpoint.save_dir={tmp_path}", "dataset.disable_validation=true"]
    output = run("hydra-train", *model, *data, *steps, *rest, f"hydra.run.dir={tmp_path}")
    assert "num_updates: 2 >= max_update: 2" in output
    assert "moe_load" in output
    assert (tmp_path / "checkpoint_last.pt").exists()


TWO_GPUS = """import torch
torch.cuda.device_count = lambda: 2
torch.cuda.set_device = lambda device: None
"""


@pytest.mark.slow
def test_without_torchrun_fairseq_starts_a_process_for_each_gpu(text: Path, tmp_path: Path) -> None:
    """On the CPU all that is missing are the GPUs to count."""
    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS, encoding="utf-8")
    steps = ("--optimizer", "adam", "--lr", 0.01, "--max-update", 2, "--disable-validation", "--no-save")
    given = (*LANGUAGE_MODEL, *steps, "--distributed-world-size", 2)
    output = run("train", text, *given, PYTHONPATH=str(tmp_path))
    assert "training on 2 devices" in output
    assert logged(output, "wpb") == [512, 512]  # 2 batches of 8 x 32 tokens
