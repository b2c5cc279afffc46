"""Reproductions of the papers' figures and tables. Only the command line imports them.

mpipemoe_memory                MPipeMoE: Eq. 1-6
mpipemoe_figures               MPipeMoE: Figs. 8 and 12
fsmoe_table5                   FSMoE: Tables 2 and 5
fsmoe_models                   FSMoE: whole models, Figs. 6 to 8
comet_tasks, comet_figures     COMET: its fused kernels as tasks of a simulation, Table 3, Fig. 8
comet_layers                   COMET: layers by system, Figs. 10, 12, 13, 14
flashdmoe_table62              FlashDMoE: Table 6.2
flashdmoe_actors               FlashDMoE: its kernel as tasks of actors, the parts of it that run side by side
flashdmoe_figures              FlashDMoE: Figs. 3.1, 6.1 to 6.5
lancet_figures                 Lancet: section 7, Figs. 2 and 6
scale                          steps of large models on many ranks, simulated
assumptions                    what the reproductions assume (assumptions.md), and the numbers that
                               the papers print (printed.json)

Words of this folder:

    row        a copy of a token for one of its experts; in a figure or table, one of its lines
    layer 0    COMET's first fused kernel: dispatch and the first product of the experts
    layer 1    COMET's second fused kernel: the second product and combine
    tile       a block of rows and columns of a product, which one thread block computes
    division   how the thread blocks of a fused kernel are divided into computing and communicating ones
    actor      a part of FlashDMoE's kernel that runs beside its other parts: a processor (which computes and
               sends), the subscriber (which notices arrivals), or the scheduler (which hands out tasks)
    testbed    a cluster on which FSMoE's authors measured
    lane       a queue that runs its tasks one after another, such as the link
"""
