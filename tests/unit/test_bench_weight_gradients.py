"""The bytes that gradients of weights take if chunks add to them, and the table of docs/gpu.md."""

from __future__ import annotations

import json

from bench import bench_weight_gradients as bench
from tests.unit.test_bench_device_calls import PAGE
from tests.unit.test_docs_numbers import table_below


def test_the_table_of_the_page_is_what_the_model_predicts() -> None:
    document = json.loads(bench.FILE.read_text(encoding="utf-8"))
    expected = [[str(value) for value in row.values()] for row in bench.rows_of(document, bench.CHUNKS)]
    page = PAGE.read_text(encoding="utf-8")
    assert table_below(page, "`python bench/bench_weight_gradients.py`") == expected


def test_bytes_of_a_sum_are_those_of_its_reads_and_writes() -> None:
    """Two chunks: 4 written; 4 read and 4 written; then 4 read and 2 written."""
    assert bench.bytes_of_sum(2) == 4 + (4 + 4) + (4 + 2)
    assert [bench.bytes_of_sum(n) for n in (1, 4, 8)] == [2, 8 * 4 + 2, 8 * 8 + 2]


def test_one_product_holds_the_tensors_of_all_chunks_but_those_of_the_ring_slots() -> None:
    """8 rows, 4 chunks: the input and the gradient of the output of 2 further chunks, the others of 3."""
    rows_of_chunk, d_model, d_hidden = 2, 3, 5
    ends = 2 * rows_of_chunk * 2 * d_model
    hidden = 3 * rows_of_chunk * 3 * d_hidden
    assert bench.held_bytes(8, d_model, d_hidden, 4) == 2 * (ends + hidden)
    assert bench.held_bytes(8, d_model, d_hidden, 1) == 0
