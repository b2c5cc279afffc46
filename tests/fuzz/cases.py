"""What the fuzzer draws: a layer's arguments, and a program of calls and backward passes. Plain data, whose
repr can be pasted into a test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from hypothesis import strategies as st

from pmoe.gates import GATES
from pmoe.schedule.restore import ALL_PAIRS

WORLDS = (1, 2, 4)
COUNTS = (0, 1, 2, 5, 9)
"""Tokens of a rank."""


class Short:
    """Its repr leaves out what is as by default."""

    def __repr__(self) -> str:
        default = type(self)()
        changed = (
            f"{each.name}={value!r}"
            for each in fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, each.name)) != getattr(default, each.name)
        )
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class Call(Short):
    """One call of the model, and its backward pass.

    tokens: of each of four ranks, of which the first are there. between: what happens before it, one of
    BETWEEN or an option with its new value. wants: ranks whose input needs a gradient. shape: how the input
    lies in memory. checkpoint, backward: of CHECKPOINTS and BACKWARDS. inplace: the layer's output is changed
    in place. hook: its gradient is doubled by a hook. chained: the layer is called on its own output again.
    mask: which rows are tokens, of MASKS, another selection on each rank. other_mode: of MODES, in which the
    rank ``Case.alone`` makes the call, where there is one and others.
    """

    tokens: tuple[int, int, int, int] = (5, 5, 5, 5)
    between: str | tuple[str, Any] = ""
    wants: tuple[bool, bool, bool, bool] = (True, True, True, True)
    shape: str = "rows"
    checkpoint: str = ""
    backward: str = "once"
    inplace: bool = False
    hook: bool = False
    chained: bool = False
    autocast: bool = False
    mask: str = ""
    other_mode: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Case(Short):
    """options: of `pmoe.MoELayer`, with words for objects (see `play.objects`), and of `Switches`. frozen:
    of PARTS, on rank ``alone``, or on all where that is None. order: how the calls' backward passes follow
    each other. joint: their losses are summed instead. surgery: of SURGERIES, by the name of a parameter of
    TREATED. watched: of MODULES, those with hooks, on rank ``alone`` or on all. wrapped: of MODULES, those in
    a wrapper. doubled: a hook of the experts doubles what they return."""

    seed: int = 0
    world: int = 2
    dtype: str = "float64"
    training: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    alone: int | None = None
    calls: tuple[Call, ...] = (Call(),)
    order: tuple[int, ...] = (0,)
    joint: bool = False
    surgery: dict[str, str] = field(default_factory=dict)
    watched: tuple[str, ...] = ()
    wrapped: tuple[str, ...] = ()
    doubled: bool = False


MASKS = ("some", "none", "all", "integers")
MODES = ("eval", "no_grad")
SURGERIES = ("squashed", "pruned", "put back")
TREATED = ("experts.w1", "experts.w2", "experts.b1", "gate.weight", "shared_expert.w1", "shared_gate.weight")
MODULES = ("gate", "experts", "shared_expert", "shared_gate")
BETWEEN = ("", "no_grad", "inference", "eval", "deepcopy", "state dict", "pickle", "retained loss")
SHAPES = ("rows", "three", "strided", "transposed", "expanded")
CHECKPOINTS = ("", "plain", "contexts", "reentrant", "nested")
BACKWARDS = ("once", "twice", "inputs", "never")
PARTS = ("gate", "experts", "shared", "callbacks", "pre", "post")

Values = st.SearchStrategy[Any]

ARGUMENTS: dict[str, Values] = {
    "d_model": st.sampled_from((1, 3, 8)),
    "d_hidden": st.sampled_from((2, 8, 12)),
    "num_experts": st.sampled_from((8, 12)),
    "top_k": st.sampled_from((1, 3, 4)),
    "gate": st.sampled_from((*GATES, "own", "module", "external")),
    "normalize_gate": st.booleans(),
    "z_loss_weight": st.just(0.5),
    "expert": st.sampled_from(("ffn", "swiglu", "mlp", "mlps", "normed", "own")),
    "activation": st.sampled_from(("relu", "silu")),
    "bias": st.just(False),
    "shared_expert": st.sampled_from((5, "module")),
    "shared_gate": st.just(True),
    "capacity_factor": st.sampled_from((0.3, 1.0, 1.5, 8.0)),
    "pad_to_capacity": st.just(True),
    "check_finite": st.booleans(),
    "balance": st.sampled_from((1, 2)),
    "pipeline": st.sampled_from((True, 1, 2, 3, 4, 8, "solve")),
    "pipeline_backward": st.sampled_from((1, 2, 4, 6)),
    "fused": st.sampled_from((True, "forward", "auto")),
    "memory_reuse": st.sampled_from((True, "S1", "S2", "S3", "S4", *range(len(ALL_PAIRS)))),
    "memory_budget": st.sampled_from(("4KiB", "64KiB", "1GiB")),
    "slack": st.sampled_from((1.0, 3.0)),
    "group": st.just("single"),
    "mesh": st.sampled_from(("ep", "esp")),
    "dispatch": st.sampled_from(("hierarchical_1d", "hierarchical_2d", "own")),
    "combine": st.sampled_from(("flat", "hierarchical_1d", "hierarchical_2d")),
    "nodes": st.sampled_from((1, 2)),
    "send_once": st.just(True),
    "order": st.just("einsum"),
    "callbacks": st.just("scales"),
    # switches
    "bypass_local": st.just(False),
    "program": st.just(True),
    "sequential": st.just(True),
    "one_lane": st.just(True),
}
"""What an argument may be beside its default. A new argument joins here: a test compares the names."""
ELSEWHERE = {
    "dtype": "Case.dtype",
    "device": "there is one",
    "d_latent": "has another definition: tests/gloo/test_latent.py",
    "wire": "rounds rows: tests/gloo/test_wire.py",
    "wire_backward": "rounds rows: tests/gloo/test_wire.py",
    "wire_combine": "rounds results: tests/gloo/test_wire_combine.py",
    "products": "rounds operands: tests/unit/test_rounded_products.py",
    "allow": "lets T_M be rounded: tests/gloo/test_narrow_pairs.py",
    "program_heaps": "needs heaps of GPUs: tests/gloo/test_program_heaps.py",
}

CHANGED = ("pipeline", "memory_reuse", "pipeline_backward", "slack", "capacity_factor", "send_once")
"""Options that are also set on a built layer, between calls."""
TOGETHER = {
    "pad_to_capacity": ("capacity_factor",),
    "shared_gate": ("shared_expert",),
    "combine": ("nodes", "dispatch"),
    "dispatch": ("nodes",),
    "program": ("memory_reuse", "pipeline"),
}
"""Options that are refused, or mean nothing, without others."""


@st.composite
def options(draw: Callable[..., Any]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), max_size=6, unique=True))
    names = [*names, *(other for name in names for other in TOGETHER.get(name, ()) if draw(_often))]
    return {name: draw(ARGUMENTS[name]) for name in sorted(set(names))}


_often = st.sampled_from((True, True, True, False))
_seldom = st.sampled_from((False, False, False, False, True))


@st.composite
def calls(draw: Callable[..., Any], world: int, dtype: str) -> Call:
    between: Any = draw(st.sampled_from(("", "", "", *BETWEEN, "set")))
    if between == "set":
        name = draw(st.sampled_from(CHANGED))
        between = (name, draw(ARGUMENTS[name]))
    counts = st.sampled_from(COUNTS)
    tokens = [draw(counts) for _ in range(world)]
    checkpoint = draw(st.sampled_from(("", "", "", *CHECKPOINTS)))
    # torch's own rules: the reentrant one gives no gradients where its input needs none, and takes no inputs.
    must = checkpoint in ("reentrant", "nested")
    backward = draw(
        st.sampled_from(("once", "once", *(each for each in BACKWARDS if not must or each != "inputs")))
    )
    # Gradients of inputs alone are asked for by all ranks or by none: else some leave out the experts' own.
    wants = [must or backward == "inputs" or draw(_often) for _ in range(world)]
    autocast = dtype == "float32" and draw(_seldom)
    mask = draw(st.sampled_from(("", "", "", *MASKS)))
    other_mode = draw(st.sampled_from((*[""] * 12, *MODES)))
    if checkpoint:  # its second pass must be in the mode of the first
        other_mode = ""
    return Call(
        mask=mask,
        other_mode=other_mode,
        tokens=(*tokens, *Call.tokens[world:]),
        between=between,
        wants=(*wants, *Call.wants[world:]),
        shape=draw(st.sampled_from(("rows", "rows", *SHAPES))),
        checkpoint=checkpoint,
        backward=backward,
        inplace=draw(_seldom),
        hook=draw(_seldom),
        chained=dtype == "float64" and draw(_seldom),
        autocast=autocast,
    )


@st.composite
def cases(draw: Callable[..., Any], worlds: tuple[int, ...] = WORLDS) -> Case:
    world = draw(st.sampled_from(worlds))
    dtype = draw(st.sampled_from(("float64", "float64", "float64", "float32", "bfloat16")))
    found = tuple(draw(st.lists(calls(world, dtype), min_size=1, max_size=3)))
    if any(call.checkpoint for call in found):  # its second pass must find the layer as the first did
        found = tuple(
            replace(call, between="") if isinstance(call.between, tuple) else call for call in found
        )
    surgery = draw(st.dictionaries(st.sampled_from(TREATED), st.sampled_from(SURGERIES), max_size=3))
    surgery = surgery if draw(_seldom) or draw(_seldom) else {}
    if surgery:  # torch copies no pruned modules, and pickles no parametrized ones
        copies = ("deepcopy", "state dict", "pickle")
        found = tuple(replace(call, between="") if call.between in copies else call for call in found)
    watched = (
        tuple(draw(st.lists(st.sampled_from(MODULES), max_size=4, unique=True))) if draw(_seldom) else ()
    )
    if watched:  # hooks that write a journal are no functions of a module, which pickle needs
        found = tuple(replace(call, between="") if call.between == "pickle" else call for call in found)
    if "experts" in watched:  # torch lets nobody change in place what a module with backward hooks returned
        found = tuple(replace(call, inplace=False) for call in found)
    joint = draw(_seldom)
    if joint:  # the inputs of one call are not those of all
        found = tuple(replace(call, backward="once") if call.backward == "inputs" else call for call in found)
    return Case(
        seed=draw(st.integers(0, 99)),
        world=world,
        dtype=dtype,
        training=draw(_often),
        options=draw(options()),
        frozen=tuple(draw(st.lists(st.sampled_from(PARTS), max_size=6, unique=True)))
        if draw(_seldom)
        else (),
        alone=draw(st.sampled_from((None, *range(world)))),
        calls=found,
        order=tuple(draw(st.permutations(range(len(found))))),
        joint=joint,
        surgery=surgery,
        watched=watched,
        wrapped=tuple(draw(st.lists(st.sampled_from(MODULES), max_size=4, unique=True)))
        if draw(_seldom)
        else (),
        doubled=draw(_seldom),
    )
