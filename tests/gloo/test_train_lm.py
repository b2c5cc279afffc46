"""examples/train_lm.py: its numbers do not depend on the number of ranks, and stopping it loses no run.

The script runs as for a user, in processes of its own, at tiny sizes.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
SCRIPT = EXAMPLES / "train_lm.py"
TORCHRUN = [sys.executable, str(EXAMPLES / "lm_launch.py"), "--standalone", "--local-addr=127.0.0.1"]
TORCHRUN += ["--nproc-per-node=2"]
LIBRARY = Path(sysconfig.get_paths()["stdlib"])

sys.path.insert(0, str(EXAMPLES))
import lm_checkpoint  # noqa: E402
import lm_data  # noqa: E402
import lm_model  # noqa: E402
import lm_ranks  # noqa: E402
import train_lm  # noqa: E402
from lm_arguments import SettingsError, check_arguments, deciding_settings, parse_arguments  # noqa: E402

from pmoe.integrations.run_folder import read_run  # noqa: E402
from pmoe.training.parallel import is_expert  # noqa: E402
from tests.pool import forks  # noqa: E402

TEXT = ["--data", str(LIBRARY / "json"), str(LIBRARY / "email")]
TINY = """
    --d-model 16 --d-hidden 32 --layers 2 --heads 2 --context 16 --batch 4 --num-experts 4 --warmup 2
    --eval-bytes 256 --final-eval-bytes 1024
""".split()  # noqa: SIM905
WAIT_SECONDS = 240
"""Seconds to wait for something that takes a few seconds on a machine that is free."""
ALONE = lm_ranks.Ranks(rank=0, world=1, device=torch.device("cpu"))


class Processes:
    """The ranks of one training run, started without torchrun so that each can be signalled by itself.

    They are forks of a process that has imported torch, as the ranks of `tests.pool` are.
    """

    def __init__(self, num_ranks: int, command: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pmoe-train-"))
        # The ranks meet at a store of this process, as under torchrun: no port is looked for and then lost.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meeting = {"MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        self.ranks = []
        for rank in range(num_ranks):
            variables = environment(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num_ranks, **meeting)
            args = (command, variables, str(self.folder / str(rank)))
            self.ranks.append(forks().Process(target=run_command, args=args))
            self.ranks[-1].start()

    def signal(self, number: signal.Signals, ranks: list[int]) -> None:
        for rank in ranks:
            os.kill(self.ranks[rank].pid, number)

    def wait(self, seconds: float = WAIT_SECONDS) -> list[int | None]:
        """Waits for all ranks to end. Returns their exit codes."""
        end = time.monotonic() + seconds
        try:
            for process in self.ranks:
                process.join(max(0.0, end - time.monotonic()))
            return [process.exitcode for process in self.ranks]
        finally:
            for process in self.ranks:
                process.kill()

    def finish(self, expected: int = 0, seconds: float = WAIT_SECONDS) -> str:
        """Waits for all ranks to end with the expected code. Returns what rank 0 wrote to stderr."""
        codes = self.wait(seconds)
        written = [(self.folder / str(rank)).read_text() for rank in range(len(self.ranks))]
        assert codes == [expected] * len(self.ranks), written
        return written[0]


def run_command(command: list[str], variables: dict[str, str], errors: str) -> None:
    """Does what ``python *command`` does, in this process."""
    os.environ.clear()
    os.environ.update(variables)
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.path[:0] = [str(REPOSITORY), str(EXAMPLES)]
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(compile(command[1], "command", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def environment(**variables: object) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), str(EXAMPLES), os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": 1, "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **{name: str(value) for name, value in (ours | variables).items()}}


def start(num_ranks: int, out: Path, *flags: object) -> Processes:
    return Processes(num_ranks, [str(SCRIPT), "--out", str(out), *TINY, *TEXT, *map(str, flags)])


def metrics(out: Path) -> dict:
    return json.loads((out / "metrics.json").read_text())


def last_step(out: Path) -> int:
    pointer = lm_checkpoint.read_pointer(out / "checkpoints")
    return int(pointer["folder"].removeprefix("step_")) if pointer else 0


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while last_step(out) < step:
        assert time.monotonic() < deadline, f"no checkpoint of step {step} in {WAIT_SECONDS} s"
        time.sleep(0.005)


def assert_close(actual: list[float], expected: list[float], relative: float) -> None:
    torch.testing.assert_close(
        torch.tensor(actual, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=relative,
        atol=0,
    )


# ---- the same numbers for any number of ranks ----------------------------------------------------

WITHOUT_AUX = ["--steps", 6, "--eval-every", 3, "--aux-weight", 0, "--layers", 4]


@pytest.mark.slow
def test_two_ranks_report_the_losses_and_gradient_norms_of_one(tmp_path):
    """The load-balance loss is off, because each rank computes it of its own tokens."""
    for num_ranks in (1, 2):
        start(num_ranks, tmp_path / str(num_ranks), *WITHOUT_AUX).finish()
    one, two = (metrics(tmp_path / name)["history"] for name in "12")
    assert len(one["train_loss"]) == 6 and len(one["valid_loss"]) == 1
    for name in ("train_loss", "gradient_norm", "valid_loss"):
        assert_close(two[name], one[name], relative=1e-4)
    assert one["train_bytes"] == two["train_bytes"] == [64 * (step + 1) for step in range(6)]
    rows = [read_run(tmp_path / name).rows for name in "12"]
    assert [(row.step, row.layer) for row in rows[0]] == [(row.step, row.layer) for row in rows[1]]
    assert [row.tokens_per_expert for row in rows[0]][:2] == [row.tokens_per_expert for row in rows[1]][:2]
    assert_close(
        [metrics(tmp_path / "2")["summary"]["valid_loss"]],
        [metrics(tmp_path / "1")["summary"]["valid_loss"]],
        relative=1e-4,
    )


@pytest.mark.slow
def test_a_batch_in_the_same_parts_has_the_load_balance_loss_of_one_rank_too(tmp_path):
    """The run has --resume if-any, and starts because there is nothing to resume."""
    flags = ["--steps", 4, "--aux-weight", 0.5, "--parts", 2, "--resume", "if-any"]
    for num_ranks in (1, 2):
        start(num_ranks, tmp_path / str(num_ranks), *flags).finish()
    one, two = (metrics(tmp_path / name)["history"] for name in "12")
    for name in ("train_loss", "gradient_norm"):
        assert_close(two[name], one[name], relative=1e-4)
    with pytest.raises(SettingsError, match=r"--parts \(3\) must be divisible by the number of ranks \(2\)"):
        check_arguments(parse_arguments(["--parts", "3", "--batch", "6"]), 2)


FIRST_GRADIENTS = """
import sys, torch, train_lm
from lm_ranks import leave, share_gradients, start_ranks, stop_ranks
ranks = start_ranks()
run = train_lm.begin(train_lm.parse_arguments(sys.argv[2:]), ranks)
train_lm.backward(run)
share_gradients(run.model, ranks)
torch.save({name: p.grad for name, p in run.model.named_parameters()}, f"{sys.argv[1]}{ranks.rank}.pt")
stop_ranks()
leave()
"""


@pytest.mark.slow
def test_the_gradients_of_two_ranks_are_those_of_one(tmp_path):
    flags = [*TINY, *TEXT, *map(str, WITHOUT_AUX), "--out", str(tmp_path / "out")]
    Processes(2, ["-c", FIRST_GRADIENTS, str(tmp_path / "rank"), *flags]).finish()
    of_rank = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    run = train_lm.begin(parse_arguments(flags), ALONE)
    train_lm.backward(run)
    num_experts = 0
    for name, parameter in run.model.named_parameters():
        gradients = [gradient[name] for gradient in of_rank]
        if is_expert(parameter):
            together = torch.cat(gradients)
            num_experts += 1
        else:
            assert torch.equal(*gradients), name
            together = gradients[0]
        error = (together - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"
    assert num_experts == 2 * 4  # two MoE layers of w1, w2, b1, b2


# ---- stopping and going on -----------------------------------------------------------------------

# Long enough that a signal sent after the first checkpoints comes before the end, on a busy machine too.
STEPS = 90
LONG = ["--steps", STEPS, "--eval-every", 45, "--checkpoint-every", 5]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    written = start(2, out, *LONG).finish()
    assert f"done: {STEPS} steps" in written
    return out


def assert_same_run(out: Path, reference: Path) -> None:
    """Checks that curves and final checkpoints of two runs are equal, bit for bit."""
    assert metrics(out)["history"] == metrics(reference)["history"]
    ours, theirs = (read_run(folder).scalars["loss"] for folder in (out, reference))
    assert ours == theirs  # whatever was written twice
    assert metrics(out)["summary"]["valid_loss"] == metrics(reference)["summary"]["valid_loss"]
    for name in ("shared.pt", "rank0.pt", "rank1.pt"):
        ours, theirs = (
            torch.load(folder / "checkpoints" / f"step_{STEPS:08}" / name) for folder in (out, reference)
        )
        kind = "dense" if name == "shared.pt" else "experts"
        assert ours[kind].keys() == theirs[kind].keys()
        for parameter, saved in theirs[kind].items():
            assert saved.keys() == {"value", "step", "exp_avg", "exp_avg_sq"}
            for key, tensor in saved.items():
                assert torch.equal(ours[kind][parameter][key], tensor), (parameter, key)


@pytest.mark.slow  # a killed run resumes in the quick tests
def test_ctrl_c_on_any_rank_stops_all_with_a_checkpoint_and_resume_continues_bit_for_bit(
    tmp_path, uninterrupted
):
    out = tmp_path / "run"
    processes = start(2, out, *LONG)
    wait_for_step(out, 5)
    processes.signal(signal.SIGINT, ranks=[1])
    written = processes.finish(expected=0)
    stopped = last_step(out)
    assert 5 <= stopped < STEPS
    assert f"stopped by another rank after step {stopped} of {STEPS}" in written
    assert (out / "curves.png").exists()
    assert f"resumed after step {stopped}" in start(2, out, *LONG, "--resume").finish()
    assert_same_run(out, uninterrupted)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit_from_its_last_checkpoint(tmp_path, uninterrupted):
    out = tmp_path / "run"
    processes = start(2, out, *LONG)
    wait_for_step(out, 30)
    processes.signal(signal.SIGKILL, ranks=[0, 1])
    # Rank 1 may see its peer die and abort before its own signal comes.
    codes = processes.wait()
    assert codes[0] == -signal.SIGKILL and codes[1] in (-signal.SIGKILL, -signal.SIGABRT, 1)
    assert 30 <= last_step(out) < STEPS
    start(2, out, *LONG, "--resume").finish()
    assert_same_run(out, uninterrupted)
    folders = {path.name for path in (out / "checkpoints").iterdir()}
    assert folders == {"latest.json", f"step_{STEPS - 5:08}", f"step_{STEPS:08}"}


@pytest.mark.slow
def test_ctrl_c_under_torchrun_leaves_a_checkpoint_and_ends_without_a_traceback(tmp_path):
    out = tmp_path / "run"
    command = [*TORCHRUN, str(SCRIPT), "--out", str(out), *TINY, *TEXT, *map(str, LONG), "--steps", "100000"]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_step(out, 20)
        process.send_signal(signal.SIGINT)
        written = process.communicate(timeout=WAIT_SECONDS)[1]
    finally:
        process.kill()
    stopped = last_step(out)
    assert stopped >= 20
    assert f"stopped by SIGINT after step {stopped} of 100000" in written
    assert metrics(out)["summary"]["steps"] == stopped
    assert process.returncode == 0 and "Traceback" not in written


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_one(uninterrupted, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    flags = ["--out", out, *TINY, *TEXT, *LONG, "--resume"]
    run = train_lm.begin(parse_arguments(list(map(str, flags))), ALONE)
    expected = metrics(uninterrupted)["summary"]["valid_loss"]
    assert_close([train_lm.evaluate(run, 1024)], [expected], relative=1e-6)


@pytest.mark.slow
def test_resume_refuses_what_would_not_be_the_same_run(uninterrupted, tmp_path):
    flags = [*TINY, *TEXT, *map(str, LONG), "--resume", "--out"]
    for change, message in (
        (["--lr", "0.5", "--data", str(LIBRARY / "json")], "other lr, text"),
        (["--d-model", "32"], "other d_model"),
        (["--dense"], "other dense"),
    ):
        with pytest.raises(lm_checkpoint.CheckpointError, match=message):
            train_lm.begin(parse_arguments([*flags, str(uninterrupted), *change]), ALONE)
    with pytest.raises(lm_checkpoint.CheckpointError, match="nothing to resume"):
        train_lm.begin(parse_arguments([*flags, str(tmp_path)]), ALONE)


# ---- a kill at any moment ------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: no handler runs, and nothing is written any more."""


FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
events_left: list[int] = []


def count_file_event(event: str) -> None:
    if events_left and event in FILE_EVENTS:
        events_left[0] -= 1
        if events_left[0] < 0:
            raise Killed


@pytest.fixture(scope="module")
def audited() -> None:
    sys.addaudithook(lambda event, arguments: count_file_event(event))  # cannot be removed, but is idle


@contextmanager
def killed_at_file_event(moment: int) -> Iterator[None]:
    """Makes every file event raise instead of happening, from the one numbered ``moment`` on."""
    events_left[:] = [moment]
    try:
        yield
    finally:
        events_left.clear()


def test_a_kill_at_any_file_operation_of_a_save_leaves_a_whole_checkpoint(tmp_path, audited, monkeypatch):
    real_sync = os.fsync

    def sync(descriptor: int) -> None:
        count_file_event("open")  # another moment to die at
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    value_at = {}

    def train_and_save(folder: Path, step: int) -> None:
        torch.manual_seed(step)
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        value_at[step] = model.weight.detach().clone()
        lm_checkpoint.save(folder, step, model, optimizer, {}, {}, ALONE)

    for step in (1, 2):
        train_and_save(tmp_path / "begun", step)
    for moment in itertools.count():
        folder = tmp_path / str(moment)
        shutil.copytree(tmp_path / "begun", folder)
        killed = True
        with killed_at_file_event(moment):
            try:
                train_and_save(folder, 3)
                killed = False
            except Killed:
                pass
        step = lm_checkpoint.load(folder, model, optimizer, {}, ALONE)["step"]
        assert step in ((2, 3) if killed else (3,))
        assert torch.equal(model.weight, value_at[step])
        train_and_save(folder, 4)  # and leftovers do not hinder the next
        assert lm_checkpoint.load(folder, model, optimizer, {}, ALONE)["step"] == 4
        lm_checkpoint.load(tmp_path / "begun", model, optimizer, {}, ALONE)
        if not killed:
            break
    assert moment > 12  # fewer would mean that the hook sees nothing


# ---- text ----------------------------------------------------------------------------------------


def test_the_library_text_is_large_and_split_by_file():
    files = lm_data.python_library()
    assert "argparse.py" in files
    assert not any("site-packages" in name for name in files)
    sizes = {name: path.stat().st_size for name, path in files.items()}
    held_out = lm_data.choose_held_out(sizes)
    share = sum(sizes[name] for name in held_out) / sum(sizes.values())
    assert 0.05 <= share < 0.08
    assert lm_data.choose_held_out(dict(reversed(sizes.items()))) == held_out


def test_no_held_out_byte_is_trained_on(tmp_path):
    for index in range(40):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * 100)
    corpus = lm_data.load_corpus([tmp_path], context=16)
    assert not set(corpus.train.tolist()) & set(corpus.valid.tolist())
    assert len(corpus.train) + len(corpus.valid) == 4000
    assert len(corpus.valid) == 200


def test_a_single_file_holds_out_its_end(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(100)) * 10)
    corpus = lm_data.load_corpus([tmp_path / "text"], context=16)
    assert corpus.valid.tolist() == list(range(50, 100))
    assert len(corpus.train) == 950


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "absent", "no such file or folder"),
        (lambda folder: folder, "no files there"),
        (lambda folder: write(folder / "empty", b""), "all 1 files are empty"),
        (
            lambda folder: write(folder / "short", b"abc" * 20),
            r"held-out text has 3 bytes; .* context \(16\)",
        ),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(tmp_path, make, message):
    with pytest.raises(lm_data.DataError, match=message):
        lm_data.load_corpus([make(tmp_path)], context=16)


def write(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


def test_the_ranks_together_see_the_batch_of_one():
    offsets = lm_data.training_offsets(1000, 16, 8, seed=3, step=5)
    slices = [lm_ranks.Ranks(rank=r, world=2, device=torch.device("cpu")).slice(offsets) for r in (0, 1)]
    assert torch.equal(torch.cat(slices), offsets)
    assert not torch.equal(lm_data.training_offsets(1000, 16, 8, seed=3, step=6), offsets)
    assert not torch.equal(lm_data.training_offsets(1000, 16, 8, seed=4, step=5), offsets)
    inputs, targets = lm_data.windows(torch.arange(1000), offsets, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and torch.equal(inputs[:, 0], offsets)


# ---- the dense comparison, the command line ------------------------------------------------------


def test_the_dense_model_has_the_same_active_size():
    sizes = {"d_model": 16, "d_hidden": 32, "layers": 4, "heads": 2, "context": 16}
    sizes |= {"num_experts": 8, "top_k": 2}
    moe, dense = (lm_model.ByteGPT(**sizes, dense=flag) for flag in (False, True))
    assert len(moe.moe_layers()) == 2 and not dense.moe_layers()
    for index in (1, 3):
        experts, ffn = moe.blocks[index].ffn.experts, dense.blocks[index].ffn
        assert experts.w1.numel() * 2 // 8 == ffn.w1.weight.numel()
        assert experts.w2.numel() * 2 // 8 == ffn.w2.weight.numel()
    same = [name for name, _ in dense.named_parameters() if ".ffn.w" not in name]
    assert set(same) <= {name for name, _ in moe.named_parameters()}


@pytest.mark.slow
def test_the_dense_run_draws_and_keeps_the_checkpoints_of_the_run_before(tmp_path):
    old = tmp_path / "checkpoints"
    old.mkdir()
    (old / "latest.json").write_text('{"folder": "step_00000007", "ranks": 1}')
    written = start(1, tmp_path, "--dense", "--steps", 4).finish()
    assert "checkpoints.previous" in written
    assert (tmp_path / "checkpoints.previous" / "latest.json").exists()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert metrics(tmp_path)["summary"]["train_bytes"] == 4 * 64
    run = read_run(tmp_path)
    assert run.scalars["loss"].steps == [1, 2, 3, 4] and run.rows == []
    assert "done: 4 steps" in written and "bits/byte" in written


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-experts", "3", "--top-k", "5"], r"top_k \(5\)"),
        (["--batch", "0"], r"--batch \(0\) must be at least 1"),
        (["--lr", "-1"], r"--lr \(-1.0\) must be positive"),
        (["--heads", "3"], r"d_model \(16\) must be divisible by 2 \* heads \(6\)"),
        (["--parts", "3"], r"--batch \(4\) must be divisible by --parts \(3\)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(tmp_path, flags, message):
    arguments = parse_arguments([*TINY, *TEXT, "--out", str(tmp_path), *flags])
    with pytest.raises(SettingsError, match=message):
        train_lm.begin(arguments, ALONE)


def test_options_of_layers_reach_every_layer_and_only_those_that_are_set_decide_a_run(tmp_path):
    flags = ["--wire", "e4m3", "--wire-backward", "bfloat16", "--wire-combine", "bfloat16"]
    flags += ["--products", "e4m3", "--memory-reuse", "True", "--allow", "e4m3"]
    arguments = parse_arguments([*TINY, *TEXT, "--out", str(tmp_path), *flags])
    run = train_lm.begin(arguments, ALONE)
    expected = {
        "wire": "e4m3", "wire_backward": "bfloat16", "wire_combine": "bfloat16", "products": "e4m3",
        "memory_reuse": True, "allow": "e4m3",
    }  # fmt: skip
    assert run.model.moe_layers()
    for layer in run.model.moe_layers():
        assert {name: getattr(layer, name) for name in expected} == expected
    names = set(expected) & set(deciding_settings(arguments))
    assert names == set(expected)
    assert not set(expected) & set(deciding_settings(parse_arguments([*TINY, *TEXT])))


MARGIN = 0.02
"""Smallest difference of the losses of both models, in nats a byte.

A model whose experts are not trained, whose tokens all take the same experts, or whose tokens take random
experts ends above the dense model, by up to 0.02.
"""


def test_the_number_of_micro_batches_is_measured_unless_it_is_given(capsys):
    assert parse_arguments([]).pipeline is True
    assert [parse_arguments(["--pipeline", text]).pipeline for text in ("4", "True", "false")] == [
        4,
        True,
        False,
    ]
    with pytest.raises(SystemExit):
        parse_arguments(["--pipeline", "two"])
    assert "invalid pipeline value: 'two'" in capsys.readouterr().err
    with pytest.raises(SettingsError, match=r"--pipeline \(0\) must be at least 1"):
        check_arguments(parse_arguments(["--pipeline", "0"]), 2)


@pytest.mark.slow
def test_the_first_step_finds_the_number_of_micro_batches_once_for_all_layers(tmp_path, monkeypatch):
    """At the default sizes of a rank: 2,048 tokens, two layers with 32 experts."""
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path / "cache"))
    sizes = "--d-model 128 --d-hidden 512 --layers 4 --heads 4 --context 128 --batch 32 --num-experts 32"
    start(2, tmp_path / "out", *sizes.split(), "--steps", 2, "--final-eval-bytes", 4096).finish()
    (stored,) = (tmp_path / "cache").glob("degrees*")
    (table,) = json.loads(stored.read_text())["tables"].values()
    ((lowest, highest, num_searches, _),) = table["ranges"]
    assert lowest <= 2048 <= highest
    assert num_searches == 1


def test_small_experts_end_below_the_small_dense_model_after_the_same_bytes(tmp_path):
    sizes = """
        --d-model 32 --d-hidden 64 --layers 2 --heads 2 --context 16 --batch 32 --num-experts 16
        --steps 120 --warmup 10 --pipeline 2
    """.split()  # noqa: SIM905
    losses = {}
    for flag in ([], ["--dense"]):
        run = train_lm.begin(parse_arguments(["--out", str(tmp_path), *TEXT, *sizes, *flag]), ALONE)
        while run.step < run.arguments.steps:
            train_lm.train_step(run, stop_here=False)
            run.step += 1
        losses[bool(flag)] = train_lm.evaluate(run, 16_384)
    assert losses[False] < losses[True] - MARGIN


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_default_model_ends_below_the_dense_one_after_the_same_bytes(tmp_path):
    """Both run a sixth of the default steps, on one rank each: 0.07 apart after 300 steps."""
    runs = {}
    for name, flags in (("experts", []), ("dense", ["--dense"])):
        out = ["--out", str(tmp_path / name), "--steps", "200", "--final-eval-bytes", "131072"]
        runs[name] = Processes(1, [str(SCRIPT), *out, *flags])
    summaries = {}
    for name, run in runs.items():
        run.finish(seconds=1500)
        summaries[name] = metrics(tmp_path / name)["summary"]
    assert summaries["experts"]["train_bytes"] == summaries["dense"]["train_bytes"]
    assert summaries["experts"]["valid_loss"] < summaries["dense"]["valid_loss"] - MARGIN
