"""`Experts`, the interface between the engine's two passes and every class of experts.

Rows come sorted by expert. In these methods, T_DI are the rows that the rank's experts received, T_M is their
hidden activation before the nonlinearity, and T_DO is the experts' output. A chunk (one micro-batch) goes
through these methods:

    forward    compute          T_DI -> T_DO, and T_M for backward
    backward   recompute        T_DI -> T_M, if forward did not keep T_M
               join             T_M of forward's chunks -> T_M of a backward chunk, if the chunks differ
               input_gradient   gradient of T_DO -> gradient of T_DI, which the tokens' ranks wait for
               weight_gradient  adds the gradients of the parameters, which no other rank waits for

weight_gradient is a task of its own, so that the engine can run it while the gradients of rows are sent to
other ranks (Lancet, section 4: weight-gradient scheduling).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pmoe.arguments import check_count, check_int
from pmoe.experts.operands import freeze_rows, read_value, value_names
from pmoe.experts.products import NO_VIEWS, ExpertViews, GradientSum, RowGroups
from pmoe.schedule.buffer_sizes import HiddenColumns
from pmoe.settings import ModuleWithSettings

if TYPE_CHECKING:
    from pmoe.experts.dtensor_layout import Reduce
    from pmoe.kernels.grouped_gemm import RowSlots

Allocate = Callable[[str, int, int], Tensor]
"""A function (name, rows, columns) that returns uninitialised memory of shape (rows, columns).

The memory has the dtype of the rows. The name says what the memory is for:

    T_M, dT_M           hidden activation before the nonlinearity, and its gradient
    active              hidden activation after the nonlinearity
    T_DO, dT_DI         output of the experts, and gradient of the rows
    scratch, products   temporary values

The engine provides this function. Its result is a part of a buffer that chunks (micro-batches) use in turn,
or newly allocated memory.
"""

RestOfCall = Callable[[Any, Tensor], Tensor]
"""A function (experts, rows) -> output that computes a layer's call with the experts of all ranks.

rows and output are (T, M), one row for each token. The function dispatches the rows, computes and combines.
"""

Runs = Sequence[tuple[slice, slice]]
"""Where the rows of a forward chunk are in a backward chunk, if the two passes have different chunks.

Each pair (slice of the forward chunk's rows, slice of the backward chunk's rows) selects the same rows.
"""

FEW_ROWS = 1024
"""Largest number of rows (tokens times choices) that counts as few, for calls without gradients."""


def fresh(like: Tensor) -> Allocate:
    """Returns a function (name, rows, columns) that allocates new memory at every call (an `Allocate`).

    The memory has the dtype and device of ``like``.

    like: a tensor of any shape.
    """
    return lambda name, rows, columns: like.new_empty(rows, columns)


class ExpertRows(NamedTuple):
    """The rows of one chunk (micro-batch), and the parameters and memory that experts compute them with.

    rows_NM: (N, M), the N rows that the experts received for this chunk (T_DI), sorted by expert, with M =
        d_model columns. If ``slots`` is given, it is (T, M) instead: the T tokens, of which the rows are
        copies.
    groups: where each expert's rows begin and end.
    parameters: the tensors that `Experts.operands` returned, of any shape; under autocast, copies of these
        tensors in autocast's dtype. The engine passes them in, because gradients reach the parameters only
        through inputs of the layer's autograd function.
    space: function (name, rows, columns) that returns uninitialised memory; None means that new memory is
        allocated.
    out: (N, M), memory for the result; None takes memory from ``space``.
    grad_weight_N: (N,) of the routing weights' dtype, memory for their gradient, which `input_gradient` may
        use for its result; None lets it allocate the result.
    slots: for each of the N rows its (token, choice) pair, if `compute` must read the rows directly from the
        tokens; None if rows_NM has the rows. Only `pmoe.experts.launched.LaunchedExperts` gets it.
    result_row: (N,) int32, for each of the N rows the row of ``out`` that takes its result; None if row r of
        ``out`` takes the result of row r. Only `pmoe.experts.launched.LaunchedExperts` gets it.
    views: the views of each expert's part of ``parameters`` that the pass has made already.
    """

    rows_NM: Tensor
    groups: RowGroups
    parameters: Sequence[Tensor]
    space: Allocate | None = None
    out: Tensor | None = None
    grad_weight_N: Tensor | None = None
    slots: RowSlots | None = None
    result_row: Tensor | None = None
    views: ExpertViews = NO_VIEWS

    def new(self, name: str, columns: int, num_rows: int | None = None) -> Tensor:
        """Returns uninitialised memory of shape (num_rows, columns) from ``space``.

        name: the use of the memory: "T_M", "dT_M", "active", "T_DO", "dT_DI", "scratch" or "products".
        columns: number of columns.
        num_rows: number of rows; None means the number of rows of the chunk.
        """
        space = fresh(self.rows_NM) if self.space is None else self.space
        return space(name, self.groups.num_rows if num_rows is None else num_rows, columns)


class Hidden(NamedTuple):
    """The tensors that experts save in forward for a chunk's backward, beside the rows: usually T_M.

    T_M is the hidden activation before the nonlinearity. Each class of experts decides what it saves.

    tensors: the saved tensors, of any shape. The engine keeps them until backward, or copies them to the
        host. Kept tensors are saved in the autograd context of the whole layer. So activation checkpointing
        and offloading hooks see them, and backward frees them.
    graph: everything that is not a tensor, such as autograd graphs of a user's modules.
    expendable: True if `Experts.input_gradient` may overwrite the tensors.
    """

    tensors: Sequence[Tensor]
    graph: Any = None
    expendable: bool = False


@dataclass(frozen=True)
class Shard:
    """One of ``count`` equal parts of every expert's hidden columns, numbered ``index``.

    If experts are split over the ranks of a node, each of these ranks holds one part.

    Raises TypeError if index or count is no int, ValueError unless 0 <= index < count.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        check_count(count=self.count)
        check_int(index=self.index)
        if not 0 <= self.index < self.count:
            raise ValueError(f"index ({self.index}) must be at least 0 and below count ({self.count})")

    def of(self, columns: int) -> slice:
        """Returns the slice of the hidden columns that belong to this part.

        columns: number of hidden columns of a whole expert.

        Example: Shard(1, 2).of(6) -> slice(3, 6).
        """
        width = columns // self.count
        return slice(self.index * width, (self.index + 1) * width)


WHOLE = Shard()


class Experts(ModuleWithSettings, abc.ABC):
    """The E_local experts of one rank. Subclass this class to give a layer another kind of experts.

    The methods of a pass compute one chunk (micro-batch) of N rows with M = d_model columns. Their arguments:

    expert_rows: the chunk's rows, with the parameters and memory to compute with (`ExpertRows`).
    weight_N: (N,), the routing weight of each row.
    """

    num_local_experts: int
    shard = WHOLE
    """The part of every expert's hidden columns that this rank holds. By default it holds all columns."""
    is_parallel = True
    """Whether ranks hold different experts. False for shared experts, of which every rank has a copy."""
    are_modules = False
    """Whether each expert is a user's own module, so that autograd decides which tensors are saved."""
    runs_under_autocast = False
    """Whether `compute` runs in the caller's autocast state, as a user's modules do.

    Otherwise the engine casts the parameters itself and turns autocast off.
    """
    is_batch_invariant = False
    """Whether the bits of a row's results do not depend on the other rows of the call."""
    is_parallelized = False
    """Whether `pmoe.parallelize` has laid the parameters out on a device mesh.

    Parameters that are one tensor for all experts of the rank are then DTensors.
    """
    built = ""
    """Digest of the parameters' values at construction; "" if there is none.

    At the layer's first call the ranks compare it, to notice if experts were overwritten after construction.
    """
    place: Any = None
    """A record for state dicts: which experts this rank has; None before a layer has the experts.

    It is a `pmoe.decide.stored_state.ExpertPlace`. With it, a rank refuses to load another rank's experts.
    """
    was_loaded = False
    """Whether load_state_dict has loaded values, which may belong to another rank's experts.

    The next call then checks that the ranks' experts differ.
    """
    may_be_equal = False
    """Set it to True before a call if all ranks' experts are equal on purpose (after upcycling, for example).

    It permits equal experts in the next check after a state dict was loaded; that check sets it to False
    again.
    """
    are_equal = False
    """Whether all ranks' experts were equal when last compared, or were copied from one dense network."""
    copy_parts: Mapping[str, tuple[int, Shard]] = {}
    """For FSDP2: maps a parameter's name to the dimension that is sharded, and this rank's part of it.

    Empty if FSDP2 does not shard the experts. `pmoe.parallelize` sets it.
    """
    keeps_gathered = False
    """Whether parameters that FSDP2 gathers stay from forward to backward (reshard_after_forward=False)."""
    gathered_dtype: torch.dtype | None = None
    """The dtype to which FSDP2 casts parameters and rows (MixedPrecisionPolicy); None if it casts nothing."""
    reduce: Reduce | None = None
    """Reduces the parameters' gradients at the end of each backward pass; None reduces nothing.

    `pmoe.parallelize` sets it to a function that averages gradients over ranks.
    """
    replicated_dims: Mapping[str, int | None] = {}
    """The parameters that all experts of all ranks share, by name; an adapter may have some.

    They have no dimension that counts experts, so every rank holds a copy. The value is the dimension along
    which a parameter is split if each expert's hidden columns are split over ranks; None for a parameter that
    stays whole.
    """
    frozen_experts: Mapping[str, Tensor] = {}
    """The experts that `pmoe.freeze_experts` has frozen: by name of a parameter, their numbers in it.

    The numbers, on the CPU, are along dimension 0 of this rank's part of the parameter.
    """
    setting = ""
    """Words for a setting of the experts that may change between calls, such as the adapter in use."""
    factor: float = 1.0
    """The factor by which a call multiplies some parameters."""
    num_scaled = 0
    """The number of elements of parameters that a call copies, to multiply them by a factor."""
    operand_names: tuple[str, ...] = ()
    """The attribute names of the values that `operands` returns, such as "w1", in the order of its result.

    They are set when a layer is built. Later pruning or parametrizations change neither their number nor
    their order.
    """

    def __init__(self) -> None:
        super().__init__()
        # DTensor placements by operand name; empty until `pmoe.parallelize` lays the parameters out.
        self.placements: dict[str, tuple[Any, ...]] = {}
        self.register_load_state_dict_post_hook(_mark_loaded)  # type: ignore[no-untyped-call]

    def mark_parameters(self) -> None:
        """Marks the parameters that data-parallel wrappers must leave alone: ``allreduce = False``.

        If each expert's hidden columns are split over ranks, the bias b2 also gets ``num_copies``, the number
        of these ranks: each of them holds the whole b2, with the same gradient. Shared experts get no marks,
        because they are the same on every rank and belong to the dense part of the model.

        Copying, unpickling, to_empty and load_state_dict(assign=True) make new Parameter objects, which have
        no marks. The experts call this method after each of these.

        Raises ValueError if `pmoe.parallelize` made a parameter a DTensor and it is a plain tensor now.
        """
        for name, parameter in self.named_parameters() if self.is_parallel else ():
            parameter.allreduce = False  # type: ignore[attr-defined]
            if name == "b2" and self.shard.count > 1:
                parameter.num_copies = self.shard.count  # type: ignore[attr-defined]
            if name in self.placements and not hasattr(parameter, "to_local"):
                raise ValueError(
                    f"{name} (a plain tensor, assigned) must be a DTensor, because pmoe.parallelize laid the "
                    "experts out: load the state dict of a parallelized model with "
                    "torch.distributed.checkpoint"
                )

    def freeze_rows(self) -> None:
        """Gives parameters the hooks that set the gradients of `frozen_experts` to zero.

        The experts call it after parameters were replaced. If FSDP2 has gathered the experts' parameters,
        nothing is done: the hooks are for this rank's parts.
        """
        if self.frozen_experts and self.is_sharded:
            from pmoe.experts.dtensor_layout import is_gathered

            if is_gathered(self):
                return
        for name, _ in self.named_parameters() if self.frozen_experts else ():
            if name in self.frozen_experts:
                freeze_rows(self, name, self.frozen_experts[name])

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the experts over the ranks that hold copies of them (`pmoe.parallelize`)."""
        return bool(self.copy_parts)

    @property
    def shared_over(self) -> int:
        """Number of ranks over which FSDP2 shards the experts; 0 if FSDP2 does not shard them."""
        return next((part.count for _, part in self.copy_parts.values()), 0)

    def as_modules(self) -> list[nn.Module]:
        """Returns this rank's experts if they are a user's own modules; otherwise an empty list."""
        return []

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        """Returns, by parameter name, the dimension along which the parameter may be split over ranks.

        If each expert's hidden columns are split over ranks (mesh dimension "esp"), each rank holds a part of
        the parameter along this dimension. None stands for a parameter that every rank holds whole. Dimension
        0 of every parameter must count the experts.

        The base class returns None instead of a mapping. A subclass keeps this result if its parameters
        cannot be split in this way. `pmoe.parallelize` then does not change the parameters, and the hidden
        columns cannot be split.
        """
        return None

    def all_hidden_dims(self) -> dict[str, int | None]:
        """Returns, by parameter name, the dimension that counts hidden columns; None if none does.

        If each expert's hidden columns are split over ranks, a parameter is split along this dimension. The
        dict has the entries of `hidden_dims` and, for parameters that all experts share, of
        `replicated_dims`.
        """
        return {**(self.hidden_dims() or {}), **self.replicated_dims}

    def keep(self, experts: slice, shard: Shard) -> None:
        """Keeps a range of the experts, and the hidden columns of ``shard``; drops all other values.

        experts: the range of local experts that stay.
        shard: the part of their hidden columns that stays. Before the call, the experts must have all
            columns, or be on the meta device.

        The parameters become new Parameter objects.

        Raises TypeError if the class of experts cannot be split. This base class always raises it.
        """
        raise TypeError(
            f"experts ({type(self).__name__}) must be stacked or modules to be spread over ranks, or "
            "implement hidden_dims() and keep()"
        )

    def forward(self, x: Tensor, *, run: RestOfCall | None = None) -> Tensor:
        """Maps rows (T, M), one for each token, to the experts' output (T, M).

        There are T tokens with M = d_model columns. `MoELayer` calls its experts through this method, so that
        hooks on the experts run.

        run: computes the call with the experts of all ranks; a layer passes it. Without ``run`` there must be
            a single expert, such as a layer's shared expert, which computes every row.

        Forward pre-hooks run before any parameter is read. So the call computes with the parameters that the
        hooks leave behind, for example with pruned parameters, or with parameters that a hook fetched from
        another device.

        Raises ValueError if there are several experts and no ``run``.
        """
        if run is not None:
            return run(self, x)
        if self.num_local_experts != 1:
            raise ValueError(
                f"experts ({self.num_local_experts} of {type(self).__name__}) must be called by their "
                "MoELayer, which routes the rows"
            )
        return self.compute_alone(x)

    if TYPE_CHECKING:  # torch's __call__ has no types; this gives type checkers forward's signature

        def __call__(self, x: Tensor, *, run: RestOfCall | None = None) -> Tensor: ...

    def compute_alone(self, x: Tensor) -> Tensor:
        """Returns the output (T, M) of the only expert of this object, a shared expert, for all tokens x.

        x is (T, M), T tokens with M = d_model columns. Autograd must be able to differentiate the operations.
        The layer calls this method, by `forward`, if the shared expert has hooks or is in a wrapper.

        Raises TypeError in this class. A subclass must implement the method if its shared experts may have
        hooks or a wrapper.
        """
        raise TypeError(
            f"shared_expert ({type(self).__name__}) has hooks or is in a wrapper, so it is computed by "
            "compute_alone(x): its class must implement that method"
        )

    def used_parameters(self) -> Iterable[nn.Parameter]:
        """Returns the parameters, of any shape, with which a call computes now."""
        return self.parameters()

    def note_operands(self) -> None:
        """Stores in `operand_names` the attribute names of the weights and biases, such as "w1".

        A layer calls this method when the layer is built. Later a parameter may get another name, for example
        "w1_orig" by pruning, but the attribute "w1" stays.
        """
        self.operand_names = tuple(value_names(self))

    @property
    def call_names(self) -> tuple[str, ...]:
        """The names of the tensors that `operands` returns, in their order."""
        return self.operand_names

    def operands(self) -> list[Tensor]:
        """Returns the weights and biases to compute with: this rank's part of each, (E_local, ...).

        E_local is the number of this rank's experts. Each tensor is the present value of an attribute such as
        ``w1``. The attribute is a parameter, or a tensor that pruning, a parametrization or dequantisation
        computes from parameters. A call reads each attribute once. The autograd graph of its value leads
        gradients back to the parameters. If `pmoe.parallelize` set the function ``reduce``, this function
        reduces the gradients over ranks.

        Raises ValueError if a value is missing or has another size than the experts need.
        """
        names = self.operand_names or tuple(value_names(self))
        values = [self._value_of(name) for name in names]
        if self.is_parallelized:
            from pmoe.experts.dtensor_layout import local_values

            values = local_values(self.placements, self.reduce, names, values)
        self.check_operands(values)
        return values

    def copied_parameters(self, operands: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the tensors that are copied if a busy expert gets a copy on another rank (``balance``).

        By default these are all tensors with which the experts compute, (E_local, ...) each.

        operands: the weights and biases that the method `operands` returned.
        """
        return operands

    def check_operands(self, values: Sequence[Tensor]) -> None:
        """Raises ValueError if a value of the experts has another size, type or device than they need.

        Another tool may have replaced a weight or bias. This base class checks nothing.

        values: the weights and biases from `operands`: this rank's part of each, (E_local, ...) for E_local
            experts.
        """

    def _value_of(self, name: str) -> Tensor:
        parameter = self._parameters.get(name)
        if (
            type(parameter) is nn.Parameter
            and parameter.layout is torch.strided
            and not parameter.is_quantized
        ):
            return parameter  # the usual case, some microseconds faster than `read_value`
        return read_value(self, name)

    def asks_for_gradients(self) -> bool:
        """Returns whether the next call needs gradients of a parameter, or of a tensor that replaced one.

        The layer asks before it calls the experts, so their forward pre-hooks have not run yet.
        """
        if any(parameter.requires_grad for parameter in self.parameters()):
            return True
        attributes = vars(self)
        values = {name: attributes.get(name) for name in self.operand_names}
        return any(
            isinstance(value, Tensor) and self._will_need_gradient(name, value)
            for name, value in values.items()
        )

    def _will_need_gradient(self, name: str, value: Tensor) -> bool:
        """Returns whether a tensor that replaced a parameter will need a gradient in the next call.

        A forward pre-hook may compute the tensor at the start of each call. ``value`` is then still the
        tensor of the last call, and the tensor of the next call may differ in requires_grad. So there are
        three cases:

        - A hook of torch.nn.utils (pruning, weight norm, spectral norm) computes the tensor: False, because
          the hook computes it from parameters of the experts, and none of these requires a gradient.
        - The experts have only other forward pre-hooks: True, because a hook may use any other tensor.
        - The experts have no forward pre-hook: whether ``value`` requires a gradient.

        name: the attribute, such as "w1".
        value: the attribute's value now. No parameter of the experts requires a gradient.
        """
        hooks = self._forward_pre_hooks.values()
        # Hooks of torch.nn.utils.prune, weight_norm and spectral_norm compute the tensor from parameters.
        written = (getattr(hook, "_tensor_name", getattr(hook, "name", None)) for hook in hooks)
        if name in written:
            return False
        # Another hook may compute the tensor from tensors that are not parameters of the experts.
        return bool(hooks) or value.requires_grad

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        vars(self).pop("frozen_experts", None)  # the copy of a model has no frozen experts
        self.mark_parameters()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.mark_parameters()
        self.freeze_rows()
        return self

    def columns(self, device_type: str) -> HiddenColumns:
        """Returns how many columns of memory the experts need for each row, for each kind of buffer.

        The engine sizes its buffers by these numbers, and the memory model predicts bytes from them. This
        base class returns 0 for every buffer: it does not say how much memory it needs, so its memory cannot
        be predicted.

        device_type: "cpu" or "cuda", because some buffers are needed on one of them only.
        """
        return HiddenColumns()

    def use_ranks(
        self,
        sum_shared: Callable[[Sequence[Tensor]], None],
        sum_whole: Callable[[Sequence[Tensor]], None],
        num_ranks: int,
        first_expert: int,
    ) -> None:
        """Stores the functions that sum gradients over ranks, for parameters with copies on several ranks.

        This base class does nothing, because it has no parameters with copies on several ranks.

        sum_shared: sums gradients, of any shape, over the ranks over which the experts are spread, in place;
            a collective. It is for parameters that all experts share (`replicated_dims`).
        sum_whole: sums gradients over the ranks over which each expert's hidden columns are split, in place;
            a collective. It is for parameters that these ranks hold whole.
        num_ranks: the number of ranks over which the experts are spread.
        first_expert: the number of this rank's first expert among all experts.
        """

    def reset_replicated(self) -> None:
        """Draws new values, of any shape, for the parameters that all experts share.

        This base class does nothing, because its experts share no parameters.
        """

    @abc.abstractmethod
    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        """Computes a chunk's N rows. Returns the output T_DO (N, M), and the tensors for backward (T_M).

        M = d_model. T_M is the hidden activation before the nonlinearity. The output is already multiplied by
        weight_N.

        expert_rows: the chunk's rows, with the parameters and memory to compute with.
        weight_N: (N,), the routing weight of each row.
        keep: whether backward may follow; if False, the second result is None.
        """

    def recipe(self, device: torch.device) -> Any:
        """Returns the state that `recompute` needs to repeat the next `compute`, such as the random state.

        The engine calls it before each `compute` whose hidden activation (T_M) may be computed again. This
        base class returns None: the result of its `compute` depends on the arguments only.
        """
        return None

    def is_repeatable(self, recipe: Any) -> bool:
        """Returns whether the last `compute` can be repeated in backward with rows in other chunks.

        The engine calls this method right after `compute`, if forward and backward have different chunks
        (micro-batches). The result is False if `compute` drew random numbers, for dropout for example: in
        other chunks, other rows would get these numbers.

        recipe: the state that the method `recipe` returned before the last call of `compute`.
        """
        return True

    @abc.abstractmethod
    def recompute(self, expert_rows: ExpertRows, recipe: Any) -> Hidden:
        """Computes the hidden activation T_M of a chunk's rows (T_DI) again, in backward.

        expert_rows: the chunk's rows, with the parameters and memory to compute with.
        recipe: the state that the method `recipe` returned before forward's call of `compute`; None if the
            rank had no rows in forward.
        """

    @abc.abstractmethod
    def join(
        self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Allocate | None = None
    ) -> Hidden:
        """Assembles the hidden activation (T_M) of a backward chunk from the T_M of forward chunks.

        The engine calls this method if the two passes cut the batch into different chunks (micro-batches).

        parts: for each forward chunk with rows of this backward chunk: its hidden activation, and the pairs
            (slice of the forward chunk's rows, slice of the backward chunk's rows) to copy.
        num_rows: number of rows of the backward chunk.
        space: gives memory for the result; None allocates it.
        """

    @abc.abstractmethod
    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Any]:
        """Computes the gradients of a chunk's N rows, (N, M), and of their routing weights, (N,).

        Returns these two, and as a third result the tensors that `weight_gradient` needs.

        grad_NM: (N, M), the gradient of the output T_DO, with M = d_model columns. This method may overwrite
            grad_NM, and the third result may refer to its memory. So the caller must not change grad_NM until
            `weight_gradient` has run.
        expert_rows: the chunk's rows, with the parameters and memory to compute with.
        weight_N: (N,), the routing weight of each row.
        hidden: the tensors that were saved for the chunk (T_M), from `compute`, `recompute` or `join`.
        """

    @abc.abstractmethod
    def weight_gradient(self, pending: Any, groups: RowGroups, sums: Sequence[GradientSum | None]) -> None:
        """Adds a chunk's gradients of the parameters to ``sums``.

        pending: the tensors that weight gradients need: the third result of `input_gradient`.
        groups: where each expert's rows begin and end.
        sums: one for each parameter, of the same shape; None for a parameter that needs no gradient.
        """


def _mark_loaded(experts: Experts, _: object) -> None:
    experts.mark_parameters()
    experts.freeze_rows()


def mark_all(model: nn.Module) -> None:
    """Marks the parameters of all experts of a model (`Experts.mark_parameters`).

    Call it before marks are read. A parameter that a user has assigned (``experts.w1 = nn.Parameter(...)``),
    or exchanged by ``torch.utils.swap_tensors``, has no marks, and would be taken for a dense parameter.

    model: the model.

    Raises what `Experts.mark_parameters` raises.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            module.mark_parameters()


def row_dot(a_NX: Tensor, b_NX: Tensor, product_NX: Tensor | None = None) -> Tensor:
    """Returns the inner product of each row of a with the same row of b, (N,) for N rows.

    The sum is computed in float32 or a wider dtype.

    a_NX, b_NX: (N, X), with any number X of columns.
    product_NX: (N, X), memory for the products of the elements; None allocates it.
    """
    narrow = a_NX.dtype in (torch.bfloat16, torch.float16)
    product_NX = torch.mul(a_NX, b_NX, out=product_NX)
    return product_NX.sum(-1, dtype=torch.float32 if narrow else None)
