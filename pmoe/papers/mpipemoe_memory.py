"""MPipeMoE's memory model of a layer, as the paper prints it (Eq. 1-6).

All results are numbers of elements on one rank, not bytes. They are ints if they are whole. The paper
assumes one expert a rank, top-1 gating, even routing, Adam, and a two-layer expert without gate or bias.
Routing data is not counted. For bytes of a real layer see `pmoe.planner.memory`.

B tokens of a rank, M = d_model, H = d_hidden, E experts in all, n chunks (n need not divide B).
"""

from __future__ import annotations


def model_states(M: int, H: int, E: int) -> int:
    """Eq. 1: 4 (E M + 2 H M), the model states of the gate and one expert.

    They are parameters, gradients, momentum and variance.
    """
    return 4 * (E * M + 2 * H * M)


def activations(B: int, M: int, H: int) -> int:
    """Eq. 2: 4 B M + B H, the elements of T_I, T_DI, T_DO, T_O and T_M together.

    Eq. 4 is the same: a pipeline without reuse holds these activations. Its buffers take as many elements
    again, because all chunks are in flight, so every tensor has its gradient.
    """
    return 4 * B * M + B * H


def buffers(B: int, M: int, H: int) -> int:
    """Eq. 3: B M + B H, the gradients of two neighbouring tensors, if stages run one after another."""
    return B * M + B * H


def saved_each(B: int, M: int, H: int, n: int) -> int | float:
    """Eq. 5: B (2 M (n - 2) / n + H (n - 1) / n), the elements that reuse saves of the activations.

    It saves as many of the buffers. T_DI and T_DO shrink from n slots to 2, T_M from n slots to 1.

    The paper's formula holds for n >= 2. At n = 1 it would be negative, since two slots are more than one
    chunk; here the saving of each tensor is at least 0.

    Example: B = 16384, M = 2048, H = 8192, n = 8 -> 16384 (3072 + 7168) = 167772160.
    """
    saved_n_times = B * (2 * M * max(n - 2, 0) + H * (n - 1))
    whole, rest = divmod(saved_n_times, n)
    return saved_n_times / n if rest else whole


def saving_ratio(B: int, M: int, H: int, E: int, n: int) -> float:
    """Eq. 6: elements that reuse saves, over all elements of a pipeline without reuse.

    Both activations and buffers count as saved, and model states count in the whole. For H = 4 M and large
    B the ratio approaches 1/4 at n = 2, 1/2 at n = 4 and 5/8 at n = 8.
    """
    return 2 * saved_each(B, M, H, n) / (model_states(M, H, E) + 2 * activations(B, M, H))


def theory(B: int, M: int, H: int, E: int, n: int) -> dict[str, int | float]:
    """Returns the values of Eq. 1-6 by name. ``saved`` is twice Eq. 5: activations and buffers together."""
    return {
        "model_states": model_states(M, H, E),
        "activations": activations(B, M, H),
        "buffers": buffers(B, M, H),
        "activations_pipelined": activations(B, M, H),
        "buffers_pipelined": activations(B, M, H),
        "saved": 2 * saved_each(B, M, H, n),
        "saving_ratio": saving_ratio(B, M, H, E, n),
    }
