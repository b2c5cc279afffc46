"""The planner: measures, models, chooses. It reads schedules and numbers only."""
