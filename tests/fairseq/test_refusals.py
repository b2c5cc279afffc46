"""Options that cannot work are refused on every rank, with the change that mends them.

They are refused before a weight is trained or read.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pmoe.integrations.fairseq.__main__ import main
from pmoe.integrations.fairseq.options import PLACES, layer_options
from tests.fairseq.cases import ACCEPTED, ON_ONE_RANK, ON_TWO_RANKS, others_of, some_of
from tests.fairseq.conftest import Session
from tests.fairseq.environment import FOLDER, LANGUAGE_MODEL, logged, run

pytestmark = pytest.mark.timeout(900)


def test_options_that_cannot_work_are_refused_before_training(session: Session) -> None:
    check_refusals(session, some_of(ON_ONE_RANK), some_of(ON_TWO_RANKS))


@pytest.mark.slow
def test_all_other_options_that_cannot_work_are_refused_too(others: Session) -> None:
    check_refusals(others, others_of(ON_ONE_RANK), others_of(ON_TWO_RANKS))
    accepted = [others.of_two[f"accepted {i}"].refusal for i in range(1, len(ACCEPTED))]
    assert accepted == [""] * len(accepted)


def check_refusals(session: Session, on_one_rank: list[str], on_two_ranks: list[str]) -> None:
    found = [(session.of_one[case].refusal, ON_ONE_RANK[case], case) for case in on_one_rank]
    found += [(session.of_two[case].refusal, ON_TWO_RANKS[case], case) for case in on_two_ranks]
    assert found
    wrong = {case: message for message, pattern, case in found if not re.search(pattern, message, re.DOTALL)}
    assert not wrong, json.dumps(wrong, indent=1)
    assert not list((session.folder / "refused").glob("*.pt"))


def test_options_that_work_are_not_refused(session: Session) -> None:
    assert session.of_two["accepted 0"].refusal == ""


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


@pytest.mark.slow
def test_fairseqs_own_command_takes_the_plugin_by_user_dir(
    session: Session, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """fairseq's own command loads the plugin, after two lines in a sitecustomize.py.

    Without these lines it cannot import fairseq 0.12.2 with Python 3.11.
    """
    lines = "from pmoe.integrations.fairseq.shim import allow_fairseq_defaults\nallow_fairseq_defaults()\n"
    (tmp_path / "sitecustomize.py").write_text(lines, encoding="utf-8")
    main(["user-dir"])
    user_dir = capsys.readouterr().out.strip()
    steps = ("--optimizer", "adam", "--lr", 0.01, "--max-update", 2, "--disable-validation", "--no-save")
    command = (str(FOLDER / "bin" / "fairseq-train"),)
    given = (session.text, "--user-dir", user_dir, *LANGUAGE_MODEL, *steps)
    output = run(*given, program=command, PYTHONPATH=str(tmp_path))
    assert "num_updates: 2 >= max_update: 2" in output


@pytest.mark.slow
def test_hydra_train_knows_the_model_and_its_options(session: Session, tmp_path: Path) -> None:
    sizes = {"layers": 2, "embed_dim": 32, "input_dim": 32, "output_dim": 32, "attention_heads": 2}
    model = [f"model.decoder_{name}={size}" for name, size in sizes.items()]
    model += ["model=transformer_lm_pmoe", "model.moe_num_experts=4", "model.moe_top_k=2"]
    data = [
        "task=language_modeling",
        f"task.data={session.text}",
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
def test_without_torchrun_fairseq_starts_a_process_for_each_gpu(session: Session, tmp_path: Path) -> None:
    """On the CPU all that is missing are the GPUs to count."""
    (tmp_path / "sitecustomize.py").write_text(TWO_GPUS, encoding="utf-8")
    steps = ("--optimizer", "adam", "--lr", 0.01, "--max-update", 2, "--disable-validation", "--no-save")
    given = (*LANGUAGE_MODEL, *steps, "--distributed-world-size", 2)
    output = run("train", session.text, *given, PYTHONPATH=str(tmp_path))
    assert "training on 2 devices" in output
    assert logged(output, "wpb") == [512, 512]  # 2 batches of 8 x 32 tokens
