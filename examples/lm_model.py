"""The language model of train_lm.py: a GPT on bytes in which every second block has a pmoe.MoELayer.

Letters: B sequences, C context, D = d_model, P = 2 * D columns of queries and keys, F half of a head's width,
V = 256 bytes.
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

    cos_CP, sin_CP: (C, P) the tables of `rotary_table` for the P = 2 * D columns of queries and keys.
    """

    cos_CP: Tensor
    sin_CP: Tensor

    def __init__(self, d_model: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        cos_CP, sin_CP = rotary_table(context, d_model // heads, 2 * heads)
        self.register_buffer("cos_CP", cos_CP, persistent=False)
        self.register_buffer("sin_CP", sin_CP, persistent=False)

    def forward(self, x_BCD: Tensor) -> Tensor:
        num, length, d_model = x_BCD.shape
        rows_BCP, value_BCD = self.query_key_value(x_BCD).split((2 * d_model, d_model), dim=-1)
        query, key = self.in_heads(self.rotate(rows_BCP).to(value_BCD.dtype), 2)
        (value,) = self.in_heads(value_BCD, 1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y_BCD: Tensor = self.out(attended.transpose(1, 2).reshape(num, length, d_model))
        return y_BCD

    def in_heads(self, rows: Tensor, count: int) -> Tensor:
        """Returns rows (B, C, count * D) as (count, B, heads, C, 2F)."""
        heads: Tensor = rows.unflatten(-1, (count, self.heads, -1))
        return heads.permute(2, 0, 3, 1, 4)

    def rotate(self, rows_BCP: Tensor) -> Tensor:
        """Rotates each pair (i, i + F) of a head's 2F columns by an angle that grows with the position.

        All columns of queries and keys are multiplied at once, which is faster than head by head.
        """
        length, width = rows_BCP.shape[1:]
        pairs: Tensor = rows_BCP.unflatten(-1, (2 * self.heads, -1))
        # Each column gets the other one of its pair: column i gets i + F, and i + F gets i.
        other_BCP = pairs.roll(pairs.shape[-1] // 2, dims=-1).view(-1, length, width)
        return rows_BCP * self.cos_CP[:length] + other_BCP * self.sin_CP[:length]


def rotary_table(context: int, head_width: int, count: int) -> tuple[Tensor, Tensor]:
    """Returns two tables (C, count * head_width) by which the columns of ``count`` heads are rotated.

    The first has cosines. The second has sines, which are negative for the first column of each pair:

        first * cos - second * sin
        second * cos + first * sin

    Wave lengths go from 2 pi to nearly 10,000 * 2 pi.
    """
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.arange(context)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).repeat(1, count), torch.cat((-sin, sin), -1).repeat(1, count)


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
