"""`pmoe report`: one page about a training run, from the files that `StatsWriter` left."""
