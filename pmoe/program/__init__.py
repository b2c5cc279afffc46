"""Pass programs: a schedule compiled into flat records, which an interpreter in C++ runs without Python.

    records       `Record` and `PassProgram`: what is compiled, and its form as an array of words
    compiler      compiles a schedule into a program
    operands      where the buffers of a pass lie
    layer_shape   the facts of a layer that a program depends on
    backend       the interface of backends, which issue programs, and the programs of a layer
    on_cuda       the backend for CUDA devices: issues passes over CUDA, and over NCCL or symmetric heaps

A pass of two chunks becomes records such as these. A record is one call of a kernel, a copy or an all-to-all
on one lane. It waits for events of other lanes, and may signal one:

    record  task  lane         call                                        waits    signals
    4       G0    compute      place     T_I position send.0               -        1
    5       S0    communicate  exchange  send.0 T_DI.0                     1        2
    ...
    11      C0    compute      hidden    T_DI.0 w1 b1 T_M.0 active.0 ends  2        -
    12      C0    compute      output    active.0 w2 b2 weight T_DO.0 ends -        5
    13      R0    communicate  exchange  T_DO.0 home.0                     5        6

A program is compiled once for a schedule, a layer and a dtype. A call passes what changes from call to call:
addresses, streams and row counts. From the row counts ``cuda/program/cut.h`` computes where the rows of each
chunk begin and end, and ``cuda/program/interpreter.h`` then issues all calls of the pass.

Words of this folder:

    operand     a matrix, vector or list that a record reads or writes: an address and a size
    base        a tensor, or other memory, of a call. The address of an operand is an offset into a base
    number      a row count of a call, or a sum of row counts. A program refers to a number by its index,
                because its value is known only in a call
    condition   the number that decides whether a record does anything: with 0 it only waits and signals
    unit        the rows that the experts compute in one task: rows that a chunk receives, or rows that stay
    form        the order in which a chunk's rows arrive: SORTED stands for rows from several ranks, which
                must be sorted by expert, STRAIGHT for rows from one rank, which arrive sorted. A program has
                records for both forms, and the numbers of a call decide which of them do something

`pmoe.runners.program` runs calls of a layer as programs, if the layer asks for them and programs take it.
The engine (`pmoe.engine`) runs all other calls, and is the reference. Nothing of a program has run on a GPU.
"""
