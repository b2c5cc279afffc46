"""fairseq's criteria with the load-balance loss of experts added. They also log numbers about experts.

    training      loss += moe_aux_weight * sample_size * sum of l_aux over the MoE layers
    validation    nothing is added, so that losses can be compared with those of other models

l_aux is a layer's load-balance loss. fairseq sums gradients over all ranks and divides them by the total
sample size (tokens, or sentences). So the result is the average of the ranks' load-balance losses, weighted
by their sample sizes.

These numbers are logged:

    moe_loss      the sum of l_aux over the MoE layers
    moe_load      rows of the busiest expert / mean rows of an expert, in the least balanced layer; 1 is even
    moe_dropped   rows that were dropped because their expert was over its capacity, in percent
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from torch import Tensor

AUX_WEIGHT = 0.01
"""Default of the option moe_aux_weight, the weight of the load-balance loss."""


class WithAuxiliaryLoss:
    """A mixin that adds the load-balance loss of experts to a criterion of fairseq.

    It must come first among the base classes, because its methods call the criterion's methods by super().

    moe_aux_weight: the weight of the load-balance loss.
    """

    moe_aux_weight = AUX_WEIGHT

    @classmethod
    def build_criterion(cls, cfg: Any, task: Any) -> Any:
        """Returns fairseq's criterion. The configuration gives the weight of the load-balance loss."""
        criterion = super().build_criterion(cfg, task)  # type: ignore[misc]
        criterion.moe_aux_weight = getattr(cfg, "moe_aux_weight", AUX_WEIGHT)
        return criterion

    def forward(self, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, Any, dict[str, Any]]:
        """Returns the loss with the load-balance loss added, the sample size, and the numbers to log.

        The loss is a scalar, or has one element for each token if ``reduce`` is False. For a dummy batch, the
        sample size and all numbers to log are 0.
        """
        loss, sample_size, logged = super().forward(model, sample, reduce=reduce)  # type: ignore[misc]
        total = self.with_experts(model, loss, sample_size, logged)
        if model.moe_layers[0].fc1.is_dummy:
            return total, 0 * sample_size, {name: 0 * number for name, number in logged.items()}
        return total, sample_size, logged

    def with_experts(self, model: Any, loss: Tensor, sample_size: Any, logged: dict[str, Any]) -> Tensor:
        """Returns ``loss`` plus the weighted load-balance loss, and adds numbers about experts to ``logged``.

        In validation, or if the weight is 0, ``loss`` is returned unchanged.

        model: the model with the MoE layers.
        loss: a scalar, or one element for each token, of any shape.
        sample_size: number of tokens or sentences by which fairseq divides the loss.
        logged: the numbers to log. Those of experts are sums and not means, because fairseq adds them up over
            ranks and batches.
        """
        layers = model.moe_layers
        moe_loss = torch.stack([layer.l_aux for layer in layers]).sum()
        for layer in layers:
            layer.l_aux = layer.fc1.l_aux = None  # l_aux would keep the graph of this pass alive
        logged["moe_loss"] = moe_loss.detach() * sample_size
        logged["moe_rows"] = torch.stack([layer.fc1.tokens_per_expert for layer in layers]).double()
        logged["moe_rows_asked"] = sum(layer.fc1.ran.num_tokens * layer.fc1.top_k for layer in layers)
        if not self.training or not self.moe_aux_weight:  # type: ignore[attr-defined]
            return loss
        total: Tensor = loss + self.moe_aux_weight * sample_size * moe_loss
        return total

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Logs moe_loss, moe_load and moe_dropped, from the numbers of all ranks and batches.

        logging_outputs: the numbers to log of each batch on each rank.
        """
        super().reduce_metrics(logging_outputs)  # type: ignore[misc]
        names = ("sample_size", "moe_loss", "moe_rows", "moe_rows_asked")
        sample_size, moe_loss, rows_LE, asked = (sum(log[name] for log in logging_outputs) for name in names)
        if not sample_size or not asked:
            return
        metrics.log_scalar("moe_loss", moe_loss / sample_size, sample_size, round=3)
        imbalance_L = rows_LE.amax(-1) / rows_LE.mean(-1).clamp(min=1e-9)
        metrics.log_scalar("moe_load", imbalance_L.amax(), asked, round=2)
        metrics.log_scalar("moe_dropped", 100 * (1 - rows_LE.sum() / asked).clamp(min=0), asked, round=1)


def _with_weight(config: type, name: str) -> type:
    """Returns a dataclass called ``name`` with the fields of ``config`` and the field moe_aux_weight.

    config: fairseq's dataclass of a criterion's options.
    """
    field = dataclasses.field(
        default=AUX_WEIGHT, metadata={"help": "weight of the experts' load-balance loss, per layer and token"}
    )
    return dataclasses.make_dataclass(name, [("moe_aux_weight", float, field)], bases=(config,))


@register_criterion(
    "cross_entropy_pmoe", dataclass=_with_weight(CrossEntropyCriterionConfig, "CrossEntropyPMoEConfig")
)
class CrossEntropyPMoE(WithAuxiliaryLoss, CrossEntropyCriterion):  # type: ignore[misc]
    """fairseq's cross entropy, with the load-balance loss of experts added."""


@register_criterion(
    "label_smoothed_cross_entropy_pmoe",
    dataclass=_with_weight(LabelSmoothedCrossEntropyCriterionConfig, "LabelSmoothedCrossEntropyPMoEConfig"),
)
class LabelSmoothedCrossEntropyPMoE(WithAuxiliaryLoss, LabelSmoothedCrossEntropyCriterion):  # type: ignore[misc]
    """fairseq's label-smoothed cross entropy, with the load-balance loss of experts added."""
