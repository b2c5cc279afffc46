"""Pass programs: a schedule compiled into flat records, which an interpreter in C++ runs without Python.

On a GPU, the Python code of a chunk can take longer than its products. A layer with
``layer.switches = Switches(program=True)`` therefore runs its passes as programs, if programs take the call
(`pmoe.decide.program_choice` says why not). The engine (`pmoe.engine`) runs all other calls, and is the
reference. Nothing of a program has run on a GPU: `tests/unit/test_program.py` compares programs with the
engine on the CPU.

    records       `Record` and `PassProgram`: what is compiled, and its form as an array of words
    compiler      compiles a schedule into a program
    operands      where the buffers of a pass lie
    layer_shape   the facts of a layer that a program depends on
    bounded       row counts that stay on the device, so that a CUDA graph can hold a pass; no layer uses it
    backend       the interface of backends, which issue programs, and the programs of a layer
    on_cuda       the backend for CUDA devices: issues passes over CUDA, and over NCCL or symmetric heaps

A record is one call of a kernel, a copy or an all-to-all on one lane. It may wait for events of other lanes,
and may signal an event. These are the first records of a forward pass on two ranks, in two chunks:

    no.  task  lane         call                                                  if          waits  signals
    0          compute      take      WEIGHT, PAIR_BY_NUMBER -> WEIGHT_BY_NUMBER  ROWS               0
    1    G0    compute      place     T_I, POSITION -> send.0                     SENT.0             2
    2    S0    communicate  exchange  send.0 -> T_DI.0                                        2
    3    P     communicate  exchange  WEIGHT_BY_NUMBER -> WEIGHT_RECEIVED         STRAIGHT           3
    4    G1    compute      place     T_I, POSITION -> send.1                     SENT.1             4
    5    S1    communicate  exchange  send.1 -> T_DI.1                                        4      5
    6    L0    compute      place     T_I, POSITION -> T_DI_L.0                   LOCAL.0
    7    L0    compute      hidden    T_DI_L.0, W1 -> active_L.0                  LOCAL.0
    8    L0    compute      output    active_L.0, W2, WEIGHT_BY_NUMBER -> home.0  LOCAL.0
    9    C0    compute      hidden    T_DI.0, W1 -> active.0                      STRAIGHT.0  3
    10   C0    compute      output    active.0, W2, WEIGHT_RECEIVED -> T_DO.0     STRAIGHT.0         6
    11   R0    communicate  exchange  T_DO.0 -> home.0                                        6      7

Column "call" has a kernel, its inputs and its output. Column "if" has the condition (below). The columns
"waits" and "signals" have the indices of events; event 0 says that the pass has begun. The last part of a
buffer's name is its chunk. The table leaves out biases, which this layer does not have, and the ends of the
experts' rows. These classes describe the names in the table:

    `pmoe.schedule.buffer_sizes.BufferSizes`     buffers, such as T_DI.0 and send.0
    `pmoe.program.records.Base`                  other memory, such as T_I and WEIGHT
    `pmoe.program.records.Kernel`                kernels
    `pmoe.program.records.CallNumber`            conditions, such as ROWS; STRAIGHT is MESSAGE_IS_STRAIGHT
    `pmoe.program.records.ChunkNumber`           conditions with a chunk, such as LOCAL.0

A layer compiles a program once for each direction, n and restore pair. A call passes what changes from call
to call: addresses, streams and row counts. From the row counts ``cuda/program/cut.h`` computes where the rows
of each chunk begin and end, and ``cuda/program/interpreter.h`` then issues all records of the pass.

    `pmoe.runners.program.ProgramRunner`   runs a call of the layer
    `pmoe.runners.bounded_program.BoundedProgramRunner`
                                           the same if the host knows no row count (`pmoe.program.bounded`)
    `pmoe.program.backend.Programs`        finds the call's program, or compiles it
    `pmoe.program.on_cuda`                 passes the program to C++, and lists the Python calls for this

Words of this folder:

    operand     a matrix, vector or list that a record reads or writes: an address and a size
    base        a tensor, or other memory, of a call. Each operand begins at some offset in a base
    number      a row count of a call, or an integer that follows from row counts: a sum of them, a flag (0 or
                1), or the byte at which a ring slot begins. Its value is known only in a call, so a program
                refers to a number by its index
    condition   the number that decides whether a record does anything: if it is 0, the record only waits and
                signals. A record without a condition has the number ONE, which is always 1
    unit        the rows that the experts compute in one task: rows that a chunk receives, or rows that stay
    form        SORTED or STRAIGHT. Received rows of a chunk have the form SORTED if they come from several
                ranks: they must be sorted by expert, and the experts read the sorted copy. They have the form
                STRAIGHT if they come from one rank: they arrive sorted, and the experts read them in place.
                If rows may come from several ranks, a program has records for both forms, and the conditions
                of a call choose between them
"""
