"""Grouped products whose operands are rounded to float8: e4m3 numbers with scales.

formats     the two number formats, by name (no torch)
rounding    rounds operands to a format, and restores the values of rounded operands
layouts     brings the scales of MXFP8 into the order that Blackwell's tensor cores read
products    the product itself: by `torch.nn.functional.scaled_grouped_mm`, or from restored operands
"""
