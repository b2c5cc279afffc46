"""The folder above the one that fairseq's ``--user-dir`` names; it holds nothing else."""
