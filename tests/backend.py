"""The switch of the pool of ranks (tests/pool.py): which backend its ranks use, and on which device.

    PMOE_TESTS_BACKEND=gloo            the default: ranks on the CPU
    PMOE_TESTS_BACKEND=nccl            ranks on GPUs, one on each, or several on one by
                                       `pmoe.comm.shared_gpu`
    PMOE_TESTS_BACKEND=nccl-stand-in   all that "nccl" does, with gloo in the place of NCCL and the CPU in the
                                       place of GPUs

A test's job makes tensors without naming a device. With "nccl" it runs in `OnDevice`, which makes them on the
rank's GPU. Results go back to the test on the CPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from pmoe.comm.shared_gpu import shared_gpu_environment

VARIABLE = "PMOE_TESTS_BACKEND"
GLOO, NCCL, STAND_IN = "gloo", "nccl", "nccl-stand-in"
PATIENCE = 3
"""How many times longer ranks on GPUs may take: processes on one GPU take turns."""


def chosen() -> str:
    """Raises ValueError for a backend that the pool has not."""
    name = os.environ.get(VARIABLE) or GLOO
    if name not in (GLOO, NCCL, STAND_IN):
        raise ValueError(f"{VARIABLE} must be {GLOO}, {NCCL} or {STAND_IN}, and is {name!r}")
    return name


def patience(name: str) -> int:
    return PATIENCE if name == NCCL else 1


def environment(rank: int, world: int, gpus: int, version: tuple[int, ...]) -> dict[str, str]:
    """The variables of a rank: those of a shared GPU where there are fewer GPUs than ranks.

    gpus: of this machine. version: of NCCL.
    """
    if gpus >= world:
        return {"CUDA_MODULE_LOADING": "EAGER"}
    return shared_gpu_environment(rank, version)


def device_of(rank: int, gpus: int) -> torch.device:
    """A GPU for each rank, in turn."""
    return torch.device("cuda", rank % gpus)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a rank of the pool computes. backend: the name that init_process_group takes."""

    backend: str
    device: torch.device | None = None

    @property
    def is_gpu(self) -> bool:
        return self.device is not None and self.device.type == "cuda"


def prepare(name: str, rank: int, world: int) -> Place:
    """Sets this process's variables and device. Call it before the process uses CUDA."""
    if name == GLOO:
        return Place(GLOO)
    if name == STAND_IN:
        os.environ.update(environment(rank, world, gpus=1, version=(2, 30)))
        return Place(GLOO, torch.device("cpu"))
    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise RuntimeError(f"{VARIABLE}={NCCL} needs a GPU, and torch {torch.__version__} sees none")
    os.environ.update(environment(rank, world, gpus, nccl_version()))
    device = device_of(rank, gpus)
    torch.cuda.set_device(device)
    return Place(NCCL, device)


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version()[:3])  # a fourth value is a text


def run_job(place: Place, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """function(*arguments) on the rank's device. Its result is on the CPU."""
    if place.device is None:
        return function(*arguments)
    with OnDevice(place.device):
        value = function(*(moved(argument, place.device) for argument in arguments))
    if place.is_gpu:
        torch.cuda.synchronize()
    return moved(value, torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """The value with its tensors on that device: in lists, tuples, dicts and dataclasses, too."""
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().to(device), value.requires_grad)
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, nn.Module):
        return value.to(device)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: moved(each, device) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device) for each in value))
    if type(value) in (list, tuple):
        return type(value)(moved(each, device) for each in value)
    return value


DRAWN_IN_PLACE = frozenset(
    {
        *(
            getattr(Tensor, name)
            for name in (
                "uniform_", "normal_", "bernoulli_", "exponential_", "random_", "log_normal_", "cauchy_",
                "geometric_",
            )
        ),
        *(
            getattr(nn.init, name)
            for name in (
                "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
                "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_",
            )
        ),
    }
)  # fmt: skip
DRAWN_NEW = frozenset({torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal})
DRAWN_OF_TENSORS = frozenset(
    {torch.rand_like, torch.randn_like, torch.randint_like, torch.bernoulli, torch.multinomial}
)


class OnDevice(TorchFunctionMode):
    """New tensors are on the device unless the caller names one. Random numbers are those of the CPU.

    A test compares ranks with a computation in its own process, on the CPU, from the same seeds.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in DRAWN_IN_PLACE:
            return draw_in_place(function, args, kwargs)
        if function in DRAWN_NEW:
            device = kwargs.pop("device", None) or self.device
            needs_grad = kwargs.pop("requires_grad", False)
            return function(*args, **kwargs, device="cpu").to(device).requires_grad_(needs_grad)
        if function in DRAWN_OF_TENSORS:
            first, *others = args
            device = kwargs.pop("device", None) or first.device
            return function(first.cpu(), *others, **kwargs).to(device)
        if function in _device_constructors() and kwargs.get("device") is None:
            kwargs["device"] = self.device
        return function(*args, **kwargs)


def draw_in_place(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draws into a copy on the CPU, and copies that into the tensor."""
    named = "tensor" if "tensor" in kwargs else "self" if "self" in kwargs else None
    tensor = kwargs.pop(named) if named else args[0]
    others = args if named else args[1:]
    if tensor.device.type in ("cpu", "meta"):
        return function(tensor, *others, **kwargs)
    drawn = tensor.detach().cpu()
    function(drawn, *others, **kwargs)
    with torch.no_grad():
        tensor.copy_(drawn)
    return tensor
