"""Pass programs: a schedule compiled into flat records, which an interpreter in C++ runs without Python.

    records       `Record` and `PassProgram`: what is compiled, and its form as an array of words
    compiler      compiles a schedule into a program
    operands      where the buffers of a pass lie
    layer_shape   the facts of a layer that a program depends on
    backend       the interface of backends, which issue programs, and the programs of a layer
    on_cuda       the backend for CUDA devices: issues passes over CUDA and NCCL

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

`pmoe.runners.program` runs calls of a layer as programs, if the layer asks for them and programs take it.
The engine (`pmoe.engine`) runs all other calls, and is the reference. Nothing of a program has run on a GPU.
"""
