"""fairseq's transformers with experts in place of the feed-forward part of every --moe-freq-th layer.

``transformer_lm_pmoe`` is a language model, ``transformer_pmoe`` a translation model.

The load-balance loss l_aux gets from a layer to the criterion in four steps:

    layer (fc1 is the MoELayer)   returns x, attention, l_aux
    activation checkpointing      returns the same outputs; recomputes the layer in backward
    forward hook `_keep_loss`     stores l_aux in layer.l_aux, and removes it from the outputs
    criterion                     reads layer.l_aux

The layer itself must not store l_aux: under fairseq's activation checkpointing, only outputs of a layer are
connected to the recomputed graph, and a stored l_aux would have no gradient.

Letters: L positions, B sequences, M = d_model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
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
"""Maps fairseq's --activation-fn to the activation argument of `pmoe.MoELayer`."""


class FeedForwardExperts(MoELayer):
    """A `pmoe.MoELayer` for fairseq's tokens (L, B, M) that sends no padding to experts.

    Letters: L positions, B sequences, M = d_model. Padding uses no capacity and does not count in the
    load-balance loss. Its output is 0. All tokens of a dummy batch are treated as padding: fairseq gives a
    rank that has no batch left an earlier batch, and multiplies its loss by 0.
    """

    is_padding_BL: Tensor | None = None
    """(B, L) bool, True for padding; None if there is none. The transformer layer sets it before each call.

    B sequences, L positions.
    """

    is_dummy: bool = False
    """Whether the present batch is a dummy. The trainer sets it before each batch."""

    def forward(self, x: Tensor, token_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Returns the experts' output, (L, B, M), for the tokens x, (L, B, M).

        There are L positions, B sequences, M = d_model.

        mask: (L, B) bool, True for tokens that go to experts. None stands for all tokens but padding, and for
            no token of a dummy batch.
        """
        if self.is_dummy:
            mask = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        elif mask is None and self.is_padding_BL is not None:
            mask = ~self.is_padding_BL.t()
        return super().forward(x, token_ids, mask)


class MoEDecoderLayer(TransformerDecoderLayerBase):  # type: ignore[misc]
    """fairseq's decoder layer with a MoELayer as its first linear layer, fc1.

    The MoELayer also does the work of the activation and of fc2.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Returns (output, attention weights, l_aux), for tokens x (L, B, M).

        The first two are those of fairseq's layer, the third is the load-balance loss, a scalar. Letters: L
        positions, B sequences, M = d_model.
        """
        # The decoder passes every argument behind incremental_state by name.
        self.fc1.is_padding_BL = kwargs.get("self_attn_padding_mask")
        x, attention, _ = super().forward(x, *args, **kwargs)
        return x, attention, self.fc1.l_aux


class MoEEncoderLayer(TransformerEncoderLayerBase):  # type: ignore[misc]
    """fairseq's encoder layer with a MoELayer as its first linear layer, fc1.

    The MoELayer also does the work of the activation and of fc2.
    """

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, l_aux) for tokens x (L, B, M): L positions, B sequences, M = d_model.

        The output is that of fairseq's layer; l_aux is the load-balance loss, a scalar.

        encoder_padding_mask: (B, L) bool, True for padding; None without padding.
        attn_mask: the attention mask, as fairseq's layer takes it.
        """
        self.fc1.is_padding_BL = encoder_padding_mask
        return super().forward(x, encoder_padding_mask, attn_mask), self.fc1.l_aux

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # fairseq's method first copies tensors for torch's fused transformer layer, which is not used with
        # experts.
        nn.Module._load_from_state_dict(self, *args, **kwargs)


def put_experts(side: Any, name: str, config: Any) -> list[nn.Module]:
    """Replaces every --moe-freq-th layer of a fairseq encoder or decoder by a layer with experts.

    side: the encoder or decoder.
    name: "encoder" or "decoder".
    config: the model's options.

    Returns the new layers.
    """
    indices = layers_with_experts(config, name)
    for index in indices:
        side.layers[index] = _build(side, name, config)
    if name == "encoder":
        for layer in side.layers:
            # torch's fused transformer layer takes the batch as dimension 0. fairseq transposes the batch for
            # all layers or for none, and the layers with experts take it as dimension 1.
            layer.can_use_fastpath = False
    return [side.layers[index] for index in indices]


def _build(side: Any, name: str, config: Any) -> nn.Module:
    """Returns a new transformer layer with experts.

    side: the encoder or decoder that the layer is for.
    name: "encoder" or "decoder".
    config: the model's options.
    """
    transformer = side.cfg
    layer: Any
    if name == "encoder":
        layer = MoEEncoderLayer(transformer)
        layer._parameters.clear()  # second references to parameters, for torch's fused layer
    else:
        has_no_encoder = side.layers[0].encoder_attn is None  # as in the layers that are replaced
        layer = MoEDecoderLayer(transformer, no_encoder_attn=has_no_encoder)
    layer.fc1 = _experts(getattr(transformer, name), transformer.activation_fn, config)
    layer.fc2 = layer.activation_fn = nn.Identity()
    layer.l_aux = None
    if transformer.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=transformer.offload_activations)
    layer.register_forward_hook(_keep_loss)
    return layer  # type: ignore[no-any-return]


def _experts(sizes: Any, activation_fn: str, config: Any) -> FeedForwardExperts:
    """Returns the experts of one transformer layer.

    sizes: fairseq's configuration of the encoder or decoder, with embed_dim and ffn_embed_dim.
    activation_fn: fairseq's option --activation-fn, used if there is no --moe-activation.
    config: the model's options.

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
        parameter.expert = True  # type: ignore[attr-defined]  # so that fairseq does not reduce it
    return experts


def _expert_ranks(config: Any) -> Ranks:
    """Returns the ranks over which the experts of a layer are spread.

    They are this rank alone, all ranks, or a group of --moe-expert-parallel-size consecutive ranks.

    config: the model's options.

    Raises ValueError if that size does not divide the number of ranks.
    """
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
    """A forward hook that moves the load-balance loss from a layer's outputs to ``layer.l_aux``.

    Returns the outputs that fairseq expects of its own layers: x, or (x, attention, None).
    """
    *rest, layer.l_aux = output
    return (*rest, None) if len(rest) > 1 else rest[0]


# ---- the models


# All options are strings, so that every option can have the value "none".
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
    """A mixin for models with experts. A rank loads its own experts from a file with all experts.

    moe_layers: the transformer layers with experts: the encoder's, then the decoder's.
    """

    moe_layers: list[nn.Module]

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """Loads a checkpoint's state dict as fairseq does, but only this rank's experts from it.

        state_dict: the state dict, with all experts: tensors of any shape by name.

        Raises ValueError if the number of experts in ``state_dict`` is not the model's.
        """
        own = own_experts(self, state_dict)
        return super().load_state_dict(own, strict, model_cfg, args)  # type: ignore[misc]


@register_model("transformer_lm_pmoe", dataclass=MoELanguageModelConfig)
class TransformerLanguageModelPMoE(ExpertParallelModel, TransformerLanguageModel):  # type: ignore[misc]
    """fairseq's transformer language model, with experts in its decoder layers."""

    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerLanguageModelPMoE:
        """Builds the model and replaces layers by layers with experts.

        args: the model's options.
        task: fairseq's task.

        Raises ValueError for options that cannot work together.
        """
        check_model(args, ("decoder",))
        model = super().build_model(args, task)
        model.moe_layers = put_experts(model.decoder, "decoder", args)
        return model  # type: ignore[no-any-return]


@register_model("transformer_pmoe")
class TransformerPMoE(ExpertParallelModel, TransformerModel):  # type: ignore[misc]
    """fairseq's transformer for translation, with experts in its encoder and decoder layers."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Adds fairseq's options for transformers, and the --moe options, to a parser."""
        super().add_args(parser)
        for option, text in HELP.items():
            parser.add_argument(option.flag, default=option.default, help=text)

    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerPMoE:
        """Builds the model and replaces layers by layers with experts.

        args: the model's options.
        task: fairseq's task.

        Raises ValueError for options that cannot work together.
        """
        base_architecture(args)
        check_model(args, ("encoder", "decoder"))
        model = super().build_model(args, task)
        model.moe_layers = put_experts(model.encoder, "encoder", args)
        model.moe_layers += put_experts(model.decoder, "decoder", args)
        return model  # type: ignore[no-any-return]


register_model_architecture("transformer_pmoe", "transformer_pmoe")(base_architecture)
