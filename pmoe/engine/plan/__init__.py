"""Plans a call: decides for both passes which rows each chunk (micro-batch) sends, receives and computes."""
