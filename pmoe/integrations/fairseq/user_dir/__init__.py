"""Holds what fairseq's ``--user-dir`` names, and nothing else."""
