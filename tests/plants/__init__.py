"""Planted mistakes: small changes of the source, of which each must make a test fail.

They say what tests are worth: one that no plant needs may leave, and a plant that nothing finds is a hole.

    python -m tests.plants                     # all: runs a copy of the tree with each, prints who finds it
    python -m tests.plants ring-slot capacity  # those whose names contain a word

``make test-nightly`` runs them too (tests/plants/test_plants.py). A plant is data: see `Plant`. Each file
``of_*.py`` names the level that finds its plants: ``make test``, or ``make test-all`` for of_kernels.py.
"""
