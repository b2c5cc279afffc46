"""`pmoe report`: makes an HTML page about a training run, from the files that `StatsWriter` wrote."""
