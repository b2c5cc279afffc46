"""Should each chunk add to the gradients of weights, or one product compute them from the rows of all chunks?

    python bench/bench_weight_gradients.py [--chunks 2 4 8]

Nothing is measured here. Bytes are counted, and stored times of an H200 are added up (bench_grouped_gemm).
For n chunks in 16 bits, an element of a weight's gradient takes these bytes of memory traffic:

    each chunk adds    the first chunk writes 4 bytes, each other one reads 4 and writes 4, and the rounded
                       result is made by reading 4 and writing 2: 8 n + 2
    one product        2

Both ways read all rows once for each tile, so these bytes cancel. One product must hold four tensors of all
rows until it runs: the experts' input, the gradients of their output and of the hidden columns, and the
activated hidden columns. With ring slots, a pass holds two chunks of the first two and one of the others.

    added ms            time of the bytes that one product saves, at the stored rate of a copy
    measured ms         what n - 1 stored products that add took longer than products that overwrite, which
                        write 2 bytes: the time of 6 of the 8 bytes of each further chunk. It may exceed
                        added ms, if a product moves these bytes at a lower rate than a copy
    added / products    added ms, as a share of the stored time of the weight gradients of all rows
    held MB             what one product holds in addition

The stored products have all rows in one chunk, so n chunks of them are n times as many rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from pmoe.text import table

FILE = Path(__file__).parent / "results" / "grouped_gemm_nvidia_h200.json"
CHUNKS = (2, 4, 8)
SIZE = 2
"""Bytes of an element of rows and weights."""


def bytes_of_sum(chunks: int) -> int:
    """Returns the bytes that an element of a weight's gradient takes if each chunk adds to it in float32."""
    if chunks == 1:
        return SIZE
    return 4 + 8 * (chunks - 1) + 4 + SIZE


def held_bytes(rows: int, d_model: int, d_hidden: int, chunks: int) -> int:
    """Returns what one product of all rows holds beyond the ring slots of a pass, for SwiGLU experts.

    rows: the rows of all chunks.
    """
    ends = 2 * d_model * max(chunks - 2, 0)  # the input, and the gradient of the output: two slots each
    hidden = 3 * d_hidden * (chunks - 1)  # the gradient of 2 * d_hidden columns, and the activated ones
    return SIZE * rows * (ends + hidden) // chunks


def rows_of(document: dict[str, Any], chunks: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the table as a list of rows. document: the stored file."""
    rate = document["copy"]["bytes_per_second"]
    found = []
    for stored in document["models"]:
        model = stored["model"]
        times = {row["product"]: row["ms"] for row in stored["rows"]}
        elements = model["experts"] * model["d_model"] * model["d_hidden"]
        names = ("up: weight gradient", "down: weight gradient")  # SwiGLU has the first one twice
        weights = (2, 1)
        overwriting = sum(n * times[name] for n, name in zip(weights, names, strict=True))
        adding = sum(n * times[f"{name}, accumulating"] for n, name in zip(weights, names, strict=True))
        for n in chunks:
            saved = sum(weights) * elements * (bytes_of_sum(n) - SIZE)
            added_ms = saved / rate * 1e3
            found.append(
                {
                    "model": model["name"],
                    "n": n,
                    "bytes an element": bytes_of_sum(n),
                    "added ms": round(added_ms, 1),
                    "measured ms": round((n - 1) * (adding - overwriting), 1),
                    "added / products": f"{added_ms / (n * overwriting):.0%}",
                    "held MB": round(
                        held_bytes(n * document["rows"], model["d_model"], model["d_hidden"], n) / 1e6
                    ),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS))
    args = parser.parse_args()
    document = json.loads(FILE.read_text(encoding="utf-8"))
    found = rows_of(document, args.chunks)
    print(table([tuple(found[0]), *(tuple(map(str, row.values())) for row in found)], left=(0,)))


if __name__ == "__main__":
    main()
