"""Runs the tasks of a schedule, each on its lane: a CUDA stream, a thread, or the calling thread."""
