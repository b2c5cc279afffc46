"""The backend "pmoe" of torch.compile: overlaps all-to-alls with the computation of a whole model.

It applies the methods of the paper Lancet to the FX graphs that torch.compile traces. The batch of a graph is
cut into parts, so that the rows of one part are sent between ranks while another part is computed. No
all-to-all waits for gradients of weights, so these are computed while rows are sent. A graph passes through
these files:

    capture           traces a MoELayer as operators that can be cut and moved (`operators`, `messages`)
    backend           receives the traced graph from torch.compile
    axes              finds along which dimension each tensor can be cut into parts of the batch
    cost              measures the seconds and the bytes of each operator
    ranges            chooses which instructions are cut, and into how many parts (Lancet, section 5)
    plan, split_batch cut the graph at the chosen instructions
    weight_gradients  moves weight gradients, so that they run during all-to-alls (Lancet, section 4)
    reductions        chooses when gradients are handed over to autograd, and so reduced over ranks
    lower             makes the module that runs: it starts all-to-alls early and waits for them late
    hand_over         lets autograd take each gradient as soon as it is computed
    run               runs these steps in the first training steps, with decisions that all ranks share
    explain           reports what was chosen

Words of this folder:

    instruction      one operator call of the graph, with its predicted seconds and bytes (`instructions`)
    part             one of k pieces of the batch
    range            a run of consecutive instructions that is cut into parts
    axis             the dimension along which a tensor is cut into parts
    weight gradient  in the order of a pass: any instruction whose result no all-to-all needs
    hand over        give a gradient to autograd, whose hooks may start to reduce it over ranks
    program          all graphs of the same layers and direction, for any input shapes

Letters of this folder:

    T         tokens of a rank
    K         choices of a token
    S         slots, T * K; a slot is one choice of one token
    N         rows; a row is a token's vector for one expert
    E         experts of all ranks
    E_local   experts of one rank
    W         ranks
    R         senders of rows: W for rows from other ranks, 1 for rows that stayed on their rank
    k         parts of the batch
    M         d_model
"""

from pmoe.graph.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
