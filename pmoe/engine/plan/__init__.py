"""Plans a call: which rows each chunk sends, receives and computes, for both passes."""
