"""What pmoe promises, case by case, in the order of the user guide. Read the names of the tests as sentences.

Only public names are used here, so this folder is also a book of examples.

| file | what it promises |
|---|---|
| test_01_first_use.py | one layer in one process: shapes, values, gradients, training |
| test_02_routing.py | gates: who gets which token, and with what weight |
| test_03_capacity.py | dropped rows, and rows that are padded |
| test_04_experts.py | feed-forward networks, modules of your own, shared experts |
| test_05_pipelining.py | chunks: the same result, communication beside computation |
| test_06_memory.py | restore pairs, budgets, skewed routing, predicted bytes |
| test_07_ways.py | orders, collectives, rows that travel once, callbacks |
| test_08_ranks.py | several ranks: the same result, whatever each of them holds |
| test_09_training.py | scales of gradients, clipping, data parallelism, loss scaling |
| test_10_checkpoints.py | what one number of ranks saves, another loads |
| test_11_recomputation.py | activation checkpointing routes as the first pass did |
| test_12_refusals.py | bad arguments and bad input: an error that names them, on every rank |
| test_13_looking.py | statistics, recordings and what a layer tells |
| test_14_commands.py | the command pmoe, and installing |
| test_99_public.py | holds that files here are short and use public names alone |

What users of such layers suffer from, and where its cases are:

| pain | cases |
|---|---|
| it hangs when a rank or an expert gets no tokens | test_08_ranks.py |
| it runs out of memory where routing is skewed | test_06_memory.py |
| gradients of experts have the wrong scale | test_09_training.py |
| routing differs in recomputation | test_11_recomputation.py |
| a checkpoint loads at one number of ranks only | test_10_checkpoints.py |
| it does not install | test_14_commands.py |
| the overlap does not show | test_05_pipelining.py |
"""
