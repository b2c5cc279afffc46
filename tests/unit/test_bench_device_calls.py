"""How many calls reach the device in a pass of several ranks: the counts of docs/gpu.md, pinned.

`bench/bench_device_calls.py` counts them on the CPU, in the branches for CUDA. A change that adds a launch, a
collective, a wait or a synchronisation to a pass fails here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fresh

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
COLUMNS = ("device calls", "operators", "launches", "collectives", "records", "waits", "syncs")


def counted(num_ranks: int) -> list[dict[str, Any]]:
    program = (
        "import json\n"
        "from bench.bench_device_calls import rows\n"
        f"print(json.dumps(rows({num_ranks}, [1, 4, 8])))"
    )
    return json.loads(fresh.run(program).splitlines()[-1])


def shown() -> dict[tuple[int, int, str], tuple[int, ...]]:
    """Returns the numbers of the table of docs/gpu.md, by ranks, n and pass."""
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- device calls -->\n")
    table: dict[tuple[int, int, str], tuple[int, ...]] = {}
    for line in rest.partition("\n\n")[0].splitlines()[2:]:
        ranks, n, name, *numbers = (cell.strip() for cell in line.strip("|").split("|"))
        table[int(ranks), int(n), name] = tuple(int(each.split()[0]) for each in numbers)
    return table


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_the_page_shows_the_calls_of_each_pass(num_ranks: int) -> None:
    table = shown()
    rows = counted(num_ranks)
    assert len(rows) == 6
    for row in rows:
        assert table[row["ranks"], row["n"], row["pass"]] == tuple(row[name] for name in COLUMNS), row


def test_the_predicted_times_follow_from_the_counts() -> None:
    """44 us for an operator or a launch, 60 for a collective, 4 for an event's record or a wait."""
    counts = shown()
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("| records and waits before |")
    seen = []
    for line in rest.partition("\n\n")[0].splitlines()[2:]:
        ranks, n, name, _, now, _, events, _, predicted = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        seen.append((int(ranks), int(n), name))
        calls, operators, launches, collectives, records, waits, _ = counts[seen[-1]]
        assert (int(now), int(events)) == (calls, records + waits), line
        seconds = 44e-6 * (operators + launches) + 60e-6 * collectives + 4e-6 * (records + waits)
        assert predicted == f"{seconds * 1e3:.1f} ms", line
    assert seen == list(counts), "each number of ranks, of chunks and each pass has its line"


@pytest.mark.slow
def test_a_wire_adds_launches_that_pack_and_unpack_and_no_operator() -> None:
    """On two ranks rows arrive sorted by expert: without a wire nothing unpacks or sorts them.

    Launches that pack messages copy no other rows. Without a wire, four launches of backward copy all rows
    that are sent, both tensors of a chunk, and most of those that stay; with it, eight and four do.
    """
    program = (
        "import json\n"
        "from bench.bench_device_calls import count\n"
        "from bench.links import alike\n"
        "alike.start(2)\n"
        "found = [count(4), count(4, wire='e4m3', wire_backward='e4m3')]\n"
        "print(json.dumps([{name: calls.row() for name, calls in each.items()} for each in found]))"
    )
    plain, wired = json.loads(fresh.run(program).splitlines()[-1])
    added = {
        name: {column: wired[name][column] - plain[name][column] for column in COLUMNS} for name in plain
    }
    nothing = dict.fromkeys(COLUMNS, 0)
    # Forward unpacks T_DI of four chunks; backward dT_DO, and T_DI that was sent again.
    assert added["forward"] == {**nothing, "device calls": 4, "launches": 4}
    assert added["backward"] == {**nothing, "device calls": 15, "launches": 15}


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_each_pass_calls_a_third_of_the_functions_that_it_called_before(num_ranks: int) -> None:
    """Python and C functions at n = 4. The page has the counts of before, and those of Python 3.11 now."""
    program = (
        f"import json\nfrom bench.bench_device_calls import rows\nprint(json.dumps(rows({num_ranks}, [4])))"
    )
    for row in json.loads(fresh.run(program).splitlines()[-1]):
        line = re.search(
            rf"^\| {num_ranks} \| {row['pass']} \| ([\d,| ]+) \|$", PAGE.read_text("utf-8"), re.M
        )
        assert line is not None
        before_python, python, before_c, c = (int(each.replace(",", "")) for each in line[1].split(" | "))
        assert 3 * max(row["python"], python) <= before_python, row
        assert 3 * max(row["c"], c) <= before_c, row
        if sys.version_info[:2] == (3, 11):  # as the page says
            assert row["python"] == pytest.approx(python, rel=0.01), row
            assert row["c"] == pytest.approx(c, rel=0.01), row


def test_the_page_says_which_share_of_the_calls_before_is_left() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shares: dict[str, list[float]] = {"forward": [], "backward": []}
    for name, cells in re.findall(
        r"^\| [128] \| (\w+) \| ([\d,]+ \| [\d,]+ \| [\d,]+ \| [\d,]+) \|$", page, re.M
    ):
        before_python, python, before_c, c = (int(each.replace(",", "")) for each in cells.split(" | "))
        shares[name].append((python + c) / (before_python + before_c))
    one, two, eight = shares["forward"]
    most = max(shares["backward"])
    sentence = (
        f"forward passes make {one:.2f}, {two:.2f} and {eight:.2f} of the calls before on one, two and eight "
        f"ranks, and backward passes at most {most:.2f}."
    )
    assert sentence in " ".join(page.split())
