"""By public function and argument, the values that are taken; every other must be refused."""

from __future__ import annotations

from tests.bad_input.values import VALUES

COUNT, NOTHING = "1 2 numpy.int numpy.uint8", ""
NONE, FLAG, FLAG_OR_NONE = "None", "True False", "None True False"
SHARE = "0 1 2 huge 0.5 numpy.int numpy.uint8 numpy.float"
POSITIVE = "None 1 2 huge 0.5 numpy.int numpy.uint8 numpy.float"
SCALING = "1 2 huge 0.5 numpy.int numpy.uint8 numpy.float"
SLACK = "1 2 huge 1e300 numpy.int numpy.uint8 numpy.float"
NUMBER = "1 2 huge numpy.int numpy.uint8"
TEXT = "text spaces"
SCALAR = f"nan inf -inf 1e300 fraction numpy.nan -1 0 0.5 numpy.float scalar {NUMBER}"
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
        "d_model": COUNT, "d_hidden": COUNT, "num_experts": "2 numpy.int numpy.uint8", "top_k": COUNT,
        "gate": NOTHING, "expert": NOTHING, "activation": NOTHING, "bias": FLAG, "capacity_factor": POSITIVE,
        "pad_to_capacity": "False", "pipeline": f"{COUNT} {FLAG}", "memory_reuse": FLAG,
        "pipeline_backward": f"None {COUNT}", "slack": SLACK,
        "memory_budget": "None huge", "group": NONE, "mesh": NONE, "fused": FLAG, "order": NOTHING,
        "dispatch": NOTHING, "combine": NONE, "nodes": IGNORED, "send_once": FLAG,
        "shared_expert": f"None {COUNT} module", "shared_gate": "False", "callbacks": "empty ()",
        "device": NONE, "dtype": NONE, "normalize_gate": FLAG_OR_NONE, "z_loss_weight": SHARE,
        "check_finite": FLAG_OR_NONE, "wire": NONE, "wire_backward": NONE, "wire_combine": NONE,
        "balance": f"0 {FLAG} {NUMBER}", "d_latent": f"None {COUNT}", "allow": NONE, "products": NONE,
    },
    "MoELayer's options": {
        "d_model": NOTHING, "d_hidden": NOTHING, "num_experts": NOTHING, "top_k": "2 numpy.int numpy.uint8",
        "capacity_factor": POSITIVE, "pad_to_capacity": "False", "pipeline": f"{COUNT} {FLAG}",
        "memory_reuse": FLAG, "pipeline_backward": f"None {COUNT}",
        "slack": SLACK, "memory_budget": "None huge", "fused": FLAG,
        "send_once": FLAG, "check_finite": FLAG_OR_NONE, "wire": NONE, "wire_backward": NONE,
        "wire_combine": NONE, "balance": f"0 {FLAG} {NUMBER}", "d_latent": "None", "allow": NONE,
        "products": NONE, "switches": NOTHING,
    },
    "MoELayer.check_spread": {"mesh": NOTHING},
    "MoELayer.spread": {"mesh": NOTHING},
    "MoELayer.save_degrees": {"path": TEXT},
    "MoELayer.load_degrees": {"path": NOTHING},
    "Switches": {
        "bypass_local": FLAG,
        "sequential": FLAG,
        "one_lane": FLAG,
        "program": FLAG,
        "program_heaps": FLAG,
    },
    "MoELayer.forward": {"x": "tensor", "token_ids": IGNORED, "mask": NONE},
    "MoELayer.predict_memory": {
        "num_tokens": f"0 {NUMBER}", "row_counts": NONE, "pipeline": f"None {COUNT}",
        "pipeline_backward": f"None {COUNT}", "memory_reuse": NONE,
    },
    "clip_grad_norm_": {
        "parameters": TENSORS, "max_norm": f"inf 1e300 {SHARE}",
        "norm_type": f"inf 1e300 {SCALING}",
        "error_if_nonfinite": FLAG, "foreach": FLAG_OR_NONE, "group": NONE,
    },
    "save_checkpoint": {
        "folder": TEXT, "model": "module", "optimizer": "None ()", "step": f"0 {NUMBER}", "extra": "None {}",
        "keep": COUNT, "group": NONE,
    },
    "load_checkpoint": {
        "folder": NOTHING, "model": NOTHING, "optimizer": "None ()", "step": "None 1", "group": NONE,
    },
    "to_pmoe": {
        "state": NOTHING, "layout": NOTHING, "prefix": "empty", "experts": "None list", "names": "None {}",
    },
    "export_weights": {
        "model": "module", "layout": NOTHING, "max_bytes": "huge", "dtype": NONE, "rename": "None",
        "group": NONE,
    },
    "save_weights": {
        "model": "module", "folder": TEXT, "layout": NOTHING, "max_shard_bytes": "huge", "max_bytes": "huge",
        "dtype": NONE, "rename": "None", "group": NONE,
    },
    "from_pmoe": {
        "state": NOTHING, "layout": NOTHING, "prefix": f"empty 10**400GiB {TEXT}", "experts": "None list",
        "names": "None {}",
    },
    "run_experts": {
        "owner": "module", "x": "tensor", "index": NOTHING, "weights": NOTHING, "w1": NOTHING, "w2": NOTHING,
        "b1": NONE, "b2": NONE, "activation": NOTHING, "transposed": "False", "group": NONE,
    },
    "stats": {"model": "module", "all_ranks": FLAG, "group": NONE, "journal": NONE, "usage": NONE},
    "ExpertUsage": {"model": "module", "training": FLAG},
    "ExpertUsage.watch": {"model": "module"},
    "GradientReducer": {"model": "module", "group": NONE, "average": FLAG, "partition": "None False"},
    "BoundedSteps": {
        "model": NOTHING, "optimizer": NOTHING, "run": "class function module",
        "run_exactly": "None class function module", "after_step": "None class function module",
        "group": NONE,
    },
    "GradScaler": {"device": NOTHING, "group": NONE},
    "parameter_groups": {
        "parameters": TENSORS, "lr": f"None scalar {SHARE}", "weight_decay": f"None {SHARE}",
    },
    "copy_into_experts": {
        "dense": NOTHING, "noise": SHARE, "drop": "0 1 0.5", "router_std": POSITIVE,
    },
    "add_lora": {
        "model": NOTHING, "rank": "1 2 numpy.int numpy.uint8", "alpha": POSITIVE, "targets": NOTHING,
        "shared": FLAG, "name": NOTHING,
    },
    "use_lora": {"model": NOTHING, "name": NOTHING},
    "disable_lora": {"model": NOTHING},
    "merge_lora": {"model": NOTHING, "name": NONE},
    "unmerge_lora": {"model": NOTHING, "merged": NOTHING},
    "remove_lora": {"model": NOTHING, "name": NONE},
    "lora_adapters": {"model": NOTHING, "name": NONE},
    "save_lora": {
        "model": NOTHING, "folder": TEXT, "layout": NOTHING, "name": NONE,
        "base_model": f"None empty 10**400GiB {TEXT}", "rename": "None", "group": NONE,
    },
    "load_lora": {"model": NOTHING, "folder": NOTHING, "layout": NOTHING, "name": NOTHING, "rename": "None"},
    "freeze_experts": {"model": NOTHING, "experts": "() {} list"},
    "ExpertMuon": {
        "model": NOTHING, "lr": SHARE, "weight_decay": SHARE, "momentum": "0 0.5", "nesterov": FLAG,
        "ns_steps": COUNT, "adjust_lr_fn": NOTHING, "dtype": NOTHING,
    },
    "ExpertMuon.step": {"closure": "None class"},
    "busiest_experts": {"rows": "numpy.array list", "count": "1 2 numpy.int numpy.uint8"},
    "prune_experts": {"state": NOTHING, "keep": "list"},
    "restore_experts": {"pruned": NOTHING, "removed": NOTHING},
    "group_experts": {"state": NOTHING, "rows": NOTHING, "count": "1 2 numpy.int numpy.uint8"},
    "merge_experts": {"state": NOTHING, "groups": NOTHING, "rows": NONE},
    "expert_parameters": {"model": "module"},
    "make_batch_invariant": {"model": NOTHING},
    "pool": {"device": NONE},
    "checkpoint_contexts": {"policy": "None class function module"},
    "parallelize": {"model": NOTHING, "mesh": NOTHING, "reduce": FLAG, "shard_experts": "False"},
    "FFNExperts": {**EXPERTS, "activation": NOTHING},
    "SwiGLUExperts": EXPERTS,
    "Shard": {"index": "0", "count": COUNT},
    "Restore": {"dispatched": NOTHING, "hidden": NOTHING},
    "StatsWriter": {
        "run_dir": TEXT, "model": "module", "every": COUNT, "tensorboard": FLAG, "exposed": FLAG,
        "routing": FLAG, "settings": "None {}", "group": NONE,
    },
    "StatsWriter.step": {"step": f"0 {NUMBER}"},
    "StatsWriter.step's scalars": {"loss": SCALAR},
    "StatsWriter.note's scalars": {"loss": SCALAR},
    "reduce_gradients": {
        "model": "module", "meshes": NOTHING, "divide_by": f"scalar {POSITIVE}", "experts_only": FLAG,
        "replicated": "() {}",
    },
    "DeepSeekGate.update_bias": {"group": NONE},
    "ForcedGate": {
        "gate": NOTHING, "num_experts": NOTHING, "busy": "list", "share": "0 1 0.5",
    },
    "ReplayGate": {"gate": NOTHING, "calls": NOTHING},
    "record_routing": {"model": NOTHING, "folder": f"None {TEXT}"},
    "replay_routing": {"model": NOTHING, "trace": NOTHING, "mask": NONE},
    "engine_routing": {"calls": NOTHING, "layers": NOTHING, "num_tokens": NONE},
    "BalanceLoss": {
        "model": NOTHING, "over": NOTHING, "layers": NOTHING, "sequence_length": NONE, "window": NONE,
        "z_loss_weight": SHARE, "averaged": FLAG, "group": NONE,
    },
    "StepTotals": {"num_tokens": f"0 {NUMBER}", "num_sequences": f"0 {NUMBER}", "counts": "None {}"},
    "BalanceLoss.sequences": {"lengths": NOTHING},
    "BalanceLoss.loss": {"totals": NONE},
    "BalanceLoss.attach": {"y": "meta tensor", "factor": SHARE, "totals": NONE},
    "BalanceLoss.load_state_dict": {"state": NOTHING},
    "read_routing": {"folder": NOTHING, "rank": "0"},
    "ExternalGate.routing": {
        "expert_TK": NOTHING, "weight_TK": NOTHING, "keep_TK": NONE,
        "weights_of": "None class function module",
    },
    "Routing": {
        "expert": NOTHING, "weight": NOTHING, "l_aux": NOTHING, "logits": "None scalar integers tensor",
        "keep": NONE, "token": NONE, "mix": NONE,
    },
    "Mix": {"dispatch": NOTHING, "combine": NOTHING},
    "make_order": {"order": NOTHING},
    "make_exchanges": {"dispatch": NOTHING, "combine": NONE, "nodes": IGNORED},
    "ModuleExperts": {"modules": NOTHING},
    "profile_module": {"module": "module", "rows": NOTHING, "make_input": COUNT},
    "configure": {
        "pipeline": f"{COUNT} {FLAG}", "pipeline_backward": f"None {COUNT}", "memory_reuse": FLAG,
        "memory_budget": f"None {NUMBER}", "slack": SLACK, "order": NOTHING,
        "dispatch": NOTHING, "combine": NONE, "nodes": IGNORED, "send_once": FLAG,
        "wire": NONE, "wire_backward": NONE, "wire_combine": NONE, "balance": f"0 {FLAG} {NUMBER}",
        "allow": NONE, "products": NONE,
    },
    "layers": {"model": "module"},
    "skip_padding": {"model": ""},
    "explain": {"model": NOTHING, "options": NOTHING},
    "torch.compile's options": {
        "parts": COUNT, "weight_gradients": FLAG, "memory_limit": f"None {NUMBER}",
    },
    "Meshes.group": {"name": NOTHING},
    "Meshes.size": {"name": NOTHING},
    "is_expert": {"parameter": IGNORED},
    "make_meshes": {"mp": "1", "ep": "1", "esp": "1", "device_type": NONE},
    "load_balance_loss": {"probability_TE": "integers meta tensor", "expert_TK": "integers"},
    "router_z_loss": {"logits_TE": "integers meta tensor"},
    "TopKGate": LEARNT,
    "SwitchGate": {**LEARNT, "top_k": "1", "normalize": "None False"},
    "NoisyTopKGate": LEARNT,
    "SigmoidGate": LEARNT,
    "DeepSeekGate": {
        **LEARNT, "num_groups": COUNT, "top_groups": "1", "update_speed": SHARE,
        "sequence_length": f"None {COUNT}", "routed_scaling": SCALING,
    },
    "XMoEGate": {**LEARNT, "d_proj": f"None {COUNT}", "score": NOTHING, "temperature": POSITIVE},
    "ExpertChoiceGate": {**GATE, "capacity_factor": POSITIVE, "normalize_over": NOTHING},
    "SoftGate": {**GATE, "slots_per_expert": f"None {COUNT}"},
    "BatchPrioritisedGate": {**LEARNT, "capacity_factor": POSITIVE},
    "HashGate": {**DRAWN, "seed": "-1 0 1 2 huge 10**400 numpy.int numpy.uint8"},
    "RandomGate": DRAWN,
}  # fmt: skip
"""By function and argument, the values that are taken."""

ALSO = {
    "load_checkpoint": "latest.json",
    "MoELayer.load_degrees": "No such file",
    "explain": "model must hold a MoELayer",
    "ExternalGate.routing": "gate (ExternalGate)",
    "Mix": "gate (Returns)",
    "profile_module": "what make_input made",
    "checkpoint_contexts": "Expected op in",
}
"""What else a refusal may name: what must be there before the argument is looked at, or the argument by the
name that it has further in."""

USERS_OWN = {
    ("profile_module", "make_input"): "class function module",
    ("ExpertMuon.step", "closure"): "function module",
    ("export_weights", "rename"): "class module",
    ("save_weights", "rename"): "class module",
}
"""Functions of users', which end in words of their own."""
