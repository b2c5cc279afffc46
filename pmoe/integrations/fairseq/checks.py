"""Refuses fairseq options that cannot work together, with messages that say what to change.

`check_model` runs before a model is built, `check_training` before a trainer is.
"""

from __future__ import annotations

from typing import Any

from pmoe import gates
from pmoe.arguments import is_int
from pmoe.integrations.fairseq.options import layer_arguments, places

LOOK_AHEAD = (gates.ExpertChoiceGate, gates.SoftGate)
"""Gates that a decoder must not use: in them later tokens change the routing of earlier tokens."""

NOT_BY_ELEMENT = ("adafactor", "composite", "lamb")
"""Optimisers that cannot update experts on several ranks.

adafactor and lamb scale the update of a parameter by norms or means over the whole parameter, but a rank
holds only a part of the experts' parameters. composite consists of several optimisers.
"""


def layers_with_experts(config: Any, side: str) -> list[int]:
    """Returns the indices of the layers that get experts, in the encoder or in the decoder.

    Every freq-th layer gets experts. freq is --moe-encoder-freq or --moe-decoder-freq if the user sets it,
    and --moe-freq otherwise.

    config: the model's options.
    side: "encoder" or "decoder".

    Raises ValueError if freq is not a whole number from 0 to the number of layers.
    """
    place_options = places(config)
    side_freq = place_options[f"{side}_freq"]
    flag = "--moe-freq" if side_freq is None else f"--moe-{side}-freq"
    freq = place_options["freq"] if side_freq is None else side_freq
    if not is_int(freq) or freq < 0:
        raise ValueError(f"{flag} ({freq}) must be a number of layers; 0 means no experts")
    num_layers = getattr(config, f"{side}_layers")
    if freq > num_layers:
        raise ValueError(
            f"{flag} ({freq}) must be at most --{side}-layers ({num_layers}), or no layer has experts (0 is "
            "for none)"
        )
    return [index for index in range(num_layers) if freq and (index + 1) % freq == 0]


def check_model(config: Any, sides: tuple[str, ...]) -> None:
    """Raises ValueError for options with which fairseq could not build the model that they describe.

    config: the model's options.
    sides: "encoder" and "decoder", or only the one that the model has.

    Arguments of MoELayer are not checked here: the layer checks them itself.
    """
    layers_of_side = {side: layers_with_experts(config, side) for side in sides}
    if not any(layers_of_side.values()):
        raise ValueError(
            "--moe-freq (0) must be at least 1 for the encoder or the decoder; for a model without experts "
            "use fairseq's own architecture"
        )
    arguments = layer_arguments(config)
    if arguments["num_experts"] is None:
        raise ValueError("--moe-num-experts (none) must be given, for example --moe-num-experts 8")
    off = {
        "base_layers": "BASE layers and pmoe's experts mark their parameters in the same way",
        "activation_dropout": "experts have no dropout between their products",
        "relu_dropout": "experts have no dropout between their products",
        "scale_fc": "experts have no norm between their products",
        "quant_noise_pq": "experts are not quantised",
        "quant_noise_scalar": "experts are not quantised",
        **{f"{side}_layerdrop": "every rank must run the same layers" for side in sides},
        **{f"{side}_layers_to_keep": "dropped layers would move the experts" for side in sides},
    }
    for name, why in off.items():
        value = getattr(config, name, None)
        if value:
            raise ValueError(f"--{name.replace('_', '-')} ({value}) must be left out: {why}")
    name = str(arguments["gate"])
    gate = next((kind for known, kind in gates.GATES.items() if known == name), None)
    if gate is not None and gate.needs_token_ids:
        raise ValueError(f"--moe-gate ({name}) must be another: fairseq's layers are not given token ids")
    if gate is not None and issubclass(gate, LOOK_AHEAD) and layers_of_side["decoder"]:
        raise ValueError(
            f"--moe-gate ({name}) must be another in a decoder, where later tokens must not decide about "
            "earlier ones; --moe-decoder-freq 0 leaves experts to the encoder"
        )


def check_training(config: Any, criterion: Any, *, num_ranks: int, device_type: str) -> None:
    """Raises ValueError if fairseq cannot train a model with experts with these options.

    config: fairseq's options, a FairseqConfig.
    criterion: the training criterion.
    num_ranks: number of data-parallel ranks.
    device_type: "cuda" or "cpu".
    """
    common = config.common
    distributed = config.distributed_training
    optimization = config.optimization
    if not hasattr(criterion, "moe_aux_weight"):
        name = config.criterion._name
        raise ValueError(
            f"--criterion ({name}) must be cross_entropy_pmoe or label_smoothed_cross_entropy_pmoe: they add "
            "the experts' load-balance loss (--moe-aux-weight 0 for none)"
        )
    if criterion.moe_aux_weight < 0:
        raise ValueError(f"--moe-aux-weight ({criterion.moe_aux_weight}) must be at least 0")
    for name in ("fp16", "bf16", "amp"):
        if getattr(common, name, False) and device_type == "cpu":
            raise ValueError(f"--{name} must be left out on the CPU, which trains in float32")
    if common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads):
        raise ValueError(
            "--fp16 must come with --fp16-no-flatten-grads or --memory-efficient-fp16: in one flat tensor, "
            "parameters of experts cannot be told from others"
        )
    backend = distributed.ddp_backend
    if backend in ("fully_sharded", "slowmo") or (num_ranks > 1 and backend not in ("legacy_ddp", "no_c10d")):
        raise ValueError(
            f"--ddp-backend ({backend}) must be legacy_ddp: it leaves experts' gradients to their own ranks"
        )
    if num_ranks > 1 and not places(config.model)["expert_parallel"]:
        raise ValueError(
            "--moe-expert-parallel (false) must be true to train on several ranks; to keep all experts on "
            "every rank, use --moe-expert-parallel-size 1"
        )
    if num_ranks > 1 and common.amp:
        raise ValueError(
            "--amp must be left out on several ranks, because each would scale its loss by itself: use "
            "--bf16, or --fp16 with --fp16-no-flatten-grads"
        )
    is_spread = num_ranks > 1 and places(config.model)["expert_parallel_size"] != 1
    if is_spread and layer_arguments(config.model)["pad_to_capacity"]:
        raise ValueError(
            "--moe-pad-to-capacity (true) must be false if experts are spread over ranks: the ranks' batches "
            "have different numbers of tokens, because of padding and of the last block of the data"
        )
    if is_spread and getattr(config.task, "eval_bleu", False):
        raise ValueError(
            "--eval-bleu must be left out if experts are spread over ranks: ranks generate sentences of "
            "different lengths, and would wait for each other for ever. Run generate on the checkpoints"
        )
    if config.optimizer is None:
        raise ValueError("--optimizer (none) must be given, for example --optimizer adam")
    optimizer = config.optimizer._name
    if num_ranks > 1 and optimizer in NOT_BY_ELEMENT:
        raise ValueError(
            f"--optimizer ({optimizer}) must be another, such as adam, on several ranks: this one changes an "
            "expert differently if more experts are on its rank"
        )
    off = {
        "--tpu": common.tpu,
        "--model-parallel-size": common.model_parallel_size != 1 and common.model_parallel_size,
        "--quantization-config-path": common.quantization_config_path,
        "--pipeline-model-parallel": distributed.pipeline_model_parallel,
        "--zero-sharding": distributed.zero_sharding != "none" and distributed.zero_sharding,
        "--use-bmuf": optimization.use_bmuf,
        "--store-ema": config.ema.store_ema,
    }
    for flag, value in off.items():
        if value:
            raise ValueError(
                f"{flag} ({value}) must be left out: it does not support experts that are spread over ranks"
            )
