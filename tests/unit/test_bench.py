"""Every benchmark can be imported and started, so that a change of pmoe that breaks one is noticed."""

from __future__ import annotations

import contextlib
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import device, timing

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "bench").rglob("*.py"))
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES]
SCRIPTS = [path.name for path in FILES if '\nif __name__ == "__main__":' in path.read_text("utf-8")]


def of_bench() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "bench"]


@pytest.fixture
def nothing_imported() -> Iterator[None]:
    """Removes the modules of bench/ and the clone's folder from this process, as in a fresh one."""
    path, threads = sys.path[:], torch.get_num_threads()
    before = {name: sys.modules.pop(name) for name in of_bench()}
    sys.path[:] = [each for each in path if Path(each).resolve() != ROOT]
    yield
    for name in of_bench():
        del sys.modules[name]
    sys.modules.update(before)
    sys.path[:] = path
    torch.set_num_threads(threads)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports(module: str) -> None:
    importlib.import_module(module)


def test_a_benchmark_is_a_script() -> None:
    assert len(SCRIPTS) >= 19
    assert {path.name for path in FILES if path.name.startswith("bench_")} <= set(SCRIPTS)


def test_every_benchmark_that_a_page_tells_to_run_is_a_script() -> None:
    """A page told readers to run a file that only had functions, so it printed nothing."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("bench/**/*.md")]
    texts = [page.read_text("utf-8") for page in pages]
    named = {name for text in texts for name in re.findall(r"python bench/(\w+\.py)", text)}
    assert len(named) > 20
    assert named <= set(SCRIPTS)


def test_no_benchmark_replaces_a_stored_result_unless_it_is_told_to() -> None:
    """The default folder of results is one that git ignores."""
    assert f"/{timing.OUT.parts[0]}/" in (ROOT / ".gitignore").read_text().split()
    for path in FILES:
        default = re.findall(
            r'add_argument\(\s*"--out".*?default=(.*?)[,)]', path.read_text("utf-8"), re.DOTALL
        )
        assert {each.partition(" / ")[0] for each in default} <= {"OUT", "None"}, path.name


LINES_OF_PROGRESS = re.compile(
    r"\b(counted|interleaved|in_rounds|measure_quietly|progress\.at|in_turn)\(|flush=True"
)
OF_OTHERS = {"bench_fairseq.py": "fairseq's own lines"}
COMPUTED = {"bench_weight_gradients.py", "disturbed_searches.py"}
"""Benchmarks that measure nothing and end within five seconds, so that they need no progress lines."""


def test_every_benchmark_says_how_far_it_is() -> None:
    """Each benchmark loops with `counted`, itself or in a module of bench/ that runs its loop."""
    texts = {path.name: path.read_text("utf-8") for path in FILES}
    loops = {name for name, text in texts.items() if LINES_OF_PROGRESS.search(text)}
    for script in set(SCRIPTS) - set(OF_OTHERS) - COMPUTED:
        used = {f"{name}.py" for name in re.findall(r"from bench\.(\w+) import", texts[script])}
        assert script in loops or (used & loops) - {"timing.py"}, script


def test_lines_of_progress_come_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("bench.timing.time.monotonic", lambda: now[0])
    for _ in timing.counted(range(12), "round"):
        now[0] += 1.0
    assert capsys.readouterr().err.split("\n") == ["round 7 of 12", ""]


@pytest.mark.usefixtures("nothing_imported")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_a_clone_prints_its_help_in_any_folder(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "bench" / script), run_name="__main__")
    assert not stopped.value.code
    assert capsys.readouterr().out.startswith(f"usage: {script}")


# ---- times of a GPU, by a clock that the test sets


class Device:
    """Stands in for torch.cuda, with a clock that only the test advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "_sleep", self.work)
        monkeypatch.setattr(device, "flush_buffer", lambda: torch.ones(1))

    def work(self, milliseconds: float) -> None:
        self.now += milliseconds


class Event:
    def __init__(self, of: Device) -> None:
        self.of = of

    def record(self) -> None:
        self.at = self.of.now

    def synchronize(self) -> None:
        assert self.at == self.of.now  # the last one

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_parts_are_timed_behind_the_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, flush = Device(monkeypatch), torch.ones(1)
    taken = device.part_seconds([lambda: clock.work(3), lambda: clock.work(4)], flush, lead_cycles=100)
    assert taken == [0.003, 0.004]
    assert clock.now == 107
    assert not flush.any()


def test_runs_in_turn_have_a_sample_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Device(monkeypatch)
    found = device.time_in_turn({"a": lambda: clock.work(1), "b": lambda: clock.work(2)}, 4)
    assert {name: timing.samples for name, timing in found.items()} == {
        "a": (0.001,) * 4,
        "b": (0.002,) * 4,
    }
    assert clock.now == (4 + device.WARMUP) * 3


class Ticking:
    """Stands in for torch.cuda's streams and events. It records, in ``told``, what runs on which stream."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.at = "current"

    def stream(self, name: str) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            self.at = name
            yield
            self.at = "current"

        return inside()

    def put(self, what: str) -> None:
        self.told.append(f"{what} on {self.at}")

    def as_torch(self) -> SimpleNamespace:
        ticking = self

        class Event:
            def record(self) -> None:
                self.at = len(ticking.told)

            def elapsed_time(self, later: Event) -> float:
                return float(later.at - self.at)

        side = SimpleNamespace(
            wait_stream=lambda stream: self.told.append("side waits for current"),
            wait_event=lambda event: self.told.append("side waits for the begin"),
        )
        cuda = SimpleNamespace(
            Stream=lambda: side, Event=lambda **_: Event(), stream=lambda _: self.stream("side"),
            current_stream=lambda: None, synchronize=lambda: None, _sleep=lambda cycles: self.put("sleep"),
        )  # fmt: skip
        return SimpleNamespace(cuda=cuda)


def test_a_holder_is_there_before_a_product_and_a_short_kernel_comes_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bench import bench_beside

    ticking = Ticking()
    monkeypatch.setattr(bench_beside, "torch", ticking.as_torch())
    monkeypatch.setattr(bench_beside, "flush_buffer", lambda: torch.zeros(1))
    beside = bench_beside.Beside()
    seconds, outlasted = beside.during_holder(lambda: ticking.put("product"), lambda: ticking.put("holder"))
    assert ticking.told == [
        "side waits for current", "holder on side", "sleep on current", "product on current",
    ]  # fmt: skip
    assert seconds == 1e-3 and not outlasted
    ticking.told.clear()
    (late,) = beside.late(lambda: ticking.put("product"), lambda: ticking.put("short"))
    assert ticking.told == [
        "sleep on current", "product on current", "side waits for the begin", "sleep on side",
        "short on side",
    ]  # fmt: skip
    assert late == 4e-3
