"""A state dict with one rank's experts cannot be loaded by another rank. What each rank may load works."""

from __future__ import annotations

import copy
import io
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pmoe
from pmoe.comm import failures
from pmoe.comm.ranks import Ranks
from tests.gloo.kit import error_of
from tests.pool import Pool, ranks

M, H, E = 6, 8, 4
CURES = ("pmoe.save_checkpoint", "pmoe.load_checkpoint")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(M, H), nn.ReLU(), nn.Linear(H, M))


EXPERTS = {"ffn": "ffn", "swiglu": "swiglu", "modules": mlp}
CASES = [(expert, spread) for expert in EXPERTS for spread in (True, False)]


def model_of(expert: str, spread: bool, seed: int = 3, **options: Any) -> nn.Module:
    """Returns a model.

    spread: whether pmoe.parallelize spreads its experts; otherwise it has a layer over the default group.
    """
    torch.manual_seed(seed)
    layer = pmoe.MoELayer(M, H, E, 2, expert=EXPERTS[expert], **options)
    model = nn.Sequential(nn.Linear(M, M), layer)
    if spread:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        return pmoe.parallelize(model, mesh)
    return model


def rows(seed: int = 0) -> Tensor:
    return torch.randn(5, M, generator=torch.Generator().manual_seed(seed))


def from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, 0)
    return box[0]


def file_of(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def file_of_rank_0(model: nn.Module, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(from_rank_0(file_of(model.state_dict()))), weights_only=weights_only)


def calm() -> None:
    """Withdraws the failure that a rank has published, so that these ranks can go on."""
    dist.barrier()
    failures.withdraw_failures()
    dist.barrier()


# ---- rank 0's file


def rank_0s_file_job(rank: int, world: int) -> dict[str, str]:
    found = {}
    for expert, spread in CASES:
        for has_run in (False, True):
            for weights_only in (True, False):
                model = model_of(expert, spread)
                if has_run:
                    model(rows())
                state = file_of_rank_0(model, weights_only)
                before = [each.detach().clone() for each in model[1].experts.parameters()]
                name = f"{expert}, {spread=}, {has_run=}, {weights_only=}"
                found[name] = error_of(lambda model=model, state=state: model.load_state_dict(state))
                assert all(map(torch.equal, before, model[1].experts.parameters())), name
        assisted = DistributedDataParallel(model) if spread else model
        found[f"{expert}, {spread=}, wrapped"] = error_of(
            lambda model=assisted: model.load_state_dict(file_of_rank_0(model))
        )
        found[f"{expert}, {spread=}, strict=False"] = error_of(
            lambda model=model, state=state: model.load_state_dict(state, strict=False)
        )
        found[f"{expert}, {spread=}, the experts alone"] = error_of(
            lambda model=model: model[1].experts.load_state_dict(file_of_rank_0(model[1].experts))
        )
    calm()
    return found


def test_rank_0s_file_is_refused_by_the_other_rank_at_load() -> None:
    first, other = ranks(2).run(rank_0s_file_job)
    assert set(first.values()) == {""}  # it is that rank's own
    for name, error in other.items():
        assert error.startswith("ValueError: "), (name, error)
        assert "experts 0 to 1 of 4, saved by rank 0 of 2" in error, (name, error)
        assert "into experts 2 to 3 of 4 (rank 1 of 2)" in error, (name, error)
        assert all(cure in error for cure in CURES), (name, error)


def peer_job(rank: int, world: int) -> tuple[str, float]:
    model = model_of("ffn", spread=True)
    model(rows())
    state = file_of_rank_0(model)
    dist.barrier()
    if rank == 1:
        found = error_of(lambda: model.load_state_dict(state))
        time.sleep(6)  # as a script that ends, but for the connections
        return found, 0.0
    model.load_state_dict(state)
    start = time.monotonic()
    return error_of(lambda: model(rows())), time.monotonic() - start


def part_of_a_copy_job(rank: int, world: int) -> list[Any]:
    """Loads state dicts of experts that FSDP2 shards over their copies, and of adapters of spread experts."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(3)
    model = pmoe.parallelize(pmoe.MoELayer(M, H, E, 2, mesh=mesh["ep"]), mesh, shard_experts=True)
    before = [each.detach().full_tensor() for each in model.experts.parameters()]
    file = file_of(model.state_dict())
    state = file_of_rank_0(model, weights_only=False)
    errors = [error_of(lambda: model.load_state_dict(state))]
    torch.manual_seed(3)
    unsharded = pmoe.parallelize(pmoe.MoELayer(M, H, E, 2, mesh=mesh["ep"]), mesh)
    of_whole = file_of_rank_0(unsharded, weights_only=False)
    errors.append(error_of(lambda: model.load_state_dict(of_whole)))
    own = error_of(lambda: model.load_state_dict(torch.load(io.BytesIO(file), weights_only=False)))
    same = all(map(torch.equal, before, (each.detach().full_tensor() for each in model.experts.parameters())))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    adapted = pmoe.MoELayer(M, H, E, 2, mesh=mesh)
    pmoe.add_lora(adapted, rank=2)
    adapters = pmoe.lora_adapters(pmoe.parallelize(adapted, mesh))
    errors.append(error_of(lambda: adapters.load_state_dict(file_of_rank_0(adapters, weights_only=False))))
    return [*errors, own, same]


def test_a_part_of_a_copy_and_adapters_of_another_rank_are_refused() -> None:
    """torch copies the local values of a DTensor from a file, whatever rank has written the file."""
    found = ranks(2).run(part_of_a_copy_job)
    assert found[0] == ["", "", "", "", True]
    errors = found[1]
    assert re.search(
        r"experts 0 to 3 of 4, part 0 of 2 of a copy .* must not be loaded into experts 0 to 3 of 4, part 1",
        errors[0],
    )
    assert re.search(r"experts 0 to 3 of 4, saved by .* must not be loaded into .*, part 1 of 2", errors[1])
    assert re.search(r"part 0 of 2 of the adapters \(experts\) must not be loaded where", errors[2])
    assert errors[3:] == ["", True]


def test_rank_0_gets_the_refusal_at_its_next_call_instead_of_a_wait() -> None:
    pool = Pool(2)
    try:
        pool.start(peer_job)
        error, seconds = pool.answer(0)
    finally:
        pool.stop()
    assert "global rank 1 raised ValueError" in error and all(cure in error for cure in CURES)
    assert seconds < 6  # of a timeout of 28


# ---- where nothing says whose values they are: the next call compares


def without_metadata(state: Any) -> dict[str, Tensor]:
    return dict(state.items())


def updated(model: nn.Module, state: Any) -> Any:
    """Loads a part, as users do: the model's own state dict with the entries of a file."""
    own = model.state_dict()
    own.update(state)
    return own


def unnamed_job(rank: int, world: int) -> dict[str, list[str]]:
    """Returns for each case the errors of the load, and of three calls.

    Before the last call this rank's own state was loaded.
    """
    found = {}
    for expert, spread in CASES:
        for how in ("a dict", "update", "broadcast_from_rank0"):
            for has_run in (False, True):
                model = model_of(expert, spread)
                own = copy.deepcopy(model.state_dict())
                if has_run:
                    model(rows())
                if how == "broadcast_from_rank0":
                    if spread and expert != "modules":
                        continue  # torch cuts it rightly
                    state = get_model_state_dict(model) if rank == 0 else {}
                    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    load = lambda m=model, s=state, o=options: set_model_state_dict(m, s, options=o)  # noqa: E731
                else:
                    state = file_of_rank_0(model)
                    given = without_metadata(state) if how == "a dict" else updated(model, state)
                    load = lambda model=model, given=given: model.load_state_dict(given)  # noqa: E731
                call = lambda model=model: model(rows())  # noqa: E731
                errors = [error_of(load), error_of(call), error_of(call)]
                model.load_state_dict(own)
                found[f"{expert}, {spread=}, {how}, {has_run=}"] = [*errors, error_of(call)]
    return found


@pytest.mark.slow
def test_the_next_call_finds_ranks_that_loaded_the_same_from_a_dict_without_metadata() -> None:
    for of_rank in ranks(2).run(unnamed_job):
        for name, (load, first, second, mended) in of_rank.items():
            assert (load, mended) == ("", ""), (name, load, mended)
            assert first == second and "ranks 0, 1 have the same since a state dict was loaded" in first, (
                name,
                first,
            )
            assert all(cure in first for cure in (*CURES, "pmoe.copy_into_experts"))


def some_ranks_job(rank: int, world: int) -> list[str]:
    """Ranks 0 and 1 load rank 0's state, the others nothing; with exact counts and with padded rows."""
    found = []
    for options in (
        {},
        {"pipeline": 2, "memory_reuse": "S4"},
        {"capacity_factor": 4.0, "pad_to_capacity": True},
    ):
        model = model_of("ffn", False, **options)
        model(rows())
        state = without_metadata(file_of_rank_0(model))
        if rank < 2:
            model.load_state_dict(state)
        found.append(error_of(lambda model=model: model(rows())))
    return found


def test_two_of_four_ranks_that_loaded_the_same_are_named_to_all() -> None:
    of_ranks = ranks(4).run(some_ranks_job)
    assert of_ranks.count(of_ranks[0]) == 4
    assert all("ranks 0, 1 have the same" in error for error in of_ranks[0]), of_ranks[0]


def one_rank_loads_job(rank: int, world: int) -> list[str]:
    """One rank loads its own values again, in an iteration of its own; gates are called once."""
    found = []
    for expert, spread in CASES:
        model = model_of(expert, spread)
        before = model(rows(rank)).detach()
        asked: list[int] = []
        model[1].gate.register_forward_hook(lambda *_, asked=asked: asked.append(1))
        if rank == 1:
            model.load_state_dict(without_metadata(copy.deepcopy(model.state_dict())))
        y = model(rows(rank))
        y.sum().backward()
        assert torch.equal(y, before) and asked == [1] and not model[1].experts.was_loaded
        found.append("")
    return found


def test_one_rank_alone_may_load_and_nobody_waits() -> None:
    assert ranks(2).run(one_rank_loads_job) == [[""] * len(CASES)] * 2


# ---- what stays right


def loaded_right(
    rank: int, expert: str, spread: bool, folder: str
) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yields (how, a model, another one that has loaded its state)."""

    def pair() -> tuple[nn.Module, nn.Module]:
        return model_of(expert, spread, 3), model_of(expert, spread, 4)

    for has_run in (False, True):
        source, target = pair()
        if has_run:
            source(rows()), target(rows())
        for weights_only in (True, False):
            own = torch.load(io.BytesIO(file_of(source.state_dict())), weights_only=weights_only)
            target.load_state_dict(own)
            yield f"a file of each rank, {has_run=}, {weights_only=}", source, target
        source, target = pair()
        target.load_state_dict(torch.load(io.BytesIO(file_of(source.state_dict()))), assign=True)
        yield "assigned", source, target
        source, target = pair()
        target.load_state_dict(without_metadata(source.state_dict()))
        yield "a dict", source, target
    source, target = pair()
    target[0].load_state_dict(source[0].state_dict())
    state = file_of_rank_0(source)
    for name in [name for name in state if ".experts." in name]:
        del state[name]
    target.load_state_dict(state, strict=False)
    target[1].experts.load_state_dict(source[1].experts.state_dict())
    yield "rank 0's dense part and own experts", source, target
    if spread:
        source, target = pair()
        pmoe.save_checkpoint(folder, source, step=1)
        pmoe.load_checkpoint(folder, target)
        yield "pmoe's", source, target
    if spread and expert == "ffn":
        source, target = pair()
        dcp.save(get_model_state_dict(source), checkpoint_id=f"{folder}/dcp")
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        set_model_state_dict(target, state)
        yield "dcp", source, target
    if spread and expert != "modules":
        for broadcast in (False, True):
            source, target = pair()
            whole = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
            assert whole["1.experts.w1"].shape[0] == E
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            set_model_state_dict(target, whole if rank == 0 or not broadcast else {}, options=options)
            yield f"full_state_dict, {broadcast=}", source, target
        source, target = pair()
        full = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = from_rank_0(dict(get_model_state_dict(source, options=full)))
        alone = model_of(expert, False, 5, group=Ranks.single())
        alone.load_state_dict(whole)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
        yield "rank 0's whole file, before parallelize", source, pmoe.parallelize(alone, mesh)


def right_job(rank: int, world: int, folder: str) -> int:
    count = 0
    for at, (expert, spread) in enumerate(CASES):
        for how, source, target in loaded_right(rank, expert, spread, f"{folder}/{at}"):
            name, count = f"{how}: {expert}, {spread=}", count + 1
            for _ in range(2):
                assert torch.equal(source(rows(rank)), target(rows(rank))), name
            assert not target[1].experts.was_loaded, name
    return count


@pytest.mark.slow
def test_what_each_rank_may_load_is_right_and_raises_no_alarm(tmp_path: Any) -> None:
    for count in ranks(2).run(right_job, str(tmp_path)):
        assert count > 50


def meta_job(rank: int, world: int) -> list[bool]:
    source = model_of("ffn", False)
    with torch.device("meta"):
        target = model_of("ffn", False)
    target.load_state_dict(torch.load(io.BytesIO(file_of(source.state_dict()))), assign=True)
    return [torch.equal(source(rows(rank)), target(rows(rank)))]


def test_a_layer_on_the_meta_device_takes_its_ranks_file() -> None:
    assert ranks(2).run(meta_job) == [[True], [True]]


# ---- files of one rank, refused when they are written


def full_job(rank: int, world: int) -> list[str]:
    options = StateDictOptions(full_state_dict=True)
    models = [model_of("ffn", False), model_of("modules", False), model_of("modules", True)]
    return [error_of(lambda m=model: get_model_state_dict(m, options=options)) for model in models]


def test_a_full_state_dict_of_plain_experts_is_refused_on_every_rank() -> None:
    for rank, errors in enumerate(ranks(2).run(full_job)):
        for error in errors:
            assert error.startswith("ValueError: 1.experts: full_state_dict=True"), error
            assert f"experts {2 * rank} to {2 * rank + 1} of 4" in error and CURES[0] in error


def accelerate_job(rank: int, world: int, folder: str) -> list[str]:
    """Returns errors of accelerate's ways to save, and of a step.

    One way is its save_state with a hook that calls pmoe's.
    """
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(model_of("ffn", spread=True))
    saves: list[Callable[[], object]] = [
        lambda: accelerator.save_state(f"{folder}/state"),
        lambda: accelerator.save_model(model, f"{folder}/model"),
        lambda: accelerator.get_state_dict(model),
        lambda: pmoe.save_checkpoint(f"{folder}/own", model, step=1),
        lambda: model(rows(rank)).sum().backward(),
    ]
    return [error_of(save) for save in saves]


def test_accelerates_files_of_one_rank_are_refused_and_the_run_goes_on(tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    for state, model, asked, own, step in ranks(2).run(accelerate_job, str(tmp_path)):
        for error in (state, model, asked):
            assert error.startswith("ValueError: 1.experts: accelerate's save_state"), error
            assert all(cure in error for cure in CURES)
        assert (own, step) == ("", "")


# ---- upcycling


def dense_of(expert: str, bias: bool = True) -> nn.Module:
    torch.manual_seed(9)
    if expert == "swiglu":
        parts = {name: nn.Linear(M, H, bias=bias) for name in ("gate_proj", "up_proj")}
        return nn.ModuleDict({**parts, "down_proj": nn.Linear(H, M, bias=bias)})
    return mlp() if expert == "modules" else nn.Sequential(nn.Linear(M, H), nn.GELU(), nn.Linear(H, M))


def dense_output(expert: str, dense: nn.Module, x: Tensor) -> Tensor:
    if expert != "swiglu":
        return dense(x)
    return dense["down_proj"](nn.functional.silu(dense["gate_proj"](x)) * dense["up_proj"](x))


def upcycling_job(rank: int, world: int, folder: str) -> None:
    for at, (expert, spread) in enumerate(CASES):
        for has_run in (False, True):
            model, dense = model_of(expert, spread), dense_of(expert)
            if has_run:
                model(rows())
            pmoe.copy_into_experts(model[1], dense)
            x = rows(rank)
            expected = dense_output(expert, dense, model[0](x))
            torch.testing.assert_close(model(x), expected)
            own = torch.load(io.BytesIO(file_of(model.state_dict())))  # says that all are equal
            other = model_of(expert, spread, 4)
            other(x)
            other.load_state_dict(own)
            torch.testing.assert_close(other(x), expected)
            other = model_of(expert, spread, 4)
            other(x)
            other[1].experts.may_be_equal = True
            other.load_state_dict(without_metadata(own))
            torch.testing.assert_close(other(x), expected)
            if spread:
                pmoe.save_checkpoint(f"{folder}/{at}", model, step=int(has_run))
                other = model_of(expert, spread, 4)
                pmoe.load_checkpoint(f"{folder}/{at}", other)
                torch.testing.assert_close(other(x), expected)


@pytest.mark.slow
def test_experts_that_are_equal_on_purpose_have_a_way_of_their_own(tmp_path: Any) -> None:
    ranks(2).run(upcycling_job, str(tmp_path))


def sharded_job(rank: int, world: int) -> None:
    for shape in ((1, 4), (2, 2)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "esp"))
        for expert in ("ffn", "swiglu"):
            dense, x = dense_of(expert), rows(rank)
            model = pmoe.parallelize(model_of(expert, False, group=Ranks.single()), mesh)
            pmoe.copy_into_experts(model[1], dense)
            torch.testing.assert_close(model(x), dense_output(expert, dense, model[0](x)))


def test_upcycling_gives_each_rank_its_part_of_split_experts() -> None:
    ranks(4).run(sharded_job)


# ---- other libraries that write one file: without them, by the functions that they save with


def lightning_job(rank: int, world: int) -> list[str]:
    strategies = pytest.importorskip("lightning.pytorch.strategies")
    fabric = pytest.importorskip("lightning.fabric.strategies")
    model = model_of("ffn", spread=True)
    ddp, own = strategies.DDPStrategy(), strategies.ModelParallelStrategy()
    ddp._lightning_module = own._model = model
    own._save_distributed_checkpoint = True
    return [
        error_of(ddp.lightning_module_state_dict),
        error_of(lambda: fabric.DDPStrategy().get_module_state_dict(model)),
        error_of(own.lightning_module_state_dict),
    ]


def test_lightnings_file_of_one_rank_is_refused_and_its_distributed_one_is_not() -> None:
    pytest.importorskip("lightning")
    for trainer, fabric, distributed in ranks(2).run(lightning_job):
        assert trainer.startswith("ValueError: 1.experts: Lightning's Trainer") and CURES[0] in trainer
        assert fabric.startswith("ValueError: 1.experts: Lightning's Fabric") and CURES[0] in fabric
        assert distributed == ""


def pretrained_job(rank: int, world: int, folder: str) -> str:
    transformers = pytest.importorskip("transformers")

    class Model(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.moe = model_of("ffn", spread=False)

    model = Model(transformers.PretrainedConfig())
    found = error_of(lambda: model.save_pretrained(f"{folder}/{rank}")) if rank == 0 else ""
    calm()
    return found


def test_save_pretrained_of_one_rank_is_refused(tmp_path: Any) -> None:
    pytest.importorskip("transformers")
    first, other = ranks(2).run(pretrained_job, str(tmp_path))
    assert first.startswith(
        "ValueError: moe.1.experts: save_pretrained would write this rank's experts 0 to 1 of 4"
    )
    assert CURES[0] in first and other == ""
