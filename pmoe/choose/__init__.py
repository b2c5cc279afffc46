"""The choice of n of both passes and of the restore pair, if the options leave it open.

choose        `choose`: what the options fix, or else what open_choice returns
open_choice   by a memory budget, or the pair by a cost model and then n by search or solve
search        n by trials (MPipeMoE, Algorithm 1), and the tables that remember it
solve         n by FSMoE's solver
trials        measures both passes of a batch
slots         the limits of ring slots and host memory, which travel with the row counts
dispatch      the all-to-all of dispatch="auto", which is chosen when a layer is built
"""
