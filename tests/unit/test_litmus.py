"""The protocols of COMET's flags and of FlashDMoE's actors in the memory model of PTX.

The tests show which outcomes are impossible, and which operations that depends on.
"""

from __future__ import annotations

import re

import pytest

from tests.cuda.compiled import CUDA
from tests.cuda.litmus import Litmus, call, everything, instruction, lanes, read, sync, write
from tests.cuda.litmus_actors import actors
from tests.cuda.ptx_model import Event, Program

ALL = [*everything(), *actors()]


def body_of(file: str, function: str) -> str:
    text = (CUDA / file).read_text()
    begin = re.search(rf"^( *)__device__ __forceinline__ [^;]*?\b{function}\(", text, re.MULTILINE)
    assert begin, f"{file} has no {function}"
    return text[begin.end() :].split(f"\n{begin[1]}}}\n")[0]


@pytest.mark.parametrize("litmus", ALL, ids=lambda each: each.name)
def test_the_sources_call_in_the_order_of_the_programs(litmus: Litmus) -> None:
    for (file, function), names in litmus.calls.items():
        pattern = ".*?".join(rf"\b{name}(?:<\w+>)?\(" for name in names)
        assert re.search(pattern, body_of(file, function), re.DOTALL), (file, function, names)


@pytest.mark.parametrize("litmus", ALL, ids=lambda each: each.name)
def test_nothing_stale_is_seen_behind_a_flag(litmus: Litmus) -> None:
    assert any(True for _ in Program(litmus.events).executions())
    assert not list(litmus.bad_executions())


@pytest.mark.parametrize("litmus", ALL, ids=lambda each: each.name)
def test_each_sense_scope_meeting_and_fence_that_is_left_out_is_found(litmus: Litmus) -> None:
    """Each of them is necessary, except those in a list with the reason why the model does not need them."""
    weakened = dict(litmus.weakened())
    assert len(weakened) >= 2
    unnoticed = {name for name, events in weakened.items() if not any(litmus.bad_executions(events))}
    assert unnoticed == set(litmus.redundant)


def test_what_an_instruction_says_is_read_from_the_header() -> None:
    assert instruction("store_release_system") == ("st", "release", "sys")
    assert instruction("load_acquire") == ("ld", "acquire", "gpu")
    assert instruction("add_acq_rel") == ("atom", "acq_rel", "gpu")


# ---- the model itself, by the textbook's programs


def outcomes(events: list[Event], *reads: tuple[str, str]) -> set[tuple[bool, ...]]:
    """Returns, for each allowed execution, whether these reads have seen a write.

    reads: (place, thread) pairs.
    """
    program = Program(events)
    found = set()
    for execution in program.executions():
        seen = {
            (program.events[i].place, program.events[i].thread.name): source is not None
            for i, source in execution.observed.items()
        }
        found.add(tuple(seen[each] for each in reads))
    return found


def test_messages_pass_by_release_and_acquire_alone() -> None:
    (a,), (b,) = lanes(0, 0, "a"), lanes(0, 1, "b")
    by_flags = [*write("x", a), *call("store_release", "f", a), *call("load_acquire", "f", b), *read("x", b)]
    plain = [*write("x", a), *write("f", a), *read("f", b), *read("x", b)]
    reads = ("f", "b"), ("x", "b")
    assert outcomes(by_flags, *reads) == {(True, True), (False, False), (False, True)}
    assert (True, False) in outcomes(plain, *reads)


def test_a_scope_that_does_not_include_the_other_thread_orders_nothing() -> None:
    (a,), (b,) = lanes(0, 0, "a"), lanes(1, 1, "b")
    events = [
        *write("x", a),
        *call("store_release", "f", a),
        *call("load_acquire_system", "f", b),
        *read("x", b),
    ]
    assert (True, False) in outcomes(events, ("f", "b"), ("x", "b"))


def test_both_of_two_stores_may_come_late() -> None:
    (a,), (b,) = lanes(0, 0, "a"), lanes(0, 1, "b")
    events = [
        *call("store_release", "x", a), *call("load_acquire", "y", a),
        *call("store_release", "y", b), *call("load_acquire", "x", b),
    ]  # fmt: skip
    assert (False, False) in outcomes(events, ("y", "a"), ("x", "b"))


def test_reads_of_one_place_do_not_go_back() -> None:
    (a,), (b,) = lanes(0, 0, "a"), lanes(0, 1, "b")
    first, second = call("load_acquire", "x", b), call("load_acquire", "x", b)
    program = Program([*call("store_release", "x", a), *first, *second])
    seen = {tuple(s is not None for s in e.observed.values()) for e in program.executions()}
    assert seen == {(False, False), (False, True), (True, True)}


def test_a_meeting_orders_and_additions_are_not_torn() -> None:
    a, b = lanes(0, 0, "a", "b")
    assert outcomes([*write("x", a), *sync("m", a, b), *read("x", b)], ("x", "b")) == {(True,)}
    both = [*call("add_acq_rel", "n", a), *call("add_acq_rel", "n", b)]
    assert outcomes(both, ("n", "a"), ("n", "b")) == {(True, False), (False, True)}
