"""fairseq's transformers with experts in place of the feed-forward part of every --moe-freq-th layer.

``transformer_lm_pmoe`` is a language model, ``transformer_pmoe`` is for translation.

The auxiliary loss leaves a layer as one more output:

    layer (fc1 is the MoELayer)  ->  x, attention, l_aux
    checkpoint                       runs the layer again in backward
    forward hook                     stores l_aux in layer.l_aux, and removes it from the output
    criterion                        reads layer.l_aux

If it were stored inside the layer, it would be cut off from the graph under fairseq's activation
checkpointing, which only connects outputs to the second run.

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
"""The layer's activation for each --activation-fn of fairseq."""


class FeedForwardExperts(MoELayer):
    """A `pmoe.MoELayer` of tokens (L, B, M) that leaves padding out.

    Padding goes to no expert, uses no capacity and does not count in the auxiliary loss. Its output is 0.
    """

    is_padding_BL: Tensor | None = None
    """(B, L) bool, or None without padding. The layer around this one sets it before each call."""

    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Returns (L, B, M), the experts' output for the tokens x (L, B, M)."""
        if mask is None and self.is_padding_BL is not None:
            mask = ~self.is_padding_BL.t()
        return super().forward(x, token_ids, mask)


class MoEDecoderLayer(TransformerDecoderLayerBase):  # type: ignore[misc]
    """fairseq's decoder layer with experts in its fc1."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns fairseq's output and attention, and the auxiliary loss."""
        # The decoder passes every argument behind incremental_state by name.
        self.fc1.is_padding_BL = kwargs.get("self_attn_padding_mask")
        x, attention, _ = super().forward(x, *args, **kwargs)
        return x, attention, self.fc1.l_aux


class MoEEncoderLayer(TransformerEncoderLayerBase):  # type: ignore[misc]
    """fairseq's encoder layer with experts in its fc1."""

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns fairseq's output, and the auxiliary loss."""
        self.fc1.is_padding_BL = encoder_padding_mask
        return super().forward(x, encoder_padding_mask, attn_mask), self.fc1.l_aux

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # fairseq's encoder layer first copies tensors for torch's fused dense layer, which is not used here.
        nn.Module._load_from_state_dict(self, *args, **kwargs)


def put_experts(side: Any, name: str, config: Any) -> list[nn.Module]:
    """Replaces layers of a fairseq encoder or decoder by layers with experts, and returns these.

    side: the encoder or decoder. name: "encoder" or "decoder". config: the model's options.
    """
    indices = layers_with_experts(config, name)
    for index in indices:
        side.layers[index] = _build(side, name, config)
    if name == "encoder":
        for layer in side.layers:
            # torch's fused dense layer takes the batch first. fairseq would transpose it for all layers or
            # none.
            layer.can_use_fastpath = False
    return [side.layers[index] for index in indices]


def _build(side: Any, name: str, config: Any) -> nn.Module:
    """Builds one layer with experts. Arguments are those of `put_experts`."""
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
    """Builds the experts of one layer.

    sizes: fairseq's configuration of the encoder or decoder. activation_fn: fairseq's.

    Raises ValueError for options that MoELayer refuses.
    """
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
        raise ValueError(f"--moe-* options (named as in pmoe.MoELayer): {error}") from error
    for parameter in experts.experts.parameters():
        parameter.expert = True  # type: ignore[attr-defined]  # fairseq's mark: not reduced, not in the norm
    return experts


def _expert_ranks(config: Any) -> Ranks:
    """Returns the ranks that hold all experts together."""
    place_options = places(config)
    if not place_options["expert_parallel"]:
        return Ranks.single()
    all_ranks = Ranks()
    size = place_options["expert_parallel_size"]
    if size is None:
        return all_ranks
    if not is_int(size) or size < 1 or all_ranks.size % size:
        raise ValueError(
            f"--moe-expert-parallel-size ({size}) must divide the number of ranks ({all_ranks.size})"
        )
    if size == 1:
        return Ranks.single()
    return all_ranks if size == all_ranks.size else Ranks(make_meshes(ep=size).group("ep"))


def _keep_loss(layer: Any, _: Any, output: tuple[Any, ...]) -> Any:
    """A forward hook that stores the auxiliary loss, and returns the output that fairseq expects."""
    *rest, layer.l_aux = output
    return (*rest, None) if len(rest) > 1 else rest[0]


# ---- the models


# All options are strings, so that "none" is a value of every one of them.
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
    """A mixin of both models: loads checkpoints that hold all experts.

    moe_layers: the layers with experts, those of the encoder first.
    """

    moe_layers: list[nn.Module]

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """Loads a state dict as fairseq does, but takes only this rank's experts out of all."""
        own = own_experts(self, state_dict)
        return super().load_state_dict(own, strict, model_cfg, args)  # type: ignore[misc]


@register_model("transformer_lm_pmoe", dataclass=MoELanguageModelConfig)
class TransformerLanguageModelPMoE(ExpertParallelModel, TransformerLanguageModel):  # type: ignore[misc]
    """fairseq's language model with experts in its decoder."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerLanguageModelPMoE:
        """Builds the model. Raises ValueError for options that cannot work."""
        check_model(args, ("decoder",))
        model = super().build_model(args, task)
        model.moe_layers = put_experts(model.decoder, "decoder", args)
        return model  # type: ignore[no-any-return]


@register_model("transformer_pmoe")
class TransformerPMoE(ExpertParallelModel, TransformerModel):  # type: ignore[misc]
    """fairseq's translation model with experts in its encoder and decoder."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Adds the --moe options to fairseq's."""
        super().add_args(parser)
        for option, text in HELP.items():
            parser.add_argument(option.flag, default=option.default, help=text)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerPMoE:
        """Builds the model. Raises ValueError for options that cannot work."""
        base_architecture(args)
        check_model(args, ("encoder", "decoder"))
        model = super().build_model(args, task)
        model.moe_layers = put_experts(model.encoder, "encoder", args)
        model.moe_layers += put_experts(model.decoder, "decoder", args)
        return model  # type: ignore[no-any-return]


register_model_architecture("transformer_pmoe", "transformer_pmoe")(base_architecture)
