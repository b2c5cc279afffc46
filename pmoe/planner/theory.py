"""The memory of a layer as MPipeMoE's Eq. 1-6 give it.

All results are elements of a rank, not bytes: ints where they are whole. The paper's setting: one expert a
rank, top-1, even routing, Adam, a two-layer expert without gate or bias; routing data is not counted.

B tokens of a rank, M = d_model, H = d_hidden, E experts in all, n chunks (which need not divide B).
"""

from __future__ import annotations


def model_states(M: int, H: int, E: int) -> int:
    """Eq. 1: 4 (E M + 2 H M), the gate and one expert: parameters, gradients, momentum, variance."""
    return 4 * (E * M + 2 * H * M)


def activations(B: int, M: int, H: int) -> int:
    """Eq. 2: 4 B M + B H, that is T_I, T_DI, T_DO, T_O and T_M, all at once.

    Also Eq. 4, of a pipeline without reuse, and again of its buffers: since all chunks are in flight, every
    tensor has its gradient.
    """
    return 4 * B * M + B * H


def buffers(B: int, M: int, H: int) -> int:
    """Eq. 3: B M + B H, the gradients of two neighbouring tensors, where one runs after the other."""
    return B * M + B * H


def saved_each(B: int, M: int, H: int, n: int) -> int | float:
    """Eq. 5: B (2 M (n - 2) / n + H (n - 1) / n), what reuse saves of the activations, and again of the
    buffers.

    T_DI and T_DO shrink from n slots to two, T_M to one. The formula is for n >= 2: at n = 1 two slots would
    be more than there is to share and the saving negative, so the saving of a tensor is at least 0 here.
    Example: B = 16384, M = 2048, H = 8192, n = 8 -> 16384 (3072 + 7168) = 167772160.
    """
    saved_n_times = B * (2 * M * max(n - 2, 0) + H * (n - 1))
    whole, rest = divmod(saved_n_times, n)
    return saved_n_times / n if rest else whole


def saving_ratio(B: int, M: int, H: int, E: int, n: int) -> float:
    """Eq. 6: what reuse saves over what a pipeline without it takes, model states included.

    For H = 4 M and large B it nears 1/4 at n = 2, 1/2 at n = 4 and 5/8 at n = 8.
    """
    return 2 * saved_each(B, M, H, n) / (model_states(M, H, E) + 2 * activations(B, M, H))


def theory(B: int, M: int, H: int, E: int, n: int) -> dict[str, int | float]:
    """Eq. 1-6 by name. ``saved`` is activations and buffers together, twice Eq. 5."""
    return {
        "model_states": model_states(M, H, E),
        "activations": activations(B, M, H),
        "buffers": buffers(B, M, H),
        "activations_pipelined": activations(B, M, H),
        "buffers_pipelined": activations(B, M, H),
        "saved": 2 * saved_each(B, M, H, n),
        "saving_ratio": saving_ratio(B, M, H, E, n),
    }
