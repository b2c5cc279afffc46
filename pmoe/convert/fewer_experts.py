"""Functions that prune or merge the experts in a layer's state dict, such as experts with few rows.

The state dict must hold all E experts of a `MoELayer`. If a tensor's name begins with ``gate.`` or
``experts.`` and its dimension 0 has size E, its entry i belongs to expert i. All other tensors stay
unchanged.

    busiest_experts   finds the experts with the most rows
    prune_experts     removes experts; `restore_experts` puts them back, bit for bit
    group_experts     groups experts around the busiest ones, by the cosine of their router rows
    merge_experts     replaces each group of experts by one expert, their weighted mean

For a model with several layers, call the functions for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.arguments import check_count, check_int, check_kind, check_not_negative, check_tensors, list_of

State = Mapping[str, Tensor]
PROJECTION = "gate.projection"
"""Name of a tensor of `pmoe.gates.XMoEGate` that has no entries for experts, whatever its size is."""

KEPT = "kept_experts"
"""Name of the entry in which `prune_experts` returns the numbers of the kept experts, in their new order."""


def busiest_experts(rows: Sequence[float], count: int) -> list[int]:
    """Returns the indices of the ``count`` experts with the most rows, in ascending order.

    Between experts with equally many rows, the expert with the lower index is chosen first.

    rows: for each expert its number of rows, such as ``pmoe.stats(model).layers[0].tokens_per_expert`` over a
        representative set of tokens.

    Raises ValueError or TypeError for numbers out of range.

    Example: ((5, 9, 0, 5), 2) -> [0, 1].
    """
    numbers = _numbers_of("rows", rows)
    check_count(count=count)
    if count > len(numbers):
        raise ValueError(f"count ({count}) must be at most the number of experts in rows ({len(numbers)})")
    ranked = sorted(range(len(numbers)), key=lambda expert: (-numbers[expert], expert))
    return sorted(ranked[:count])


def prune_experts(state: State, keep: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Removes experts from a layer's state dict.

    Returns two state dicts, which share no memory with ``state``:

    1. The kept experts: the state dict of a `MoELayer` with ``len(keep)`` experts.
    2. The removed experts' tensors, and the indices of the kept experts.

    `restore_experts` makes the original state dict from both.

    state: the state dict of a layer with E experts; w1 is (E, ...), for example.
    keep: the indices of the experts to keep, in their new order.

    Raises ValueError if an index in ``keep`` is out of range or occurs twice, or if ``state`` has no experts.
    Raises TypeError for values of a wrong type.
    """
    num_experts = _num_experts(state)
    kept = _checked_experts("keep", keep, num_experts)
    removed = [expert for expert in range(num_experts) if expert not in {*kept}]
    pruned = {name: value.clone() for name, value in state.items()}
    rest: dict[str, Tensor] = {KEPT: torch.tensor(kept)}
    for name in _of_experts(state, num_experts):
        pruned[name] = state[name][kept].clone()
        rest[name] = state[name][removed].clone()
    return pruned, rest


def restore_experts(pruned: State, removed: State) -> dict[str, Tensor]:
    """Puts removed experts back into a layer's state dict: the inverse of `prune_experts`.

    Returns the state dict of the layer with all E experts. If the kept experts were trained after they were
    pruned, the result has their new values.

    pruned: the state dict of the layer with P experts; w1 is (P, ...), for example.
    removed: the second result of `prune_experts`: the tensors of the E - P removed experts, and the indices
        of the kept experts.

    Raises ValueError or TypeError if ``pruned`` and ``removed`` do not belong together.
    """
    check_kind(Mapping, "a state dict", pruned=pruned, removed=removed)
    if KEPT not in removed:
        raise ValueError(f"removed must have {KEPT!r}: pass the second result of prune_experts")
    kept = removed[KEPT].tolist()
    names = [name for name in removed if name != KEPT]
    missing = [name for name in names if name not in pruned or pruned[name].shape[:1] != (len(kept),)]
    if missing or not names:
        raise ValueError(
            f"pruned must have the {len(kept)} experts that removed leaves, but it has not in "
            f"{', '.join(missing) or 'any tensor'}"
        )
    whole = {name: value.clone() for name, value in pruned.items()}
    for name in names:
        num_experts = len(kept) + removed[name].shape[0]
        others = [expert for expert in range(num_experts) if expert not in {*kept}]
        value = pruned[name].new_empty(num_experts, *pruned[name].shape[1:])
        value[kept] = pruned[name]
        value[others] = removed[name]
        whole[name] = value
    return whole


def group_experts(state: State, rows: Sequence[float], count: int) -> list[list[int]]:
    """Groups experts around the ``count`` busiest experts, by the similarity of their router rows.

    This is the grouping of M-SMoE (arXiv 2310.01334). The ``count`` experts with the most rows are leaders.
    Each other expert joins the group of the leader whose router row has the largest cosine with its own
    router row. If several leaders have the same cosine, it joins the one with the lowest index.

    Returns a list of expert indices for each group. Groups are in the order of their leaders' indices, and
    each list begins with the leader.

    state: the state dict of a layer with ``gate.weight`` (E, M), for E experts and M = d_model.
    rows: for each expert its number of rows.
    count: the number of groups.

    Raises ValueError or TypeError if ``state`` has no ``gate.weight``, or if ``rows`` or ``count`` is out of
    range.
    """
    num_experts = _num_experts(state)
    leaders = busiest_experts(rows, count)
    if len(list_of("rows", rows)) != num_experts:
        raise ValueError(f"rows must have a number for each of the {num_experts} experts of state")
    router = state.get("gate.weight")
    if router is None or router.shape[0] != num_experts:
        raise ValueError("state must have gate.weight (E, M), whose rows say which experts are alike")
    rows_EM = F.normalize(router.detach().double(), dim=1)
    alike = rows_EM @ rows_EM[leaders].t()
    groups = [[leader] for leader in leaders]
    for expert in range(num_experts):
        if expert not in leaders:
            groups[int(alike[expert].argmax())].append(expert)
    return groups


def merge_experts(
    state: State, groups: Sequence[Sequence[int]], rows: Sequence[float] | None = None
) -> dict[str, Tensor]:
    """Returns a layer's state dict in which each group of experts is replaced by one expert, their mean.

    The mean is weighted (``rows``). The rows of the router are averaged in the same way. Integer tensors,
    such as counters, are summed. If all experts of a group have the same bits, the new expert has these bits
    too. The result shares no memory with ``state``.

    state: the state dict of a layer with E experts; w1 is (E, ...), for example.
    groups: for each new expert the indices of the old experts that it replaces. Each old expert must be in
        exactly one group.
    rows: for each old expert its weight in the mean, usually its number of rows. If ``rows`` is None, or if
        all members of a group have 0 rows, the members have equal weights.

    Raises ValueError or TypeError if an expert is in no group or in several, if a group is empty, or if
    ``rows`` is out of range.
    """
    num_experts = _num_experts(state)
    members = [
        [int(expert) for expert in _ints(f"groups[{at}]", group)]
        for at, group in enumerate(list_of("groups", groups))
    ]
    found = sorted(expert for group in members for expert in group)
    if found != list(range(num_experts)) or not all(members):
        raise ValueError(
            f"groups ({members}) must have each of the {num_experts} experts once, and no empty group"
        )
    weights = [1.0] * num_experts if rows is None else _numbers_of("rows", rows)
    if len(weights) != num_experts:
        raise ValueError(f"rows (of {len(weights)} experts) must have a number for each of the {num_experts}")
    merged = {name: value.clone() for name, value in state.items()}
    for name in _of_experts(state, num_experts):
        merged[name] = torch.stack([_mean(state[name], group, weights) for group in members])
    return merged


def _mean(value: Tensor, group: Sequence[int], weights: Sequence[float]) -> Tensor:
    """Returns the weighted mean of the entries of a group of experts. Entries of integers are summed.

    value: (E, ...), a tensor with one entry for each expert.
    group: the indices of the experts in the group.
    weights: the weight of each of the E experts.
    """
    parts = value[list(group)]
    if not value.is_floating_point():
        return parts.sum(0).to(value.dtype)
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[0].clone()
    of_group = torch.tensor([weights[expert] for expert in group], dtype=torch.float64, device=value.device)
    if not of_group.any():
        of_group = torch.ones_like(of_group)
    share = (of_group / of_group.sum()).view(-1, *[1] * (value.dim() - 1))
    return (parts.double() * share).sum(0).to(value.dtype)


# ---- checks


def _num_experts(state: State) -> int:
    """Returns the number of experts of a state dict: dimension 0 of ``experts.w1`` or ``gate.weight``.

    Raises ValueError or TypeError if ``state`` is not the state dict of a whole layer.
    """
    check_kind(Mapping, "a state dict", state=state)
    adapted = next((name for name in state if str(name).startswith("experts.adapters.")), None)
    if adapted is not None:
        raise ValueError(
            f"state (with {adapted}) must be of a layer without adapters: call pmoe.merge_lora(model) or "
            "pmoe.remove_lora(model) first"
        )
    check_tensors(None, **{f"state[{name!r}]": value for name, value in state.items()})
    first = next((state[name] for name in ("experts.w1", "gate.weight") if name in state), None)
    if first is None or not first.dim():
        raise ValueError(f"state (with {', '.join(state) or 'nothing'}) must have experts.w1 or gate.weight")
    return int(first.shape[0])


def _of_experts(state: State, num_experts: int) -> list[str]:
    """Returns the names of the tensors that have an entry for each expert in dimension 0.

    Raises ValueError if the name of a tensor begins with ``experts.`` and its dimension 0 is not of size
    ``num_experts``.
    """
    names = [name for name in state if name.startswith(("experts.", "gate."))]
    for name in names:
        if name.startswith("experts.") and state[name].shape[:1] != (num_experts,):
            raise ValueError(
                f"state[{name!r}] of shape {tuple(state[name].shape)} must have {num_experts} experts in "
                "dimension 0: pass the state dict of a whole layer with stacked experts"
            )
    return [name for name in names if state[name].shape[:1] == (num_experts,) and name != PROJECTION]


def _ints(what: str, values: Any) -> list[int]:
    """Returns values as a list of integers.

    what: the name of the values, for errors.
    values: what a caller of pmoe passed.

    Raises TypeError if ``values`` is no sequence of integers.
    """
    numbers = list_of(what, values)
    for number in numbers:
        check_int(**{what: number})
    return numbers


def _checked_experts(what: str, experts: Any, num_experts: int) -> list[int]:
    """Returns a caller's indices of experts as a list, after checking them.

    Raises ValueError or TypeError unless ``experts`` holds one or more different integers from 0 to
    num_experts - 1.

    what: the name of the indices, for errors.
    """
    numbers = [int(number) for number in _ints(what, experts)]
    if not numbers or len({*numbers}) < len(numbers) or not {*numbers} <= {*range(num_experts)}:
        raise ValueError(f"{what} ({numbers}) must be different numbers from 0 to {num_experts - 1}")
    return numbers


def _numbers_of(what: str, values: Any) -> list[float]:
    """Returns a caller's numbers, one for each expert, as a list, after checking them.

    what: the name of the numbers, for errors.
    values: a sequence of numbers, or a tensor of shape (E,) for E experts.

    Raises ValueError if ``values`` is empty or a number is negative. Raises TypeError if a value is no
    number.
    """
    numbers = list_of(what, values.tolist() if isinstance(values, Tensor) and values.dim() == 1 else values)
    for number in numbers:
        check_not_negative(**{what: number})
    if not numbers:
        raise ValueError(f"{what} (0 of them) must have a number for each expert")
    return numbers
