"""Schedules as pure data: tasks, lanes, links, builders, ring slots, restore pairs. No torch here."""
