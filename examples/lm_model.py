"""The language model of train_lm.py: a GPT on bytes in which every second block has a pmoe.MoELayer.

Letters: B sequences, C context, D = d_model, F half of a head's width, V = 256 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pmoe

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    cos_CF, sin_CF: (C, F) cosines and sines of `rotary_table`.
    """

    cos_CF: Tensor
    sin_CF: Tensor

    def __init__(self, d_model: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        cos_CF, sin_CF = rotary_table(context, d_model // heads)
        self.register_buffer("cos_CF", cos_CF, persistent=False)
        self.register_buffer("sin_CF", sin_CF, persistent=False)

    def forward(self, x_BCD: Tensor) -> Tensor:
        num, length, d_model = x_BCD.shape
        heads = self.query_key_value(x_BCD).view(num, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            self.rotate(query).to(value.dtype), self.rotate(key).to(value.dtype), value, is_causal=True
        )
        y_BCD: Tensor = self.out(attended.transpose(1, 2).reshape(num, length, d_model))
        return y_BCD

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates each pair (i, i + F) of x (..., C, 2F) by an angle that grows with the position."""
        cos, sin = self.cos_CF[: x.shape[-2]], self.sin_CF[: x.shape[-2]]
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_table(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, both (C, head_width / 2).

    Wave lengths go from 2 pi to nearly 10,000 * 2 pi.
    """
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.arange(context)[:, None] * frequency
    return angle.cos(), angle.sin()


class FeedForward(nn.Module):
    """The dense feed-forward network. An expert computes the same function of its tokens."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(d_model, d_hidden)
        self.w2 = nn.Linear(d_hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.gelu(self.w1(x)))
        return y


class Block(nn.Module):
    """Transformer block with normalization first: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, attention: nn.Module, ffn: nn.Module, d_model: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(d_model)
        self.attention = attention
        self.ffn_norm = nn.LayerNorm(d_model)
        self.ffn = ffn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class ByteGPT(nn.Module):
    """Language model: maps bytes (B, C) to logits (B, C, V) of the next byte.

    ``d_hidden`` is the hidden width that a token passes in every block: the width of a dense FFN, or of top_k
    experts together. So the dense model (``dense=True``) has the same active size. ``layer_options`` are
    further arguments of `pmoe.MoELayer`, such as ``pipeline``.

    Raises ValueError if a width is not divisible as needed.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_hidden: int,
        layers: int,
        heads: int,
        context: int,
        num_experts: int,
        top_k: int,
        dense: bool = False,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        if d_model % (2 * heads):
            raise ValueError(f"d_model ({d_model}) must be divisible by 2 * heads ({2 * heads})")
        if d_hidden % top_k:
            raise ValueError(f"d_hidden ({d_hidden}) must be divisible by top_k ({top_k})")
        self.embedding = nn.Embedding(VOCABULARY, d_model)
        self.blocks = nn.ModuleList()
        for index in range(layers):
            attention = Attention(d_model, heads, context)
            ffn: nn.Module
            if index % 2 == 1 and not dense:
                ffn = pmoe.MoELayer(d_model, d_hidden // top_k, num_experts, top_k, **layer_options)
            else:
                ffn = FeedForward(d_model, d_hidden)
            self.blocks.append(Block(attention, ffn, d_model))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)

    def forward(self, bytes_BC: Tensor) -> Tensor:
        x_BCD = self.embedding(bytes_BC)
        for block in self.blocks:
            x_BCD = block(x_BCD)
        logits_BCV: Tensor = self.head(self.norm(x_BCD))
        return logits_BCV

    def moe_layers(self) -> list[pmoe.MoELayer]:
        """Returns the MoE layers of the model."""
        return [module for module in self.modules() if isinstance(module, pmoe.MoELayer)]

    def auxiliary_loss(self) -> Tensor:
        """Returns the sum of the MoE layers' load-balance losses of the last forward pass: a scalar, 0 if
        dense.
        """
        return sum((layer.l_aux for layer in self.moe_layers()), self.head.weight.new_zeros(()))
