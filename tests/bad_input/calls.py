"""A call of each public function with some of its arguments given, the others being right."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pmoe
from pmoe.call.options import Switches
from pmoe.comm import make_exchanges
from pmoe.convert import from_pmoe, to_pmoe
from pmoe.experts import FFNExperts, Shard
from pmoe.experts.modules import ModuleExperts
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.gates import (
    GATES,
    ExternalGate,
    ForcedGate,
    Mix,
    ReplayGate,
    TopKGate,
    load_balance_loss,
    router_z_loss,
)
from pmoe.graph.options import Options
from pmoe.integrations.logging import StatsWriter
from pmoe.integrations.statistics import stats
from pmoe.measure.module_cost import profile_module
from pmoe.ordering import make_order
from pmoe.training.parallel import Meshes, is_expert, make_meshes, reduce_gradients
from tests.bad_input.values import E, H, K, M, T

SIZES = {"d_model": M, "d_hidden": H, "num_local_experts": 2}


def layer(**options: Any) -> pmoe.MoELayer:
    return pmoe.MoELayer(**{"d_model": M, "d_hidden": H, "num_experts": E, "top_k": K, **options})


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(M, M), layer())


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(M, H), nn.Linear(H, M))


def adapted() -> nn.Module:
    made = layer()
    pmoe.add_lora(made, rank=1)
    return made


def use_disabled(model: Any) -> None:
    with pmoe.disable_lora(model):
        pass


def use_unmerge(**given: Any) -> None:
    made = adapted()
    merged = pmoe.merge_lora(made)
    pmoe.unmerge_lora(**{"model": made, "merged": merged, **given})


def trained() -> nn.Module:
    found = model()
    found(torch.randn(T, M)).sum().backward()
    return found


def step(used: pmoe.MoELayer) -> None:
    y = used(torch.randn(T, used.d_model))
    (y.sum() + used.l_aux).backward()


@contextlib.contextmanager
def in_a_group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def use_gate(kind: Any) -> Callable[..., None]:
    def use(**given: Any) -> None:
        gate = kind(**{"d_model": M, "num_experts": E, **given})
        ids = [torch.arange(T)] if gate.needs_token_ids else []
        gate(torch.randn(T, int(given.get("d_model", M))), *ids)

    return use


def use_conversion(function: Any) -> Callable[..., None]:
    def use(**given: Any) -> None:
        state = layer(expert="swiglu", bias=False).state_dict()
        if function is to_pmoe:
            state = from_pmoe(state, "mixtral")
        function(**{"state": state, "layout": "mixtral", **given})

    return use


def use_loading(**given: Any) -> None:
    folder = tempfile.mkdtemp()
    pmoe.save_checkpoint(folder, model(), step=1)
    pmoe.load_checkpoint(**{"folder": folder, "model": model(), **given})


def use_writer(**given: Any) -> None:
    with StatsWriter(**{"run_dir": f"{tempfile.mkdtemp()}/run", "model": model(), **given}):
        pass


def use_step(**given: Any) -> None:
    with StatsWriter(f"{tempfile.mkdtemp()}/run", model(), tensorboard=False) as writer:
        writer.step(**{"step": 1, **given})


def use_note(**given: Any) -> None:
    with StatsWriter(f"{tempfile.mkdtemp()}/run", model(), tensorboard=False) as writer:
        writer.step(1)
        writer.note(**given)


def use_option(**given: Any) -> None:
    used = layer()
    for name, value in given.items():
        setattr(used, name, value)
    step(used)


def use_degrees(**given: Any) -> None:
    used, file = layer(pipeline=True), f"{tempfile.mkdtemp()}/degrees.json"
    used.save_degrees(file)
    used.load_degrees(**{"path": file, **given})


class Returns(nn.Module):
    """A gate that returns a routing of these fields."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__()
        self.fields = fields

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        right = {"expert": torch.zeros(T, 1).long(), "weight": torch.ones(T, 1), "l_aux": torch.zeros(())}
        return pmoe.Routing(**{**right, **self.fields})


def use_routing(**given: Any) -> None:
    step(layer(top_k=1, gate=Returns(given)))


def use_mix(**given: Any) -> None:
    use_routing(mix=Mix(**{"dispatch": torch.rand(T, T), "combine": torch.rand(T, T), **given}))


def use_external(**given: Any) -> None:
    gate = ExternalGate()
    used = layer(top_k=1, gate=gate)
    right = {"expert_TK": torch.zeros(T, 1).long(), "weight_TK": torch.ones(T, 1)}
    with gate.routing(**{**right, **given}):
        step(used)


def use_forced(**given: Any) -> None:
    right = {"gate": TopKGate(M, E, K), "num_experts": E, "busy": (0, 1), "share": 0.5}
    ForcedGate(**{**right, **given})(torch.randn(T, M))


def use_replay(**given: Any) -> None:
    right = {"gate": TopKGate(M, E, K), "calls": [torch.zeros(T, K, dtype=torch.int64)]}
    ReplayGate(**{**right, **given})(torch.randn(T, M))


def use_recording(**given: Any) -> None:
    with pmoe.record_routing(**{"model": model(), "folder": tempfile.mkdtemp(), **given}):
        pass


def use_replay_of_model(**given: Any) -> None:
    used = layer(top_k=K)
    with pmoe.record_routing(used) as trace:
        used(torch.randn(T, M))
    with pmoe.replay_routing(**{"model": used, "trace": trace, **given}):
        used(torch.randn(T, M))


def use_engine(**given: Any) -> None:
    right = {"calls": [torch.zeros(T, 1, K, dtype=torch.int64)], "layers": ["a"]}
    pmoe.engine_routing(**{**right, **given})


def use_sequences(**given: Any) -> None:
    used = layer()
    with pmoe.BalanceLoss(used, over="sequence").sequences(**{"lengths": [T], **given}):
        used(torch.randn(T, M))


def use_balance(**given: Any) -> None:
    used = layer()
    balance = pmoe.BalanceLoss(used)
    used(torch.randn(T, M))
    balance.loss(**given)


def use_attach(**given: Any) -> None:
    used = layer()
    balance = pmoe.BalanceLoss(used)
    y = used(torch.randn(T, M))
    balance.attach(**{"y": y, "factor": 0.1, "totals": None, **given})


def use_restore(**given: Any) -> None:
    pruned, removed = pmoe.prune_experts(layer().state_dict(), [0])
    pmoe.restore_experts(**{"pruned": pruned, "removed": removed, **given})


def use_export(**given: Any) -> None:
    right = {"model": layer(expert="swiglu", bias=False), "layout": "qwen-moe"}
    list(pmoe.export_weights(**{**right, **given}))


def use_files(**given: Any) -> None:
    folder = f"{tempfile.mkdtemp()}/out"
    right = {"model": layer(expert="swiglu", bias=False), "layout": "qwen-moe", "folder": folder}
    pmoe.save_weights(**{**right, **given})


def use_save_lora(**given: Any) -> None:
    made = layer(expert="swiglu", bias=False)
    pmoe.add_lora(made, rank=1)
    folder = f"{tempfile.mkdtemp()}/out"
    pmoe.save_lora(**{"model": made, "layout": "qwen-moe", "folder": folder, **given})


def use_load_lora(**given: Any) -> None:
    folder = f"{tempfile.mkdtemp()}/out"
    use_save_lora(folder=folder)
    made = layer(expert="swiglu", bias=False)
    pmoe.load_lora(**{"model": made, "layout": "qwen-moe", "folder": folder, **given})


def use_trace(**given: Any) -> None:
    folder = tempfile.mkdtemp()
    with pmoe.record_routing(model(), folder):
        pass
    pmoe.read_routing(**{"folder": folder, **given})


def use_configure(**given: Any) -> None:
    from pmoe.integrations.transformers.layers import configure  # imports transformers

    try:
        configure(**given)
    finally:
        configure()


def use_layers(**given: Any) -> None:
    from pmoe.integrations.transformers.layers import layers

    layers(**given)


def use_skip_padding(**given: Any) -> None:
    from pmoe.integrations.transformers.padding import skip_padding

    skip_padding(**given)


def use_explain(**given: Any) -> None:
    from pmoe.graph.explain import explain  # imports the compiler

    explain(given.pop("model") if "model" in given else model(), torch.randn(T, M), **given)


def use_reduction(**given: Any) -> None:
    with in_a_group():
        reduce_gradients(**{"model": trained(), "meshes": make_meshes(), **given})


def use_meshes(**given: Any) -> None:
    with in_a_group():
        make_meshes(**given)


def use_mesh(name: str) -> Callable[..., None]:
    def use(**given: Any) -> None:
        with in_a_group():
            getattr(make_meshes(), name)(**given)

    return use


def use_parallelize(**given: Any) -> None:
    with in_a_group():
        pmoe.parallelize(**{"model": model(), "mesh": make_meshes().experts, **given})


def use_spread(name: str) -> Callable[..., None]:
    def use(**given: Any) -> None:
        with in_a_group():
            getattr(layer(), name)(**{"mesh": make_meshes().experts, **given})

    return use


def with_right(function: Callable[..., Any], **right: Callable[[], Any]) -> Callable[..., Any]:
    """Calls the function with right arguments in place of those that are not given."""
    return lambda **given: function(
        **{name: make() for name, make in right.items() if name not in given}, **given
    )


CALLS: Mapping[str, tuple[Any, Callable[..., Any]]] = {
    "MoELayer": (pmoe.MoELayer, lambda **given: step(layer(**given))),
    "MoELayer's options": (None, use_option),
    "MoELayer.forward": (
        pmoe.MoELayer.forward,
        lambda **given: layer()(**{"x": torch.randn(T, M), **given}).sum().backward(),
    ),
    "MoELayer.predict_memory": (
        pmoe.MoELayer.predict_memory,
        lambda **given: layer().predict_memory(**{"num_tokens": 16, **given}),
    ),
    "MoELayer.check_spread": (pmoe.MoELayer.check_spread, use_spread("check_spread")),
    "MoELayer.spread": (pmoe.MoELayer.spread, use_spread("spread")),
    "MoELayer.save_degrees": (
        pmoe.MoELayer.save_degrees,
        lambda **given: layer(pipeline=True).save_degrees(**given),
    ),
    "MoELayer.load_degrees": (pmoe.MoELayer.load_degrees, use_degrees),
    "Switches": (Switches, Switches),
    "Restore": (
        pmoe.Restore,
        lambda **given: pmoe.Restore(**{"dispatched": "keep", "hidden": "keep", **given}),
    ),
    "Routing": (pmoe.Routing, use_routing),
    "Mix": (Mix, use_mix),
    "ExternalGate.routing": (ExternalGate.routing, use_external),
    "ForcedGate": (ForcedGate, use_forced),
    "ReplayGate": (ReplayGate, use_replay),
    "record_routing": (pmoe.record_routing, use_recording),
    "read_routing": (pmoe.read_routing, use_trace),
    "replay_routing": (pmoe.replay_routing, use_replay_of_model),
    "engine_routing": (pmoe.engine_routing, use_engine),
    "BalanceLoss": (pmoe.BalanceLoss, with_right(pmoe.BalanceLoss, model=layer)),
    "BalanceLoss.sequences": (pmoe.BalanceLoss.sequences, use_sequences),
    "BalanceLoss.loss": (pmoe.BalanceLoss.loss, use_balance),
    "BalanceLoss.attach": (pmoe.BalanceLoss.attach, use_attach),
    "BalanceLoss.load_state_dict": (
        pmoe.BalanceLoss.load_state_dict,
        lambda **given: pmoe.BalanceLoss(layer(), over="window", window=2).load_state_dict(**given),
    ),
    "StepTotals": (pmoe.StepTotals, lambda **given: pmoe.StepTotals(**{"num_tokens": 1, **given})),
    "DeepSeekGate.update_bias": (
        GATES["deepseek"].update_bias,  # type: ignore[attr-defined]
        lambda **given: GATES["deepseek"](M, E).update_bias(**given),  # type: ignore[operator]
    ),
    "clip_grad_norm_": (
        pmoe.clip_grad_norm_,
        with_right(pmoe.clip_grad_norm_, parameters=trained, max_norm=lambda: 1.0),
    ),
    "save_checkpoint": (
        pmoe.save_checkpoint,
        with_right(pmoe.save_checkpoint, folder=tempfile.mkdtemp, model=model, step=lambda: 1),
    ),
    "load_checkpoint": (pmoe.load_checkpoint, use_loading),
    "export_weights": (pmoe.export_weights, use_export),
    "save_weights": (pmoe.save_weights, use_files),
    "to_pmoe": (to_pmoe, use_conversion(to_pmoe)),
    "from_pmoe": (from_pmoe, use_conversion(from_pmoe)),
    "run_experts": (
        pmoe.run_experts,
        with_right(
            pmoe.run_experts,
            owner=lambda: nn.Linear(1, 1),
            x=lambda: torch.randn(T, M),
            index=lambda: torch.zeros(T, K, dtype=torch.int64),
            weights=lambda: torch.ones(T, K),
            w1=lambda: torch.randn(E, 2 * H, M),
            w2=lambda: torch.randn(E, M, H),
        ),
    ),
    "stats": (stats, with_right(stats, model=trained)),
    "ExpertUsage": (pmoe.ExpertUsage, with_right(pmoe.ExpertUsage, model=model)),
    "ExpertUsage.watch": (
        pmoe.ExpertUsage.watch,
        lambda **given: pmoe.ExpertUsage(model()).watch(**given),
    ),
    "StatsWriter": (StatsWriter, use_writer),
    "StatsWriter.step": (StatsWriter.step, use_step),
    "StatsWriter.step's scalars": (None, use_step),
    "StatsWriter.note's scalars": (None, use_note),
    "GradientReducer": (pmoe.GradientReducer, with_right(pmoe.GradientReducer, model=model)),
    "BoundedSteps": (
        pmoe.BoundedSteps,
        with_right(
            pmoe.BoundedSteps,
            model=lambda: pmoe.MoELayer(M, H, E, K, capacity_factor=1.0, pad_to_capacity=True),
            optimizer=lambda: torch.optim.SGD(nn.Linear(1, 1).parameters()),
            run=lambda: print,
        ),
    ),
    "GradScaler": (pmoe.GradScaler, with_right(pmoe.GradScaler, device=lambda: "cpu")),
    "parameter_groups": (pmoe.parameter_groups, with_right(pmoe.parameter_groups, parameters=model)),
    "add_lora": (pmoe.add_lora, with_right(pmoe.add_lora, model=layer, rank=lambda: 1)),
    "use_lora": (pmoe.use_lora, with_right(pmoe.use_lora, model=adapted, name=lambda: "default")),
    "disable_lora": (pmoe.disable_lora, lambda **given: use_disabled(**{"model": adapted(), **given})),
    "merge_lora": (pmoe.merge_lora, with_right(pmoe.merge_lora, model=adapted)),
    "unmerge_lora": (pmoe.unmerge_lora, use_unmerge),
    "remove_lora": (pmoe.remove_lora, with_right(pmoe.remove_lora, model=adapted)),
    "lora_adapters": (pmoe.lora_adapters, with_right(pmoe.lora_adapters, model=adapted)),
    "save_lora": (pmoe.save_lora, use_save_lora),
    "load_lora": (pmoe.load_lora, use_load_lora),
    "freeze_experts": (
        pmoe.freeze_experts,
        with_right(pmoe.freeze_experts, model=layer, experts=lambda: [0]),
    ),
    "ExpertMuon": (pmoe.ExpertMuon, with_right(pmoe.ExpertMuon, model=layer)),
    "ExpertMuon.step": (pmoe.ExpertMuon.step, lambda **given: pmoe.ExpertMuon(layer()).step(**given)),
    "busiest_experts": (
        pmoe.busiest_experts,
        lambda **given: pmoe.busiest_experts(**{"rows": [3, 2], "count": 1, **given}),
    ),
    "prune_experts": (
        pmoe.prune_experts,
        lambda **given: pmoe.prune_experts(**{"state": layer().state_dict(), "keep": [0], **given}),
    ),
    "restore_experts": (pmoe.restore_experts, use_restore),
    "group_experts": (
        pmoe.group_experts,
        lambda **given: pmoe.group_experts(
            **{"state": layer().state_dict(), "rows": [1] * E, "count": 1, **given}
        ),
    ),
    "merge_experts": (
        pmoe.merge_experts,
        lambda **given: pmoe.merge_experts(**{"state": layer().state_dict(), "groups": [range(E)], **given}),
    ),
    "copy_into_experts": (
        pmoe.copy_into_experts,
        with_right(pmoe.copy_into_experts, layer=layer, dense=dense),
    ),
    "make_batch_invariant": (pmoe.make_batch_invariant, pmoe.make_batch_invariant),
    "expert_parameters": (pmoe.expert_parameters, pmoe.expert_parameters),
    "pool": (pmoe.pool, pmoe.pool),
    "checkpoint_contexts": (pmoe.checkpoint_contexts, pmoe.checkpoint_contexts),
    "parallelize": (pmoe.parallelize, use_parallelize),
    "reduce_gradients": (reduce_gradients, use_reduction),
    "make_meshes": (make_meshes, use_meshes),
    "Meshes.group": (Meshes.group, use_mesh("group")),
    "Meshes.size": (Meshes.size, use_mesh("size")),
    "is_expert": (is_expert, is_expert),
    "FFNExperts": (FFNExperts, lambda **given: FFNExperts(**{**SIZES, **given})),
    "SwiGLUExperts": (SwiGLUExperts, lambda **given: SwiGLUExperts(**{**SIZES, **given})),
    "ModuleExperts": (ModuleExperts, ModuleExperts),
    "Shard": (Shard, Shard),
    "make_order": (make_order, make_order),
    "make_exchanges": (
        make_exchanges,
        with_right(make_exchanges, dispatch=lambda: "flat", combine=lambda: None, nodes=lambda: None),
    ),
    "profile_module": (
        profile_module,
        with_right(profile_module, module=nn.Tanh, rows=lambda: (1, 2), make_input=lambda: M),
    ),
    "configure": (None, use_configure),
    "layers": (None, use_layers),
    "skip_padding": (None, use_skip_padding),
    "explain": (None, use_explain),
    "torch.compile's options": (Options, lambda **given: Options.of(given)),
    "load_balance_loss": (
        load_balance_loss,
        with_right(
            load_balance_loss,
            probability_TE=lambda: torch.rand(T, M),
            expert_TK=lambda: torch.zeros(T, 1, dtype=torch.int64),
        ),
    ),
    "router_z_loss": (router_z_loss, router_z_loss),
    **{kind.__name__: (kind, use_gate(kind)) for kind in GATES.values()},
}
