"""The backend "pmoe" of torch.compile: overlaps all-to-alls with the computation of a whole model.

It is Lancet (paper 004) on the FX graphs of torch.compile. A graph passes through these files:

    capture           traces a MoELayer as operators (`operators`, `messages`) that passes can cut and move
    backend           receives the traced graph from torch.compile
    axes              finds along which dimension each tensor can be cut into parts of the batch
    cost              measures the time and the memory of each operator
    ranges            chooses which instructions are cut, and into how many parts (Lancet, section 5)
    parts, plan       cut the graph accordingly
    weight_gradients  moves weight gradients beside all-to-alls (Lancet, section 4)
    lower             makes the module that runs: it starts all-to-alls early and waits for them late
    run               does all this in the first steps, agreed among ranks, then runs the result
    explain           reports what was chosen

Letters of this folder: T tokens, K choices, S = T * K slots, N rows, E experts, E_local experts of a rank,
W ranks, R rows of a table of counts (W for rows that travelled, 1 for rows that stayed), k parts,
M = d_model.
"""

from pmoe.graph.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
