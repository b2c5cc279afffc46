"""`pmoe report`: one page about a training run, from the files that `StatsWriter` left."""

from pmoe.integrations.report.page import run_page, summary

__all__ = ["run_page", "summary"]
