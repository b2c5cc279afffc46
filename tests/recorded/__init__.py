"""What the layer did when it was last recorded: order of tasks, bits of results, bytes sent and held.

`tests/gloo/test_recorded.py` compares the layer with the JSON files beside this one. A commit that changes
them on purpose says so, and writes them again:

    python -m tests.recorded.write [--group pairs] [--field memory]
"""
