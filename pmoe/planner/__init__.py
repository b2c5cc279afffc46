"""The planner: measures, models, chooses. It reads schedules and numbers only. Letters: `pmoe.engine`'s, and
B most tokens of a rank, m pieces that stay, H columns of T_M, t_gar seconds of other layers' gradients."""
