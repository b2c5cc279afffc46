"""Small random models of transformers, and what is compared between two ways to run their experts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": 8}),
    "Qwen2-MoE": (
        "Qwen2Moe",
        {"num_experts": 8, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "Qwen3-MoE": (
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    ),
    "OLMoE": ("Olmoe", {"num_experts": 8}),
    "Phi-3.5-MoE": ("Phimoe", {"num_local_experts": 8}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 8, "head_dim": 8, "sliding_window": 8}),
}
"""The name of a model -> the prefix of its classes and what its configuration has beside `SIZES`."""


def make_config(name: str, **changes: Any) -> Any:
    import transformers

    prefix, more = MODELS[name]
    return getattr(transformers, f"{prefix}Config")(**(SIZES | more | changes))


def make_model(name: str, experts: str, seed: int = 0, **changes: Any) -> Any:
    """In float32, with parameters that are a function of the seed, none of them zero."""
    import transformers

    config = make_config(name, **changes)
    config._experts_implementation = experts
    torch.manual_seed(seed)
    model = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")(config)
    return randomise(model, seed)


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Biases begin at zero, and experts' of many models in a range where outputs hardly differ."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.copy_(around + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(rows: int, seed: int = 7, length: int = 12) -> Tensor:
    """(rows, length) token ids."""
    return torch.randint(
        3, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed)
    )


LENGTHS = (12, 7, 3, 1)
"""Tokens of each sequence of `padded`, of 12."""


def padded(side: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> dict[str, Tensor]:
    """Returns a batch of padded sequences, as transformers' collators write it.

    Padding is 0 in the mask and -100 in the labels. The first token's label is -100 too, because transformers
    would predict it from the padding before it.
    """
    ids = batch(len(lengths), seed)
    place = torch.arange(ids.shape[1])
    length = torch.tensor(lengths).unsqueeze(1)
    mask = place < length if side == "right" else place >= ids.shape[1] - length
    ids = ids.where(mask, SIZES["pad_token_id"])
    is_behind_token = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
    labels = ids.where(mask & is_behind_token, -100)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad


def relative(found: Tensor, wanted: Tensor) -> float:
    """The error of ``found`` by the size of ``wanted``, as norms."""
    found, wanted = found.detach(), wanted.detach()
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-12))


class Later:
    """A module that is imported when something of it is used: not while tests are collected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


integration = Later("pmoe.integrations.transformers")


@pytest.fixture(autouse=True)
def as_by_default() -> Iterator[None]:
    yield
    integration.configure()


def trained(model: Any, ids: Tensor, **given: Any) -> tuple[Any, dict[str, Tensor]]:
    """One forward and backward in training mode: (output, gradients). Phi's router draws random numbers."""
    model.train()
    torch.manual_seed(3)
    output = model(input_ids=ids, labels=ids, **given)
    output.loss.backward()
    return output, dict(gradients(model))
