"""Every argument of every public function with values that are none: ValueError or TypeError with its name,
or a documented meaning. The table says which values are taken; an argument that is not in it fails.
"""

from __future__ import annotations

import inspect
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pmoe
from pmoe.experts import FFNExperts, Shard
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.gates import GATES, load_balance_loss, router_z_loss
from pmoe.integrations.logging import StatsWriter
from pmoe.integrations.statistics import stats
from pmoe.training.checkpoint import CheckpointError
from pmoe.training.parallel import make_meshes

M, H, E, K, T = 6, 8, 4, 2, 5

VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "huge": lambda: 1 << 62,
    "0.5": lambda: 0.5,
    "True": lambda: True,
    "False": lambda: False,
    "numpy.int": lambda: np.int64(2),
    "numpy.float": lambda: np.float64(1.5),
    "numpy.bool": lambda: np.bool_(True),
    "numpy.array": lambda: np.ones(2),
    "text": lambda: "no such",
    "spaces": lambda: " topk ",
    "empty": lambda: "",
    "bytes": lambda: b"topk",
    "list": lambda: [1],
    "()": lambda: (),
    "{}": lambda: {},
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "scalar": lambda: torch.tensor(2),
    "sparse": lambda: torch.eye(M).to_sparse(),
    "complex": lambda: torch.ones(T, M, dtype=torch.complex64),
    "integers": lambda: torch.ones(T, M, dtype=torch.int64),
    "meta": lambda: torch.ones(T, M, device="meta"),
    "tensor": lambda: torch.ones(T, M),
    "module": lambda: nn.Linear(M, M),
}

COUNT, NOTHING, NONE, FLAG, FLAG_OR_NONE = "1 2 numpy.int", "", "None", "True False", "None True False"
SHARE = "0 1 2 huge 0.5 numpy.int numpy.float"
POSITIVE = "None 1 2 huge 0.5 numpy.int numpy.float"
NUMBER = "1 2 huge numpy.int"
TEXT = "text spaces empty"
TENSORS = "() {} scalar sparse complex integers meta tensor module"
IGNORED = " ".join(VALUES)
"""Of what is not looked at: said in the docstring."""

GATE = {"d_model": COUNT, "num_experts": COUNT, "top_k": COUNT, "device": NONE, "dtype": NONE}
LEARNT = {**GATE, "normalize": FLAG_OR_NONE, "z_loss_weight": SHARE}
DRAWN = {**GATE, "device": IGNORED, "dtype": IGNORED}
EXPERTS = {
    "d_model": COUNT, "d_hidden": COUNT, "num_local_experts": COUNT, "bias": FLAG, "shard": NOTHING,
    "device": NONE, "dtype": NONE,
}  # fmt: skip

TAKEN: dict[str, dict[str, str]] = {
    "MoELayer": {
        "d_model": COUNT, "d_hidden": COUNT, "num_experts": "2 numpy.int", "top_k": COUNT, "gate": NOTHING,
        "expert": NOTHING, "activation": NOTHING, "bias": FLAG, "capacity_factor": POSITIVE,
        "pad_to_capacity": "False", "pipeline": f"{COUNT} {FLAG}", "memory_reuse": FLAG,
        "pipeline_backward": f"None {COUNT}", "slack": "1 2 huge numpy.int numpy.float",
        "memory_budget": "None huge", "group": NONE, "mesh": NONE, "fused": FLAG, "order": NOTHING,
        "dispatch": NOTHING, "combine": NONE, "nodes": IGNORED, "send_once": FLAG,
        "shared_expert": f"None {COUNT} module", "shared_gate": "False", "callbacks": "empty ()",
        "device": NONE, "dtype": NONE, "normalize_gate": FLAG_OR_NONE, "z_loss_weight": SHARE,
        "check_finite": FLAG_OR_NONE,
    },
    "MoELayer.forward": {"x": "tensor", "token_ids": IGNORED},
    "MoELayer.predict_memory": {
        "num_tokens": f"0 {NUMBER}", "row_counts": NONE, "pipeline": f"None {COUNT}",
        "pipeline_backward": f"None {COUNT}", "memory_reuse": NONE,
    },
    "clip_grad_norm_": {
        "parameters": TENSORS, "max_norm": f"inf {SHARE}",
        "norm_type": "inf 1 2 huge 0.5 numpy.int numpy.float",
        "error_if_nonfinite": FLAG, "foreach": FLAG_OR_NONE, "group": NONE,
    },
    "save_checkpoint": {
        "folder": TEXT, "model": "module", "optimizer": "None ()", "step": f"0 {NUMBER}", "extra": "None {}",
        "keep": COUNT, "group": NONE,
    },
    "load_checkpoint": {
        "folder": NOTHING, "model": NOTHING, "optimizer": "None ()", "step": "None 1", "group": NONE,
    },
    "stats": {"model": "module", "all_ranks": FLAG, "group": NONE, "journal": NONE},
    "GradientReducer": {"model": "module", "group": NONE, "average": FLAG, "partition": "None False"},
    "GradScaler": {"device": TEXT, "group": NONE},
    "parameter_groups": {"parameters": TENSORS},
    "expert_parameters": {"model": "module"},
    "pool": {"device": NONE},
    "parallelize": {"model": NOTHING, "mesh": NOTHING, "reduce": NOTHING},
    "FFNExperts": {**EXPERTS, "activation": NOTHING},
    "SwiGLUExperts": EXPERTS,
    "Shard": {"index": "0", "count": COUNT},
    "Restore": {"dispatched": NOTHING, "hidden": NOTHING},
    "StatsWriter": {
        "run_dir": TEXT, "model": "module", "every": COUNT, "tensorboard": FLAG, "exposed": FLAG,
        "settings": "None {}", "group": NONE,
    },
    "make_meshes": {"mp": NOTHING, "ep": NOTHING, "esp": NOTHING, "device_type": NOTHING},
    "load_balance_loss": {"probability_TE": "integers meta tensor", "expert_TK": "integers"},
    "router_z_loss": {"logits_TE": "integers meta tensor"},
    "TopKGate": LEARNT,
    "SwitchGate": {**LEARNT, "top_k": "1", "normalize": "None False"},
    "NoisyTopKGate": LEARNT,
    "SigmoidGate": LEARNT,
    "DeepSeekGate": {
        **LEARNT, "num_groups": COUNT, "top_groups": "1", "update_speed": SHARE,
        "sequence_length": f"None {COUNT}", "routed_scaling": "1 2 huge 0.5 numpy.int numpy.float",
    },
    "XMoEGate": {**LEARNT, "d_proj": f"None {COUNT}", "score": NOTHING, "temperature": POSITIVE},
    "ExpertChoiceGate": {**GATE, "capacity_factor": POSITIVE, "normalize_over": NOTHING},
    "SoftGate": {**GATE, "slots_per_expert": f"None {COUNT}"},
    "BatchPrioritisedGate": {**LEARNT, "capacity_factor": POSITIVE},
    "HashGate": {**DRAWN, "seed": "-1 0 1 2 huge numpy.int"},
    "RandomGate": DRAWN,
}  # fmt: skip
"""By function and argument, the values that are taken."""

ALSO = {"make_meshes": "must be initialised", "parallelize": "mesh", "load_checkpoint": "latest.json"}
"""What else a refusal may name: what must be there before the argument is looked at."""


# ---- a call of each, the other arguments being right


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(M, M), pmoe.MoELayer(M, H, E, K))


def trained() -> nn.Module:
    found = model()
    found(torch.randn(T, M)).sum().backward()
    return found


def use_layer(**given: Any) -> None:
    layer = pmoe.MoELayer(**{"d_model": M, "d_hidden": H, "num_experts": E, "top_k": K, **given})
    y = layer(torch.randn(T, layer.d_model))
    (y.sum() + layer.l_aux).backward()


def use_gate(kind: Any) -> Callable[..., None]:
    def use(**given: Any) -> None:
        gate = kind(**{"d_model": M, "num_experts": E, **given})
        ids = [torch.arange(T)] if gate.needs_token_ids else []
        gate(torch.randn(T, int(given.get("d_model", M))), *ids)

    return use


def use_loading(**given: Any) -> None:
    folder = tempfile.mkdtemp()
    pmoe.save_checkpoint(folder, model(), step=1)
    pmoe.load_checkpoint(**{"folder": folder, "model": model(), **given})


def use_writer(**given: Any) -> None:
    with StatsWriter(**{"run_dir": f"{tempfile.mkdtemp()}/run", "model": model(), **given}):
        pass


CALLS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "MoELayer": (pmoe.MoELayer, use_layer),
    "MoELayer.forward": (
        pmoe.MoELayer.forward,
        lambda **given: model()[1](**{"x": torch.randn(T, M), **given}).sum().backward(),
    ),
    "MoELayer.predict_memory": (
        pmoe.MoELayer.predict_memory,
        lambda **given: model()[1].predict_memory(**{"num_tokens": 16, **given}),
    ),
    "clip_grad_norm_": (
        pmoe.clip_grad_norm_,
        lambda **given: pmoe.clip_grad_norm_(**{"parameters": trained(), "max_norm": 1.0, **given}),
    ),
    "save_checkpoint": (
        pmoe.save_checkpoint,
        lambda **given: pmoe.save_checkpoint(
            **{"folder": tempfile.mkdtemp(), "model": model(), "step": 1, **given}
        ),
    ),
    "load_checkpoint": (pmoe.load_checkpoint, use_loading),
    "stats": (stats, lambda **given: stats(**{"model": trained(), **given})),
    "GradientReducer": (
        pmoe.GradientReducer,
        lambda **given: pmoe.GradientReducer(**{"model": model(), **given}),
    ),
    "GradScaler": (pmoe.GradScaler, lambda **given: pmoe.GradScaler(**{"device": "cpu", **given})),
    "parameter_groups": (pmoe.parameter_groups, pmoe.parameter_groups),
    "expert_parameters": (pmoe.expert_parameters, pmoe.expert_parameters),
    "pool": (pmoe.pool, pmoe.pool),
    "parallelize": (
        pmoe.parallelize,
        lambda **given: pmoe.parallelize(**{"model": model(), "mesh": None, **given}),
    ),
    "FFNExperts": (
        FFNExperts,
        lambda **given: FFNExperts(**{"d_model": M, "d_hidden": H, "num_local_experts": 2, **given}),
    ),
    "SwiGLUExperts": (
        SwiGLUExperts,
        lambda **given: SwiGLUExperts(**{"d_model": M, "d_hidden": H, "num_local_experts": 2, **given}),
    ),
    "Shard": (Shard, Shard),
    "Restore": (
        pmoe.Restore,
        lambda **given: pmoe.Restore(**{"dispatched": "keep", "hidden": "keep", **given}),
    ),
    "StatsWriter": (StatsWriter, use_writer),
    "make_meshes": (make_meshes, make_meshes),
    "load_balance_loss": (
        load_balance_loss,
        lambda **given: load_balance_loss(
            **{"probability_TE": torch.rand(T, M), "expert_TK": torch.zeros(T, 1, dtype=torch.int64), **given}
        ),
    ),
    "router_z_loss": (router_z_loss, router_z_loss),
    **{kind.__name__: (kind, use_gate(kind)) for kind in GATES.values()},
}


def arguments(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.name != "self" and each.kind not in (2, 4)]


def test_every_argument_of_every_public_function_is_in_the_table() -> None:
    assert {name: set(arguments(function)) for name, (function, _) in CALLS.items()} == {
        name: set(found) for name, found in TAKEN.items()
    }
    left_out = {"Combine", "Dispatch", "Experts", "Gate", "Order", "Routing", "Callback"}  # to be subclassed
    left_out |= {"checkpoint_contexts", "recording", "__version__"}  # without arguments
    assert {*pmoe.__all__} - left_out <= CALLS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_value_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names are paths, too
    wrong = []
    _, call = CALLS[name]
    for argument, taken in TAKEN[name].items():
        for shown, make in VALUES.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    call(**{argument: make()})
                if shown not in taken.split():
                    wrong.append(f"{argument}={shown} was taken")
            except (ValueError, TypeError, CheckpointError, RuntimeError) as error:
                named = argument in str(error) or ALSO.get(name, argument) in str(error)
                if shown in taken.split() or not named or type(error) is RuntimeError and name not in ALSO:
                    wrong.append(f"{argument}={shown}: {type(error).__name__}: {str(error)[:200]}")
    assert not wrong, "\n".join(wrong)
