"""Ordering: how routed rows are arranged for their journey, and which of them capacity drops."""
