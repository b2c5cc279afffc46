"""Schedules as pure data, without torch: the tasks of a pass, their lanes, and the buffers that they use.

    tasks              `Task` and `Schedule`, the lanes, and the builder of task lists
    separate_buffers   schedules in which every buffer has memory of its own
    ring_buffers       schedules in which buffers take turns in a few pieces of memory, the ring slots
    buffer_sizes       the sizes of buffers and ring slots
    restore            restore pairs: how backward gets T_DI and T_M
    wire               the number formats in which rows are sent

Words and letters of this folder:

    lane             a queue of tasks, which run one after another
    T_I, T_O         the layer's input and output, on the rank of the tokens
    T_DI, T_M, T_DO  the experts' input, hidden activation and output, on the rank of the experts
    rows that stay   rows that are not sent, because their expert is on the token's own rank
    buffer           memory for a tensor of one chunk; "T_M.3" is the buffer of T_M for chunk 3
    _L               ending of the names of buffers for rows that stay, such as "T_M_L.3"
    ring slot        memory in which buffers of several chunks take turns
    n                number of chunks (micro-batches); chunks have the indices 0 to n - 1
    m                number of tasks that compute the rows that stay. A task may have rows of several chunks
    M, H             d_model and d_hidden
"""
