"""What would one rank's layer take on a Hopper GPU at SonicMoE's seven shapes? Predicted, not measured.

    python bench/bench_shapes.py

A product's tiles of 128 x 256 run in waves, one tile on each multiprocessor:

    seconds = waves * (steps * STEP + store)

steps   a tile's steps along the reduction, 64 deep
STEP    the time of a step while the tensor cores are busy
store   the time from a tile's last product to the first product of the next tile: nothing runs beside it

`STEP` and the stores' times were fitted by eye to the rows that bench_grouped_gemm stored on an H200. The
other kernels move rows, at a share of a copy's rate that was stored as well. An H100 has the arithmetic of an
H200 and 0.7 of its memory rate, so what moves bytes takes longer there.

"Beside" is a layer whose tiles are stored beside the products of the next tiles, in the way that is predicted
to be faster. In one way the tensor memory accelerator stores a tile from boxes in shared memory
(cuda/grouped_gemm/hopper_boxes.cuh). The multiplying warps are held until they have written the boxes:

    seconds = waves * (product + held) + drained
    held      two warps of a scheduler issue their instructions; and what does not fit into the boxes at once
              is stored at the memory's rate, as if nothing else stored it
    drained   the last boxes are stored

The other way are turns (cuda/grouped_gemm/hopper_turns.cuh). Tiles of 128 x 128 alternate between two
warpgroups. While one is held, the other multiplies, so two tiles take as long as both products, or as one
product and its store:

    seconds = waves * max(product, (product + held) / 2) + drained

The gradient of a first weight gathers its rows from tokens there, if it has few columns, so that no kernel
has to copy tokens into sorted rows for it. Each of its steps is then longer.

In both ways a wave takes at least as long as the memory needs for its results. The gradient of gated hidden
columns has only turns, and its store goes through registers; held and drained are then the time of the store.

"Bound" is the first model with stores that take no time: what a layer would take if the products of the next
tile ran beside each store, and steps were as fast as they are now.

Routing is random: each row goes to each expert with equal probability.

Letters: T tokens, M = d_model, H = d_hidden, K choices, N = T * K rows, E experts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.bench_alone import SHAPES, Scenario
from pmoe.kernels.grouped_gemm.launch import WEIGHT_COLUMNS, gathers_in_load
from pmoe.text import table

MULTIPROCESSORS = 132
ROWS, COLUMNS, DEPTH = 128, 256, 64
STEP = 0.68e-6
COLUMNS_IN_TURNS = 128
CYCLES, CYCLES_IN_TURNS = 512, 640
"""Cycles of a step of a tile of 128 x 128: of its products alone, and with its operands.

A multiprocessor's shared memory passes 128 bytes a cycle. In a step of 128 x 256, products read 80 KiB and
loads write 48 KiB, which is just 128 bytes for each of the products' 1,024 cycles. In a step of 128 x 128
they read 48 KiB and write 32 KiB: 160 bytes for each of 512 cycles. So such a step is predicted to take 640
cycles. That reads and writes share these bytes is an assumption, and was not measured.
"""
STEP_IN_TURNS = STEP / 2 * CYCLES_IN_TURNS / CYCLES
BOX_BYTES = 8 * 2 * 2048
"""Bytes of the boxes of a multiprocessor: two for each of eight warps."""
GATHERED_STEP = 0.066e-6
"""Seconds that a gather of the rows of A in the load adds to a step. It was measured."""
GATHERED_STEP_OF_B = GATHERED_STEP * COLUMNS / ROWS
"""Seconds that a gather of the rows of B adds to a step of a weight gradient.

It has 256 columns of 64 rows, twice the bytes of A. That it takes twice as long is an assumption: it was not
measured. A gathered row of B is 512 bytes in one piece, and one of A 128 bytes.
"""
SMALL_KERNELS = 71e-6
"""Seconds of a backward pass's other kernels: the scores' gradient, casts, sums and reductions."""
ROUTE_FIXED = 29e-6
"""Seconds of the routing's two kernels besides the instructions of `choose_slots`."""
CLOCK = 1.7e9
"""Cycles a second of a multiprocessor, each of whose four schedulers issues one instruction a cycle."""
WARPS_A_SCHEDULER = 2
"""Eight warps multiply, and each of the four schedulers has two of them."""


RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Card:
    """A GPU.

    copy: bytes per second of a copy of rows, read and written bytes together.
    stores: whether stores take time; False is the bound.
    beside: whether tiles are stored beside the products of the next tiles.
    """

    copy: float
    stores: bool = True
    beside: bool = False

    def seconds_for(self, num_bytes: float) -> float:
        """Returns the seconds in which all multiprocessors move so many bytes each."""
        return MULTIPROCESSORS * num_bytes / self.copy


H200 = Card(4.27e12)
H100 = Card(2.98e12)


@dataclass(frozen=True)
class Store:
    """What an epilogue does with a tile.

    seconds: on the H200, from the last product of a tile to the first of the next.
    num_bytes: read from and written to memory. All multiprocessors store at the same time, so each gets its
        share of the memory's rate.
    takes_turns: whether there are kernels that compute such products in turns.
    instructions: of a warp for its rows of a tile that is stored as boxes, counted in machine code; None if
        there are no kernels that store boxes.
    """

    seconds: float
    num_bytes: int
    takes_turns: bool = False
    instructions: int | None = None

    def on(self, card: Card) -> float:
        """Returns the seconds of this store on a card."""
        slower = card.seconds_for(self.num_bytes) - H200.seconds_for(self.num_bytes)
        return (self.seconds + slower) * card.stores

    def held(self, card: Card) -> float:
        """Returns the seconds in which the warps that store a tile do not multiply; with boxes, if it can."""
        if self.instructions is None:
            return self.on(card)
        issued = WARPS_A_SCHEDULER * self.instructions / CLOCK
        return issued + card.seconds_for(max(0, self.num_bytes - BOX_BYTES))

    def drained(self, card: Card) -> float:
        """Returns the seconds from the last warps' end to the end of the last store."""
        if self.instructions is None:
            return self.on(card)
        return card.seconds_for(min(self.num_bytes, BOX_BYTES))

    def least(self, card: Card) -> float:
        """Returns the least seconds of a wave of tiles that are stored as boxes: those of its results."""
        return 0.0 if self.instructions is None else card.seconds_for(self.num_bytes)


PLAIN = Store(4.2e-6, 64 * 1024, takes_turns=True, instructions=810)
GATED = Store(7.0e-6, 96 * 1024, takes_turns=True, instructions=1330)
GATED_GRADIENT = Store(17.8e-6, 320 * 1024, takes_turns=True)
WEIGHT = Store(3.0e-6, 64 * 1024, instructions=509)
WEIGHT_OF_GATHERED = replace(WEIGHT, instructions=517)

NOTHING, B, A = "nothing", "B", "A"
Tiles = Callable[[int], float]
"""Returns the number of tiles of so many rows, over all experts; an expert's last tile may have fewer."""


def shared_operand(*, weight: bool, m: int, n: int, gathered: bool = False) -> str:
    """Returns the operand that two blocks share, by the rule of cuda/grouped_gemm/sharing.h.

    gathered: whether rows of A are gathered; for a weight gradient, rows of B.
    """
    if weight and not gathered and math.ceil(m / ROWS) % 2 == 0:
        return B
    return A if (weight or not gathered) and math.ceil(n / COLUMNS) % 2 == 0 else NOTHING


def counted_tiles(counts: Sequence[int]) -> Tiles:
    """Returns the numbers of tiles of experts with these numbers of rows."""
    return lambda rows: sum(math.ceil(count / rows) for count in counts)


def random_tiles(num_rows: int, experts: int) -> Tiles:
    """Returns the expected numbers of tiles under random routing.

    The number of rows of an expert is taken as normally distributed. An expert has more than i tiles if it
    has more than i * rows rows.
    """
    mean = num_rows / experts
    deviation = math.sqrt(2 * mean * (1 - 1 / experts))

    def tiles(rows: int) -> float:
        most = math.ceil((mean + 6 * deviation) / rows)
        return experts * sum(math.erfc((i * rows + 0.5 - mean) / deviation) / 2 for i in range(most))

    return tiles


def waves(down: float, across: int, shared: str) -> int:
    """Returns the number of waves of a product of ``down`` x ``across`` tiles.

    down: tiles below each other, over all experts; pairs of tiles if operand B is shared.
    """
    if shared == NOTHING:
        return math.ceil(down * across / MULTIPROCESSORS)
    pairs = down * (across if shared == B else math.ceil(across / 2))
    return math.ceil(pairs / (MULTIPROCESSORS // 2))


def product_of_rows(
    tiles: Tiles,
    k: int,
    n: int,
    store: Store,
    card: Card = H200,
    *,
    gathered: bool = False,
    shared: str | None = None,
) -> float:
    """Returns the seconds of a product of each expert's rows: (rows, k) times (k, n).

    n: columns of the result; for GATED all columns, gate and up.
    shared: the operand that two blocks share; None: by the rule.
    """
    if shared is None:
        shared = shared_operand(weight=False, m=0, n=n, gathered=gathered)
    down = tiles(2 * ROWS if shared == B else ROWS)
    step = STEP + GATHERED_STEP * gathered
    product = math.ceil(k / DEPTH) * step
    num_waves = waves(down, math.ceil(n / COLUMNS), shared)
    seconds = num_waves * (product + store.on(card))
    if not card.beside:
        return seconds
    if store.instructions is not None and shared != B:
        seconds = stored_as_boxes(num_waves, product, store, card)
    if store.takes_turns and not gathered:
        seconds = min(seconds, product_in_turns(tiles, k, n, store, card))
    return seconds


def stored_as_boxes(num_waves: int, product: float, store: Store, card: Card) -> float:
    """Returns the seconds of a product whose tiles are stored as boxes.

    product: seconds in which a tile is multiplied.
    """
    wave = max(product + store.held(card), store.least(card))
    return num_waves * wave + store.drained(card)


def product_in_turns(tiles: Tiles, k: int, n: int, store: Store, card: Card = H200) -> float:
    """Returns the seconds of a product of each expert's rows that two warpgroups compute in turns.

    The arguments are those of `product_of_rows`. Two blocks share operand A if the number of tiles side by
    side is even.
    """
    across = math.ceil(n / COLUMNS_IN_TURNS)
    product = math.ceil(k / DEPTH) * STEP_IN_TURNS
    share = COLUMNS_IN_TURNS / COLUMNS
    num_waves = waves(tiles(ROWS), across, A if across % 2 == 0 else NOTHING)
    wave = max(product, (product + store.held(card) * share) / 2, store.least(card) * share)
    return num_waves * wave + store.drained(card) * share


def product_of_weights(
    tiles: Tiles,
    experts: int,
    m: int,
    n: int,
    card: Card = H200,
    *,
    shared: str | None = None,
    gathered: bool = False,
) -> float:
    """Returns the seconds of the weight gradient of all experts, each of m x n.

    gathered: whether the rows of B are gathered from tokens.
    """
    if shared is None:
        shared = shared_operand(weight=True, m=m, n=n, gathered=gathered)
    down = experts * math.ceil(m / (2 * ROWS if shared == B else ROWS))
    product = tiles(DEPTH) / experts * (STEP + GATHERED_STEP_OF_B * gathered)
    num_waves = waves(down, math.ceil(n / COLUMNS), shared)
    if card.beside:
        return stored_as_boxes(num_waves, product, WEIGHT_OF_GATHERED if gathered else WEIGHT, card)
    return num_waves * (product + WEIGHT.on(card))


def stored_products() -> Iterator[tuple[str, float, float]]:
    """Yields (name, predicted, measured seconds) of the products that bench_grouped_gemm stored on an H200.

    Weight gradients that add to earlier ones are left out: one rank's layer has none.
    """
    file = RESULTS / "grouped_gemm_nvidia_h200.json"
    columns = {NOTHING: "alone", B: "share B", A: "share A"}
    for document in json.loads(file.read_text(encoding="utf-8"))["models"]:
        for row in document["rows"]:
            if row["product"].endswith("accumulating"):
                continue
            for shared, column in columns.items():
                name = f"{document['model']['name']}, {row['product']}, {column}"
                yield name, stored_product(document, row["product"], shared), row[column] / 1e3


def stored_product(document: dict[str, Any], product: str, shared: str) -> float:
    """Returns the predicted seconds of a product of a stored model."""
    width = document["model"]["d_model"]
    hidden = document["model"]["d_hidden"]
    counts = document["counts"]
    tiles = counted_tiles(counts)
    is_up = product.startswith("up")
    columns_in = width if is_up else hidden
    columns_out = hidden if is_up else width
    if "weight gradient" in product:
        return product_of_weights(tiles, len(counts), columns_out, columns_in, shared=shared)
    if "input gradient" in product:
        return product_of_rows(tiles, columns_out, columns_in, PLAIN, shared=shared)
    if product == "gradient of the gated hidden":
        return product_of_rows(tiles, width, hidden, GATED_GRADIENT, shared=shared)
    if product.startswith("gated hidden"):
        gathered = product.endswith("gathered")
        return product_of_rows(tiles, width, 2 * hidden, GATED, gathered=gathered, shared=shared)
    return product_of_rows(tiles, columns_in, columns_out, PLAIN, shared=shared)


MERGED = {
    8: (312, {4: 264, 8: 305}),
    16: (320, {4: 280, 8: 319, 16: 373}),
    32: (294, {4: 255, 8: 296, 16: 359}),
}
"""Instructions of a warp for its 32 / lanes tokens, by the number of lanes that share a token.

The first number is of everything but the choice and the writing of choices; then come those of the choice, by
the length of the lists that are merged (cuda/route/merge.cuh).
"""


def choose_slots(experts: int, top_k: int, *, merges: bool = True) -> float:
    """Returns the instructions that a warp issues for one token in the first kernel of the routing.

    They are counted in machine code of sm_90a (nvcc 13.0).

    merges: whether experts are chosen by merging sorted lists, where there are kernels for it; the tokens
        whose scores agree in their upper bits are left out. False: by a maximum or a reduction a choice.
    """
    if merges and 32 < experts <= 256 and top_k <= (8 if experts <= 64 else 16):
        lanes = 8 if experts <= 64 else 16 if experts <= 128 else 32
        others, choice = MERGED[lanes]
        longest = next(length for length in choice if top_k <= length)
        return (others + 85 * math.ceil(top_k / lanes) + choice[longest]) * lanes / 32
    if experts > 256:
        return 1295 + 82 + 49 * top_k
    if experts > 128:
        return 633 + 84 + 31 * top_k
    if experts > 64:
        return 355 + 86 + 22 * top_k if top_k > 2 else (394 + 85 + 161 * top_k) / 2
    lanes = max(1, experts // 8)
    return (390 + 85 * math.ceil(top_k / lanes) + 143 * top_k) * lanes / 32


def route(scenario: Scenario, *, merges: bool = True) -> float:
    """Returns the seconds of the two forward kernels of the routing; ``merges`` as in choose_slots()."""
    slots = choose_slots(scenario.experts, scenario.top_k, merges=merges) * scenario.tokens
    return slots / (4 * MULTIPROCESSORS * CLOCK) + ROUTE_FIXED


def moved(scenario: Scenario, card: Card, share: float) -> float:
    """Returns the seconds of a kernel that reads each token and writes its K rows, or the reverse.

    share: the kernel's share of a copy's rate, as stored by bench_permute.
    """
    rows = scenario.tokens * (scenario.top_k + 1)
    return rows * scenario.d_model * 2 / (share * card.copy)


def gate(scenario: Scenario, card: Card, passes: int) -> float:
    """Returns the seconds of products with the gate's weight, which read or write all tokens once each."""
    return passes * scenario.tokens * scenario.d_model * 2 / (0.8 * card.copy)


def old_sharing(scenario: Scenario) -> str | None:
    """Returns the operand that products of rows shared when bench_alone was stored; None: by the rule."""
    return B if scenario.tokens * scenario.top_k >= 1024 * scenario.experts else None


def forward(scenario: Scenario, card: Card, *, old_rules: bool = False) -> dict[str, float]:
    """Returns the seconds of each kernel of a forward pass.

    old_rules: the rules under which bench_alone was stored. Products of rows shared B from 1,024 rows of an
        expert on, and a first product always gathered. The routing took a maximum for each choice. In
        backward, autograd added the gate's gradient of the tokens to that of the experts.
    """
    tiles = random_tiles(scenario.tokens * scenario.top_k, scenario.experts)
    columns = 2 * scenario.d_hidden
    width = scenario.d_model
    gathered = old_rules or gathers_in_load("sm_90a", columns, scenario.top_k)
    shared = old_sharing(scenario) if old_rules else None
    return {
        "gate": gate(scenario, card, 1),
        "route": route(scenario, merges=not old_rules),
        "permute": 0.0 if gathered else moved(scenario, card, 0.89),
        "up": product_of_rows(tiles, width, columns, GATED, card, gathered=gathered, shared=shared),
        "down": product_of_rows(tiles, scenario.d_hidden, width, PLAIN, card, shared=shared),
        "unpermute": moved(scenario, card, 0.99),
    }


def backward(scenario: Scenario, card: Card, *, old_rules: bool = False) -> dict[str, float]:
    """Returns the seconds of each kernel of a backward pass; ``old_rules`` as in forward()."""
    tiles = random_tiles(scenario.tokens * scenario.top_k, scenario.experts)
    hidden = scenario.d_hidden
    columns = 2 * hidden
    width = scenario.d_model
    shared = old_sharing(scenario) if old_rules else None
    # The permute of the tokens is for "up weight" alone. Only kernels that store boxes can do without it.
    gathered = card.beside and columns <= WEIGHT_COLUMNS * (1 + 1 / scenario.top_k)
    return {
        "permutes": (1 if gathered else 2) * moved(scenario, card, 0.89),
        "gated gradient": product_of_rows(tiles, width, hidden, GATED_GRADIENT, card, shared=shared),
        "down weight": product_of_weights(tiles, scenario.experts, width, hidden, card),
        "up weight": product_of_weights(tiles, scenario.experts, columns, width, card, gathered=gathered),
        "up input": product_of_rows(tiles, columns, width, PLAIN, card, shared=shared),
        "unpermute": moved(scenario, card, 0.99),
        # The product for the gate's gradient of the tokens also reads that of the experts.
        "gate": gate(scenario, card, 2 if old_rules else 3) + SMALL_KERNELS,
        "add": 3 * scenario.tokens * width * 2 / card.copy if old_rules else 0.0,
    }


STATED = {
    "1.4B, n=256": (340, 368),
    "7B, n=256": (365, 405),
    "7B, n=1024": (468, 468),
    "30B, n=256": (430, 460),
    "30B, n=1024": (553, 555),
    "120B, n=1024": (560, 568),
    "120B, n=2048": (598, 588),
}
"""TFLOP/s of both passes on an H100, as SonicMoE's authors state and the project's issue quotes."""


def rates(scenario: Scenario, card: Card) -> tuple[float, float]:
    """Returns the predicted TFLOP/s of a forward and of a backward pass."""
    forward_seconds = sum(forward(scenario, card).values())
    backward_seconds = sum(backward(scenario, card).values())
    flop = scenario.forward_flop / 1e12
    return flop / forward_seconds, 2 * flop / backward_seconds


CARDS = {
    "pmoe, H100": H100,
    "beside, H100": Card(H100.copy, beside=True),
    "bound, H100": Card(H100.copy, stores=False),
    "pmoe, H200": H200,
    "beside, H200": Card(H200.copy, beside=True),
    "bound, H200": Card(H200.copy, stores=False),
}


def rows() -> list[list[str]]:
    """Returns the cells of the table: each shape with SonicMoE's rates and those predicted for pmoe."""
    cells = []
    for name, stated in STATED.items():
        pairs = [stated, *(rates(SHAPES[name], card) for card in CARDS.values())]
        cells.append([name, *(f"{ahead:.0f} / {back:.0f}" for ahead, back in pairs)])
    return cells


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print("TFLOP/s, forward / backward: SonicMoE's as stated, pmoe's predicted")
    print(table([["shape", "SonicMoE, H100", *CARDS], *rows()]))
    for name in STATED:
        for passed in (forward, backward):
            parts = passed(SHAPES[name], H200)
            text = ", ".join(f"{part} {1e6 * seconds:.0f}" for part, seconds in parts.items())
            print(f"{name}, {passed.__name__}, us on an H200: {text}")


if __name__ == "__main__":
    main()
