"""`pmoe report`: a page about a training run, made from the files of `StatsWriter`."""
