"""Ranks whose layers have different options: every rank raises an error before any row is sent."""

from __future__ import annotations

import inspect
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.call.options import Switches
from pmoe.comm.base import FlatAllToAll
from pmoe.comm.hierarchical_2d import HierarchicalAllToAll2D
from pmoe.comm.ranks import Ranks
from pmoe.decide import rank_consistency
from tests.gloo.kit import error_of
from tests.pool import Pool, ranks

D_MODEL, D_HIDDEN = 6, 12


class Doubled(pmoe.Callback):
    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * 2


class Told(pmoe.Callback):
    """A callback that only looks on, outside of the layer."""

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x


def build(**options: Any) -> pmoe.MoELayer:
    switches = options.pop("switches", Switches())
    torch.manual_seed(1)  # the dense parts must have the same values
    layer = pmoe.MoELayer(
        **{"d_model": D_MODEL, "d_hidden": D_HIDDEN, "num_experts": 4, "top_k": 2, **options}
    )
    layer.switches = switches
    return layer


class OwnDispatch(FlatAllToAll):
    """A dispatch of a user's own."""


class OwnCombine(FlatAllToAll):
    pass


# (argument, its values, others that go with it): under what name a difference is told, the argument's own
# where that is "", and what is shown of the values.
CASES: list[tuple[str, tuple[Any, Any], dict[str, Any], str, tuple[str, str]]] = [
    ("d_model", (D_MODEL, 8), {}, "", ("6", "8")),
    ("pipeline", (2, 4), {}, "", ("2", "4")),
    ("pipeline", (True, "solve"), {}, "", ("True", "solve")),
    ("pipeline_backward", (None, 2), {}, "", ("None", "2")),
    ("memory_reuse", (False, "S4"), {}, "", ("False", "communicate/recompute")),
    ("memory_reuse", ("S1", "S2"), {}, "", ("offload/offload", "communicate/offload")),
    ("memory_budget", (1 << 20, 1 << 21), {}, "", ("1048576", "2097152")),
    ("d_hidden", (D_HIDDEN, 2 * D_HIDDEN), {}, "", ("12", "24")),
    ("num_experts", (4, 8), {}, "", ("4", "8")),
    ("top_k", (1, 2), {}, "", ("1", "2")),
    ("send_once", (True, False), {}, "", ("True", "False")),
    ("wire", ("e4m3", None), {}, "", ("e4m3", "None")),
    ("wire", ("e4m3", "bfloat16"), {}, "", ("e4m3", "bfloat16")),
    ("wire_backward", (None, "e4m3"), {}, "", ("None", "e4m3")),
    ("wire_combine", (None, "e4m3"), {}, "", ("None", "e4m3")),
    ("allow", ("e4m3", None), {}, "", ("e4m3", "None")),
    ("products", ("e4m3", "mxfp8"), {}, "", ("e4m3", "mxfp8")),
    ("fused", (True, False), {}, "", ("True", "False")),
    ("slack", (1.25, 1.5), {}, "", ("1.25", "1.5")),
    ("capacity_factor", (None, 1.0), {}, "", ("None", "1.0")),
    ("pad_to_capacity", (True, False), {"capacity_factor": 1.0}, "", ("True", "False")),
    ("check_finite", (True, False), {}, "", ("True", "False")),
    ("balance", (False, 1), {}, "", ("False", "1")),
    ("d_latent", (3, 4), {}, "", ("3", "4")),
    ("gate", ("topk", "sigmoid"), {}, "", ("TopKGate(", "SigmoidGate(")),
    ("normalize_gate", (True, False), {}, "gate", ("normalize=True", "normalize=False")),
    ("z_loss_weight", (0.0, 0.1), {}, "gate", ("z_loss_weight=0.0", "z_loss_weight=0.1")),
    ("expert", ("ffn", "swiglu"), {}, "experts", ("FFNExperts(", "SwiGLUExperts(")),
    ("activation", ("gelu", "relu"), {}, "experts", ("activation='gelu'", "activation='relu'")),
    ("bias", (True, False), {}, "experts", ("b1=torch.float32", "num_local_experts=2, w1=")),
    ("dtype", (torch.float32, torch.float64), {}, "gate", ("weight=torch.float32", "weight=torch.float64")),
    ("shared_expert", (None, 4), {}, "", ("None", "FFNExperts(")),
    ("shared_expert", (8, 4), {}, "", ("all_hidden=8", "all_hidden=4")),
    ("shared_gate", (True, False), {"shared_expert": 4}, "", ("SharedGate", "None")),
    ("order", ("sorted", "einsum"), {}, "", ("SortedOrder()", "EinsumOrder()")),
    ("dispatch", ("flat", OwnDispatch()), {}, "", ("FlatAllToAll()", "OwnDispatch")),
    ("combine", ("flat", OwnCombine()), {}, "", ("FlatAllToAll()", "OwnCombine")),
    ("dispatch", ("flat", "hierarchical_2d"), {}, "", ("FlatAllToAll()", "HierarchicalAllToAll2D(")),
    ("nodes", (1, 2), {"dispatch": "hierarchical_1d"}, "dispatch", ("'nodes (1)'", "'nodes (2)'")),
    *(
        ("switches", (Switches(), Switches(**{name: not getattr(Switches(), name)})), {}, "", (name, name))
        for name in ("bypass_local", "one_lane", "program", "program_heaps", "sequential")
    ),
]

NOT_COMPARED = {"self", "group", "mesh", "device", "callbacks"}
"""Arguments that are not compared: they say who takes part and where; callbacks have a test of their own."""


def test_every_argument_of_a_layer_is_compared() -> None:
    arguments = set(inspect.signature(pmoe.MoELayer.__init__).parameters)
    assert {case[0] for case in CASES} == (arguments - NOT_COMPARED) | {"switches"}


def differ_job(rank: int, world: int, name: str, values: tuple[Any, ...], others: Any) -> list[Any]:
    found = []
    for tokens in (5, 0):
        layer = build(**{name: values[rank]}, **others)
        with pytest.raises(ValueError, match="same on every rank") as told:
            layer(torch.randn(tokens * (rank == 0), D_MODEL))
        found += [str(told.value), layer.traffic.total]
    return found


@pytest.mark.parametrize("name, values, others, told_as, shown", CASES, ids=lambda each: str(each)[:24])
def test_an_option_that_differs_is_named_on_every_rank(
    name: str, values: tuple[Any, ...], others: dict[str, Any], told_as: str, shown: tuple[str, str]
) -> None:
    first, second = map(re.escape, shown)
    rule = f"{told_as or name} must be the same on every rank of a MoELayer, and differs"
    for told, sent, told_empty, sent_empty in ranks(2).run(differ_job, name, values, others):
        assert re.fullmatch(rf"{rule}( \(and so do .+\))?: rank 0: .*{first}.*; rank 1: .*{second}.*", told)
        assert told_empty == told and sent == sent_empty == 0


def hooks_job(rank: int, world: int, callback: type[pmoe.Callback]) -> str:
    layer = build(callbacks=[callback()] if rank == 0 else [])
    try:
        layer(torch.randn(3, D_MODEL))
    except ValueError as error:
        return str(error)
    return ""


def test_hooks_inside_must_be_everywhere_and_those_outside_need_not() -> None:
    assert ranks(2).run(hooks_job, Told) == ["", ""]
    for told in ranks(2).run(hooks_job, Doubled):
        assert told.startswith("callbacks must be the same on every rank") and "rank 1: without hooks" in told


def several_job(rank: int, world: int) -> str:
    layer = build(pipeline=1 + rank, slack=1.25 + rank % 2, capacity_factor=1 + rank % 2)
    with pytest.raises(ValueError, match="same on every rank") as told:
        layer(torch.randn(3, D_MODEL))
    return str(told.value)


def test_the_first_difference_has_its_values_told_and_the_others_their_names() -> None:
    found = ranks(4).run(several_job)
    assert len(set(found)) == 1
    assert found[0] == (
        "capacity_factor must be the same on every rank of a MoELayer, and differs (and so do pipeline, "
        "slack): rank 0: 1; rank 1: 2; rank 2: 1; rank 3: 2"
    )


WRONG: dict[str, tuple[Any, str]] = {
    "shared_expert": ("8", "TypeError: shared_expert ('8') must be None, an int or a torch.nn.Module"),
}
"""For some arguments a wrong value, and the error that it raises."""


def wrong_job(rank: int, world: int) -> list[str]:
    """Passes each wrong value on rank 1 alone. Returns this rank's errors, those of rank 0 from its calls.

    Two more errors follow: of a layer for which both ranks pass a wrong value, and of the call after it, to
    which rank 1 comes late.
    """
    messages = list[str]()
    x = torch.randn(3, D_MODEL)
    store = dist.distributed_c10d._get_default_store()
    for name, (value, _) in WRONG.items():
        group = dist.new_group(list(range(world)))
        options = {"dispatch": "hierarchical_2d", "group": group}
        if rank == 1:
            options[name] = value
        messages.append(error_of(lambda options=options: build(**options)(x)))
        store.set(f"{group.group_name} raised {rank}", "")
        store.wait([f"{group.group_name} raised {other}" for other in range(world)])
        build(group=Ranks.single())(x)  # withdraws rank 1's report
        dist.barrier()
    both = error_of(lambda: build(shared_expert="8"))
    layer = build()
    if rank == 1:
        time.sleep(1.3)
    return [*messages, both, error_of(lambda: layer(x))]


def test_an_argument_that_is_wrong_on_one_rank_is_named_on_all() -> None:
    """The other ranks built the layer, and waited for that rank in its first call until the timeout."""
    told, own = ranks(2).run(wrong_job)
    for at, (_, error) in enumerate(WRONG.values()):
        assert own[at].startswith(error)
        assert "failed in comparing the layer's options" in told[at]
        assert f"global rank 1 raised {error}" in told[at]
    # Nobody waits if all ranks raise, however late a rank comes to the next call.
    assert told[-2:] == own[-2:] == [told[-2], ""] and told[-2].startswith(WRONG["shared_expert"][1])


def set_job(rank: int, world: int) -> list[str]:
    """Sets modules of a built layer. Returns the errors of the assignments, and of a call after the last."""
    layer = build()
    x = torch.randn(3, D_MODEL)
    expected = layer(x)
    messages = [
        error_of(lambda name=name: setattr(layer, name, "hierarchical_2d"))
        for name in ("dispatch", "combine", "order")
    ]
    assert torch.equal(layer(x), expected)
    layer.dispatch = HierarchicalAllToAll2D(1)
    assert torch.equal(layer(x), expected)
    if rank == 1:
        layer.combine = HierarchicalAllToAll2D(1)
    return [*messages, error_of(lambda: layer(x))]


def test_names_are_no_modules_of_a_built_layer_and_other_exchanges_are_compared() -> None:
    """The name was stored, and the next call failed: "'str' object has no attribute 'exchange'"."""
    for *messages, differs in ranks(2).run(set_job):
        for name, kind, message in zip(
            ("dispatch", "combine", "order"), ("Dispatch", "Combine", "Order"), messages, strict=True
        ):
            assert message == (
                f"TypeError: {name} ('hierarchical_2d') must be a pmoe.{kind} object on a built layer: pass "
                f"a name when the layer is built, MoELayer(..., {name}='hierarchical_2d')"
            )
        assert differs.startswith("ValueError: combine must be the same on every rank of a MoELayer")


def once_job(rank: int, world: int) -> list[int]:
    """Returns the numbers of comparisons after four events.

    They are a first call, a second call, both passes of a copy under a checkpoint, and a failed call.
    """
    seen: list[int] = []
    compared = mock.Mock(side_effect=rank_consistency.compare_options)
    with mock.patch.object(rank_consistency, "compare_options", compared):
        layer = build(pipeline=2)
        x = torch.randn(3, D_MODEL, requires_grad=True)
        for _ in range(2):
            layer(x).sum().backward()
            seen.append(compared.call_count)
        # Pickled layers know their ranks again, and have compared nothing.
        other = build(pipeline=2)
        for kind in ({}, {"context_fn": pmoe.checkpoint_contexts}):
            checkpoint(nn.Sequential(other), x, use_reentrant=False, **kind).sum().backward()
            seen.append(compared.call_count)
        broken = build(pipeline=1 + rank)
        for _ in range(2):
            with pytest.raises(ValueError):
                broken(x)
            seen.append(compared.call_count)
    dist.barrier()
    return seen


def test_layers_compare_once_and_again_only_where_they_differed() -> None:
    assert ranks(2).run(once_job) == [[1, 1, 2, 2, 3, 4]] * 2


def test_one_rank_has_nobody_to_compare_with() -> None:
    with mock.patch.object(rank_consistency, "compare_options") as compared:
        build()(torch.randn(3, D_MODEL))
    assert not compared.called


# ---- GPUs


def of_kind(rank: int, world: int, kinds: list[str], built_alike: bool = True) -> str:
    """The error of a layer whose ranks take their GPUs for those kinds; "" for none."""
    layer = build(pipeline=1 if built_alike else rank + 1)
    with mock.patch.object(rank_consistency, "kind_of_gpu", lambda device: kinds[rank]):
        try:
            layer(torch.ones(rank, D_MODEL))
        except ValueError as error:
            return str(error)
    return ""


def test_a_mixed_group_of_gpus_is_refused_by_name_on_every_rank() -> None:
    h200, a100 = "NVIDIA H200 (compute capability 9.0)", "NVIDIA A100 (compute capability 8.0)"
    assert ranks(2).run(of_kind, [h200, h200]) == ["", ""]
    errors = ranks(2).run(of_kind, [h200, a100], False)  # the GPUs come before options that differ
    assert errors[0] == errors[1]
    assert f"must be of one kind, and differ: rank 0: {h200}; rank 1: {a100}" in errors[0]
    assert "MoELayer(..., group=...)" in errors[0]
    assert ranks(2).run(of_kind, [h200, h200]) == ["", ""], "all ranks leave the same collectives behind"


def compared_numbers(rank: int, world: int, kind: str) -> list[int]:
    """Returns how many numbers each comparison of a first call has on a rank with this kind of GPU."""
    sizes = list[int]()
    compare = rank_consistency.same

    def counted(ranks: Any, device: torch.device, values: list[float], **options: Any) -> list[bool]:
        sizes.append(len(values))
        return compare(ranks, device, values, **options)

    layer = build()
    with (
        mock.patch.object(rank_consistency, "same", counted),
        mock.patch.object(rank_consistency, "kind_of_gpu", lambda device: kind),
    ):
        layer(torch.ones(2, D_MODEL))
    return sizes


def test_ranks_on_cpus_and_on_gpus_compare_equally_many_numbers() -> None:
    assert rank_consistency.kind_of_gpu(torch.device("cpu")) == ""
    [[of_cpu], _] = ranks(2).run(compared_numbers, "")
    [[of_gpu], _] = ranks(2).run(compared_numbers, "NVIDIA H200 (compute capability 9.0)")
    assert of_cpu == of_gpu


def refused_by_nccl(rank: int, world: int) -> str:
    """The error of a first call in which NCCL refuses two ranks on one GPU."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise dist.DistBackendError("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000")

    layer = build()
    with mock.patch.object(dist, "all_reduce", refuse), pytest.raises(RuntimeError) as caught:
        layer(torch.ones(2, D_MODEL))
    return str(caught.value)


def test_ranks_on_one_gpu_without_the_environment_are_told_what_to_set() -> None:
    with Pool(2) as pool:
        for error in pool.run(refused_by_nccl):
            assert "two ranks of this job use one GPU" in error and "NCCL_HOSTID" in error
            assert "a peer has died" not in error and "rank 1 and rank 0 both on CUDA device 1a000" in error
