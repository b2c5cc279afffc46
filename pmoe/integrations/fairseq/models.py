"""``transformer_lm_pmoe``, a language model, and ``transformer_pmoe``, for translation: fairseq's
transformers with experts in every --moe-freq-th layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerModel, base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from torch import nn

from pmoe.integrations.fairseq.checkpoint import own_experts
from pmoe.integrations.fairseq.checks import check_model, layers_with_experts
from pmoe.integrations.fairseq.layers import put_experts
from pmoe.integrations.fairseq.options import PLACES, layer_options


def _fields() -> list[tuple[str, type, Any]]:
    """Of a configuration, one for each option. All are text: what is not given then differs from what is."""
    return [
        (
            f"moe_{option.name}",
            str,
            dataclasses.field(default=option.default, metadata={"help": option.help.replace("%", "%%")}),
        )
        for option in (*PLACES, *layer_options())
    ]


MoEConfig = dataclasses.make_dataclass("MoEConfig", _fields(), bases=(FairseqDataclass,))
MoELanguageModelConfig = dataclasses.make_dataclass(
    "MoELanguageModelConfig", _fields(), bases=(TransformerLanguageModelConfig,)
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
        model.moe_layers = put_experts(model.decoder, "decoder", args, layers_with_experts(args, "decoder"))
        return model  # type: ignore[no-any-return]


@register_model("transformer_pmoe")
class TransformerPMoE(ExpertParallelModel, TransformerModel):  # type: ignore[misc]
    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(parser)
        gen_parser_from_dataclass(parser, MoEConfig())

    @classmethod
    def build_model(cls, args: Any, task: Any) -> TransformerPMoE:
        base_architecture(args)
        sides = ("encoder", "decoder")
        check_model(args, sides)
        model = super().build_model(args, task)
        model.moe_layers = [
            layer
            for side in sides
            for layer in put_experts(getattr(model, side), side, args, layers_with_experts(args, side))
        ]
        return model  # type: ignore[no-any-return]


register_model_architecture("transformer_pmoe", "transformer_pmoe")(base_architecture)
