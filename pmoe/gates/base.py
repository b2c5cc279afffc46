"""What every gate returns: the routing of a rank's tokens, decided once and never again.

Letters: S rows of the routing (T but for gates that say otherwise).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_flag, check_int, check_not_negative, check_place


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Rows that are mixtures of tokens, as SoftMoE's are: row s is sum_t dispatch[t, s] x_t, and token t gets
    sum_s combine[t, s] y_s. Both (T, S), attached to the graph."""

    dispatch: Tensor
    combine: Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Where each token goes and with what weight.

    expert: (S, K) int64, global expert indices, distinct within a token. S is T, and row t is token t's,
    unless ``token`` or ``mix`` says otherwise.
    weight: (S, K) float32 or float64, the factor of each expert's output; carries the gate's gradient.
    l_aux: scalar, the auxiliary loss of this rank's tokens, attached to the graph where the gate learns.
    logits: the gate's scores or None; looked at only to check that they are finite.
    keep: (S, K) bool, what the gate itself keeps within capacity; None leaves capacity to the layer.
    token: (S,) int64, ascending: the token of each row, where tokens do not all go to as many experts.
    mix: how rows are mixed of tokens, and tokens of results.
    """

    expert: Tensor
    weight: Tensor
    l_aux: Tensor
    logits: Tensor | None = None
    keep: Tensor | None = None
    token: Tensor | None = None
    mix: Mix | None = None


PartitionName = Literal["tokens", "none"]
"""What `Gate.partition` may be."""


class KeptType:
    """A buffer of a gate that keeps its type, whatever becomes of the module's: a sum of small steps, say.

    ``.to(torch.bfloat16)`` leaves its values alone (`Gate._apply`). Whatever puts another tensor in its place
    (a state dict that is assigned, accelerate's set_module_tensor_to_device) gives that one's values, in this
    type as soon as it is read.

        class MyGate(pmoe.Gate):
            steps = KeptType(torch.float32)  # and register_buffer("steps", ...) as ever
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, gate: None, owner: type) -> KeptType: ...

    @overload
    def __get__(self, gate: nn.Module, owner: type) -> Tensor: ...

    def __get__(self, gate: nn.Module | None, owner: type) -> Tensor | KeptType:
        if gate is None:
            return self
        # No __set__: torch's own __setattr__ stores what is assigned among the buffers.
        buffers = gate.__dict__.get("_buffers", {})
        if self.name not in buffers:
            raise AttributeError(self.name)
        buffer: Tensor = buffers[self.name]
        if buffer is not None and buffer.dtype != self.dtype:
            buffers[self.name] = buffer = buffer.to(self.dtype)
        return buffer


def _kept(gate: nn.Module) -> list[str]:
    """Names of the buffers of a `KeptType`."""
    names = [
        name for kind in type(gate).__mro__ for name, each in vars(kind).items() if type(each) is KeptType
    ]
    return [name for name in names if name in gate._buffers]


class Gate(nn.Module, abc.ABC):
    """A gate maps tokens to a `Routing`. Subclass it, or pass any module that returns one.

    A gate decides for the rank's whole batch at once, so micro-batches follow its decision and cannot
    change it.
    """

    partition: PartitionName = "tokens"
    """What a part of the batch would be routed to: "tokens", the same as within the whole (capacity, where
    there is one, passed from part to part); "none", something else: the gate needs the whole batch. Said of
    eval mode: a gate that draws noise in training draws other noise for a part."""

    needs_token_ids = False
    """Whether forward takes the tokens' ids as a second argument, (T,) int64."""

    decides_capacity = False
    """Whether the constructor takes ``capacity_factor``: the gate itself says which rows are kept."""

    picks_tokens = False
    """Whether rows are no tokens' top_k choices: experts pick tokens, or rows are mixtures of them."""

    mixes_tokens = False
    """Whether rows are mixtures of tokens (`Routing.mix`)."""

    has_external_routing = False
    """Whether the routing comes from outside of the layer."""

    saved_scores = 1
    """How many numbers for each pair of token and expert autograd keeps until backward."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Gate:
        """Moves the module as ever; buffers of a `KeptType` keep their values, which a cast there and back
        would round."""
        before = {name: getattr(self, name) for name in _kept(self)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                # From the meta device (to_empty) there are no values to keep.
                source = new if old.is_meta else old
                self._buffers[name] = source.to(device=new.device, dtype=old.dtype)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        for name in _kept(self):
            getattr(self, name)  # assign=True has put the file's tensors here

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        for name in _kept(self):
            getattr(self, name)
        super()._save_to_state_dict(*args, **options)

    def num_rows(self, num_tokens: int) -> int:
        """S for so many tokens, where the gate `picks_tokens`: by it memory is predicted."""
        return num_tokens

    def reset_parameters(self) -> None:
        """Draws parameters and buffers anew, as the constructor does: what a gate from the meta device needs
        after ``to_empty``. Override it where there are any."""

    def extra_repr(self) -> str:
        """The plain attributes and the shapes of the parameters, by name."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | float | str)}
        del plain["training"]
        shapes = {name: tuple(each.shape) for name, each in self.named_parameters(recurse=False)}
        return ", ".join(f"{name}={value!r}" for name, value in (plain | shapes).items())

    @abc.abstractmethod
    def forward(self, x_TM: Tensor, *args: Any, **kwargs: Any) -> Routing:
        """Routes the tokens x_TM, (T, d_model); T may be 0. Where `needs_token_ids`, the second argument is
        token_ids_T; else there is none."""

    if TYPE_CHECKING:  # of torch's __call__ type checkers know nothing: this is forward's signature again

        def __call__(self, x_TM: Tensor, *args: Any, **kwargs: Any) -> Routing: ...


def at_least_float32(x: Tensor) -> Tensor:
    """Routing is computed in float32 or wider, whatever the rows' type: rounding flips near ties."""
    return x if x.dtype == torch.float64 else x.float()


# ---- what constructors check, and what gates have in common that choose by logits of one parameter


def check_sizes(d_model: int, num_experts: int, top_k: int) -> None:
    """TypeError unless all are ints, ValueError unless positive and top_k at most num_experts."""
    check_count(d_model=d_model, num_experts=num_experts)
    check_int(top_k=top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")


def draw_router_weight(weight: nn.Parameter) -> None:
    """Uniform within 1 / sqrt(columns), as `torch.nn.Linear` begins."""
    bound = 1 / math.sqrt(weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)


def scaled(weight_TK: Tensor, normalize: bool) -> Tensor:
    """(T, K): a token's weights over their sum, where that is asked for."""
    return weight_TK / weight_TK.sum(-1, keepdim=True) if normalize else weight_TK


class TopKRouter(Gate):
    """weight: parameter (E, M). normalize: None means what the gate's papers do, see `normalizes`."""

    top_k: int
    z_loss_weight: float
    normalize: bool

    normalizes = True
    """Whether several weights of a token are scaled to sum 1 where nothing is said. A single one never is: it
    would be the constant 1, and the gate would never learn from the task."""

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        normalize: bool | None = None,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sizes(d_model, num_experts, top_k)
        check_flag("normalize", normalize, or_none=True)
        self.check_options(top_k, normalize)
        check_not_negative(z_loss_weight=z_loss_weight)
        check_place(device, dtype)
        self.top_k, self.z_loss_weight = int(top_k), z_loss_weight
        self.normalize = self.normalizes and top_k > 1 if normalize is None else normalize
        weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        draw_router_weight(weight)
        self.make_parameters(weight)

    def check_options(self, top_k: int, normalize: bool | None) -> None:
        """Raises ValueError for what a subclass does not take."""

    def make_parameters(self, weight: nn.Parameter) -> None:
        """weight: (E, M). A subclass adds its own, like that one."""
        self.weight = weight

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)
