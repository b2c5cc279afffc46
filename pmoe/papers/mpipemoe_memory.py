"""MPipeMoE's memory model of a layer, as the paper prints it (Eq. 1-6).

All results are numbers of elements on one rank, not bytes. They are ints if they are whole. The paper assumes
one expert on each rank, top-1 gating, even routing, the Adam optimizer, and an expert of two linear layers
without gate or bias. Routing data is not counted. For bytes of a real layer see `pmoe.planner.memory`.

Letters: B tokens of a rank, M = d_model, H = d_hidden, E experts of all ranks, n chunks (micro-batches; n
need not divide B).
"""

from __future__ import annotations


def model_states(M: int, H: int, E: int) -> int:
    """Eq. 1: 4 (E M + 2 H M), the elements of the model states of the gate and one expert.

    Model states are parameters, gradients, momentum and variance.

    M, H, E: d_model, d_hidden, number of experts.
    """
    return 4 * (E * M + 2 * H * M)


def activations(B: int, M: int, H: int) -> int:
    """Eq. 2: 4 B M + B H, the elements of all activations of a layer together.

    These are the input, the rows that the expert received, its output and the layer's output (B M each), and
    the expert's hidden activation (B H).

    Eq. 4 has the same value. It is for a pipeline of chunks without reuse of memory, which holds the same
    activations. Its temporary buffers have equally many elements: all chunks are in work at the same time, so
    there is a gradient for every tensor.

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    """
    return 4 * B * M + B * H


def buffers(B: int, M: int, H: int) -> int:
    """Eq. 3: B M + B H, the elements of temporary buffers if the stages run one after another.

    At any time gradients exist for two successive tensors, such as the hidden activation (B H) and the
    expert's output (B M).

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    """
    return B * M + B * H


def saved_each(B: int, M: int, H: int, n: int) -> int | float:
    """Eq. 5: B (2 M (n - 2) / n + H (n - 1) / n), the elements that reuse of memory saves in activations.

    With reuse, memory is allocated for only 2 of n chunks of the expert's input and output (B M each), and
    for only 1 of n chunks of its hidden activation (B H). Reuse saves this number of elements a second time,
    in the temporary buffers (not in this result).

    The paper's formula is for n >= 2. For n = 1 it is negative, because two chunks would be more than the
    whole tensor. This function takes the saving of each tensor as at least 0.

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    n: number of chunks.

    Example: B = 16384, M = 2048, H = 8192, n = 8 -> 16384 (3072 + 7168) = 167772160.
    """
    saved_n_times = B * (2 * M * max(n - 2, 0) + H * (n - 1))
    whole, rest = divmod(saved_n_times, n)
    return saved_n_times / n if rest else whole


def saving_ratio(B: int, M: int, H: int, E: int, n: int) -> float:
    """Eq. 6: the fraction of all elements that a pipeline need not hold if it reuses memory.

    The fraction is the number of elements that reuse saves, divided by the number of elements that a pipeline
    without reuse holds: model states, activations and temporary buffers. Reuse saves equally many elements in
    activations and in temporary buffers. For H = 4 M and large B the ratio approaches 1/4 at n = 2, 1/2 at n
    = 4 and 5/8 at n = 8.

    B: tokens of a rank.
    M, H, E: d_model, d_hidden, number of experts.
    n: number of chunks.
    """
    return 2 * saved_each(B, M, H, n) / (model_states(M, H, E) + 2 * activations(B, M, H))


def theory(B: int, M: int, H: int, E: int, n: int) -> dict[str, int | float]:
    """Returns the values of MPipeMoE's Eq. 1-6 by name, in elements.

    ``saved`` is twice the result of Eq. 5: the elements saved in activations and in temporary buffers
    together.

    B: tokens of a rank.
    M, H, E: d_model, d_hidden, number of experts.
    n: number of chunks.
    """
    return {
        "model_states": model_states(M, H, E),
        "activations": activations(B, M, H),
        "buffers": buffers(B, M, H),
        "activations_pipelined": activations(B, M, H),
        "buffers_pipelined": activations(B, M, H),
        "saved": 2 * saved_each(B, M, H, n),
        "saving_ratio": saving_ratio(B, M, H, E, n),
    }
