"""Rates of this machine and group, measured and stored."""
