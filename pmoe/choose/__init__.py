"""Chooses the numbers of chunks of both passes and the restore pair, if the options leave them open.

A chunk is a micro-batch, n the number of chunks. The restore pair says what becomes of the dispatched input
T_DI and of the hidden activation T_M between forward and backward: kept, offloaded to the host, or made
again.

    choose        `choose`: takes what the options fix, and lets open_choice choose the rest
    open_choice   with a memory budget chooses n and the pair together; otherwise the pair by a cost model,
                  then n
    search        n by trials (MPipeMoE, Algorithm 1), and the tables that store the results of trials
    solve         n by FSMoE's solver
    trials        measures both passes of a batch for several choices
    part_of_batch measures on the first tokens of a batch, if all tokens would need too much memory
    slots         limits for received rows, which ranks check when they exchange row counts
    dispatch      the all-to-all of dispatch="auto", chosen when a layer is built
"""
