"""Simulates COMET's Figs. 10, 12, 13 and 14: the time of a layer by COMET and by four other systems.

COMET is simulated as two fused kernels. Each has its best division into communicating and computing thread
blocks (`pmoe.papers.comet_figures`). The four other systems launch more kernels, and every launch costs time.
They are simulated as pmoe's forward schedule in chunks (micro-batches). The command `pmoe simulate comet
--assumptions` prints the assumptions, which were written down before the first run.

Letters are the paper's: M tokens of all ranks, E experts, topk experts of a token, W = EP * TP ranks (expert
and tensor parallel). Layer 0 is dispatch and the first product, layer 1 the second product and combine.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pmoe.papers.assumptions import printed
from pmoe.papers.comet_figures import H800, MODELS, RANKS, best_division, chunked_run
from pmoe.papers.comet_tasks import Arriving, DeviceRates, Model, Returning, even_layer
from pmoe.planner.simulator import makespan

LAUNCH_SECONDS = 5e-6
"""Seconds that each launch of a kernel or of a collective adds to a layer."""

LAUNCHES: Mapping[str, int] = printed("flashdmoe table 1.1")
"""Launches of a forward pass, by system, as FlashDMoE's Table 1.1 counts them."""

L20 = DeviceRates(
    blocks=92,
    block_flops=2 / 3 * 119.5e12 / 92,
    block_local_bytes=28e9,
    block_peer_bytes=28e9,
    link_bytes=25e9,
    signal_seconds=2e-6,
)
"""Rates of one L20 GPU. Section 5.4 of the paper has eight of them, connected by PCIe."""

MIXTRAL = MODELS["Mixtral 8x7B"]
CHUNKS = (1, 2, 4, 8)
"""Numbers of chunks that Tutel chooses from."""

TOKENS = (2048, 4096, 8192, 16384, 32768)
"""Numbers of tokens (M) in Fig. 10. The paper's text does not list them."""

LAYOUTS = ((8, 1), (4, 2), (2, 4), (1, 8))
"""Pairs (EP, TP), the sizes of expert- and tensor-parallel groups, in Fig. 12 and in Fig. 14, right."""

STRUCTURES = tuple(itertools.product((8, 16, 32), (2, 4, 8)))
"""Pairs (E, topk) in Fig. 13: the number of experts, and the number of experts of a token.

The paper's text does not list them.
"""

STDS = (0.0, 0.01, 0.02, 0.032, 0.04, 0.05)
"""Measures of skewed routing in Fig. 14, left: standard deviations of the experts' shares of the rows.

The paper's text names only 0, 0.032 and 0.05.
"""


class SystemTime(NamedTuple):
    """Time of a layer's forward pass by one system.

    device: seconds of the kernels and messages, without their launches.
    launches: number of launches of kernels and collectives. Each launch adds `LAUNCH_SECONDS`.
    """

    device: float
    launches: int

    @property
    def seconds(self) -> float:
        """Seconds of the forward pass: the sum of kernels, messages, and all launches."""
        return self.device + self.launches * LAUNCH_SECONDS


def chunk_launches(n: int, local_experts: int) -> int:
    """Returns the number of launches of a forward pass in n chunks, if each expert has its own kernels.

        gate and routing            20
        each chunk                  4: 2 collectives, and 2 kernels that arrange rows
        each expert in each chunk   3: two products and an activation

    n: number of chunks.
    local_experts: number of experts of the rank.
    """
    return 20 + n * (4 + 3 * local_experts)


@functools.cache
def system_times(arriving: Arriving, returning: Returning, device: DeviceRates) -> dict[str, SystemTime]:
    """Returns {name of a system: time of a layer's forward pass in this system}.

    "CUTLASS" is Megatron-LM with matrix products by CUTLASS, "TE" Megatron-LM with matrix products by
    Transformer Engine.

    arriving: work of one rank in COMET's layer 0 (dispatch and first product).
    returning: work of one rank in COMET's layer 1 (second product and combine).
    device: rates of the device.
    """
    local_experts = len(arriving.rows_E)
    chunked = {n: makespan(chunked_run(arriving, returning, device, n)) for n in CHUNKS}
    in_chunks = {n: SystemTime(chunked[n], chunk_launches(n, local_experts)) for n in CHUNKS}
    _, first = best_division(arriving, device)
    _, second = best_division(returning, device)
    return {
        "COMET": SystemTime(first + second, LAUNCHES["COMET"]),
        "Tutel": min(in_chunks.values(), key=lambda time: time.seconds),
        "CUTLASS": SystemTime(chunked[1], LAUNCHES["Megatron-LM CUTLASS"]),
        "TE": SystemTime(chunked[1], LAUNCHES["Megatron-LM TE"]),
        "FasterMoE": in_chunks[2],
    }


def skewed_layer(model: Model, tokens: int, std: float) -> tuple[Arriving, Returning]:
    """Returns the busiest rank's work in COMET's layers 0 and 1, under skewed routing.

    There are 8 ranks with one expert each. Layer 0 is dispatch and the first product, layer 1 the second
    product and combine.

    An expert's share is the fraction of all rows that the expert receives. The shares of the 8 experts are
    evenly spaced around their mean. The busiest rank has the largest share. By assumption, every rank sends
    as many rows as the busiest rank receives.

    model: sizes of the layer. It has 8 experts.
    tokens: tokens of all ranks.
    std: standard deviation of the experts' shares.
    """
    own_tokens = tokens // RANKS
    spread = statistics.pstdev(range(model.E))
    share = 1 / model.E + std * (model.E - 1) / 2 / spread
    rows = round(own_tokens * model.topk * share)
    arriving = Arriving(rows_WE=((rows,),) * RANKS, reduction=model.N, columns=model.K)
    returning = Returning(
        rows_E=arriving.rows_E,
        partials_W=(rows,) * RANKS,
        tokens=own_tokens,
        reduction=model.K,
        columns=model.N,
    )
    return arriving, returning


def _row(case: Mapping[str, Any], layers: tuple[Arriving, Returning], device: DeviceRates) -> dict[str, Any]:
    """Returns one row of a figure: the fields of ``case``, and each system's seconds for a forward pass.

    The field "no launches_seconds" has COMET's seconds without the time of launches. FasterMoE has no tensor
    parallelism. So its field is None in cases with TP > 1, where TP is the size of a tensor-parallel group.

    case: the numbers by which the rows of the figure differ, such as {"M": 8192}.
    layers: work of one rank in COMET's layer 0 (dispatch and first product) and layer 1 (second product and
        combine).
    device: rates of the device.
    """
    times = system_times(*layers, device)
    seconds: dict[str, float | None] = {f"{name}_seconds": time.seconds for name, time in times.items()}
    if case.get("TP", 1) > 1:
        seconds["FasterMoE_seconds"] = None
    return {**case, **seconds, "no launches_seconds": times["COMET"].device}


def figure10() -> list[dict[str, Any]]:
    """Returns Fig. 10, the seconds of each system for a layer of Mixtral: a row for each number of tokens.

    M is the number of tokens of all ranks. The experts are distributed over 8 ranks (EP = 8).
    """
    return [_row({"M": M}, even_layer(MIXTRAL, M, ep=8), H800) for M in TOKENS]


def figure12() -> list[dict[str, Any]]:
    """Returns Fig. 12, the seconds of each system for a layer of Mixtral: a row for each EP and TP.

    EP is the number of ranks of an expert-parallel group, TP of a tensor-parallel group. All ranks together
    have 8192 tokens.
    """
    return [_row({"EP": ep, "TP": tp}, even_layer(MIXTRAL, 8192, ep=ep, tp=tp), H800) for ep, tp in LAYOUTS]


def figure13() -> list[dict[str, Any]]:
    """Returns Fig. 13, the seconds of each system: a row for each E (experts) and topk (experts of a token).

    All other sizes are those of a layer of Mixtral, with 8192 tokens on 8 expert-parallel ranks.
    """
    return [
        _row({"E": E, "topk": topk}, even_layer(MIXTRAL._replace(E=E, topk=topk), 8192, ep=8), H800)
        for E, topk in STRUCTURES
    ]


def figure14_left() -> list[dict[str, Any]]:
    """Returns the left side of Fig. 14, the seconds of each system: a row for each skew of the routing.

    The layer is Mixtral's, with 8192 tokens on 8 expert-parallel ranks. Two fields are not seconds:

        1000 std        1000 times the standard deviation of the experts' shares of the rows
        over CUTLASS    the seconds of CUTLASS divided by the seconds of COMET
    """
    rows = [_row({"1000 std": round(1000 * std)}, skewed_layer(MIXTRAL, 8192, std), H800) for std in STDS]
    return [{**row, "over CUTLASS": row["CUTLASS_seconds"] / row["COMET_seconds"]} for row in rows]


def figure14_right() -> list[dict[str, Any]]:
    """Returns the right side of Fig. 14, the seconds of each system on eight L20: a row for each EP and TP.

    EP is the number of ranks of an expert-parallel group, TP of a tensor-parallel group. The layer is
    Mixtral's, but with 4 experts for each token. All ranks together have 8192 tokens.
    """
    model = MIXTRAL._replace(topk=4)
    return [_row({"EP": ep, "TP": tp}, even_layer(model, 8192, ep=ep, tp=tp), L20) for ep, tp in LAYOUTS]


FIGURES: Mapping[str, Callable[[], list[dict[str, Any]]]] = {
    "figure10": figure10,
    "figure12": figure12,
    "figure13": figure13,
    "figure14_left": figure14_left,
    "figure14_right": figure14_right,
}
"""Functions that return the rows of each figure, by the figure's name."""


def speed_ups(figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yields COMET's mean speed-ups over the other systems: a row for each figure.

    A row has the name of the figure, the simulated mean for each system, and the paper's means in the field
    "paper".

    figures: the rows of each figure, by the figure's name in `FIGURES`.
    """
    for figure, rows in figures.items():
        row: dict[str, Any] = {"figure": figure.removeprefix("figure").replace("_", ", ")}
        for name in ("Tutel", "CUTLASS", "TE", "FasterMoE"):
            pairs = [(row[f"{name}_seconds"], row["COMET_seconds"]) for row in rows]
            row[name] = statistics.fmean(other / own for other, own in pairs if other is not None)
        yield {**row, "paper": printed("comet speed-ups")[row["figure"]]}


def tables() -> dict[str, list[dict[str, Any]]]:
    """Returns the tables of Figs. 10, 12, 13 and 14 that `pmoe simulate comet` prints, by name."""
    figures = {name: figure() for name, figure in FIGURES.items()}
    return {**figures, "speed_ups": list(speed_ups(figures))}
