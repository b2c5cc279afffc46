"""Random layers, called in random ways, beside the plain definition.

`cases` draws them as plain data, `plain` is the definition as a module, `play` runs a case on both and says
what differs. A few hundred run with every test run, ten thousand by `python -m tests.fuzz`. What was found is
kept, made small, in test_found.py.
"""
