"""Runs the tasks of a schedule, each on its lane: CUDA streams, threads, or the calling thread."""
