"""The forward and the backward pass: what the tasks of a schedule do."""
