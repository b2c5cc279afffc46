"""The base class of gates, and `Routing`, the result of a gate.

Letters: T tokens of this rank, K experts of a token (top_k), E experts of all ranks, M = d_model. S is the
number of lines of a `Routing`: one for each token, unless a gate says otherwise.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_flag, check_int, check_not_negative, check_place
from pmoe.settings import ModuleWithSettings


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Weights of a routing whose rows are mixtures of tokens, as in SoftMoE.

    There are T tokens x_t, and S rows. Each row goes to one expert, whose output for row s is y_s.

    dispatch: (T, S), row s is sum_t dispatch[t, s] x_t.
    combine: (T, S), the result of token t is sum_s combine[t, s] y_s.

    Both tensors may need gradients.
    """

    dispatch: Tensor
    combine: Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The result of a gate: to which experts each token of this rank goes, and with which weights.

    A routing is a table of S lines, each with K choices of an expert. Without ``token`` and ``mix``, line s
    is for token s, and S is T, the number of tokens.

    expert: (S, K) int64, global indices of experts, distinct within a line.
    weight: (S, K) float32 or float64, factor of each expert's output. The gate's gradient flows through it.
    l_aux: scalar, the auxiliary loss for this rank's tokens. It has a gradient if the gate has parameters.
    logits: the gate's scores, of any shape, or None. The layer only checks that they are finite. Routing
        replay and `pmoe.BalanceLoss` compute from them.
    keep: (S, K) bool, False for choices that the gate drops because their expert has reached its capacity.
        None means that the gate drops nothing; the layer does if it has a capacity factor.
    token: (S,) int64 ascending, the token of each line, for gates that give tokens different numbers of
        experts; else None.
    mix: weights of the mixtures, for gates that send mixtures of tokens instead of tokens: line s is then for
        mixture s. Else None.
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
    """A descriptor for a gate's buffer. The buffer keeps its dtype when the module is cast.

    It is meant for values that would lose too much in a narrower dtype, such as a sum of many small steps:

        class MyGate(pmoe.Gate):
            steps = KeptType(torch.float32)  # in addition to register_buffer("steps", ...)

    - ``.to(torch.bfloat16)`` and other casts change neither dtype nor values of the buffer (`Gate._apply`).
    - If another tensor replaces the buffer (load_state_dict with assign=True, or accelerate's
      set_module_tensor_to_device), the new tensor is cast to the dtype when the attribute is next read.
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
    """Returns the names of a gate's buffers with `KeptType`. Casts such as ``.half()`` do not change them."""
    names = [
        name for kind in type(gate).__mro__ for name, value in vars(kind).items() if type(value) is KeptType
    ]
    return [name for name in names if name in gate._buffers]


class Gate(ModuleWithSettings, abc.ABC):
    """Base class of gates: modules that map the tokens of a rank to a `Routing`.

    MoELayer also accepts any other module that returns a `Routing`.

    A gate routes the rank's whole batch in one call, before the batch is divided into chunks (micro-batches).
    So the number of chunks cannot change the routing.
    """

    partition: PartitionName = "tokens"
    """Whether a batch may be routed in parts: "tokens" if so, "none" if the gate needs the whole batch.

    "tokens": the routing of a token does not depend on other tokens, so parts give the same routing as the
        whole batch. (The number of rows that each expert already has, for the capacity, is passed from part
        to part.)

    "none": the routing depends on the whole batch, so the gate must get all tokens in one call.

    The value describes eval mode. In training a gate may add noise, which is different if a batch is routed
    in parts.
    """

    needs_token_ids = False
    """Whether forward takes the tokens' ids, (T,) int64, as second argument."""

    decides_capacity = False
    """Whether the gate applies the capacity itself. Its constructor then takes a capacity_factor.

    The layer drops nothing after such a gate.
    """

    picks_tokens = False
    """False if each token has one line in the `Routing`, with its top_k experts.

    True if experts pick tokens, so that tokens have different numbers of experts, or if the experts get
    mixtures of tokens.
    """

    mixes_tokens = False
    """Whether the rows of the routing are mixtures of tokens, so that it has `Routing.mix`."""

    has_external_routing = False
    """Whether the routing is computed outside the layer and passed to the gate."""

    saved_scores = 1
    """How many numbers autograd saves for each pair of a token and an expert. Memory predictions use it."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Gate:
        """Moves or casts the module as torch.nn.Module does, but buffers with `KeptType` are never cast.

        After torch has cast such a buffer, its old values are restored, because casting to a narrow dtype and
        back would round them.
        """
        before = {name: getattr(self, name) for name in _kept(self)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                # A tensor on the meta device has no values to restore (to_empty moves from there).
                source = new if old.is_meta else old
                self._buffers[name] = source.to(device=new.device, dtype=old.dtype)
        return self

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        for name in _kept(self):
            getattr(self, name)  # reading casts a tensor that load_state_dict(assign=True) has just stored

    def _save_to_state_dict(self, *args: Any, **options: Any) -> None:
        for name in _kept(self):
            getattr(self, name)  # reading casts a tensor that was stored but never read
        super()._save_to_state_dict(*args, **options)

    def num_rows(self, num_tokens: int) -> int:
        """Returns S, the number of lines of the `Routing` that the gate returns for num_tokens tokens.

        Memory predictions call this method, but only if the gate's `picks_tokens` is True. The routings of
        other gates have one line for each token.
        """
        return num_tokens

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the weights, (T, K), that the gate would have given the experts in expert_TK.

        That is so if it had chosen them in the call that returned ``routing``.

        The weights follow from the scores of that call. `pmoe.replay_routing`, which replaces the choices of
        a call by recorded ones, needs this method. Gradients flow from the weights to the scores, so also to
        experts that the gate would not have chosen. For the gate's own choices the result equals
        ``routing.weight`` bit by bit.

        routing: what `forward` returned, with the scores in ``logits``.
        expert_TK: (T, K) int64, K experts for each of T tokens.

        Raises NotImplementedError in this class. A gate whose routing can be replayed overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights_of")

    def balance_terms(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns the two inputs of a balance loss: the experts' shares of the scores, and the choices.

        The shares, (T, E), are the scores of each of T tokens for E experts, scaled to a sum of 1, with a
        gradient. The choices, (T, K) int64, are K experts of each token. The loss counts them as the experts'
        load. `pmoe.BalanceLoss` needs this method.

        routing: what `forward` returned, with the scores in ``logits``.

        Raises NotImplementedError in this class. A gate whose load can be balanced by a loss overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no balance_terms")

    def reset_parameters(self) -> None:
        """Initialises parameters and buffers as the constructor does.

        After a gate was built on the meta device and moved with ``to_empty``, call this to set its values. A
        gate with parameters or buffers must override it.
        """

    def extra_repr(self) -> str:
        """Returns the gate's options and the shapes of its parameters, for repr."""
        plain = {name: value for name, value in vars(self).items() if isinstance(value, int | float | str)}
        del plain["training"]
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters(recurse=False)}
        return ", ".join(f"{name}={value!r}" for name, value in (plain | shapes).items())

    @abc.abstractmethod
    def forward(self, x_TM: Tensor, *args: Any, **kwargs: Any) -> Routing:
        """Routes the T tokens x_TM, (T, d_model). T may be 0.

        If the gate `needs_token_ids`, the tokens' ids (T,) int64 are the second argument; other gates take no
        other argument.
        """

    if TYPE_CHECKING:  # torch's __call__ has no signature, so type checkers get that of forward

        def __call__(self, x_TM: Tensor, *args: Any, **kwargs: Any) -> Routing: ...


def at_least_float32(x: Tensor) -> Tensor:
    """Returns a tensor of any shape as float32, or unchanged if it is float64.

    Gates compute in this dtype, because a narrower one would round nearly equal scores to equal ones.
    """
    return x if x.dtype == torch.float64 else x.float()


# ---- checks for constructors, and the base class of gates with a single router weight


def check_sizes(d_model: int, num_experts: int, top_k: int) -> None:
    """Raises TypeError unless all sizes are ints, and ValueError unless 1 <= top_k <= num_experts.

    It also raises ValueError unless d_model and num_experts are at least 1.
    """
    check_count(d_model=d_model, num_experts=num_experts)
    check_int(top_k=top_k)
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and num_experts ({num_experts})")


def draw_router_weight(weight: nn.Parameter) -> None:
    """Initialises a weight uniformly within +-1 / sqrt(number of columns), like torch.nn.Linear."""
    bound = 1 / math.sqrt(weight.shape[1])
    nn.init.uniform_(weight, -bound, bound)


UNCHANGED: AbstractContextManager[object] = nullcontext()
"""A context that does nothing. All blocks share it, because it has no state."""


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Returns a context in which autocast is off for a type of device ("cuda", "cpu").

    If autocast is off already, the context does nothing. Entering and leaving `torch.autocast` takes as long
    as ten small operations.
    """
    if not torch.is_autocast_enabled(device_type):
        return UNCHANGED
    return torch.autocast(device_type, enabled=False)


def scaled(weight_TK: Tensor) -> Tensor:
    """Returns the routing weights divided by their sum for each token, (T, K).

    weight_TK: (T, K), the K weights of each of T tokens.
    """
    return weight_TK / weight_TK.sum(-1, keepdim=True)


class TopKRouter(Gate):
    """Base class of gates with a single weight matrix (E, M): the logits of a token x are x weight^T.

    E is the number of experts, M = d_model.

    Args:
        normalize: whether a token's weights are divided by their sum. None stands for the gate's usual value,
            from its papers (`normalizes`).
        z_loss_weight: factor of `router_z_loss` in the auxiliary loss.

    Raises ValueError and TypeError for invalid options.
    """

    top_k: int
    z_loss_weight: float
    normalize: bool

    normalizes = True
    """Whether normalize=None means that a token's weights are divided by their sum if top_k is above 1.

    With top_k = 1 they are not divided: the weight would be the constant 1, and the gate would get no
    gradient from the task.
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
        """Raises ValueError for options that a subclass does not support. The base class supports all."""

    def make_parameters(self, weight: nn.Parameter) -> None:
        """Stores the router's weight, (E, M) for E experts and M = d_model.

        Subclasses override it to add parameters of their own.
        """
        self.weight = weight

    def reset_parameters(self) -> None:
        draw_router_weight(self.weight)
