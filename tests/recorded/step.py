"""A configuration's layer, run on one rank, and everything about it that is recorded."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import pmoe
from tests.recorded import internals
from tests.recorded.configurations import GROUPS, TOKENS, Configuration, E, H, M

AUX = 0.37

_meshes: dict[object, DeviceMesh] = {}


def record(rank: int, world: int, group: str, name: str, counted_steps: int) -> dict[str, Any]:
    """A job of `tests.pool.Pool`: everything that this rank records of one configuration.

    counted_steps: how many steps' bytes are counted; the least count is taken. On a busy machine gloo's
    threads may free a tensor too late, never too early.
    """
    return Recording(GROUPS[group][name], rank).fields(counted_steps)


class Recording:
    def __init__(self, configuration: Configuration, rank: int) -> None:
        self.configuration, self.rank = configuration, rank
        self.layer = build(configuration, rank)
        self.x, self.dy = inputs(configuration, rank)

    def fields(self, counted_steps: int) -> dict[str, Any]:
        layer = self.layer
        with self._stand_in() as steps, internals.recorded_passes() as passes:
            results = self._step()
        found: dict[str, Any] = {
            "passes": passes,
            "steps": " ".join(steps),
            "results": {name: described(value) for name, value in results.items()},
            "traffic": traffic_of(layer),
            "tokens_per_expert": " ".join(map(str, layer.tokens_per_expert.tolist())),
            "ran": {each.name: str(getattr(layer.ran, each.name)) for each in fields(layer.ran)},
        }
        before = traffic_of(layer)
        found["pool"] = internals.pooled(lambda: self._compare(results))
        found["traffic again"] = {name: value - before[name] for name, value in traffic_of(layer).items()}
        counted = [self._counted() for _ in range(counted_steps)]
        found["memory"] = {name: min(each[name] for each in counted) for name in counted[0]}
        return found

    def _compare(self, results: dict[str, Tensor | None]) -> None:
        with self._stand_in():
            again = self._step()
        for name, value in results.items():
            assert described(value) == described(again[name]), f"{name} of a second step has other bits"

    def _counted(self) -> dict[str, int]:
        self._begin()
        with self._stand_in():
            return internals.allocated(self._forward, self._backward)

    def _step(self) -> dict[str, Tensor | None]:
        self._begin()
        self._backward(self._forward())
        layer = self.layer
        named = {**dict(layer.named_parameters()), **_borrowed(layer)}
        gradients = {name: parameter.grad for name, parameter in named.items()}
        if self.configuration.carries_gradients:
            gradients["others"] = layer.gradients.total
        return {"y": self.y.detach(), "l_aux": layer.l_aux.detach(), "x": self.x.grad, **gradients}

    def _begin(self) -> None:
        torch.manual_seed(100 + self.rank)
        self.y = self.x.grad = None
        for parameter in (*self.layer.parameters(), *_borrowed(self.layer).values()):
            parameter.grad = None

    def _forward(self) -> Tensor:
        autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.configuration.autocast)
        inference = self.configuration.way == "inference"
        with autocast, torch.set_grad_enabled(not inference):
            y, l_aux = self._through()(self.x)
        self.y = y
        return (y * self.dy).sum() + AUX * l_aux

    def _backward(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss.backward()

    def _through(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """How the step calls the layer."""
        frozen = {"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts}
        ways: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
            "checkpoint": lambda x: checkpoint(self._once, x, use_reentrant=False),
            "reentrant checkpoint": lambda x: checkpoint(self._once, x, use_reentrant=True),
            "frozen checkpoint": lambda x: checkpoint(self._once, x, **frozen),
            "frozen checkpoint of two calls": lambda x: checkpoint(self._twice, x, **frozen),
            "two calls": self._twice,
        }
        return ways.get(self.configuration.way, self._once)

    def _once(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer
        if getattr(layer.gate, "needs_token_ids", False):
            y = layer(x, torch.arange(x.shape[0]) * 7 % 31)
        elif hasattr(layer.gate, "routing"):
            expert_TK = (torch.arange(x.shape[0]).unsqueeze(1) * 3 + torch.tensor([0, 5])) % E
            with layer.gate.routing(expert_TK, x[:, :2].softmax(1)):
                y = layer(x)
        else:
            y = layer(x)
        return y, layer.l_aux

    def _twice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, first = self._once(x)
        y, second = self._once((x + y).sin())
        return y.exp().cos(), first.exp() + second

    @contextlib.contextmanager
    def _stand_in(self) -> Any:
        ways = {"fused": internals.fused_by_plain_steps, "one rank": internals.one_rank_by_kernels}
        with ways.get(self.configuration.stand_in, lambda: contextlib.nullcontext([]))() as steps:
            yield steps


def build(configuration: Configuration, rank: int) -> pmoe.MoELayer:
    """The layer under one seed; ``load`` bends the gate: x's first column is positive."""
    torch.manual_seed(7)
    c = configuration
    options: dict[str, Any] = {"dtype": c.dtype, **c.options}
    if c.mesh is not None:
        options["mesh"] = _mesh(c)
    local = E // (c.world if c.mesh is None else c.mesh[0])
    options |= {name: make(local, c.dtype) for name, make in c.making.items()}
    layer = internals.build_layer((M, H, E, c.top_k), options, c.switches)
    with torch.no_grad():
        for parameter in layer.gate.parameters():
            parameter *= 3
        if c.load == "one expert":
            layer.gate.weight[-1, 0] += 40
        if c.load == "some experts get none":
            layer.gate.weight[::2, 0] -= 40
    if c.carries_gradients:
        internals.carry_gradients(layer, rank)
    if c.frozen:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.startswith(c.frozen[rank]))
    return layer


def inputs(configuration: Configuration, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's x and dy."""
    c = configuration
    generator = torch.Generator().manual_seed(10 + rank)
    count = (c.tokens or TOKENS[c.world])[rank]
    x, dy = (torch.randn(count, M, generator=generator, dtype=torch.float64) for _ in range(2))
    x[:, 0] = x[:, 0].abs() + 1
    return x.to(c.dtype).requires_grad_(c.input_needs_grad), dy.to(c.dtype)


def _mesh(c: Configuration) -> DeviceMesh:
    assert c.mesh is not None
    sizes = dict(zip(("ep", "esp"), c.mesh, strict=True))
    key = (tuple(sizes.items()), c.mesh_names)
    if key not in _meshes:
        shape = tuple(sizes[name] for name in c.mesh_names)
        _meshes[key] = init_device_mesh("cpu", shape, mesh_dim_names=c.mesh_names)
    return _meshes[key]


def _borrowed(layer: pmoe.MoELayer) -> dict[str, Tensor]:
    """Experts' parameters that are no parameters of the layer."""
    own = {id(parameter) for parameter in layer.parameters()}
    return {
        f"borrowed.{name}": parameter
        for name, parameter in layer.experts.named_parameters()
        if id(parameter) not in own
    }


def described(value: Tensor | None) -> str:
    """Returns a text about a tensor: dtype, shape, and a hash of the bytes.

    Behind "|" are the norm and the inner product with cosines, for machines that add in another order.
    """
    if value is None:
        return "none"
    value = value.detach().contiguous()
    content = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    wide = value.double().reshape(-1)
    dot = torch.dot(wide, torch.arange(wide.numel(), dtype=torch.float64).cos())
    kind, shape = str(value.dtype).removeprefix("torch."), "x".join(map(str, value.shape))
    return f"{kind} ({shape}) {hashlib.sha256(content).hexdigest()[:16]} | {wide.norm():.6e} {dot:.6e}"


def traffic_of(layer: pmoe.MoELayer) -> dict[str, int]:
    """Returns the bytes of the layer's messages by kind. Only a layer with balance sends weights."""
    return {name: value for name, value in vars(layer.traffic).items() if name != "weights" or layer.balance}
