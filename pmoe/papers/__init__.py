"""Reproductions of the papers' figures and tables. Only the command line imports them.

comet_tasks, comet_figures     COMET: its fused kernels as tasks of a simulation, Table 3, Fig. 8
fsmoe_table5                   FSMoE: Tables 2 and 5
lancet_figures                 Lancet: section 7
flashdmoe_table62              FlashDMoE: Table 6.2
mpipemoe_memory                MPipeMoE: Eq. 1-6
scale                          steps of large models on many ranks, simulated
assumptions                    what the reproductions assume (assumptions.md), and the numbers that
                               the papers print (printed.json)
"""
