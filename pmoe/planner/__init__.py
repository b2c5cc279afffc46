"""The planner: predicts a layer's seconds and bytes, and chooses n and the restore pair.

n is the number of chunks (micro-batches) of a pass. The restore pair says what happens to two large tensors
between forward and backward: T_DI (the rows that a rank's experts received) and T_M (their hidden
activations) are each kept, offloaded to the host, or made again.

Nothing is measured or run in this folder. The planner's inputs are schedules (`pmoe.schedule`), sizes, and
rates that were measured before (`pmoe.planner.profile`). Files, in the order in which a choice is made:

    layer_sizes, rows_per_pass             sizes of a layer, numbers of rows in a pass
    costs, profile, cluster                seconds of a message, of a matrix product, of a copy to the host
    simulator, layer_seconds, cost_model   seconds of a pass
    uneven_ranks                           seconds of a pass if ranks have different numbers of rows
    memory, rounded_products               bytes of a pass
    priced_choices, cluster_candidates     the choices that exist, and the best of them
    degree, degree_search                  the pipeline degree n, by FSMoE's solver
    granularity, degree_trials             n by trials: MPipeMoE's ranges, and which n to try
    timed_rounds                           which trials to repeat, and which differences are more than noise
    gradient_partition                     when gradients of other layers are all-reduced
    copies, copies_of_few_ranks            which ranks get copies of busy experts
    copy_groups, copy_rows                 which ranks pass a copy on, and which rows copies compute
    copy_price, copy_work                  how many rows a copy must save to be worth its messages; work that
                                           copies add to a pass
    block_split                            which thread blocks of the fused kernels communicate
    timeline, drawing                      pictures

A busy expert is an expert that many tokens choose. A copy of a busy expert is a copy of its weights on
another rank, which then computes a part of the expert's rows. Rows that stay are rows whose expert is on
their own rank, so they are not sent.

Letters are those of `pmoe.engine` (T tokens, M = d_model, H columns of T_M, W ranks, ...), and three more:

    B        tokens of the rank that has most tokens
    m        number of chunks of the backward pass, where n is that of the forward pass
    t_gar    seconds of the all-reduce of other layers' gradients
"""
