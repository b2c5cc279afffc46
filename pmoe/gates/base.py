"""The base class of gates, and `Routing`, which every gate returns for a rank's tokens.

Letters: S rows of the routing; S is T unless a gate says otherwise.
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
    """Weights of rows that are mixtures of tokens, as in SoftMoE. x are tokens, y are experts' outputs.

    dispatch: (T, S), row s is sum_t dispatch[t, s] x_t.
    combine: (T, S), the result of token t is sum_s combine[t, s] y_s.

    Both carry gradients.
    """

    dispatch: Tensor
    combine: Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """A gate's decision: to which experts each token of this rank goes, and with what weight.

    expert: (S, K) int64, global indices of experts, distinct within a row. S is T and row s is of token s,
        unless ``token`` or ``mix`` is set.
    weight: (S, K) float32 or float64, the factor of each expert's output. It carries the gate's gradient.
    l_aux: scalar, the auxiliary loss of this rank's tokens. It carries a gradient if the gate learns.
    logits: the gate's scores, of any shape, or None. They are read only to check that they are finite.
    keep: (S, K) bool, the choices that the gate itself keeps within capacity. None leaves capacity to the
        layer.
    token: (S,) int64 ascending, the token of each row, if tokens go to different numbers of experts.
    mix: the weights of the mixtures, if rows are mixtures of tokens.
    """

    expert: Tensor
    weight: Tensor
    l_aux: Tensor
    logits: Tensor | None = None
    keep: Tensor | None = None
    token: Tensor | None = None
    mix: Mix | None = None


PartitionName = Literal["tokens", "none"]
"""Values of `Gate.partition`."""


class KeptType:
    """A descriptor for a buffer of a gate that keeps its dtype when the module is cast.

    It is for values that a narrower dtype would spoil, such as a sum of small steps:

        class MyGate(pmoe.Gate):
            steps = KeptType(torch.float32)  # beside the usual register_buffer("steps", ...)

    - ``.to(torch.bfloat16)`` and other casts leave the buffer's values as they are (`Gate._apply`).
    - If another tensor takes the buffer's place (load_state_dict with assign=True, accelerate's
      set_module_tensor_to_device), it is cast to the kept dtype when the attribute is read next.
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
        # There is no __set__, so torch's __setattr__ stores assigned tensors among the buffers, as usual.
        buffers = gate.__dict__.get("_buffers", {})
        if self.name not in buffers:
            raise AttributeError(self.name)
        buffer: Tensor = buffers[self.name]
        if buffer is not None and buffer.dtype != self.dtype:
            buffers[self.name] = buffer = buffer.to(self.dtype)
        return buffer


def _kept(gate: nn.Module) -> list[str]:
    """Returns the names of a gate's buffers that keep their dtype (`KeptType`)."""
    names = [
        name for kind in type(gate).__mro__ for name, value in vars(kind).items() if type(value) is KeptType
    ]
    return [name for name in names if name in gate._buffers]


class Gate(nn.Module, abc.ABC):
    """A module that maps a rank's tokens to a `Routing`.

    Subclass it, or pass any module that returns a `Routing`.

    A gate routes the rank's whole batch at once, before the batch is cut into chunks. So the number of chunks
    cannot change the routing.
    """

    partition: PartitionName = "tokens"
    """Whether the gate routes a part of a batch as it routes the same tokens within the whole batch.

    "tokens": it does. Capacity, if there is one, is passed from part to part.
    "none": it does not, so it needs the whole batch.

    This is about eval mode: a gate that draws noise in training draws other noise for a part.
    """

    needs_token_ids = False
    """Whether forward takes a second argument, the tokens' ids (T,) int64."""

    decides_capacity = False
    """Whether the gate itself decides which rows are kept. Its constructor then takes capacity_factor."""

    picks_tokens = False
    """Whether rows are something else than the top_k choices of each token.

    True if experts pick tokens, or if rows are mixtures of tokens.
    """

    mixes_tokens = False
    """Whether rows are mixtures of tokens (`Routing.mix`)."""

    has_external_routing = False
    """Whether the routing comes from outside the layer."""

    saved_scores = 1
    """How many numbers autograd keeps until backward, for each pair of token and expert."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Gate:
        """Moves or casts the module as torch does, except that `KeptType` buffers keep dtype and values.

        The old tensors are put back, because casting to a narrow dtype and back would round their values.
        """
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
            getattr(self, name)  # casts the tensor that load_state_dict(assign=True) has put here

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        for name in _kept(self):
            getattr(self, name)  # casts a tensor that was put here and has not been read yet
        super()._save_to_state_dict(*args, **options)

    def num_rows(self, num_tokens: int) -> int:
        """Returns S for this number of tokens. Memory is predicted by it if the gate `picks_tokens`."""
        return num_tokens

    def reset_parameters(self) -> None:
        """Initialises parameters and buffers again, as the constructor does.

        A gate that was built on the meta device needs it after ``to_empty``. Override it in a gate that has
        parameters or buffers.
        """

    def extra_repr(self) -> str:
        """Returns the plain attributes and the shapes of the parameters, by name, for repr."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | float | str)}
        del plain["training"]
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters(recurse=False)}
        return ", ".join(f"{name}={value!r}" for name, value in (plain | shapes).items())

    @abc.abstractmethod
    def forward(self, x_TM: Tensor, *args: Any, **kwargs: Any) -> Routing:
        """Routes the tokens x_TM (T, d_model). T may be 0.

        A gate that `needs_token_ids` gets token_ids_T (T,) int64 as second argument; others get none.
        """

    if TYPE_CHECKING:  # torch's __call__ has no signature, so type checkers get that of forward

        def __call__(self, x_TM: Tensor, *args: Any, **kwargs: Any) -> Routing: ...


def at_least_float32(x: Tensor) -> Tensor:
    """Returns a tensor in float32, or unchanged if it is float64.

    Routing is computed in it, because rounding in a narrower dtype would decide near ties.
    """
    return x if x.dtype == torch.float64 else x.float()


# ---- checks of constructors, and the base class of gates that choose by the logits of one parameter


def check_sizes(d_model: int, num_experts: int, top_k: int) -> None:
    """Raises TypeError unless all are ints, ValueError unless positive and top_k at most num_experts."""
    check_count(d_model=d_model, num_experts=num_experts)
    check_int(top_k=top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")


def draw_router_weight(weight: nn.Parameter) -> None:
    """Draws a weight uniformly within +-1 / sqrt(columns), as `torch.nn.Linear` does."""
    bound = 1 / math.sqrt(weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)


def scaled(weight_TK: Tensor, normalize: bool) -> Tensor:
    """Returns weights (T, K), each token's divided by their sum if ``normalize``."""
    return weight_TK / weight_TK.sum(-1, keepdim=True) if normalize else weight_TK


class TopKRouter(Gate):
    """Base class of gates whose logits are x weight^T, with a parameter weight (E, M).

    Args:
        normalize: whether a token's weights are divided by their sum. None means what the gate's papers do
            (`normalizes`).
        z_loss_weight: factor of `router_z_loss` in the auxiliary loss.

    Raises ValueError and TypeError for invalid options.
    """

    top_k: int
    z_loss_weight: float
    normalize: bool

    normalizes = True
    """Whether normalize=None means that several weights of a token are divided by their sum.

    A single weight is not, because it would be the constant 1, and the gate would not learn from the task.
    """

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
        self.top_k = int(top_k)
        self.z_loss_weight = z_loss_weight
        self.normalize = self.normalizes and top_k > 1 if normalize is None else normalize
        weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        draw_router_weight(weight)
        self.make_parameters(weight)

    def check_options(self, top_k: int, normalize: bool | None) -> None:
        """Raises ValueError for options that a subclass does not support."""

    def make_parameters(self, weight: nn.Parameter) -> None:
        """Stores the router's weight (E, M). A subclass makes its own parameters like it."""
        self.weight = weight

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)
