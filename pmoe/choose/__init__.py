"""Chooses the numbers of chunks of both passes and the restore pair, if the options leave them open.

A chunk is a micro-batch, n the number of chunks. The restore pair says how backward gets the experts' inputs
(T_DI, the dispatched rows) and their hidden activations (T_M): kept, offloaded to the host, or made again
(sent or computed a second time).

    choose        the entry point `choose`: uses the numbers and the pair that the options fix, and calls
                  open_choice for those that the options leave open
    open_choice   with a memory budget, chooses n and the pair together. Otherwise it chooses the pair by a
                  cost model, then n by search or solve
    search        chooses n by trials (MPipeMoE, Algorithm 1), and stores the results of trials in tables
    solve         chooses n by FSMoE's solver
    trials        runs trials: measures the seconds of both passes on a real batch, for several choices
    part_of_batch runs trials on the first tokens of a batch, if all tokens would need too much memory
    slots         limits for the rows that a rank receives; ranks check them when they exchange row counts
    dispatch      chooses the all-to-all of dispatch="auto", when a layer is built
"""
