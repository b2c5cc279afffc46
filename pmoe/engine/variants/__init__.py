"""Features that only some layers need, one a file. Its classes stand in front of both passes of `passes/`."""
