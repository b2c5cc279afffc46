"""Plays a case on the ranks of a pool: builds the layer, and the same model by the definition, runs the
case's program on both, and says what differs."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

import pmoe
from pmoe.comm.counts import FaultError
from pmoe.comm.ranks import Ranks
from pmoe.engine.buffers.arena import pool
from pmoe.experts.base import WHOLE, Shard
from pmoe.gates import TopKGate
from pmoe.gates.external import ExternalGate
from pmoe.schedule.restore import ALL_PAIRS
from tests.around import Around
from tests.featured import OwnDispatch, OwnExperts
from tests.fuzz.cases import Call, Case
from tests.fuzz.plain import PlainLayer, own_part, values, whole_experts
from tests.own_experts import mlp, normed
from tests.programs import CpuBackend, on_cpu
from tests.switched import switched_layer

SIZES = {"d_model": 6, "d_hidden": 4, "num_experts": 4, "top_k": 2}
LIMITS = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.1}
"""Of a difference, relative to the largest value."""
AUX = 0.37
FACTOR = 3.0
"""Of gates' parameters: they route unevenly."""


# ---- what the words of `cases` stand for


class OwnGate(nn.Module):
    """No subclass of pmoe.Gate. It begins with a product in the rows' type."""

    def __init__(self, d_model: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.first, self.second, self.top_k = nn.Linear(d_model, 5), nn.Linear(5, num_experts), top_k

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        logits = self.second(self.first(x_TM).tanh()).float()
        weight, expert = logits.softmax(-1).topk(self.top_k)
        return pmoe.Routing(expert=expert, weight=weight, l_aux=logits.square().sum(), logits=logits)


class Scales(pmoe.Callback, nn.Module):
    """Hooks with a parameter, outside and inside of the layer."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(d_model))

    def before_moe_start(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x.dtype)

    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows * self.factor.to(rows.dtype)


_meshes: dict[str, DeviceMesh] = {}


def mesh(kind: str, world: int) -> DeviceMesh:
    if kind not in _meshes:
        shape = (world // 2, 2) if kind == "esp" else (world, 1)
        _meshes[kind] = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "esp"))
    return _meshes[kind]


def objects(options: dict[str, Any], world: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `MoELayer` and fields of `Switches`."""
    found = {**SIZES, **options, "dtype": dtype}
    m, h, e, k = (found[name] for name in SIZES)
    made: dict[tuple[str, Any], Callable[[], Any]] = {
        ("gate", "own"): lambda: OwnGate(m, e, k),
        ("gate", "module"): lambda: TopKGate(m, e, k, dtype=dtype),
        ("gate", "external"): ExternalGate,
        ("expert", "mlp"): lambda: mlp,
        ("expert", "normed"): lambda: normed,
        ("expert", "mlps"): lambda: nn.ModuleList(mlp(m, h) for _ in range(e // spread)),
        ("expert", "own"): lambda: OwnExperts(m, h, e // spread, shard=shard, dtype=dtype, **given),
        ("shared_expert", "module"): lambda: nn.Linear(m, m),
        ("callbacks", "scales"): lambda: [Scales(m)],
        ("group", "single"): Ranks.single,
        ("mesh", "ep"): lambda: mesh("ep", world),
        ("mesh", "esp"): lambda: mesh("esp", world),
        ("dispatch", "own"): OwnDispatch,
    }
    given = {name: value for name, value in options.items() if name in ("activation", "bias")}
    split = options.get("mesh") == "esp" and world > 1
    spread = 1 if options.get("group") else world // 2 if split else world
    shard = Shard(mesh("esp", world).get_local_rank("esp"), 2) if split else WHOLE
    if isinstance(reuse := found.get("memory_reuse"), int) and not isinstance(reuse, bool):
        found["memory_reuse"] = ALL_PAIRS[reuse]
    if options.get("mesh") == "esp" and world == 1:
        del found["mesh"]
    known = {name: made[key]() for name, value in found.items() if (key := _key(name, value)) in made}
    return {**found, **known}


def _key(name: str, value: Any) -> tuple[str, Any]:
    return (name, value) if isinstance(value, str) else (name, None)


# ---- the model


class Model(nn.Module):
    """A layer between two products."""

    def __init__(self, layer: nn.Module, d_model: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.pre, self.post = (
            nn.Linear(d_model, d_model, dtype=dtype),
            nn.Linear(d_model, d_model, dtype=dtype),
        )
        self.layer = layer

    def forward(self, x: Tensor, call: Call, seed: int) -> tuple[Tensor, Tensor]:
        h = self.pre(x)
        mask = masked(call, h.shape[:-1])
        y, l_aux = self._layer(h, seed, mask)
        if call.chained:
            y, more = self._layer(y + h, seed + 1, mask)
            l_aux = l_aux + more
        if call.hook and y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        if call.inplace:
            y.mul_(1.5)
        return self.post(y), l_aux

    def _layer(self, h: Tensor, seed: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)  # of gates that draw
        gate = getattr(self.layer.gate, "base_layer", self.layer.gate)
        options = {} if mask is None else {"mask": mask}
        if isinstance(gate, ExternalGate):
            flat = h.reshape(-1, h.shape[-1]) if mask is None else h[mask.bool()]
            expert = (torch.arange(len(flat))[:, None] ** 2 + torch.arange(2) + seed) % 4
            with gate.routing(expert, flat[:, :1].float().sigmoid().expand(-1, 2)):
                y = self.layer(h, **options)
        elif getattr(gate, "needs_token_ids", False):
            y = self.layer(h, torch.arange(h.shape[:-1].numel()).reshape(h.shape[:-1]) * 7 + seed, **options)
        else:
            y = self.layer(h, **options)
        return y, self.layer.l_aux


def masked(call: Call, shape: torch.Size) -> Tensor | None:
    """Which rows are tokens: another selection where there are other rows."""
    place = torch.arange(shape.numel()).reshape(shape)
    masks = {
        "some": (place * 5 + shape.numel()) % 3 != 0,
        "none": place < 0,
        "all": place >= 0,
        "integers": (place % 2).to(torch.int64),
    }
    return masks.get(call.mask)


# ---- what is done to a built layer


class Squash(nn.Module):
    """A parametrization that treats each number by itself: whole or in parts, it gives the same."""

    def forward(self, weight: Tensor) -> Tensor:
        return squash(weight)


def squash(weight: Tensor) -> Tensor:
    return weight.tanh() * 1.5


def clip(weight: Tensor) -> Tensor:
    """What pruning by the sign of a number leaves."""
    return weight * (weight.detach() > -0.1)


def treat(case: Case, layer: pmoe.MoELayer) -> dict[str, Callable[[Tensor], Tensor]]:
    """Carries out the case's surgery; by parameter of the experts, what their values are then."""
    values_of = {"squashed": squash, "pruned": clip, "put back": lambda weight: weight}
    treated: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, surgery in case.surgery.items():
        part, _, own = name.partition(".")
        module = getattr(layer, part)
        weight = None if module is None else getattr(module, own, None)
        if not isinstance(weight, nn.Parameter):
            continue
        if surgery == "squashed" or part != "experts":  # torch copies no pruned module for the definition
            parametrize.register_parametrization(module, own, Squash())
            surgery = "squashed"
        elif surgery == "pruned":
            prune.custom_from_mask(module, own, weight.detach() > -0.1)
        else:
            delattr(module, own)
            setattr(module, own, weight)
        if part == "experts":
            treated[own] = values_of[surgery]
    return treated


def plain_name(name: str) -> str:
    """A parameter's name before anything was done to it."""
    name = name.replace(".base_layer", "").replace("_orig", "")
    return name.replace("parametrizations.", "").replace(".original", "")


def double(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output * 2


def watch(case: Case, layer: pmoe.MoELayer, rank: int) -> list[str]:
    """Puts wrappers and hooks where the case says; a journal of which hooks ran."""
    journal: list[str] = []
    for name in case.watched if case.alone in (None, rank) else ():
        module = getattr(layer, name)
        if module is None:
            continue
        module.register_forward_pre_hook(lambda *_, name=name: journal.append(name))
        module.register_forward_hook(lambda *_, name=name: journal.append(name))
        if name != "gate":
            module.register_full_backward_hook(lambda *_, name=name: journal.append(name))
    if case.doubled:
        layer.experts.register_forward_hook(double)
    for name in case.wrapped:
        if getattr(layer, name) is not None:
            setattr(layer, name, Around(getattr(layer, name)))
    return journal


def built(case: Case, world: int) -> tuple[Model, Model]:
    """The model, and the same by the definition."""
    dtype = getattr(torch, case.dtype)
    options = objects(case.options, world, dtype)
    layer = switched_layer(**options)
    kind, bias = case.options.get("expert", "ffn"), case.options.get("bias", True)
    layer.to(dtype)
    whole = whole_experts(layer, kind, bias or layer.layer_modules.experts.are_modules)
    with torch.no_grad():
        whole = {name: value.to(dtype).double() for name, value in whole.items()}
        experts = own_part(layer, kind, whole)
        for name, parameter in layer.named_parameters():
            factor = FACTOR if name.startswith("gate") else 1.0
            drawn = values(name, *parameter.shape, scale=factor)
            parameter.copy_(experts.get(name, drawn))
    treated = treat(case, layer)
    plain = PlainLayer(layer, whole, kind, case.options.get("activation", "gelu"))
    plain.treated = treated
    plain.factor = 2.0 if case.doubled else 1.0
    models = Model(layer, layer.d_model, dtype), Model(plain, layer.d_model, dtype)
    with torch.no_grad():
        for each in models:
            for name in ("pre", "post"):
                for n, parameter in getattr(each, name).named_parameters():
                    parameter.copy_(values(name + n, *parameter.shape, scale=0.7))
    for each in models:
        each.train(case.training)
    return models


def freeze(case: Case, model: Model, rank: int) -> None:
    if case.alone not in (None, rank):
        return
    starts = {
        "gate": "layer.gate",
        "experts": "layer.experts",
        "shared": "layer.shared",
        "callbacks": "layer.callback",
        "pre": "pre",
        "post": "post",
    }
    for name, parameter in model.named_parameters():
        if any(name.startswith(starts[part]) for part in case.frozen):
            parameter.requires_grad_(False)


# ---- the program


def laid_out(call: Call, rank: int, d_model: int, dtype: torch.dtype, i: int) -> Tensor:
    """The input of a call: a leaf of the shape and strides that it asks for."""
    count = call.tokens[rank]
    x = values(f"x{rank}{i}", count, d_model).to(dtype)
    if call.shape == "three":
        x = x.reshape(count, 1, d_model)
    if call.shape == "strided":
        x = x.repeat_interleave(2, -1)[:, ::2]
    if call.shape == "transposed":
        x = x.t().contiguous().t()
    if call.shape == "expanded":
        x = x[:1].expand(count, d_model) if count else x
    return x.detach().requires_grad_(call.wants[rank])


def called(model: Model, call: Call, x: Tensor, seed: int, real: bool) -> tuple[Tensor, Tensor]:
    """(output, l_aux). The definition is not recomputed."""

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x, call, seed)

    def inner(x: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = checkpoint(run, x, use_reentrant=False)
        return found

    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: checkpoint(run, x, use_reentrant=False),
        "contexts": lambda: checkpoint(run, x, use_reentrant=False, context_fn=pmoe.checkpoint_contexts),
        "reentrant": lambda: checkpoint(run, x, use_reentrant=True),
        "nested": lambda: checkpoint(inner, x, use_reentrant=True),
    }
    with torch.autocast("cpu", torch.bfloat16, enabled=call.autocast):
        found: tuple[Tensor, Tensor] = ways[call.checkpoint]() if real and call.checkpoint else run(x)
    return found


def between(model: Model, call: Call, x: Tensor, seed: int, real: bool) -> Tensor | None:
    """What happens before a call, and the output that it gives."""
    what, plain = call.between, Call()
    if isinstance(what, tuple):
        if real or what[0] == "capacity_factor":
            setattr(model.layer, *(_set(*what)))
        return None
    if what in ("no_grad", "inference", "eval"):
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "eval": torch.no_grad}
        training = model.training
        model.train(training and what != "eval")
        with modes[what]():
            y, _ = model(x.detach(), plain, seed)
        model.train(training)
        return y
    if what in ("deepcopy", "state dict", "pickle"):
        other = model
        if real:
            other = copy.deepcopy(model) if what != "pickle" else pickle.loads(pickle.dumps(model))
            if what == "state dict":
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.zero_()
                other.load_state_dict(model.state_dict())
        with torch.no_grad():
            return other(x.detach(), plain, seed)[0]
    if what == "retained loss" and real:
        model.layer.l_aux = None
    return None


def _set(name: str, value: Any) -> tuple[str, Any]:
    is_pair = name == "memory_reuse" and isinstance(value, int) and not isinstance(value, bool)
    return name, ALL_PAIRS[value] if is_pair else value


def program(case: Case, model: Model, rank: int, real: bool) -> dict[str, Tensor | None]:
    """Plays the case: outputs, losses and gradients."""
    dtype = getattr(torch, case.dtype)
    found: dict[str, Tensor | None] = {}
    losses: list[Tensor | None] = []
    inputs: list[Tensor] = []
    for i, call in enumerate(case.calls):
        seed = 100 * case.seed + 10 * i
        x = laid_out(call, rank, model.pre.in_features, dtype, i)
        told = between(model, call, x, seed + 5, real)
        if told is not None:
            found[f"between {i}"] = told
        with other_mode(case, call, model, rank, real):
            y, l_aux = called(model, call, x, seed, real)
        found[f"y {i}"], found[f"l_aux {i}"] = y.detach().clone(), l_aux.detach().clone()
        dy = values(f"dy{rank}{i}", *y.shape).to(y.dtype)
        loss = (y * dy).sum() + AUX * l_aux
        losses.append(None if call.backward == "never" else loss)
        inputs.append(x)
        del y, l_aux, loss
    if case.joint:
        losses = _joined(losses)
    for i in case.order:
        if losses[i] is not None and losses[i].requires_grad:
            found |= backward(case.calls[i], i, losses[i], inputs[i], model)
        losses[i] = None
    for i, x in enumerate(inputs):
        if x.requires_grad:
            found[f"x {i}"] = x.grad
    return found | {plain_name(name): p.grad for name, p in model.named_parameters() if p.requires_grad}


@contextlib.contextmanager
def other_mode(case: Case, call: Call, model: Model, rank: int, real: bool) -> Iterator[None]:
    """One rank alone is in eval mode, or without gradients; all of them refuse the latter."""
    if not call.other_mode or case.alone != rank or case.world == 1:
        yield
        return
    training = model.training
    model.train(training and call.other_mode != "eval")
    try:
        with torch.no_grad() if call.other_mode == "no_grad" else contextlib.nullcontext():
            yield
    finally:
        model.train(training)


def _joined(losses: list[Tensor | None]) -> list[Tensor | None]:
    """All in the first's place."""
    there = [loss for loss in losses if loss is not None]
    return [sum(there[1:], there[0]) if there else None, *[None] * (len(losses) - 1)]


def backward(call: Call, i: int, loss: Tensor, x: Tensor, model: Model) -> dict[str, Tensor | None]:
    if call.backward == "twice":
        loss.backward(retain_graph=True)
    if call.backward == "inputs":
        return {f"asked {i}": torch.autograd.grad(loss, [x], allow_unused=True)[0]}
    loss.backward()
    return {}


# ---- both, compared


def job(rank: int, world: int, case: Case, folder: str) -> list[str]:
    """What differs on this rank; ["refused: ..."] where the layer does not take such a case. folder: for what
    is measured."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, PMOE_CACHE=folder))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(on_cpu(CpuBackend(seed=100 * case.seed + rank)))
        told = _played(rank, world, case)
        if not told and case.options.get("program") and not _measures(case):
            told = _beside_engine(rank, world, case)
        return told


def _measures(case: Case) -> bool:
    """Whether times that are measured decide the chunks: another n sums numbers in another order."""
    options = {**case.options}
    chosen = [(name, options.get(name)) for name in ("pipeline", "memory_reuse")]
    chosen += [call.between for call in case.calls if isinstance(call.between, tuple)]
    return "memory_budget" in options or any(value is True or value == "solve" for _, value in chosen)


def _beside_engine(rank: int, world: int, case: Case) -> list[str]:
    """What differs, to the bit, between the case's layer by programs and the same layer by the engine."""
    by_programs, by_engine = (
        _results(case, world, rank, {**case.options, "program": is_program}) for is_program in (True, False)
    )
    return [
        f"{name}: not the engine's bits"
        for name in by_engine
        if not _equal(by_programs[name], by_engine[name])
    ]


def _results(case: Case, world: int, rank: int, options: dict[str, Any]) -> dict[str, Tensor | None]:
    case = replace(case, options=options)
    torch.manual_seed(case.seed)
    model, _ = built(case, world)
    freeze(case, model, rank)
    watch(case, model.layer, rank)
    return program(case, model, rank, real=True)


def _equal(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs)


def _played(rank: int, world: int, case: Case) -> list[str]:
    torch.manual_seed(case.seed)
    host = pool(torch.device("cpu")).host
    gc.collect()
    before = host.bytes_in_use
    try:
        model, plain = built(case, world)
        freeze(case, model, rank)
        journal = watch(case, model.layer, rank)
        got = program(case, model, rank, real=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, FaultError) and "routing changed" in str(error):
            raise
        return [f"refused: {type(error).__name__}: {error}"]
    layer = model.layer
    assert isinstance(layer, pmoe.MoELayer)
    wanted = program(case, plain, rank, real=False)
    experts = {name.rpartition(".")[2]: wanted.pop(name) for name in [*wanted] if ".whole." in name}
    if layer.ranks.size > 1:
        for name, value in plain.layer.whole.items():
            total = torch.zeros_like(value) if experts[name] is None else experts[name].clone()
            dist.all_reduce(total)
            experts[name] = total
    kind = case.options.get("expert", "ffn")
    whole = {
        n: plain.layer.whole[n].new_zeros(plain.layer.whole[n].shape) if g is None else g
        for n, g in experts.items()
    }
    wanted |= {f"layer.{name}": value for name, value in own_part(layer, kind, whole).items()}
    told = list(differences(case, got, wanted))
    watched = [name for name in case.watched if getattr(layer, name) is not None]
    if case.alone in (None, rank):
        told += [f"the hooks of {name} did not run" for name in watched if name not in journal]
    del model, plain, layer, got, wanted
    gc.collect()
    if host.bytes_in_use != before:
        told.append(f"{host.bytes_in_use - before} bytes of the pool stayed in use")
    return told


def differences(case: Case, got: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> Iterator[str]:
    narrow = any(call.autocast for call in case.calls)
    kind = "bfloat16" if narrow else case.dtype
    # Small sums of large numbers: what a number is rounded by is that of those. Where a LayerNorm has one
    # column, its scale's gradient is rounding and nothing else.
    share = {"bfloat16": 1, "float32": 1e-2, "float64": 1e-3}[kind]
    if case.options.get("expert") == "normed" and case.options.get("d_model") == 1:
        share *= 10
    largest = max(
        (float(each.abs().max()) for each in wanted.values() if each is not None and each.numel()),
        default=0.0,
    )
    limit, least = LIMITS[kind], share * largest
    for name in sorted(got):
        ours, theirs = got[name], wanted.get(name)
        if ours is None or theirs is None:
            other = theirs if ours is None else ours
            if other is not None and other.count_nonzero():
                yield f"{name}: {'none' if ours is None else 'some'}, and should be the other"
            continue
        if ours.shape != theirs.shape:
            yield f"{name}: shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"
            continue
        if not ours.numel():
            continue
        ours, theirs = ours.double(), theirs.double()
        scale = max(theirs.abs().max().item(), least, 1e-30)
        error = (ours - theirs).abs().max().item() / scale
        if not error <= limit:
            yield f"{name}: {error:.1e}"
