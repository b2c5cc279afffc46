"""Plans a call: which rows each chunk (micro-batch) of both passes sends, receives and computes."""
