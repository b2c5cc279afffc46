"""Files from outside, as data: the kinds that pmoe reads, and the harms that are done to them.

A kind is a way to make a whole file, a way to read it as users do, and the functions of pmoe that open it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import pmoe
from pmoe.choose import search
from pmoe.choose.search import load_degrees, save_degrees, stored_path
from pmoe.cli import main
from pmoe.cli.cluster import load_cluster
from pmoe.comm.ranks import Ranks
from pmoe.graph.cost import Costs
from pmoe.integrations.logging import StatsWriter
from pmoe.integrations.run_folder import read_run
from pmoe.measure.block_split import load_divisions, read_divisions
from pmoe.measure.profile import load_profile, profile_path, save_profile
from pmoe.planner.degree import DEGREES
from pmoe.planner.granularity import GranularityTable, PassDegrees
from pmoe.training.checkpoint import CheckpointError
from tests.unit.test_checkpoint import assert_same, contents, make, train
from tests.unit.test_profile import MADE

STORED = Path(__file__).resolve().parent / "stored"


class Bomb:
    """A pickle of it is a program, which makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# ---- kinds of files


@dataclass(frozen=True, kw_only=True)
class Kind:
    """make: writes a whole file into a folder and returns its path. read: as users do; returns what it holds.

    opened_by: the functions of pmoe that open it, "file:function". remedy: what a message of damage advises.
    other_version: turns the file into one of another version; None where another file tells the version.
    has_numbers: as text. is_json: its text. has_sum: no flipped bit stays unseen. may_be_missing: reading
    goes on without it.
    also_named: a pattern of what a message may name in its place. grows: reading it also adds to it. is_slow:
    to be harmed in fewer ways.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    opened_by: tuple[str, ...] = ()
    remedy: str
    other_version: Callable[[Path], object] | None = None
    has_numbers: bool = True
    is_json: bool = True
    has_sum: bool = False
    is_slow: bool = False
    may_be_missing: bool = False
    also_named: str = "without another file"
    is_folder: bool = False
    grows: bool = False


def stored_as(
    make: Callable[[Path], Path], remedy: str, other_version: Callable[[Path], object]
) -> Callable[..., Kind]:
    """Of one kind of file, however it is read: takes ``read``, the functions that open it, and what else
    there is to say."""

    def kind(read: Callable[[Path], object], *opened_by: str, **more: Any) -> Kind:
        return Kind(
            make=make, read=read, opened_by=opened_by, remedy=remedy, other_version=other_version, **more
        )

    return kind


def other_format(path: Path) -> None:
    fields = json.loads(path.read_bytes())
    assert "format" in fields
    path.write_text(json.dumps({**fields, "format": 1000}))


# ---- a checkpoint


FILES, LOAD = "pmoe/training/checkpoint_files.py", "pmoe/training/checkpoint.py:load_checkpoint"


def made_checkpoint(folder: Path) -> Path:
    model, optimizer = make()
    train(model, optimizer, 2)
    return pmoe.save_checkpoint(folder / "checkpoints", model, optimizer, step=2, extra={"epoch": 1})


@functools.cache
def as_saved() -> dict[str, torch.Tensor]:
    model, optimizer = make()
    train(model, optimizer, 2)
    return contents(model, optimizer)


def load(path: Path) -> object:
    """Loads a checkpoint, and asserts that the model is as saved, or unchanged if loading fails.

    path: of a file in the checkpoint.
    """
    model, optimizer = make()
    before = contents(model, optimizer)
    folder = next(each for each in path.parents if each.name == "checkpoints")
    try:
        loaded = pmoe.load_checkpoint(folder, model, optimizer)
    except CheckpointError:
        assert_same(contents(model, optimizer), before)
        raise
    assert_same(contents(model, optimizer), as_saved())
    return loaded.step, loaded.extra


def with_right_sums(path: Path) -> None:
    """As who changes a checkpoint on purpose leaves it."""
    sums = path.parent / "sums_0.json"
    found = {name: zlib.crc32((path.parent / name).read_bytes()) for name in json.loads(sums.read_bytes())}
    sums.write_text(json.dumps(found))


def other_plain(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True) | {"format": 1000}, path)
    with_right_sums(path)


def of_checkpoint(name: str, *opened_by: str, **more: Any) -> Kind:
    return Kind(
        make=lambda folder: made_checkpoint(folder) / name,
        read=load,
        opened_by=tuple(each if ":" in each else f"{FILES}:{each}" for each in opened_by),
        remedy="step=|as it was saved",
        **{"has_numbers": False, "is_json": False, "has_sum": True, "is_slow": True, **more},
    )


# ---- measurements


def made_profile(folder: Path) -> Path:
    path = profile_path(MADE, folder)
    save_profile(MADE, path)
    return path


def other_profile(path: Path) -> None:
    fields = json.loads(path.read_bytes())
    fields["versions"]["file"] = 1000
    path.write_text(json.dumps(fields))


def printed(*command: str) -> str:
    """What a command prints; ValueError with the message of one that refuses."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main(command)
        except SystemExit as ended:
            assert ended.code == 2
            raise ValueError(errors.getvalue()) from None
    return out.getvalue()


def planned(*options: str) -> str:
    sizes = ["--d-model", "8", "--d-hidden", "8", "--num-experts", "4", "--tokens", "16", "--ranks", "4"]
    lines = printed("plan", *sizes, *options).splitlines()
    return "\n".join(line for line in lines if not line.startswith("rates:"))  # where the file lies


of_profile = stored_as(made_profile, "pmoe profile|--ranks", other_profile)


def made_divisions(folder: Path) -> Path:
    (stored,) = STORED.glob("division*.json")
    return Path(shutil.copy(stored, folder))


of_divisions = stored_as(made_divisions, "measure again with: pmoe profile --kernels", other_format)


CACHED = {"device": "cpu", "num_ranks": 1, "backend": "none", "versions": {"torch": "2"}}
"""Of a layer: the key of what it learns."""


def made_degrees(folder: Path) -> Path:
    with mock.patch.dict(os.environ, {"PMOE_CACHE": str(folder)}):
        path = stored_path(CACHED)
    points = {tokens: {PassDegrees(n, n)} for tokens, n in ((100, 1), (400, 2), (900, 4))}
    assert path is not None
    save_degrees({"torch.float32": GranularityTable.from_points(points)}, path, CACHED)
    return path


def in_fields(tables: Any) -> object:
    return {name: table.to_fields() for name, table in tables.items()}


def kept_degrees(path: Path) -> object:
    """As a layer with pipeline=True finds them."""
    with (
        mock.patch.object(search, "_LEARNED", {}),
        mock.patch.dict(os.environ, {"PMOE_CACHE": str(path.parent)}),
    ):
        return in_fields(search.load_learned(Ranks(None), CACHED, DEGREES).tables)


of_degrees = stored_as(made_degrees, "save_degrees, or trials, write it", other_format)


def costs_in(folder: Path) -> Costs:
    with mock.patch.dict(os.environ, {"PMOE_CACHE": str(folder)}):
        return Costs(torch.device("cpu"))


def made_costs(folder: Path) -> Path:
    costs = costs_in(folder)
    costs.seconds |= {"aten.mm": 1e-5, "aten.add": 2.5e-6}
    costs.save()
    return next(folder.iterdir())


CLUSTER = """
machines = 2
ranks_per_machine = 2
device_type = "cpu"
memory_bytes = 1e9
compute = { alpha_seconds = 1e-5, beta_seconds = 3e-11 }
copy = { alpha_seconds = 1e-5, beta_seconds = 1e-10 }
inside = { alpha_seconds = 1e-5, beta_seconds = 1e-9 }
outside = { alpha_seconds = 1e-4, beta_seconds = 1e-8 }
"""


def made_cluster(folder: Path) -> Path:
    path = folder / "cluster.toml"
    path.write_text(CLUSTER)
    return path


# ---- a training run


def trained(folder: Path, steps: range) -> None:
    model = torch.nn.Sequential(pmoe.MoELayer(4, 6, 2))
    with StatsWriter(folder, model, every=1) as writer:
        for step in steps:
            model(torch.ones(5, 4)).sum().backward()
            writer.step(step, loss=torch.tensor(float(step)))


def made_run(folder: Path) -> Path:
    trained(folder / "run", range(1, 3))
    return folder / "run"


def reported(path: Path) -> object:
    """The page goes elsewhere: not everybody may write beside the run."""
    return printed("report", str(path.parent), "--out", os.devnull).partition("\n")[0]


def continued(path: Path) -> object:
    trained(path.parent, range(3, 5))
    return read_run(path.parent).scalars["loss"].steps


def of_run(name: str, *opened_by: str, **more: Any) -> Kind:
    return Kind(
        make=lambda folder: made_run(folder) / name,
        opened_by=tuple(f"pmoe/integrations/run_folder.py:{each}" for each in opened_by),
        is_json=name.endswith(".json"),
        remedy="to read the rest|the pmoe that wrote it|another folder|must hold",
        may_be_missing=more.get("grows", False),
        is_slow=True,
        **more,
    )


def made_trace(folder: Path) -> Path:
    """Writes the trace of a layer that is called twice, and returns the file of rank 0."""
    layer = pmoe.MoELayer(4, 6, 4, top_k=2)
    with pmoe.record_routing(layer, folder / "trace"):
        for _ in range(2):
            layer(torch.ones(3, 4))
    return folder / "trace" / "rank_00000.routing"


def traced(path: Path) -> object:
    return {name: [call.tolist() for call in calls] for name, calls in pmoe.read_routing(path.parent).items()}


def other_trace(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 2', 1))


def other_columns(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"step,", b"step,more,", 1))


def made_adapter(folder: Path) -> Path:
    """Writes an adapter in PEFT's files, and returns the configuration."""
    torch.manual_seed(0)
    layer = pmoe.MoELayer(4, 6, 2, expert="swiglu", bias=False)
    pmoe.add_lora(layer, rank=2, alpha=3)
    pmoe.save_lora(layer, folder / "adapter", "qwen-moe-stacked")
    return folder / "adapter" / "adapter_config.json"


def adapter_in(path: Path) -> object:
    """Loads an adapter, and asserts that the layer has none if loading fails."""
    layer = pmoe.MoELayer(4, 6, 2, expert="swiglu", bias=False)
    try:
        adapters = pmoe.load_lora(layer, path.parent, "qwen-moe-stacked")
    except (OSError, ValueError):
        assert not hasattr(layer.experts, "adapters")
        raise
    return [value.tolist() for value in adapters.parameters()], layer.experts.adapter("default").alpha


KINDS: dict[str, Kind] = {
    "adapter: adapter_config.json": Kind(
        make=made_adapter,
        read=adapter_in,
        opened_by=("pmoe/training/lora_files.py:_read_config",),
        remedy="must be|must have|must hold|belongs to no expert",
        also_named="adapter_model.safetensors|the files must have",
    ),
    "adapter: adapter_model.safetensors": Kind(
        make=lambda folder: made_adapter(folder).with_name("adapter_model.safetensors"),
        read=adapter_in,
        remedy="must be|must have|must hold|belongs to no expert",
        is_json=False,
        has_numbers=False,
    ),
    "checkpoint: latest.json": of_checkpoint(
        "../latest.json", "_last", has_numbers=True, is_json=True, has_sum=False
    ),
    "checkpoint: plain.pt": of_checkpoint(
        "plain.pt", "_opened", "_read_plain", "check_plain", other_version=other_plain
    ),
    "checkpoint: random_0.pt": of_checkpoint("random_0.pt", "_opened", "_read_plain"),
    "checkpoint: .metadata": of_checkpoint(".metadata", "_opened", "_Records"),
    "checkpoint: __0_0.distcp": of_checkpoint("__0_0.distcp", "_sum", LOAD),
    "checkpoint: sums_0.json": of_checkpoint(
        "sums_0.json", "read", has_numbers=True, is_json=True, has_sum=False, also_named="No such file"
    ),
    "checkpoint: the folder": of_checkpoint("", is_folder=True),
    "profile": of_profile(load_profile, "pmoe/measure/profile.py:load_profile"),
    "profile, by a command": of_profile(lambda path: planned("--profile", str(path))),
    "profile, in a folder": of_profile(lambda path: planned("--folder", str(path.parent))),
    "cluster": Kind(
        make=made_cluster,
        read=lambda path: load_cluster(path, None),
        opened_by=("pmoe/cli/cluster.py:load_cluster",),
        remedy="must describe a cluster|must be a file to read",
        is_json=False,
    ),
    "divisions": of_divisions(read_divisions, "pmoe/measure/block_split.py:read_divisions"),
    "divisions, in a folder": of_divisions(lambda path: load_divisions(path.parent), may_be_missing=True),
    "degrees": of_degrees(
        lambda path: in_fields(load_degrees(path, CACHED)), "pmoe/choose/search.py:load_degrees"
    ),
    "degrees, in a folder": of_degrees(kept_degrees, may_be_missing=True),
    "operators' seconds": Kind(
        make=made_costs,
        read=lambda path: costs_in(path.parent).seconds,
        opened_by=("pmoe/graph/cost.py:Costs._stored.read",),
        remedy="measured again",
        may_be_missing=True,
    ),
    "routing trace": Kind(
        make=made_trace,
        read=traced,
        opened_by=("pmoe/integrations/routing_trace.py:read_routing",),
        remedy="must hold",
        other_version=other_trace,
        is_json=False,
    ),
    "run: run.json": of_run("run.json", "read_sessions", read=reported, other_version=other_format),
    "run: scalars.csv": of_run("scalars.csv", "_read", read=reported, other_version=other_columns),
    "run: layers.csv": of_run("layers.csv", "_read", read=reported, other_version=other_columns),
    "run: the folder": of_run("", read=lambda path: reported(path / "x"), is_folder=True),
    "run, continued: run.json": of_run("run.json", read=continued, other_version=other_format, grows=True),
    "run, continued: scalars.csv": of_run(
        "scalars.csv", "claim", "mend", "append", read=continued, other_version=other_columns, grows=True
    ),
    "run, continued: layers.csv": of_run(
        "layers.csv", "mend", "append", read=continued, other_version=other_columns, grows=True
    ),
}

NO_FOREIGN_FILE = {
    "pmoe/choose/search.py:from_fields": "the key of the layer itself, as JSON would give it back",
    "pmoe/integrations/deepspeed.py:_entries": "a configuration that DeepSpeed checks next",
    "pmoe/integrations/lightning.py:SpreadDDPStrategy.load_checkpoint": "a file that Lightning has read",
    "pmoe/measure/store.py:load_json": "reads for all that name it",
    "pmoe/integrations/routing_trace.py:_writers": "writes a new file",
    "pmoe/integrations/routing_trace.py:_layers_in": "a line that read_routing has read",
    "pmoe/measure/store.py:save_json": "writes a new file",
    "pmoe/comm/meeting.py:left_out": "a message of another rank",
    "pmoe/comm/mesh_agreement.py:_Board.last_call": "a message of another rank",
    "pmoe/comm/mesh_agreement.py:_refusal_of": "a message of another rank",
    f"{FILES}:_write_to_disk": "writes a new file",
    f"{FILES}:_sync_folder": "opens a folder",
    "pmoe/engine/buffers/host_pool.py:_available_bytes": "the system's /proc/meminfo",
    "pmoe/measure/bench.py:_full_name": "the system's /proc/cpuinfo",
    "pmoe/papers/assumptions.py:assumptions": "a text of pmoe itself",
    "pmoe/papers/assumptions.py:printed": "numbers of pmoe itself",
    "pmoe/cli/simulate.py:_models": "models that pmoe knows",
    "pmoe/convert/state_dicts.py:": "layouts that pmoe knows",
    "pmoe/planner/timeline.py:": "colours and words of pmoe's own pictures",
    "pmoe/cli/__init__.py:_quiet_on_closed_pipe": "the system's /dev/null",
    "pmoe/kernels/heap.py:host_name": "the system's /proc/sys/kernel/random/boot_id",
}
"""Functions that open something else, and what."""


# ---- harms


TOLD, MAYBE, SAME = "told", "told, or no harm", "the same as before"
"""What reading ends with."""

Act = Callable[[Path], object]


@dataclass(frozen=True)
class Harm:
    """ways: of a whole file, what is done to a copy at another path, in one way after another."""

    ways: Callable[[Kind, Path], list[Act]]
    ends: str
    to_folders: bool = False
    by_nobody: bool = False


def bytes_instead(contents: Iterable[bytes]) -> list[Act]:
    return [functools.partial(Path.write_bytes, data=each) for each in contents]


def flipped(kind: Kind, path: Path) -> list[Act]:
    whole, found = path.read_bytes(), []
    draw = random.Random(len(whole))
    for _ in range(4 if kind.is_slow else 30):
        place, changed = draw.randrange(len(whole)), bytearray(whole)
        changed[place] ^= 1 << draw.randrange(8)
        found.append(bytes(changed))
    return bytes_instead(found)


def cut(kind: Kind, path: Path) -> list[Act]:
    whole = path.read_bytes()
    return bytes_instead(whole[:length] for length in (1, len(whole) // 3, len(whole) // 2, len(whole) - 1))


NUMBER = re.compile(r"(?<![\w.-])\d[\d.e+-]*")
HUGE = ("1" + 400 * "0", "9" * 5000, "1e999", "-1")


def with_huge_numbers(kind: Kind, path: Path) -> list[Act]:
    text = path.read_text()
    places = [each.span() for each in NUMBER.finditer(text)]
    few = places[:: max(1, len(places) // (3 if kind.is_slow else 12))]
    return bytes_instead((text[:begin] + huge + text[end:]).encode() for huge in HUGE for begin, end in few)


def values_in(held: Any) -> Iterator[tuple[Any, Any]]:
    """Of JSON: each list and object, with a key or place of it; of lists the first places."""
    if isinstance(held, dict | list):
        for key in list(held) if isinstance(held, dict) else range(min(2, len(held))):
            yield held, key
            yield from values_in(held[key])


def of_other_types(kind: Kind, path: Path) -> list[Act]:
    """Each value of JSON as one of another type, and each key of it left out."""
    found, fields = [], json.loads(path.read_bytes())
    places = list(values_in(fields))
    for held, key in places[:: max(1, len(places) // (3 if kind.is_slow else 12))]:
        before = held[key]
        for other in ([None], {}, "x", 1.5)[: 2 if kind.is_slow else 4]:
            held[key] = other
            found.append(json.dumps(fields).encode())
        held[key] = before
        if isinstance(held, dict):
            found.append(json.dumps(fields).replace(json.dumps(key), '"other"', 1).encode())
    return bytes_instead(found)


def moved(path: Path) -> Path:
    """The whole one, out of the way."""
    return Path(shutil.move(path, path.parent / "moved"))


def instead(act: Callable[[Path, Path], object]) -> Callable[[Kind, Path], list[Act]]:
    """act: of the free path, and where the whole one is."""
    return lambda kind, path: [lambda free: act(free, moved(free))]


def of_torch(value: object) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


RAN = "it ran"
"""The folder that programs make, in that of the file."""


def programs(kind: Kind, path: Path) -> list[Act]:
    return [
        lambda path: path.write_bytes(pickle.dumps(Bomb(path.parent / RAN))),
        lambda path: path.write_bytes(of_torch(Bomb(path.parent / RAN))),
    ]


HARMS: dict[str, Harm] = {
    "a flipped bit": Harm(flipped, MAYBE),
    "cut short": Harm(cut, MAYBE),
    "empty": Harm(lambda kind, path: bytes_instead([b""]), MAYBE),
    "another version": Harm(lambda kind, path: [kind.other_version] if kind.other_version else [], TOLD),
    "a huge number": Harm(with_huge_numbers, MAYBE),
    "values of other types": Harm(of_other_types, MAYBE),
    "a program": Harm(programs, TOLD),
    "a link": Harm(instead(lambda free, whole: free.symlink_to(whole)), SAME, to_folders=True),
    "a dangling link": Harm(instead(lambda free, _: free.symlink_to("nothing")), TOLD, to_folders=True),
    "a link to itself": Harm(instead(lambda free, _: free.symlink_to(free)), TOLD, to_folders=True),
    "a folder": Harm(instead(lambda free, _: free.mkdir()), TOLD),
    "a file": Harm(instead(lambda free, _: free.write_bytes(b"no folder")), TOLD, to_folders=True),
    "not to be read": Harm(
        lambda kind, path: [lambda path: path.chmod(0)], TOLD, to_folders=True, by_nobody=True
    ),
}


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything: for the while this process is nobody's."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
