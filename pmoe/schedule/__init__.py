"""Schedules as pure data: tasks, lanes, links, builders, ring slots, restore pairs. No torch here.

Letters of this folder: n chunks, m pieces of the rows that stay, M = d_model, H = d_hidden; T_I, T_DI, T_M,
T_DO, T_O as in MPipeMoE.
"""
