"""Failure reports: a rank that fails publishes its error, so that its peers stop waiting for it.

Reports are written to the default group's store. A rank that waits on the CPU for a collective reads the
store every `LOOK_AFTER`, and raises `PeerError` if it finds a report that concerns it:

    rank 0   collective: waits ... reads the store: raises PeerError with rank 1's error
    rank 1   raises an error: writes it into the store, and never starts the collective

A peer may also stay away without an error, because its loss needs no output of a layer. So a waiting rank
also writes in which pass it waits (`PASS`). An error then names the ranks that have not written the same.

On a GPU the host does not wait for collectives, so no rank reads the reports.

This file also has

- `wait_for`, which waits for a collective, and `wait_for_device`, for a step on the device;
- `at_stage` and `publishing_failures`, contexts that publish an error of their block;
- `enter_call` and `backward_pass`, with which a call and its backward pass begin. Both raise an error on a
  rank that has left an earlier pass in the middle (`check_whole`);
- `meet_before_call` and `meet_before_reduction`, which wait for the peers if their calls may differ.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.comm.group_options import has_peers, timeout_of
from pmoe.comm.group_record import (
    GroupRecord,
    collectives,
    is_known,
    known_groups,
    names_of_left_groups,
    record_of_group,
)
from pmoe.comm.meeting import (
    CURE,
    FIRST_PAUSE_SECONDS,
    IN_HOOK,
    IS_OPEN,
    LAST_PAUSE_SECONDS,
    Meeting,
    left_out,
    not_waiting,
    other_passes,
    waiting_in_sum,
)
from pmoe.comm.ranks import Ranks
from pmoe.comm.shared_gpu import shared_gpu_hint
from pmoe.warn import warn_once

FAILED = "pmoe/failed"
"""Beginning of all keys of failure reports.

LIFE is `GroupRecord.life`, RANK a global rank, and GROUP the name of a process group:

    pmoe/failed/LIFE              set when any rank has failed; until then no other key is read
    pmoe/failed/LIFE/RANK         three lines: the name of the group that the rank left, its
                                  `GroupRecord.left_at`, and its error. Emptied when the rank goes on
    pmoe/failed/LIFE/RANK/GROUP   two lines: `GroupRecord.left_at`, and the error with which the rank left
                                  that group. Never emptied
"""

LOOK_AFTER = datetime.timedelta(seconds=0.5)
"""Time after which a waiting rank reads the failure reports, again and again."""

failure_published: threading.Event = threading.Event()
"""Set when this rank publishes a failure. Cleared when `enter_call` accepts a later call of this rank."""


PASS = "pmoe/pass"
"""Beginning of the keys under which waiting ranks write in which pass they wait.

The whole key is pmoe/pass/LIFE/GROUP/RANK, with the words of `FAILED`; here RANK is the number in the group.
The value is `GroupRecord.place_of_pass`.
"""

WARN_AFTER_SECONDS = 20.0
"""Time after which a rank that waits in a backward pass warns which peers have not come to it."""


class PeerError(RuntimeError):
    """The error of a rank that stops waiting because a peer has failed. It quotes the peer's error."""


def leave(error: BaseException, ranks: Ranks, stage: str, *, by_itself: bool = True) -> None:
    """Records that this rank leaves a forward or backward pass before its end, and publishes the error.

    This rank starts no more collectives of the pass, and without the report the other ranks would wait for
    it. If the rank has left the group before, the record keeps the first error. A single rank has no peers,
    and records nothing.

    error: the error with which the rank leaves.
    ranks: the group whose collectives the pass uses.
    stage: what the rank did when it failed, in words; "" if the error's text has these words already.
    by_itself: True if this rank has raised the error itself, False if a peer or a failed collective caused
        it.
    """
    from torch.utils.checkpoint import _StopRecomputationError

    if isinstance(error, _StopRecomputationError):
        return  # no failure: torch raises it on all ranks to end activation checkpointing's second pass early
    if ranks.size == 1 or not dist.is_initialized() or ranks.group is None or not is_known(ranks.group):
        return
    record = ranks.record
    if not record.reason_left:
        where = f" in {stage}{' of ' if ranks.layer else ''}{ranks.layer}" if stage else ""
        record.reason_left = f"{type(error).__name__}{where}: {error}"
        record.left_with = f"global rank {dist.get_rank()} raised {type(error).__name__}: {error}"
        record.times_left += 1
        record.left_at = f"{record.place()} {record.times_left}" if by_itself else ""
    publish_leaving(record)


def publish_leaving(record: GroupRecord) -> None:
    """Publishes the error that made this rank leave a forward or backward pass before its end.

    The error is written into the store under two keys (`FAILED`). GROUP is the group whose collectives the
    pass used:

        pmoe/failed/LIFE/RANK/GROUP   for ranks that wait for a collective of GROUP. Never emptied
        pmoe/failed/LIFE/RANK         for ranks that wait for this rank in another group. This rank's next
                                      call empties it

    record: this rank's record of GROUP.
    """
    rank = dist.get_rank()
    text = record.left_with[:4000]
    failure_published.set()
    _to_take_back.add(_key(record, rank))
    in_store = {
        _key(record, rank): f"{record.name}\n{record.left_at}\n{text}",
        f"{_key(record, rank)}/{record.name}": f"{record.left_at}\n{text}",
        _any_failed(record): "",
    }
    _write(in_store)


def publish_outside_pass(error: BaseException) -> None:
    """Publishes an error raised outside of any forward or backward pass, such as one of load_state_dict.

    Peers that wait for this rank in their next call then raise the error, too. No collective was left
    unfinished, so the group can still be used. If the program goes on after the error, this rank's next call
    withdraws the report.
    """
    _publish_report(error, place="")


def publish_construction(error: Exception) -> None:
    """Publishes the error with which this rank failed to build a layer, or refused to call it.

    Peers that have built the layer may wait for this rank in their first call. A rank also refuses a call
    inside a transform of ``torch.func``, before any message. A refused call counts as a failed
    constructor.

    If constructors fail on all ranks, no rank waits. So a rank ignores the report of a peer's n-th failed
    constructor if n of its own constructors have failed, even if the errors differ. If a constructor failed
    only on a peer, and this rank has read the report, it counts as failed on this rank, too.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None or not has_peers(world):
        return
    life = record_of_group(world).life
    _failed_constructors[life] = max(_failed_constructors[life], _reported_constructors[life]) + 1
    _publish_report(error, _construction(_failed_constructors[life]))


_failed_constructors: collections.Counter[int] = collections.Counter()
"""The number of this rank's failed constructors of layers, for each `GroupRecord.life`."""

_reported_constructors: collections.Counter[int] = collections.Counter()
"""The largest number of failed constructors in any report of a peer, for each `GroupRecord.life`."""


def _construction(number: int) -> str:
    """Returns the text that stands in a report for a rank's failed constructor ``number``, counted from 1."""
    return f"{CONSTRUCTION}{number}"


CONSTRUCTION = "construction "
"""The beginning of the text that stands for a failed constructor."""


def _publish_report(error: BaseException, place: str) -> None:
    """Publishes an error that leaves no collective unfinished. This rank's next call withdraws the report.

    place: the first line of the report, in place of the group's name (`FAILED`). A peer that knows the text
        ignores the report (`failures`). With "" no peer ignores it.
    """
    world = dist.group.WORLD if dist.is_available() else None
    if world is None or not has_peers(world):
        return
    record = record_of_group(world)
    rank = dist.get_rank()
    text = f"global rank {rank} raised {type(error).__name__}: {error}"[:4000]
    failure_published.set()
    _to_take_back.add(_key(record, rank))
    _write({_key(record, rank): f"{place}\n\n{text}", _any_failed(record): ""})


PATIENCE_SECONDS = 3.0
"""How long a rank waits for its peers to report where they left a pass.

A peer that waits for a collective leaves after about a second, because it reads the reports every
`LOOK_AFTER`.
"""


def settle(ranks: Ranks) -> bool:
    """Returns whether a group may be used again, after this rank has left a pass over it in the middle.

    The group may be used again if every rank left that pass by an error of its own, after the same
    collective: then no rank waits. The other ranks report in the store after which collective they left. The
    function waits for these reports, at most `PATIENCE_SECONDS`. If the result is True, it clears this rank's
    record of leaving.

    If the result is False, the caller must call `publish_leaving` again, with which the other ranks also
    learn that the group cannot be used.
    """
    group = ranks.group
    record = ranks.record
    assert group is not None
    store = dist.distributed_c10d._get_default_store()
    end = time.monotonic() + PATIENCE_SECONDS
    keys = [f"{_key(record, rank)}/{record.name}" for rank in dist.get_process_group_ranks(group)]
    while record.left_at:
        values = [store.get(key).decode() if store.check([key]) else "" for key in keys]
        places = [value.partition("\n")[0] for value in values if value]
        # Reports stay in the store. A rank whose report has a smaller number of times has not left this time.
        # A rank with a larger number has settled this time already, and has left again since.
        new_places = [place for place in places if not place or _times_left(place) >= record.times_left]
        are_same = [
            place == record.left_at or (bool(place) and _times_left(place) > record.times_left)
            for place in new_places
        ]
        if all(are_same) and len(are_same) == ranks.size:
            record.settled_at = record.left_at
            record.reason_left = record.left_with = record.left_at = ""
            return True
        if not all(are_same) or time.monotonic() > end:
            record.left_at = ""
        time.sleep(0.01)
    return False


def _times_left(left_at: str) -> int:
    """Returns the `GroupRecord.times_left` in a text `GroupRecord.left_at`, its last word."""
    return int(left_at.rpartition(" ")[2])


_to_take_back: set[str] = set()
"""Keys of the store under which this rank has published errors. Its next call sets their values to ""."""


def withdraw_failures() -> None:
    """Withdraws this rank's reports of failures, because the rank goes on with another call.

    Reports about a group that this rank left in the middle of a pass are kept (`publish_leaving`). Ranks that
    still wait in this group must read them.
    """
    failure_published.clear()
    if dist.is_initialized():
        _write(dict.fromkeys(_to_take_back, ""))
    _to_take_back.clear()


def _key(record: GroupRecord, rank: int) -> str:
    return f"{FAILED}/{record.life}/{rank}"


def _any_failed(record: GroupRecord) -> str:
    return f"{FAILED}/{record.life}"


def _write(values: dict[str, str]) -> None:
    """Writes values into the store, in the order of the dict. Returns after 2 seconds at the latest.

    The limit is needed because the store may be on a rank that has stopped: the store then never answers.

    values: the text for each key.
    """
    store = dist.distributed_c10d._get_default_store()

    def write() -> None:
        with contextlib.suppress(RuntimeError):
            for key, value in values.items():
                store.set(key, value)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(2)


# ---- waiting for peers


def wait_for(work: dist.Work, group: dist.ProcessGroup | None, on_gpu: bool = False) -> None:
    """Waits for a collective. On a GPU the current stream waits, and the host does not.

    On the CPU the function raises PeerError if a rank of the group publishes a failure during the wait.

    work: the collective.
    group: the group whose failures are looked for; None for none.
    on_gpu: whether the tensors of the collective are on a GPU.
    """
    if group is None or on_gpu or not hasattr(work, "is_completed"):
        work.wait()
        return
    try:
        work.wait(LOOK_AFTER)
        return
    except RuntimeError:
        pass  # the collective takes longer, or has failed: the next line finds out which
    wait_or_peer_failure(work, group)


def reduce_to_largest(values: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replaces each value by its maximum over the ranks of the group. A collective.

    On a GPU the host does not wait for the result. On the CPU the call raises PeerError if a rank of the
    group publishes a failure during the wait.

    values: a tensor of any shape, which is overwritten.
    """
    collectives.begun += 1
    wait_for(dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True), group, values.is_cuda)


def sum_between_calls(values: Tensor, group: dist.ProcessGroup | None, doing: str) -> None:
    """Replaces each value by its sum over the ranks of a group, between calls of layers. A collective.

    Statistics and some gates need such sums. A rank may ask for a sum while its peers do not, and call a
    layer. None of them would ever go on:

        rank 0   waits in the sum                 writes so into the store after `LOOK_AFTER`
        rank 1   waits in the call of a layer     reads this: both raise

    On a GPU the host does not wait for the sum, and no rank finds out that its peers do not come.

    values: a tensor of any shape, which is overwritten.
    group: the ranks; None for the default group.
    doing: what the sum is for, in words, such as "summing statistics".

    Raises RuntimeError on the CPU if a peer does not come to the sum, or has published a failure.
    """
    ranks = Ranks(group)
    if ranks.group is None or ranks.size == 1:
        return
    ranks.record.sums += 1
    with at_stage(doing, ranks):
        work = dist.all_reduce(values, group=ranks.group, async_op=True)
        if values.is_cuda or not hasattr(work, "is_completed"):
            work.wait()
            return
        try:
            work.wait(LOOK_AFTER)
            return
        except RuntimeError:
            pass  # the sum takes longer, or has failed: the next lines find out which
        members = set(ranks.members)
        # A peer outside of `ranks` may call a layer in the meantime, and rightly waits for this rank.
        groups = [
            (record, known.rank())
            for known, record in known_groups()
            if members.issuperset(dist.get_process_group_ranks(known))
        ]
        why = (
            f"waits for other ranks in {doing}, and they do not come: every rank must come to it between the "
            "same calls of layers"
        )
        try:
            for record, rank in groups:
                _write(waiting_in_sum(record, rank, ranks.record, why))
            wait_or_peer_failure(work, ranks.group)
        finally:
            for record, rank in groups:
                _write(not_waiting(record, rank))


def wait_for_device(is_done: Callable[[], bool], ranks: Ranks, number: int) -> None:
    """Waits until the device has finished a step in which all ranks take part, at most the group's timeout.

    A CUDA graph may hold collectives and kernels that wait for other ranks. torch watches no collective that
    a graph has launched. So while this rank waits, it writes into the store which step it waits for, and
    reads which errors its peers have published. A single rank waits without a timeout.

    is_done: returns whether the device has finished.
    ranks: the ranks that take part.
    number: the number of the step (`GroupRecord.steps`), the same on all ranks.

    Raises PeerError if a peer has published a failure. At the timeout it raises RuntimeError with the ranks
    that have not reported that they wait for this step. Perhaps such a rank has not come to the step. But it
    may also have finished the step: a rank reports only after it has waited for `LOOK_AFTER`.
    """
    start = time.monotonic()
    pause = FIRST_PAUSE_SECONDS
    look_at = start + LOOK_AFTER.total_seconds()
    while not is_done():
        time.sleep(pause)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
        group = ranks.group
        if group is None or ranks.size == 1 or time.monotonic() < look_at:
            continue
        look_at = time.monotonic() + LOOK_AFTER.total_seconds()
        key = f"{WAITING}/{ranks.record.life}/{ranks.record.name}"
        _write({f"{key}/{ranks.rank}": str(number)})
        reports = Reports()
        looker = threading.Thread(target=_look, args=(group, reports), daemon=True)
        looker.start()
        looker.join(LOOK_AFTER.total_seconds())
        if reports:
            raise _peer_error(reports, group)
        timeout = timeout_of(group)
        if timeout is not None and time.monotonic() - start > timeout.total_seconds():
            raise RuntimeError(
                f"the device has not finished step {number} after {timeout.total_seconds():g} s; "
                f"{_absent_ranks(key, ranks.size, number)}"
            )


WAITING = "pmoe/waits"
"""Beginning of the keys under which ranks write the number of the step that they wait for.

The whole key is pmoe/waits/LIFE/GROUP/RANK, with the words of `FAILED`.
"""


def _absent_ranks(key: str, size: int, number: int) -> str:
    """Returns a text with the ranks that have not reported that they wait for a step.

    key: the beginning of the ranks' keys (`WAITING`), without the rank.
    size: number of ranks.
    number: the number of the step.
    """
    last_steps = _values_of_ranks(key, size)
    if last_steps is None:
        return (
            "the default group's store does not answer: the process that holds it, often rank 0, may have "
            "ended"
        )
    silent = [rank for rank, last_step in enumerate(last_steps) if int(last_step or 0) < number]
    if not silent:
        return "all ranks wait for it"
    return f"{_named(silent)} not reported that {'it waits' if len(silent) == 1 else 'they wait'} for it"


def _values_of_ranks(key: str, size: int) -> list[str] | None:
    """Returns what each rank has written into the store under its key; "" for a rank that wrote nothing.

    Returns None if the store does not answer within 2 seconds. It may be on a rank that has ended.

    key: the beginning of the ranks' keys, without the rank.
    size: number of ranks.
    """
    values = list[str]()

    def read() -> None:
        store = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(RuntimeError):
            for of_rank in (f"{key}/{rank}" for rank in range(size)):
                values.append(store.get(of_rank).decode() if store.check([of_rank]) else "")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(2)
    return values if len(values) == size else None


def _named(ranks: Sequence[int]) -> str:
    """Returns the subject of a sentence about ranks, with its verb, such as "rank 3 has"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    return f"ranks {', '.join(map(str, ranks))} have"


def wait_or_peer_failure(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Waits for a collective on the CPU, and checks while waiting whether peers have published a failure.

    work: the collective.
    group: the group whose failures are looked for.

    Raises PeerError if a published failure shows that the collective will not end. The store is read in a
    thread, because the store may never answer. A rank that waits in a backward pass warns after
    `WARN_AFTER_SECONDS`, with the peers that have not come to it.
    """
    reports = Reports()
    looker = None
    record = record_of_group(group)
    warn_at = time.monotonic() + WARN_AFTER_SECONDS
    while not reports:
        if work.is_completed():
            work.wait()  # raises the collective's error, if it has failed
            record.waits_in = ""
            return
        if looker is None or not looker.is_alive():
            if record.waits_in != record.place_of_pass:
                record.waits_in = record.place_of_pass
                _write({f"{_pass_key(record)}/{group.rank()}": record.waits_in})
            looker = threading.Thread(target=_look, args=(group, reports), daemon=True)
            looker.start()
        with contextlib.suppress(RuntimeError):
            work.wait(LOOK_AFTER)
            record.waits_in = ""
            return
        if record.backward_of_layer and time.monotonic() > warn_at:
            warn_at = math.inf
            _warn_of_waiting(record, group)
    raise _peer_error(reports, group)


def _pass_key(record: GroupRecord) -> str:
    return f"{PASS}/{record.life}/{record.name}"


def _warn_of_waiting(record: GroupRecord, group: dist.ProcessGroup) -> None:
    """Warns which peers have not reported that they wait in the backward pass in which this rank waits.

    record: this rank's record of the group.
    group: the group.
    """
    who = _silent_ranks(record, group)
    if who:
        warn_once(
            f"rank {group.rank()} of {group.size()} waits for more than {WARN_AFTER_SECONDS:.0f} s in the "
            f"backward pass of {record.backward_of_layer}, and {who} not reported the same: if this does not "
            f"end, {CURE}"
        )


def _silent_ranks(record: GroupRecord, group: dist.ProcessGroup) -> str:
    """Returns a text about the ranks that have not reported that they wait in the same pass as this rank.

    The text is the subject of a sentence with its verb, such as "rank 3 has". It is "" if all ranks have
    reported, or if the store does not answer within 2 seconds.

    record: this rank's record of the group.
    group: the group.
    """
    values = _values_of_ranks(_pass_key(record), group.size())
    silent = [rank for rank, value in enumerate(values or []) if value != record.place_of_pass]
    return _named(silent) if silent else ""


Reports = list[tuple[str, dist.ProcessGroup]]
"""Reasons why a collective will not end: each is a text and the group whose ranks it is about."""


def _look(group: dist.ProcessGroup, reports: Reports) -> None:
    """Adds to ``reports`` the reasons why a collective of the group will not end.

    The reasons are the failures that ranks of the group have published. If there are no failures, the
    function looks for peers that wait for a call in which this rank will not take part (`left_out`). They may
    wait in any group of this rank: gradients are reduced over other groups than rows are sent.

    group: the group.
    reports: a list to which reasons are added.
    """
    with contextlib.suppress(RuntimeError):
        reports += [(text, group) for text in failures(group)]
        for any_group, record in known_groups() if not reports else ():
            if not record.reason_left:
                sentences = left_out(record, any_group.rank(), range(any_group.size()))
                reports += [(sentence, any_group) for sentence in sentences]


def _peer_error(reports: Reports, group: dist.ProcessGroup) -> PeerError:
    """Returns the error for a rank that has found out why a collective of a group will not end.

    reports: the reasons.
    group: the group.
    """
    # The shortest text is the cause, which the longer texts quote.
    text, of_group = min(reports, key=lambda report: len(report[0]))
    error = PeerError(text)
    if of_group is not group:
        # The peers of that group wait in it, and read what is published about it.
        leave(error, Ranks(of_group), stage="", by_itself=False)
    return error


def failures(group: dist.ProcessGroup) -> list[str]:
    """Returns the published errors that keep a collective of the group from ending.

    A rank leaves a group if an error ends a pass over the group before all collectives of the pass have run.
    The errors of ranks of ``group`` are returned in three cases:

    1. The rank has left ``group``. Not returned if this rank, or all ranks, have left it after the same
       collective, because then no rank waits.
    2. The rank has left another group, such as that of another layer, so it may never come to the collective.
       Not returned if this rank has left that group, too.
    3. The rank failed outside of any pass (`publish_outside_pass`), or could not build a layer that this rank
       has built (`publish_construction`).
    """
    store = dist.distributed_c10d._get_default_store()
    record = record_of_group(group)
    if not store.check([_any_failed(record)]):
        return []

    def value_of(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    texts = []
    constructions = map(_construction, range(1, _failed_constructors[record.life] + 1))
    known_here = {*names_of_left_groups(), *constructions} - {record.name}
    for rank in dist.get_process_group_ranks(group):
        # The rank has left this group, and not all ranks left it at the same place (`settle`).
        place, _, in_group = value_of(f"{_key(record, rank)}/{record.name}").partition("\n")
        if in_group and not (place and place in (record.settled_at, record.left_at)):
            texts.append(in_group)
        left_group, _, rest = value_of(_key(record, rank)).partition("\n")
        # The rank has left another group, or no group (`publish_outside_pass`). If this rank has left that
        # group too, the report says nothing about the present group.
        if rest and left_group != record.name and left_group not in known_here:
            texts.append(rest.partition("\n")[2])
            if left_group.startswith(CONSTRUCTION):
                number = int(left_group.removeprefix(CONSTRUCTION))
                reported = _reported_constructors[record.life]
                _reported_constructors[record.life] = max(reported, number)
    return texts


# ---- contexts that publish the failure of their block


NOTHING: contextlib.nullcontext[None] = contextlib.nullcontext()
"""A context that does nothing. All blocks share it, because it has no state."""


def at_stage(stage: str, ranks: Ranks) -> contextlib.AbstractContextManager[None]:
    """Returns a context that publishes errors of its block, and adds the stage to errors of collectives.

    A RuntimeError of the block counts as an error of a collective. A RuntimeError with the stage in its text
    is raised in its place. The text says that a peer has died or did not come in time, unless this rank lacks
    memory (`lacks_memory`). All other errors are this rank's own, and are raised unchanged. Errors of both
    kinds are published, because peers may wait for this rank (`leave`).

    stage: what the block does, in words.
    ranks: the ranks of the layer.
    """
    return NOTHING if ranks.size == 1 else _AtStage(stage, ranks)


def _order_hint(ranks: Ranks) -> str:
    """Returns a hint that ranks may call layers in different orders; "" if messages have the same size.

    The messages of row counts of two layers may have different sizes. If two ranks call different layers at
    the same time, one of them gets a longer message than it expects, and gloo ends its process. Only the
    other ranks still run, and can give this hint.

    ranks: the ranks of the layer.
    """
    sizes = () if ranks.group is None else ranks.record.message_bytes
    if len(sizes) < 2:
        return ""
    return (
        f" (layers of this group send messages of {min(sizes)} to {max(sizes)} bytes of row counts: if gloo "
        "has ended a peer with the words 'Received data size', that peer was in another layer than this "
        "rank; every rank must call the layers of a group in the same order and equally often)"
    )


def _missing_hint(ranks: Ranks) -> str:
    """Returns which ranks have not come to the pass in which this rank has waited, and what to do.

    Returns "" if this rank has not waited for long (`LOOK_AFTER`), if it does not know which ranks these are,
    or if it has not waited for a layer.

    ranks: the ranks of the layer.
    """
    if ranks.group is None or not ranks.layer or ranks.record.waits_in != ranks.record.place_of_pass:
        return ""
    record = ranks.record
    who = _silent_ranks(record, ranks.group)
    if not who:
        return ""
    if record.backward_of_layer:
        return f" ({who} not reported to wait in this backward pass: {CURE})"
    return f" ({who} not reported to wait in this call: every rank must call the layer, also without tokens)"


def _left_out_hint(ranks: Ranks) -> str:
    """Returns a hint that this rank's loss may have left out a layer; "" in any other case.

    Autograd runs the layer first that was called last. If this rank's loss leaves that layer out, the rank
    sends rows of another layer than its peers expect. If these are more rows, gloo ends the peer's process.

    ranks: the ranks of the layer.
    """
    if ranks.group is None or not ranks.record.backward_of:
        return ""
    record = ranks.record
    own = record.backward_of_layer
    later = [call.layer for number, call in record.open_calls.items() if number > record.backward_of]
    # A later call of the same layer is open in many right schedules: passes of several micro-batches.
    if not later or later[-1] == own:
        return ""
    return (
        f" (this rank has not run the backward pass of {later[-1]}, which it called after {own}: "
        f"if gloo has ended a peer with the words 'Received data size', that "
        f"peer was in the pass that is left out; {CURE})"
    )


OUT_OF_MEMORY_TEXTS = (
    "can't allocate memory",
    "not enough memory",
    "error: out of memory",
    "cudaErrorMemoryAllocation",
    "_STATUS_ALLOC_FAILED",
)
"""Texts that distinguish errors of too little memory from other RuntimeErrors.

Only torch's allocator on a GPU raises `torch.OutOfMemoryError`. The first two texts are of torch's allocator
on the CPU. "CUDA error: out of memory" comes from pinned memory and from kernels that need memory of their
own, "cudaErrorMemoryAllocation" from pmoe's extension, and "CUBLAS_STATUS_ALLOC_FAILED" from a library that
allocates a workspace. The device can still be used after these errors.
"""


def lacks_memory(error: BaseException) -> bool:
    """Returns whether an error says that this rank's device or host has too little memory."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    if isinstance(error, PeerError):  # it quotes the error of another rank
        return False
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


def _why_failed(error: RuntimeError, ranks: Ranks) -> str:
    """Returns why a collective failed: which peer did, or that this rank lacks memory, with hints."""
    if isinstance(error, PeerError):
        return str(error)
    if lacks_memory(error):
        # A trial that lacks memory goes on with its collectives. After this error one of them is missing, so
        # the text must not be one by which `lacks_memory` finds such errors.
        return "this rank has too little memory for the messages (the error before this one says how much)"
    shared_gpu = shared_gpu_hint(error)
    if shared_gpu:
        return f"{shared_gpu}{error}"
    late = "a peer has died, never arrived, or took longer than the group's timeout: "
    return f"{late}{error}{_missing_hint(ranks)}{_left_out_hint(ranks)}{_order_hint(ranks)}"


class _Publishing:
    """A context that publishes an error of its block. It is a class, because generators take longer to enter.

    stage: what the block does, in words.
    ranks: the ranks of the layer.
    """

    def __init__(self, stage: str, ranks: Ranks) -> None:
        self.stage = stage
        self.ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            leave(error, self.ranks, self.stage)


class _AtStage(_Publishing):
    """Publishes errors as `_Publishing` does. Replaces a RuntimeError by one that names the stage."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        if not isinstance(error, RuntimeError):
            super().__exit__(kind, error, traceback)
            return
        ranks = self.ranks
        layer = f" of {ranks.layer}" if ranks.layer else ""
        failed = RuntimeError(f"pmoe: {ranks} failed in {self.stage}{layer}; {_why_failed(error, ranks)}")
        leave(failed, ranks, stage="", by_itself=False)
        raise failed from error


def publishing_failures(ranks: Ranks, stage: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context that publishes an error of its block, so that peers stop waiting for this rank.

    The context is for errors that may happen on a single rank, such as an error of users' code or of an
    allocation. After the error, the rank has left a pass in the middle. If all ranks raise an error after the
    same collective, no rank waits, and the group can be used again (`settle`).

    Passes and the exchange of row counts call `leave` in a ``try`` statement of their own, which has the same
    effect and takes fewer calls of the host.

    ranks: the ranks of the layer.
    stage: what the block does, in words. The error of this rank's next call quotes it.
    """
    return NOTHING if ranks.size == 1 else _Publishing(stage, ranks)


# ---- the beginning of a call and of its backward pass


_first_calls = itertools.count(1)
"""The numbers N for the names "MoELayer N" that `enter_call` gives to layers."""


def enter_call(ranks: Ranks) -> None:
    """Begins a call of a layer: checks the group, and names the layer if it has no name.

    The name is "MoELayer N". N counts the layers of this process that were named in this way.

    ranks: the ranks of the layer.

    Raises RuntimeError, also on the peers, if an earlier pass over the group ended halfway on this rank.
    """
    if ranks.size > 1:
        check_whole(ranks)
    elif ranks.by_default:
        _warn_alone(ranks)
    if failure_published.is_set():
        withdraw_failures()
    ranks.layer = ranks.layer or f"MoELayer {next(_first_calls)}"


def meet_before_call(ranks: Ranks, why_compare: str) -> bool:
    """Waits until all ranks have come to the same call of a layer, if they may be in different calls.

    This rank waits in three cases (`pmoe.comm.meeting`):

    - it has not run the backward pass of the layer's last call, or its last backward pass has left out any
      open call of the group;
    - a hook of a backward pass makes the call. Hooks run without gradients; the recomputation of a checkpoint
      runs with them;
    - it compares its options in this call, and the other ranks may not compare theirs.

    ranks: the ranks of the layer.
    why_compare: in the last case, why this rank compares its options, as the end of a sentence that begins
        with "rank 3"; otherwise "".

    Returns True if all ranks must compare their options in this call, because one of them has a reason. The
    result is the same on all ranks.

    Raises what `meet` raises.
    """
    record = ranks.record
    is_in_backward = torch._C._current_graph_task_id() != -1
    is_in_hook = is_in_backward and not torch.is_grad_enabled()
    # In a backward pass a checkpoint may run the layer again, while calls are open.
    is_open = not is_in_backward and (ranks.open_call in record.open_calls or record.leaves_call_out)
    if not (why_compare or is_in_hook or is_open):
        return False
    assert ranks.group is not None
    if not has_peers(ranks.group):
        return bool(why_compare)
    why = IN_HOOK if is_in_hook else why_compare or IS_OPEN
    return meet(ranks, why, compares=bool(why_compare))


def meet_before_reduction(ranks: Ranks) -> None:
    """Waits for the other ranks before gradients are reduced, if this rank has left out a backward pass.

    A rank whose loss needs no output of a layer does not run the layer's backward pass, in which its peers
    wait for it. If it began to reduce gradients, its messages would be taken for rows of that pass. Or the
    peers have left out the pass of another layer, and have taken rows of one layer for rows of the other: the
    ranks find this out in the meeting.

    The function looks at all calls that this thread has made over groups within ``ranks``, and not at those
    of one model: a scaler or a list of parameters does not know its layers. If all of them have run their
    backward pass, the function communicates nothing. Otherwise each group meets once. A call that stays open,
    as in a validation with gradients, is a reason to meet in one reduction only. Inside a backward pass the
    function does nothing.

    ranks: the ranks that reduce gradients.

    Raises what `meet` raises.
    """
    # Gradients may be reduced in a hook of autograd. The calls of earlier layers are then still open.
    if ranks.size == 1 or torch._C._current_graph_task_id() != -1:
        return
    members = set(ranks.members)
    thread = threading.current_thread()
    open_calls = [
        (call, group)
        for group, record in known_groups()
        if (call := record.last_open_call) is not None
        # Another thread may be between two passes of its own group.
        and record.thread is thread
        and not record.reason_left
        and members.issuperset(dist.get_process_group_ranks(group))
        and has_peers(group)
    ]
    # Autograd runs the last call first. So peers wait in the group of the last call that is left out here.
    open_calls.sort(key=lambda pair: pair[0].order, reverse=True)
    for call, group in open_calls:
        of_layer = Ranks(group).of_layer(call.layer)
        meet(of_layer, IS_OPEN, compares=False, stage="waiting for the other ranks before a reduction")
        of_layer.record.reduced_after = of_layer.record.exchanges


def _warn_alone(ranks: Ranks) -> None:
    """Warns in the first call of a layer of one rank, if torch.distributed has more ranks by now.

    The layer was then built before init_process_group, so it holds all experts on this rank. This may be a
    mistake.
    """
    ranks.by_default = False
    is_initialized = dist.is_available() and dist.is_initialized()
    if ranks.group is None and is_initialized and dist.get_world_size() > 1:
        warn_once(
            "a MoELayer that was built before init_process_group holds all of its experts on this rank "
            f"of {dist.get_world_size()}: spread them with pmoe.parallelize(model, mesh), before the "
            "optimizer and wrappers are made. If one rank is intended, build the layer with "
            "group=pmoe.comm.ranks.Ranks.single()"
        )


def check_whole(ranks: Ranks) -> None:
    """Raises RuntimeError if this rank has left an earlier pass over the group in the middle.

    The peers may still wait for a collective of the earlier pass. Without this error, that collective would
    be paired with one of the next pass. The failure is published, so that the peers also raise.

    No error is raised if every rank left the earlier pass by an error of its own, after the same collective:
    the group can then be used again. The function may wait some seconds to find this out (`settle`).
    """
    if ranks.size == 1 or not ranks.record.reason_left:
        return
    record = ranks.record
    if settle(ranks):
        return
    cure = "end all processes and start again from the last checkpoint"
    if ranks.takes_default:
        cure += (
            ", or call destroy_process_group() and init_process_group() of torch.distributed on all "
            "ranks, with a new store under torchrun (docs/troubleshooting.md), and go on"
        )
    error = RuntimeError(
        f"pmoe: {ranks} left its process group in the middle of a pass ({record.reason_left}), and the "
        f"group's collectives do not match any more: {cure}"
    )
    publish_leaving(record)
    raise error


FREED_GRAPH = "backward through the graph a second time"
"""The text that distinguishes torch's error for a second backward pass over a freed graph."""


def backward_pass(ranks: Ranks, number: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context that records that the backward pass of a call is running, and publishes its errors.

    The record is used to detect a peer that skips the backward pass (`pmoe.comm.meeting`). Errors may be of
    one rank only: a saved tensor was changed in place there, or a user's hook for saved tensors failed.

    ranks: the ranks of the layer.
    number: the number of the call, which `Ranks.expect_backward` has returned in forward; 0 for none.

    Raises RuntimeError if an earlier pass over the group ended halfway on this rank.
    """
    if ranks.size == 1:
        return NOTHING
    check_whole(ranks)
    return _published_backward(ranks, number)


@contextlib.contextmanager
def _published_backward(ranks: Ranks, number: int) -> Iterator[None]:
    with ranks.record.backward_pass(number, ranks.layer):
        try:
            yield
        except BaseException as error:
            # If torch has freed the graph, this rank has run the pass before, and so have its peers.
            if FREED_GRAPH not in str(error):
                leave(error, ranks, "a backward pass")
            raise


def meet(
    ranks: Ranks, why: str, *, compares: bool, stage: str = "waiting for the other ranks before a call"
) -> bool:
    """Waits until all ranks of the group have come to the same point (`pmoe.comm.meeting`).

    The point is before a call of a layer, or before a reduction of gradients.

    ranks: the ranks of the layer.
    why: why this rank waits, as the end of a sentence that begins with "rank 3". Errors of the peers quote
        the text.
    compares: whether this rank compares its options with the other ranks in this call.
    stage: what this rank waits for, for error messages.

    Returns True if any rank compares its options in this call. All ranks must then compare their options. The
    result is the same on all ranks.

    Raises RuntimeError if a peer has published a failure, or after the group's timeout. A peer that runs a
    different pass publishes a failure when it reads in the store that this rank waits. Raises RuntimeError on
    every rank if the ranks have not run the same backward passes in the same order.
    """
    group = ranks.group
    assert group is not None
    record = ranks.record
    with at_stage(stage, ranks):
        meeting = Meeting(group, record, why, compares=compares)
        _wait_for_all(meeting, group, why)
        if meeting.passes_differ:
            # The second meeting ends when all ranks have published which calls are open. `left_out` reads it.
            meeting.publish()
            _wait_for_all(Meeting(group, record, why, compares=False), group, why)
            texts = left_out(record, ranks.rank, range(ranks.size)) or [other_passes(record)]
            raise PeerError(min(texts, key=len))
        return meeting.leave()


def _wait_for_all(meeting: Meeting, group: dist.ProcessGroup, why: str) -> None:
    """Waits until all ranks of the group have come to a meeting.

    meeting: this rank's part in the meeting.
    group: the group.
    why: why this rank waits, as the end of a sentence that begins with "this rank".

    Raises PeerError if a peer has published a failure. Raises RuntimeError after the group's timeout.
    """
    began = time.monotonic()
    timeout = timeout_of(group) or dist.default_pg_timeout
    while not (meeting.is_complete or meeting.has_all(wait_for=LOOK_AFTER)):
        texts = failures(group)
        if texts:
            raise PeerError(min(texts, key=len))
        if time.monotonic() - began > timeout.total_seconds():
            raise RuntimeError(f"not all ranks have come within {timeout}: this rank {why}")
        meeting.publish()
