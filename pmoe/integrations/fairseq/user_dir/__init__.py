"""The parent folder of fairseq's ``--user-dir``. fairseq adds it to sys.path, so it holds nothing else."""
