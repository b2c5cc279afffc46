"""The backend "pmoe" of torch.compile: overlaps all-to-alls with the computation of a whole model.

It is Lancet (paper 004) on the FX graphs of torch.compile. A graph passes through these files:

    backend       receives a graph from torch.compile; one backend call for each graph
    capture       traces a MoELayer as operators (`operators`, `messages`) that passes can cut and move
    axes          finds along which dimension each tensor can be cut into parts of the batch
    ranges        chooses which instructions are cut, and into how many parts (Lancet, section 5)
    parts, plan   cut a graph accordingly
    weight_gradients   moves weight gradients beside all-to-alls (Lancet, section 4)
    cost          measures what each operator costs
    run           measures, chooses and agrees among ranks in the first steps, then runs the chosen order
    lower         turns that order into code that starts an all-to-all early and waits for it late
    explain       reports what was chosen

Letters of this folder: T tokens, K choices, S = T * K slots, N rows, E experts, E_local experts of a rank,
W ranks, R rows of a table of counts (W for rows that travelled, 1 for rows that stayed), k parts,
M = d_model.
"""

from pmoe.graph.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
