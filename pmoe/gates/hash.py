"""Hash Layers (arXiv 2106.04426, section 3): a token's id alone says where it goes."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.arguments import check_int
from pmoe.gates.base import Routing
from pmoe.gates.draws import DrawnGate
from pmoe.kernels.operands import check_tensor

WORD = 1 << 64
# The steps of SplitMix64 (Steele, Lea and Flood 2014), as int64: its increment, and two factors that mix.
INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15 - WORD, 0xBF58476D1CE4E5B9 - WORD, 0x94D049BB133111EB - WORD


class HashGate(DrawnGate):
    """As `DrawnGate`; the experts of token id i are a fixed pseudo-random function of (i, seed): random
    hashing (section 3.1), with one expert for top_k = 1, several for more. It needs no vocabulary size: ids
    may be any int64, negative ones included. The same on every rank, device and version of Python or torch,
    in training and in eval mode.

    seed: any int. Give the layers of a model different ones, or they all group ids alike. It is not in the
    state dict. How even the load is depends on how often each id comes.

    Raises ValueError at the call where token_ids_T is not (T,), not int64 or not on the tokens' device.
    """

    seed: int

    needs_token_ids = True

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        seed: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_experts, top_k)
        check_int(seed=seed)
        self.seed = int(seed)

    def forward(self, x_TM: Tensor, token_ids_T: Tensor) -> Routing:
        """Routes the tokens x_TM (T, M) by their ids (T,). Raises ValueError, see the class."""
        if not isinstance(token_ids_T, Tensor):
            raise ValueError(
                f"token_ids ({type(token_ids_T).__name__}) must be a torch.Tensor of dtype int64"
            )
        shape, device = x_TM.shape[:1], x_TM.device
        check_tensor("token_ids", token_ids_T, shape=shape, dtypes=[torch.int64], device=device)
        return self.routed(x_TM, hashed(token_ids_T, self.seed, self.top_k))


def hashed(id_T: Tensor, seed: int, draws: int) -> Tensor:
    """(T, draws) of 63 pseudo-random bits each: SplitMix64 begun at a mixture of seed and id."""
    first = (seed + INCREMENT + WORD // 2) % WORD - WORD // 2  # wrapped around to int64
    state_T = _mixed(id_T ^ _mixed(torch.tensor(first, device="cpu")))
    step = torch.arange(1, draws + 1, device=id_T.device) * INCREMENT
    return _mixed(state_T.unsqueeze(1) + step) & (WORD // 2 - 1)


def _mixed(word: Tensor) -> Tensor:
    """SplitMix64's mixing of 64 bits. int64 products and sums wrap around."""
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Shifted right, zeros coming in, where int64 would bring in its sign."""
    return (word >> bits) & ((WORD - 1) >> bits)
