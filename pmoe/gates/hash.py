"""The gate of Hash Layers (arXiv 2106.04426, section 3): a token's experts depend on its id only."""

from __future__ import annotations

import torch
from torch import Tensor

from pmoe.arguments import check_int
from pmoe.gates.base import Routing
from pmoe.gates.draws import DrawnGate
from pmoe.kernels.operands import check_tensor

WORD = 1 << 64
# The constants of SplitMix64 (Steele, Lea and Flood 2014), as int64: its increment, and two mixing factors.
INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15 - WORD, 0xBF58476D1CE4E5B9 - WORD, 0x94D049BB133111EB - WORD


class HashGate(DrawnGate):
    """Draws the experts of a token from its id, with a fixed pseudo-random function of (id, seed).

    This is random hashing (section 3.1), but for top_k experts of a token instead of one. The weights are 1 /
    top_k and l_aux is 0, as in `DrawnGate`.

    - Ids may be any int64, also negative. The gate needs no vocabulary size.
    - An id has the same experts on every rank and device, with every version of Python and torch, in training
      and in eval mode.
    - How evenly the experts are used depends on how often each id occurs.

    Args:
        seed: any int. Give each layer of a model another seed: with equal seeds, two ids with the same expert
            in one layer also have the same expert in every other layer. The state dict does not have the
            seed.

    Raises ValueError at the call if token_ids_T is not (T,) int64 on the device of the T tokens.
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
        """Routes the T tokens x_TM, (T, M), by their ids. M = d_model.

        token_ids_T: (T,) int64, on the same device.

        Raises ValueError if the ids have another type, shape or device.
        """
        if not isinstance(token_ids_T, Tensor):
            raise ValueError(
                f"token_ids ({type(token_ids_T).__name__}) must be a torch.Tensor of dtype int64"
            )
        shape = x_TM.shape[:1]
        device = x_TM.device
        check_tensor("token_ids", token_ids_T, shape=shape, dtypes=[torch.int64], device=device)
        return self.routed(x_TM, hashed(token_ids_T, self.seed, self.top_k))


def hashed(id_T: Tensor, seed: int, draws: int) -> Tensor:
    """Returns pseudo-random numbers for each id, (T, draws) int64, each with 63 random bits.

    They come from the generator SplitMix64, whose first state is computed from seed and id.

    id_T: (T,) int64, the ids of T tokens.
    seed: any int.
    draws: how many numbers each id gets.
    """
    first = (seed + INCREMENT + WORD // 2) % WORD - WORD // 2  # wrapped around to int64
    state_T = _mixed(id_T ^ _mixed(torch.tensor(first, device="cpu")))
    step = torch.arange(1, draws + 1, device=id_T.device) * INCREMENT
    return _mixed(state_T.unsqueeze(1) + step) & (WORD // 2 - 1)


def _mixed(word: Tensor) -> Tensor:
    """Returns 64-bit words of the same shape, each with its bits mixed as SplitMix64 does.

    SplitMix64 needs products and sums modulo 2**64. Those of int64 tensors wrap around, which is the same.
    """
    word = (word ^ _shifted(word, 30)) * FIRST
    word = (word ^ _shifted(word, 27)) * SECOND
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """Returns 64-bit words shifted right, with zeros shifted in.

    The operator >> of int64 would shift in copies of the sign bit.

    word: int64, of any shape.
    bits: the number of bits by which each word is shifted.
    """
    return (word >> bits) & ((WORD - 1) >> bits)
