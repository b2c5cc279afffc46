"""The checks of state dicts, so that no rank loads the experts of another rank.

Each rank's ``state_dict()`` holds the experts of that rank, and every rank uses the same names for its
experts. Without checks, rank 0's file could be loaded on every rank, and every rank would then have rank 0's
experts. Three checks prevent this:

    state_dict()        records in ``_metadata`` which experts it holds        `_say_whose`
                        raises if the caller writes one file for all ranks     `_refuse_one_file`
    load_state_dict()   raises if the metadata names another rank's experts    `_check_whose`
    the next call       if any rank has loaded a state dict: raises if two     `check_loaded`
                        ranks hold equal experts. This also finds wrong
                        state dicts without metadata (safetensors, or made
                        by hand)

Loading is not a collective: one rank may load while the other ranks do not. So a rank that has loaded a state
dict reports the loading together with the row counts of its next call. All ranks then compare their experts
before that call goes on (`pmoe.decide.exact_counts.LoadedExchange`).
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from pmoe.call.modules import LayerModules
from pmoe.comm.agreement import gathered
from pmoe.comm.failures import publish_outside_pass
from pmoe.comm.grid import Grid
from pmoe.decide.dense_values import fingerprint
from pmoe.experts.base import WHOLE, Experts
from pmoe.experts.operands import local_part

KEY = "pmoe.experts"
"""The key of an `ExpertPlace` in the metadata of a state dict (``_metadata``).

torch.save writes this metadata into the file, and torch.load reads it.
"""

CURE = (
    "Save with pmoe.save_checkpoint(folder, model, optimizer, step=step) and load with "
    "pmoe.load_checkpoint(folder, model, optimizer), both on every rank (after pmoe.parallelize)"
)


@dataclass(frozen=True, kw_only=True)
class ExpertPlace:
    """The experts that a rank holds: a range of all experts, or a part of each expert in a range.

    first_expert       index of the first expert of the range, among the experts of all ranks
    num_local_experts  number of experts in the range
    num_experts        number of experts of all ranks
    shard              index of this rank's part, if each expert's hidden columns are split over ranks; else 0
    num_shards         number of parts into which an expert is split; 1 if experts are not split
    copy_part          index of this rank's part, if FSDP2 shards experts over ranks; else 0
    num_copy_parts     number of parts into which FSDP2 splits experts; 1 if it does not
    rank               this rank in the group whose ranks together hold all experts
    num_ranks          size of that group
    """

    first_expert: int
    num_local_experts: int
    num_experts: int
    shard: int
    num_shards: int
    rank: int
    num_ranks: int
    copy_part: int = 0
    num_copy_parts: int = 1

    @staticmethod
    def of(grid: Grid, num_experts: int) -> ExpertPlace:
        """Returns the record of the experts that this rank holds.

        grid: the ranks of the layer.
        num_experts: number of experts of all ranks.
        """
        local = num_experts // grid.ep.size
        return ExpertPlace(
            first_expert=grid.ep.rank * local,
            num_local_experts=local,
            num_experts=num_experts,
            shard=grid.esp.rank,
            num_shards=grid.esp.size,
            rank=grid.all.rank,
            num_ranks=grid.all.size,
        )

    def with_part_of(self, experts: Experts) -> ExpertPlace:
        """Returns this record with ``copy_part`` and ``num_copy_parts`` as FSDP2 shards the experts.

        experts: this rank's experts.
        """
        part = next((own for _, own in experts.copy_parts.values()), WHOLE)
        return replace(self, copy_part=part.index, num_copy_parts=part.count)

    def differs_from(self, saved: ExpertPlace) -> bool:
        """Returns whether a state dict holds values of experts that are not this rank's.

        A state dict of experts that FSDP2 had not sharded has whole experts. Each rank can take its part of
        them, so the part of this rank is then not compared.

        saved: the record in the metadata of the state dict.
        """
        if saved.num_copy_parts > 1:
            own_part = (self.copy_part, self.num_copy_parts)
            if own_part != (saved.copy_part, saved.num_copy_parts):
                return True
        return self.holds != saved.holds

    @property
    def holds(self) -> tuple[int, ...]:
        """Returns the fields in which a saved record must equal this rank's own record.

        They say which experts a rank holds, or which part of each. The number of the rank and the number of
        ranks are not among them: in a group of another size a different rank may hold the same experts. The
        parts of FSDP2 are not among them, either; `differs_from` compares these.
        """
        return self.first_expert, self.num_local_experts, self.num_experts, self.shard, self.num_shards

    def __str__(self) -> str:
        last = self.first_expert + self.num_local_experts - 1
        part = f", part {self.shard} of {self.num_shards} of each" if self.num_shards > 1 else ""
        if self.num_copy_parts > 1:
            part += f", part {self.copy_part} of {self.num_copy_parts} of a copy (shard_experts)"
        return f"experts {self.first_expert} to {last} of {self.num_experts}{part}"


def watch(experts: Experts, grid: Grid, num_experts: int) -> None:
    """Records which experts this rank holds, so that state dicts include the record and loading checks it.

    experts: the experts of this rank, which get hooks for ``state_dict()`` and ``load_state_dict()``.
    grid: the ranks of the layer.
    num_experts: number of experts of all ranks.

    The function may be called a second time after the ranks of the layer have changed.
    """
    if not experts.is_parallel:
        return
    if experts.place is None:
        experts.register_state_dict_post_hook(_say_whose)  # type: ignore[no-untyped-call]
        experts.register_load_state_dict_pre_hook(_check_whose)  # type: ignore[no-untyped-call]
    experts.place = ExpertPlace.of(grid, num_experts)


# ---- state_dict()


def _say_whose(experts: Experts, state: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Records in the metadata of a state dict which experts it holds. This is a hook of ``state_dict()``.

    experts: the module whose state dict is made.
    state: the state dict; not used.
    prefix: the name of the module in the model, with a dot at the end.
    local_metadata: the metadata of the module, to which the record is added.

    Raises ValueError if the caller will write the state dict of a single rank to a file. The experts of the
    other ranks would be missing in it.
    """
    place: ExpertPlace = experts.place.with_part_of(experts)
    if place.num_ranks > 1:
        _refuse_one_file(experts, place, prefix.rstrip("."))
    local_metadata[KEY] = {**asdict(place), "are_equal": experts.are_equal}


@dataclass(frozen=True)
class Writer:
    """A function of another library that saves a checkpoint by writing the state dict of a single rank.

    The checkpoint would have only the experts of that rank. So pmoe raises an error if this function calls
    ``state_dict()``.

    name: the name of the function in error messages.
    on_all_ranks: True if the function calls ``state_dict()`` on every rank, False if only on the rank that
        writes.
    """

    name: str
    on_all_ranks: bool = True


ONE_FILE = {
    ("accelerate.accelerator", "get_state_dict"): Writer(
        "accelerate's save_state, save_model and get_state_dict"
    ),
    ("transformers.trainer", "_save"): Writer("transformers' Trainer", on_all_ranks=False),
    ("transformers.modeling_utils", "save_pretrained"): Writer("save_pretrained", on_all_ranks=False),
    **{
        (f"{package}.strategies.strategy", function): Writer(f"Lightning's {what}")
        for package, function, what in (
            ("lightning.pytorch", "lightning_module_state_dict", "Trainer under this strategy"),
            ("pytorch_lightning", "lightning_module_state_dict", "Trainer under this strategy"),
            ("lightning.fabric", "get_module_state_dict", "Fabric under this strategy"),
            ("lightning_fabric", "get_module_state_dict", "Fabric under this strategy"),
        )
    },
}
"""Functions that save a checkpoint by writing the state dict of a single rank, by (module, function).

Lightning's strategies for distributed checkpoints use other functions, so they work.
"""

DCP = "torch.distributed.checkpoint.state_dict"
"""The module of torch's distributed checkpoints (DCP).

If experts are DTensors, DCP saves the experts of all ranks. If they are plain tensors, a full state dict from
DCP has the experts of one rank only.
"""


def _refuse_one_file(experts: Experts, place: ExpertPlace, name: str) -> None:
    """Raises ValueError if the caller of ``state_dict()`` will save the experts of one rank only.

    The arguments of ``state_dict()`` do not say how its result will be used. So this function searches the
    call stack for a function that it knows. The one that is nearest to ``state_dict()`` decides:

    - A function in the table `ONE_FILE` writes the experts of one rank. ValueError is raised.
    - torch's distributed checkpoint (DCP) makes a full state dict, and some parameters of the experts are
      plain tensors. ValueError is raised: DCP collects the values of all ranks only from DTensors, and would
      return this rank's plain tensors as if they were the experts of all ranks.
    - DCP is called in any other way: nothing is raised.

    If the call stack has no such function, nothing is raised, either. If the caller then writes one file for
    all ranks, an error is raised when another rank loads the file (`_check_whose`).

    experts: the experts of this rank.
    place: the record of which experts this rank holds.
    name: the name of the experts module in the model, for errors.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__")
        function = frame.f_code.co_name
        if module == DCP and function == "_get_model_state_dict":
            is_full = getattr(frame.f_locals.get("info"), "full_state_dict", False)
            if is_full and not all(hasattr(parameter, "device_mesh") for parameter in experts.parameters()):
                raise ValueError(
                    f"{name}: full_state_dict=True would return only this rank's {place} as if these were "
                    "all, because they are plain tensors. After pmoe.parallelize, stacked experts (ffn, "
                    "swiglu) are DTensors, and it returns all of them. "
                    f"{CURE}"
                )
            return
        if module == DCP:
            return
        writer = ONE_FILE.get((module, function)) if isinstance(module, str) else None
        if writer is not None:
            error = ValueError(
                f"{name}: {writer.name} would write this rank's {place} as if these were all; the experts of "
                f"the other ranks would be lost. {CURE}"
            )
            if writer.on_all_ranks:
                raise error
            publish_outside_pass(error)  # the other ranks may be waiting for this one
            raise error
        frame = frame.f_back  # type: ignore[assignment]


# ---- load_state_dict()


def _check_whose(
    experts: Experts, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: object
) -> None:
    """Checks whose experts a state dict holds, before it is loaded. A hook of ``load_state_dict()``.

    experts: the module that loads.
    state: the state dict of the whole model.
    prefix: the name of the module in the model, with a dot at the end.
    local_metadata: the metadata of the module; empty if the state dict has none.

    The first case that applies decides:

    - The values are certainly this rank's own (`_is_own`): nothing else is checked.
    - The metadata says that the state dict holds experts of another rank: ValueError is raised, and published
      to the other ranks.
    - The metadata says that the experts of all ranks were equal when they were saved: nothing else is
      checked.
    - None of these: the layer's next call compares the experts of all ranks. It raises ValueError if two
      ranks hold equal experts, because they have probably loaded the same file.
    """
    place: ExpertPlace = experts.place.with_part_of(experts)
    parameters = {
        name: parameter for name, parameter in experts.named_parameters() if f"{prefix}{name}" in state
    }
    if not parameters:
        return  # the state dict has no experts
    loaded = {name: state[f"{prefix}{name}"] for name in parameters}
    if all(_is_own(loaded[name], parameter) for name, parameter in parameters.items()):
        return  # The metadata does not matter: torch may have cut these values out of a whole model's state.
    metadata = dict(local_metadata.get(KEY) or {})
    were_equal = bool(metadata.pop("are_equal", False))
    is_other_part = False
    if place.num_copy_parts > 1:
        from pmoe.experts.dtensor_layout import is_of_other_place

        is_other_part = any(
            is_of_other_place(loaded[name], parameter) for name, parameter in parameters.items()
        )
    if metadata and (is_other_part or place.differs_from(ExpertPlace(**metadata))):
        if place.num_ranks == 1 and any(
            loaded[name].shape != parameter.shape for name, parameter in parameters.items()
        ):
            return  # torch itself raises an error, which shows the sizes
        error = ValueError(
            f"{prefix.rstrip('.')}: a state dict of {ExpertPlace(**metadata)}, saved by rank "
            f"{metadata['rank']} of {metadata['num_ranks']}, must not be loaded into {place} (rank "
            f"{place.rank} of {place.num_ranks}): torch.save(model.state_dict()) writes the experts of one "
            f"rank only. {CURE}. Or let every rank save and load its own file"
        )
        if place.num_ranks > 1:
            publish_outside_pass(
                error
            )  # rank 0 loads its own file without an error, and would wait for this rank
        raise error
    if place.num_ranks > 1 and not were_equal:
        experts.was_loaded = True


def _is_own(value: Any, parameter: Tensor) -> bool:
    """Returns whether a value to be loaded certainly belongs to this rank's experts, so needs no check.

    The answer is True in two cases:

    - The value shares the memory of the parameter: torch's distributed checkpoint has read into that memory.
    - The value is a DTensor with the same mesh object as the parameter: it was made in this process. A
      DTensor from a file has another mesh object, even if the meshes are equal.

    value: a value of the state dict.
    parameter: the parameter into which the value will be loaded.
    """
    if not isinstance(value, Tensor):
        return False
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is not None and getattr(value, "device_mesh", None) is mesh:
        return True
    own_local = local_part(parameter)
    value_local = local_part(value)
    return not own_local.is_meta and own_local.data_ptr() == value_local.data_ptr() != 0


# ---- the next call


def check_loaded(modules: LayerModules) -> None:
    """Checks that all ranks hold different experts, after any rank has loaded a state dict. Collective.

    modules: the modules and options of the layer.

    Raises ValueError on all ranks if two ranks hold the same values. A user who wants equal experts sets
    ``experts.may_be_equal`` on any rank. Then the function raises nothing, and resets the flag.
    """
    experts = modules.experts
    own = fingerprint(dict(experts.named_parameters())), experts.may_be_equal
    of_ranks = gathered(modules.ranks, own, stage="comparing experts that were loaded")
    holders = dict[str, list[int]]()
    for rank, (digest, _) in enumerate(of_ranks):
        holders.setdefault(digest, []).append(rank)
    equal_ranks = next((ranks for ranks in holders.values() if len(ranks) > 1), None)
    if equal_ranks is not None and not any(may_be for _, may_be in of_ranks):
        raise ValueError(
            f"experts must differ from rank to rank, but ranks {', '.join(map(str, equal_ranks))} have the "
            f"same since a state dict was loaded: they probably loaded the file of one rank. {CURE}. "
            "If all experts are equal on purpose (upcycling), call pmoe.copy_into_experts(layer, dense), or "
            "set layer.experts.may_be_equal = True before the next call"
        )
    experts.was_loaded = False
    experts.may_be_equal = False
    experts.are_equal = len(holders) == 1
    modules.cache.differed = not experts.are_equal
