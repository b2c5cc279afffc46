"""`pmoe report`: one page about a training run, from the files that `StatsWriter` left."""

from pmoe.integrations.report.history import summary
from pmoe.integrations.report.page import run_page

__all__ = ["run_page", "summary"]
