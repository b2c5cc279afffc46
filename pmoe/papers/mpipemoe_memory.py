"""MPipeMoE's memory model of a layer, as the paper prints it (Eq. 1-6).

All results are numbers of elements on one rank, not bytes. They are ints if they are whole. The paper assumes
one expert on each rank, top-1 gating, even routing, the Adam optimizer, and an expert of two linear layers
without gate or bias. Routing data is not counted. For bytes of a real layer see `pmoe.planner.memory`.

Letters: B tokens of a rank, M = d_model, H = d_hidden, E experts of all ranks, n chunks (micro-batches; n
need not divide B).
"""

from __future__ import annotations


def model_states(M: int, H: int, E: int) -> int:
    """Returns 4 (E M + 2 H M) (Eq. 1), the number of elements of the model states on one rank.

    Model states are parameters, gradients, momentum and variance. A rank has those of the gate and of one
    expert.

    M, H: d_model and d_hidden.
    E: number of experts of all ranks.
    """
    return 4 * (E * M + 2 * H * M)


def activations(B: int, M: int, H: int) -> int:
    """Returns 4 B M + B H (Eq. 2), the number of elements of all activations of a layer together.

    There are four activations of B M elements each: the layer's input, the rows that the expert received, the
    expert's output and the layer's output. The expert's hidden activation has B H elements.

    Eq. 4 is for a pipeline of chunks without reuse of memory. It has the same value, for two numbers: the
    elements of the pipeline's activations, and the elements of its temporary buffers. The buffers hold a
    gradient for each element of the activations, because the pipeline works on all chunks at the same time.

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    """
    return 4 * B * M + B * H


def buffers(B: int, M: int, H: int) -> int:
    """Returns B M + B H (Eq. 3), the elements of temporary buffers if the stages run one after another.

    Temporary buffers hold gradients. At any time there are gradients of two successive tensors, such as the
    hidden activation (B H elements) and the expert's output (B M elements).

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    """
    return B * M + B * H


def saved_each(B: int, M: int, H: int, n: int) -> int | float:
    """Returns the number of elements that reuse of memory saves in activations (Eq. 5).

    The number is B (2 M (n - 2) / n + H (n - 1) / n). With reuse there is memory only for a part of these
    tensors:

        expert's input, expert's output   B M elements each   2 of n chunks
        expert's hidden activation        B H elements        1 of n chunks

    Reuse saves the same number again in temporary buffers, which is not counted here.

    The formula is for n >= 2. For n = 1 it would be negative; this function then counts 0 for the input and
    the output.

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    n: number of chunks.

    Example: B = 16384, M = 2048, H = 8192, n = 8 -> 16384 (3072 + 7168) = 167772160.
    """
    saved_n_times = B * (2 * M * max(n - 2, 0) + H * (n - 1))
    whole, rest = divmod(saved_n_times, n)
    return saved_n_times / n if rest else whole


def saving_ratio(B: int, M: int, H: int, E: int, n: int) -> float:
    """Returns the fraction of all elements that a pipeline saves if it reuses memory (Eq. 6).

        fraction = saved / all
        saved    = elements that reuse saves in activations and in temporary buffers
        all      = elements of model states, activations and temporary buffers, without reuse

    For H = 4 M and large B, the fraction approaches 1/4 with n = 2, 1/2 with n = 4, and 5/8 with n = 8.

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    E: number of experts of all ranks.
    n: number of chunks.
    """
    return 2 * saved_each(B, M, H, n) / (model_states(M, H, E) + 2 * activations(B, M, H))


def theory(B: int, M: int, H: int, E: int, n: int) -> dict[str, int | float]:
    """Returns the values of MPipeMoE's Eq. 1-6. All values but the last are numbers of elements.

        model_states             model states (Eq. 1)
        activations              activations (Eq. 2)
        buffers                  temporary buffers if the stages run one after another (Eq. 3)
        activations_pipelined    activations in a pipeline without reuse of memory (Eq. 4)
        buffers_pipelined        temporary buffers in a pipeline without reuse of memory (Eq. 4)
        saved                    elements that reuse of memory saves in activations and temporary buffers
                                 together, which is twice the result of Eq. 5
        saving_ratio             fraction of all elements that reuse of memory saves (Eq. 6)

    B: tokens of a rank.
    M, H: d_model and d_hidden.
    E: number of experts of all ranks.
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
