"""The planner: predicts a layer's seconds and bytes, and chooses n and the restore pair. It only computes.

It measures nothing and runs nothing: its inputs are schedules (`pmoe.schedule`), sizes, and rates that were
measured before (`pmoe.planner.profile`). Files, in the order in which a choice is made:

    layer_sizes, pass_rows                 sizes of a layer, rows of a pass
    costs, profile, cluster                seconds of a message, a product, a copy
    simulator, layer_seconds, cost_model   seconds of a pass
    memory, theory                         bytes of a pass
    candidates, ways                       what to choose
    degree, degree_search, granularity     the pipeline degree n
    gradient_partition                     where gradients of other layers are all-reduced
    division                               thread blocks of the fused kernels
    timeline, drawing                      pictures
    scale                                  large models on many ranks

Letters: those of `pmoe.engine`, and B tokens of the rank that has most, m pieces of the rows that stay on
    their rank, H columns of T_M, t_gar seconds of the all-reduce of other layers' gradients.
"""
