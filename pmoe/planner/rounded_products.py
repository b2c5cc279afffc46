"""Predicts the bytes of rounded weights and rows in a layer with the option ``products``.

With this option, both operands of each of the experts' matrix products (a weight and rows) are rounded to
8-bit numbers (e4m3) with scales. A pass rounds each weight before the first product that uses it, and keeps
the rounded weight until the pass ends. Rows are rounded before each product, and the rounded rows are freed
after the product:

    chunk 0         round w1, round rows, multiply; round w2, round rows, multiply
    later chunks              round rows, multiply;           round rows, multiply

A product is computed for one expert after another: the expert's rounded weight and rounded rows are copied to
float32 and multiplied. If torch has a product for rounded operands, no float32 copies are made. The
prediction counts the copies in both cases, so it is an upper bound.

Letters: K columns that a product sums over, O columns of its result.
"""

from __future__ import annotations

from typing import NamedTuple

from pmoe.kernels.scaled_products.products import restored_product_bytes
from pmoe.kernels.scaled_products.rounding import rounded_bytes, rounding_bytes
from pmoe.planner.layer_sizes import LayerSizes
from pmoe.planner.rows_per_pass import PassRows
from pmoe.schedule.restore import Restore


class RoundedBytes(NamedTuple):
    """Bytes of the rounded operands of matrix products in one pass.

    held: bytes of the rounded weights, which exist from the first chunk until the pass ends.
    computing: the most bytes needed in addition to ``held`` while experts compute.
    """

    held: int
    computing: int


NOTHING_ROUNDED = RoundedBytes(0, 0)


def bytes_of_rounded(sizes: LayerSizes, rows: PassRows, direction: str, restore: Restore) -> RoundedBytes:
    """Returns the bytes that the rounded operands of the experts' products take in one pass.

    With the option ``products``, a layer rounds the operands (weights and rows) to 8-bit numbers (e4m3) with
    scales. Without this option, all numbers are 0.

    sizes: sizes of the layer.
    rows: numbers of rows of the pass.
    direction: "forward" or "backward".
    restore: the restore pair. If backward makes T_M again, it repeats forward's first product, so it also
        rounds w1.
    """
    products = sizes.products
    if products is None:
        return NOTHING_ROUNDED
    size = sizes.element_size
    num_local = sizes.num_experts // sizes.ep_size
    num_rows = rows.largest_unit
    held = 0
    most = 0
    for columns, out_columns in _products(sizes, direction, restore):
        num_matrix_rows = num_local * out_columns
        most = max(most, held + rounding_bytes(products, num_matrix_rows, columns, size))
        held += rounded_bytes(products, num_matrix_rows, columns)
    of_rows = [
        max(
            rounding_bytes(products, num_rows, columns, size),
            rounded_bytes(products, num_rows, columns)
            + restored_product_bytes(products, rows.busiest, columns, out_columns),
        )
        for columns, out_columns in _products(sizes, direction, restore)
    ]
    return RoundedBytes(held, max(most - held, *of_rows))


def _products(sizes: LayerSizes, direction: str, restore: Restore) -> list[tuple[int, int]]:
    """Returns (K, O) of each rounded product of a pass, in the order in which experts compute the products.

    K is the number of columns that the product sums over, O the number of columns of its result.

    sizes: sizes of the layer.
    direction: "forward" or "backward".
    restore: the restore pair.
    """
    d_model = sizes.d_model
    first = (d_model, sizes.columns.hidden)
    width = sizes.columns.scratch
    if direction == "forward":
        return [first, (width, d_model)]
    again = [first] * (restore.hidden == "recompute")
    return [*again, (d_model, width), (sizes.columns.hidden, d_model)]
