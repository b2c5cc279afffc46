"""``transformer_lm_pmoe``, a language model, and ``transformer_pmoe``, for translation: fairseq's
transformers with experts in every --moe-freq-th layer, where their feed-forward part was.

The auxiliary loss leaves a layer as one more output. So it stays in the graph under fairseq's activation
checkpointing, which runs the layer a second time and knows nothing of what a first run has left in
attributes. A forward hook, outside of the checkpoint, takes it off again and keeps it as ``layer.l_aux``
until the criterion fetches it.

Letters: L positions, B sequences, M = d_model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from pmoe import MoELayer
from pmoe.arguments import is_int
from pmoe.comm.ranks import Ranks
from pmoe.integrations.fairseq.checkpoint import own_experts
from pmoe.integrations.fairseq.checks import check_model, layers_with_experts
from pmoe.integrations.fairseq.options import PLACES, layer_arguments, layer_options, places
from pmoe.training.parallel import make_meshes

ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_accurate": "gelu", "swish": "silu"}
"""Of fairseq's --activation-fn, the layer's."""


class FeedForwardExperts(MoELayer):
    """A `pmoe.MoELayer` of tokens (L, B, M) that leaves padding out: it takes no expert's time or capacity,
    and has no part in the auxiliary loss. What comes out for it is 0."""

    is_padding_BL: Tensor | None = None
    """Set by the layer around it before each call."""

    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if mask is None and self.is_padding_BL is not None:
            mask = ~self.is_padding_BL.t()
        return super().forward(x, token_ids, mask)


class MoEDecoderLayer(TransformerDecoderLayerBase):  # type: ignore[misc]
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        # decoder.forward gives every argument behind incremental_state by name.
        self.fc1.is_padding_BL = kwargs.get("self_attn_padding_mask")
        x, attention, _ = super().forward(x, *args, **kwargs)
        return x, attention, self.fc1.l_aux


class MoEEncoderLayer(TransformerEncoderLayerBase):  # type: ignore[misc]
    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self.fc1.is_padding_BL = encoder_padding_mask
        return super().forward(x, encoder_padding_mask, attn_mask), self.fc1.l_aux

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Not the base class's, which first copies what the fused dense layer needs.
        nn.Module._load_from_state_dict(self, *args, **kwargs)


def put_experts(side: Any, name: str, config: Any) -> list[nn.Module]:
    """Replaces layers of a fairseq encoder or decoder (``name``) by layers with experts; returns them."""
    indices = layers_with_experts(config, name)
    for index in indices:
        side.layers[index] = _build(side, name, config)
    if name == "encoder":
        for layer in side.layers:
            # torch's fused dense layer turns the batch around, for all layers or none.
            layer.can_use_fastpath = False
    return [side.layers[index] for index in indices]


def _build(side: Any, name: str, config: Any) -> nn.Module:
    transformer = side.cfg
    layer: Any
    if name == "encoder":
        layer = MoEEncoderLayer(transformer)
        layer._parameters.clear()  # copies of its modules' parameters, for torch's fused dense layer
    else:
        has_no_encoder = side.layers[0].encoder_attn is None  # as in the layers that fairseq has built
        layer = MoEDecoderLayer(transformer, no_encoder_attn=has_no_encoder)
    layer.fc1 = _experts(getattr(transformer, name), transformer.activation_fn, config)
    layer.fc2 = layer.activation_fn = nn.Identity()
    layer.l_aux = None
    if transformer.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=transformer.offload_activations)
    layer.register_forward_hook(_keep_loss)
    return layer  # type: ignore[no-any-return]


def _experts(sizes: Any, activation_fn: str, config: Any) -> FeedForwardExperts:
    arguments = layer_arguments(config)
    if arguments["d_hidden"] is None:
        arguments["d_hidden"] = sizes.ffn_embed_dim
    if arguments["activation"] is None:
        if str(activation_fn) not in ACTIVATIONS and arguments["expert"] == "ffn":
            raise ValueError(
                f"--activation-fn ({activation_fn}) must be one of {', '.join(ACTIVATIONS)}, or "
                "--moe-activation be given"
            )
        arguments["activation"] = ACTIVATIONS.get(str(activation_fn), "gelu")
    ranks = _expert_ranks(config)
    try:
        experts = FeedForwardExperts(d_model=sizes.embed_dim, group=ranks, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--moe-* options, by their names in pmoe.MoELayer: {error}") from error
    for parameter in experts.experts.parameters():
        parameter.expert = True  # type: ignore[attr-defined]  # fairseq's mark: not reduced, not in the norm
    return experts


def _expert_ranks(config: Any) -> Ranks:
    """The ranks that hold all experts together."""
    given = places(config)
    if not given["expert_parallel"]:
        return Ranks.single()
    everyone, size = Ranks(), given["expert_parallel_size"]
    if size is None:
        return everyone
    if not is_int(size) or size < 1 or everyone.size % size:
        raise ValueError(
            f"--moe-expert-parallel-size ({size}) must divide the number of ranks ({everyone.size})"
        )
    if size == 1:
        return Ranks.single()
    return everyone if size == everyone.size else Ranks(make_meshes(ep=size).group("ep"))


def _keep_loss(layer: Any, _: Any, output: tuple[Any, ...]) -> Any:
    *rest, layer.l_aux = output
    return (*rest, None) if len(rest) > 1 else rest[0]


# ---- the models


# All options are text: what is not given then differs from what is.
HELP = {option: option.help.replace("%", "%%") for option in (*PLACES, *layer_options())}
MoELanguageModelConfig: type = dataclasses.make_dataclass(
    "MoELanguageModelConfig",
    [
        (f"moe_{option.name}", str, dataclasses.field(default=option.default, metadata={"help": text}))
        for option, text in HELP.items()
    ],
    bases=(TransformerLanguageModelConfig,),
)


class ExpertParallelModel:
    """What both models add to fairseq's."""

    moe_layers: list[nn.Module]
    """The layers with experts, encoder first."""

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """As fairseq's; of a checkpoint, which holds all experts, it takes this rank's."""
        own = own_experts(self, state_dict)
        return super().load_state_dict(own, strict, model_cfg, args)  # type: ignore[misc]


@register_model("transformer_lm_pmoe", dataclass=MoELanguageModelConfig)
class TransformerLanguageModelPMoE(ExpertParallelModel, TransformerLanguageModel):  # type: ignore[misc]
    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerLanguageModelPMoE:
        check_model(args, ("decoder",))
        model = super().build_model(args, task)
        model.moe_layers = put_experts(model.decoder, "decoder", args)
        return model  # type: ignore[no-any-return]


@register_model("transformer_pmoe")
class TransformerPMoE(ExpertParallelModel, TransformerModel):  # type: ignore[misc]
    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(parser)
        for option, text in HELP.items():
            parser.add_argument(option.flag, default=option.default, help=text)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerPMoE:
        base_architecture(args)
        check_model(args, ("encoder", "decoder"))
        model = super().build_model(args, task)
        model.moe_layers = put_experts(model.encoder, "encoder", args)
        model.moe_layers += put_experts(model.decoder, "decoder", args)
        return model  # type: ignore[no-any-return]


register_model_architecture("transformer_pmoe", "transformer_pmoe")(base_architecture)
