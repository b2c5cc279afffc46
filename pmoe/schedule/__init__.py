"""Schedules as pure data, without torch: tasks, lanes, builders, ring slots and restore pairs.

    tasks       `Task` and `Schedule`, the lanes, and the builder of task lists
    straight    schedules in which every buffer has memory of its own
    rings       schedules in which buffers take turns in ring slots
    slots       the sizes of buffers and slots
    restore     restore pairs: how backward gets T_DI and T_M

Letters of this folder: n chunks, m pieces of the rows that stay, M = d_model, H = d_hidden; T_I, T_DI, T_M,
T_DO, T_O as in MPipeMoE.
"""
