"""Choosing the number of chunks of both passes and the restore pair, where the options leave a choice."""
