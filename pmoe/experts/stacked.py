"""Base class of FFN and SwiGLU experts: two-layer experts, whose weights are stacked.

Each weight is one tensor, which has the values of all experts.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pmoe.arguments import check_count, check_flag, check_kind, check_place
from pmoe.experts.base import WHOLE, Allocate, ExpertRows, Experts, Hidden, Runs, Shard, fresh, row_dot
from pmoe.experts.columns import own_columns
from pmoe.experts.marks import mark_stacked
from pmoe.experts.operands import has_value, local_part, value_names
from pmoe.experts.products import (
    GradientSum,
    RowGroups,
    choice,
    expert_input_gradient,
    expert_product,
    scale_of,
)
from pmoe.kernels import grouped_gemm
from pmoe.kernels.grouped_gemm.reference import activate
from pmoe.kernels.registry import PMOE, Form
from pmoe.schedule.buffer_sizes import HiddenColumns

V = TypeVar("V")

OPERANDS = ("w1", "w2", "b1", "b2")
"""Names of the weights and biases, in the order in which kernels take them. Experts have both biases or none.
"""

HIDDEN_DIMS: dict[str, int | None] = {"w1": 1, "w2": 2, "b1": 1, "b2": None}
"""The dimension of each weight and bias that counts hidden columns; None if there is none."""

UNCUT = (0, WHOLE)
"""The part of a parameter that FSDP2 does not shard: all of it, along any dimension."""

SCRATCH_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
"""Bytes of one block of rows that `input_gradient` processes at a time, by device type.

On the CPU a block fits into a core's cache. On a GPU a block is large, because a small number of launches
matters more than the cache.
"""


class StackedExperts(Experts):
    """Two-layer experts whose weights are stacked: one tensor holds a weight of all experts of the rank.

    For E experts of this rank, N rows, M = d_model, H hidden columns, and G columns of T_M, the hidden
    activation before the nonlinearity (G = H, or 2H for gated experts):

    w1: (E, G, M). Output features come before input features, as in `torch.nn.Linear`.
    w2: (E, M, H).
    b1: (E, G); None without bias.
    b2: (E, M); None without bias.

    A subclass defines how T_M (N, G) becomes the activated hidden (N, H): `activate` and
    `activation_gradient`.

    The output T_DO is never saved. If dy is the gradient of a row of T_DO, and e the row's expert, the
    gradient of the row's routing weight is

        <activated hidden, dy w2[e]> + <dy, b2[e]>

    If each expert's hidden columns are split over ranks (FSMoE's ESP), H counts the columns of this rank. If
    experts are gated, w1 has two halves, and a rank has the same columns of both. T_DO and the gradients of
    rows and routing weights are then partial sums, which the engine adds up over these ranks. Each of the
    ranks holds the whole b2 and gets the same gradient for it, but only the first rank adds b2 to the output.
    """

    hidden_factor: int
    """Columns of T_M divided by the expert's H hidden columns: 1 for feed-forward, 2 for gated experts."""
    activation: str
    """The nonlinearity's name in `pmoe.kernels.grouped_gemm`, if it is one of pmoe's own."""
    num_local_experts: int
    shard: Shard
    all_hidden: int
    w1: nn.Parameter
    w2: nn.Parameter
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    product: Callable[..., Tensor] = staticmethod(expert_product)
    """The function that multiplies rows by a weight of the experts."""
    input_product: Callable[..., Tensor] = staticmethod(expert_input_gradient)
    """The function that multiplies gradients of results by a weight of the experts."""
    fuses = True
    """Whether pmoe's kernels may compute a product and the nonlinearity together."""

    @property
    def fused_activation(self) -> str | None:
        """Name of the nonlinearity, if pmoe's kernels can compute it.

        None if a subclass outside pmoe has a nonlinearity of its own.
        """
        for method in (type(self).activate, type(self).activation_gradient):
            if not getattr(method, "__module__", "").startswith("pmoe.experts."):
                return None
        return self.activation if self.fuses else None

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_local_experts: int,
        *,
        bias: bool = True,
        shard: Shard = WHOLE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count(d_model=d_model, d_hidden=d_hidden, num_local_experts=num_local_experts)
        check_flag("bias", bias)
        check_place(device, dtype)
        check_kind(Shard, "a pmoe.experts.Shard", shard=shard)
        self._d_model = int(d_model)
        self.num_local_experts = int(num_local_experts)
        self.shard = shard
        self.all_hidden = int(d_hidden)
        d_hidden = self.all_hidden // shard.count

        def stacked(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_local_experts, *shape, device=device, dtype=dtype))

        self.w1 = stacked(self.hidden_factor * d_hidden, d_model)
        self.w2 = stacked(d_model, d_hidden)
        self.b1 = stacked(self.hidden_factor * d_hidden) if bias else None
        self.b2 = stacked(d_model) if bias else None
        mark_stacked(self)

    def mark_parameters(self) -> None:
        super().mark_parameters()
        mark_stacked(self)

    @property
    def d_model(self) -> int:
        """M, the number of columns of a row."""
        return self._d_model

    @property
    def num_hidden(self) -> int:
        """H, the number of each expert's hidden columns that this rank holds."""
        return self.all_hidden // self.shard.count

    def shapes(self) -> dict[str, tuple[int, int, int]]:
        """Returns the shapes of this rank's w1 and w2 by name."""
        return self._shapes_with(self.num_hidden)

    def whole_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Returns the shapes of w1 and w2 of this rank's experts with all their hidden columns, by name."""
        return self._shapes_with(self.all_hidden)

    def _shapes_with(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Returns the shapes of w1 and w2 of experts with ``hidden`` hidden columns, by name."""
        experts = self.num_local_experts
        d_model = self.d_model
        return {"w1": (experts, self.hidden_factor * hidden, d_model), "w2": (experts, d_model, hidden)}

    @property
    def has_bias(self) -> bool:
        """Whether these experts have the biases b1 and b2."""
        if self._parameters.get("b1") is not None:
            return True
        return has_value(self, "b1") or has_value(self, "b2")

    def note_operands(self) -> None:
        own_names = OPERANDS if self.has_bias else OPERANDS[:2]
        # Operands that a subclass adds come last. The subclass's `weights` reads them.
        self.operand_names: tuple[str, ...] = (
            *own_names,
            *(name for name in value_names(self) if name not in OPERANDS),
        )

    def operands(self) -> list[Tensor]:
        if not self.operand_names or self.has_bias != ("b1" in self.operand_names):
            self.note_operands()
        return super().operands()

    def check_operands(self, values: Sequence[Tensor]) -> None:
        """Raises ValueError if a weight or bias has another size, dtype or device than these experts.

        Another tool may have replaced a parameter since the layer was built.

        values: the result of `operands`: w1 (E_local, G, M), w2 (E_local, M, H), b1 (E_local, G), b2
            (E_local, M). E_local is the number of this rank's experts, H their hidden columns, and G is H, or
            2H for gated experts.
        """
        reference = values[0]
        num_experts = self.num_local_experts
        num_hidden = self.num_hidden
        hidden = self.hidden_factor * num_hidden
        weights = ((num_experts, hidden, self._d_model), (num_experts, self._d_model, num_hidden))
        # In the order of OPERANDS. A subclass checks operands that it adds.
        shapes = (*weights, (num_experts, hidden), (num_experts, self._d_model))
        for name, value, shape in zip(self.operand_names, values, shapes, strict=False):
            if value.dtype is not reference.dtype or value.device != reference.device:
                raise ValueError(
                    f"experts' {name} ({value.dtype} on {value.device}) must have the dtype and device of "
                    f"their {self.operand_names[0]} ({reference.dtype} on {reference.device})"
                )
            if value.shape != shape:
                raise ValueError(
                    f"experts' {name} (of shape {tuple(value.shape)} on this rank) must have shape {shape}: "
                    f"{self.num_local_experts} experts of d_model {self.d_model}. For more or fewer experts "
                    "build another MoELayer with that num_experts and copy weights into it (docs/weights.md)"
                )

    def compute_alone(self, x: Tensor) -> Tensor:
        # FSDP may cast the rows and not the parameters, so their dtypes may differ even without autocast.
        w1, w2, b1, b2 = self.weights([value.to(x.dtype) for value in self.operands()])
        hidden = F.linear(x, w1[0], None if b1 is None else b1[0])
        if self.fused_activation is None:
            raise TypeError(
                f"shared_expert ({type(self).__name__}) has hooks or is in a wrapper, so it is computed by "
                "compute_alone(x): its class must implement that method"
            )
        return F.linear(activate(self.activation, hidden), w2[0], None if b2 is None else b2[0])

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        names = value_names(self)
        # Only a subclass knows how to split parameters that it added.
        return {name: HIDDEN_DIMS[name] for name in names} if set(names) <= set(HIDDEN_DIMS) else None

    def keep(self, experts: slice, shard: Shard) -> None:
        if self.hidden_dims() is None:
            super().keep(experts, shard)  # raises TypeError
        keep_part(self, experts, shard)

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Returns the experts' weights and biases as pairs (name, parameter).

        Subclasses leave out parameters that they add, such as adapters.
        """
        return self.named_parameters()

    @torch.no_grad()
    def initialise_expert(self, local_expert: int) -> None:
        """Draws one expert's parameters from the CPU's generator, within the bounds of `torch.nn.Linear`.

        A rank that holds a part of the hidden columns draws the whole expert and takes its columns. So the
        values do not depend on the number of ranks that share the columns.

        local_expert: the expert's number on this rank.
        """
        d_model = self.d_model
        columns = self.shard.of(self.all_hidden)
        whole_shapes = {
            "w1": (self.hidden_factor, self.all_hidden, d_model),
            "w2": (d_model, self.all_hidden),
            "b1": (self.hidden_factor, self.all_hidden),
            "b2": (d_model,),
        }
        for name, parameter in self.own_parameters():
            bound = 1 / math.sqrt(d_model if name in ("w1", "b1") else self.all_hidden)
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            values = torch.empty(whole_shapes[name], dtype=dtype, device="cpu").uniform_(-bound, bound)
            if name != "b2":
                values = values[:, columns]
            if name in ("w1", "b1"):
                values = values.flatten(0, 1)
            put_expert(parameter, local_expert, values, self.copy_parts.get(name, UNCUT))

    @abc.abstractmethod
    def activate(self, hidden_NG: Tensor, active_NH: Tensor) -> None:
        """Applies the nonlinearity to N rows of T_M, and writes the result, H columns, to active_NH.

        hidden_NG: (N, H), or (N, 2H) for gated experts: T_M, the hidden activation before the nonlinearity.
        active_NH: (N, H), the result's memory. It may be the first H columns of hidden_NG.
        """

    @abc.abstractmethod
    def activation_gradient(self, grad_NG: Tensor, hidden_NG: Tensor) -> None:
        """Overwrites the gradient of the nonlinearity's result with the gradient of its input, T_M.

        The nonlinearity maps T_M, (N, G), to the activated hidden, (N, H). There are N rows and H hidden
        columns; G is H, or 2H for gated experts.

        grad_NG: (N, G). On entry its first H columns have the gradient of the activated hidden. On return all
            G columns have the gradient of T_M.
        hidden_NG: (N, G), T_M: the hidden activation before the nonlinearity.
        """

    def columns(self, device_type: str) -> HiddenColumns:
        width = self.num_hidden
        hidden = self.hidden_factor * width
        return HiddenColumns(
            hidden=hidden,
            active=0 if self._activates_in_place(device_type) else width,
            scratch=width,
            # grouped_mm returns new memory, which is then copied into place. pmoe's kernels write in place,
            # and their partial inner products take fewer bytes than this.
            staged=max(hidden, self.d_model) if device_type == "cuda" else 0,
            scratch_rows=self._scratch_rows(device_type),
        )

    @property
    def element_size(self) -> int:
        """Bytes of one number of the parameters, which all have the same dtype."""
        parameter = self._parameters.get("w2", vars(self).get("w2"))  # FSDP1 makes it a plain attribute
        return (next(self.parameters()) if parameter is None else parameter).element_size()

    def _scratch_rows(self, device_type: str) -> int:
        """Returns how many rows `input_gradient` processes at a time.

        That is as many as fit into `SCRATCH_BYTES` of temporary memory, but at least 16.

        device_type: "cpu" or "cuda".
        """
        row_bytes = self.num_hidden * self.element_size
        return max(SCRATCH_BYTES.get(device_type, SCRATCH_BYTES["cuda"]) // row_bytes, 16)

    def _activates_in_place(self, device_type: str) -> bool:
        """Returns whether the nonlinearity may write its result, H columns, over the first H columns of T_M.

        T_M is the hidden activation before the nonlinearity. For gated experts T_M has 2H columns. A result
        in its first H columns then has gaps between the rows, which CUDA kernels of grouped products refuse.

        device_type: "cpu" or "cuda".
        """
        return self.hidden_factor == 1 or device_type == "cpu"

    def compute(
        self, expert_rows: ExpertRows, weight_N: Tensor, *, keep: bool = True
    ) -> tuple[Tensor, Hidden | None]:
        rows_NM = expert_rows.rows_NM
        groups = expert_rows.groups
        num_hidden = self.num_hidden
        w1, w2, b1, b2 = self.weights(expert_rows.parameters)
        in_place = not keep and self._activates_in_place(rows_NM.device.type)
        # One launch of pmoe's kernels computes T_M and the activated hidden. It needs no memory for a T_M
        # that is not kept.
        like_NM = rows_NM if expert_rows.slots is None or expert_rows.out is None else expert_rows.out
        fused = self._fused("forward", like_NM, w1, groups, b1)
        hidden_NG = expert_rows.new("T_M", w1.shape[1]) if keep or in_place or fused is None else None
        if in_place and hidden_NG is not None:
            active_NH = _first(hidden_NG, num_hidden, 1)
        else:
            active_NH = expert_rows.new("active", num_hidden)
        if fused is not None:
            grouped_gemm.hidden(
                rows_NM, w1, groups.ends_E, activation=fused, bias_EG=b1, slots=expert_rows.slots,
                out=hidden_NG if keep else None, active=active_NH, keep=keep,
            )  # fmt: skip
        else:
            assert hidden_NG is not None and expert_rows.slots is None
            self.product(rows_NM, w1, groups, b1, out=hidden_NG, views=expert_rows.views)
            self.activate(hidden_NG, active_NH)
        if not keep:
            hidden_NG = None  # frees it before T_DO is allocated
        out = expert_rows.new("T_DO", w2.shape[1]) if expert_rows.out is None else expert_rows.out
        bias = None if self.shard.index else b2
        self.product(active_NH, w2, groups, bias, out=out, scale_N=weight_N, views=expert_rows.views)
        return out, None if hidden_NG is None else Hidden(tensors=[hidden_NG])

    def _fused(
        self, form: Form, rows: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None
    ) -> str | None:
        """Returns the nonlinearity that pmoe's kernel can compute together with this product, or None.

        form: "forward" for rows times w1, "input" for the gradient of the output times w2.
        rows, weight: the two factors: (N, ...) for N rows, and a matrix for each of the rank's experts.
        groups: where each expert's rows begin and end.
        bias: the product's bias for each expert; None if there is none.
        """
        if choice(form, rows, weight, groups, bias) != PMOE:
            return None
        fused = self.fused_activation
        width = self.num_hidden  # each half of a gated T_M
        fits = not rows.is_cuda or grouped_gemm.layout_problem(rows.dtype, hidden=width) is None
        return fused if fits else None

    def recompute(self, expert_rows: ExpertRows, recipe: Any) -> Hidden:
        w1, _, b1, _ = self.weights(expert_rows.parameters)
        hidden_NG = expert_rows.new("T_M", w1.shape[1])
        self.product(expert_rows.rows_NM, w1, expert_rows.groups, b1, out=hidden_NG, views=expert_rows.views)
        return Hidden(tensors=[hidden_NG], expendable=True)

    def join(
        self, parts: Sequence[tuple[Hidden, Runs]], num_rows: int, *, space: Allocate | None = None
    ) -> Hidden:
        first_NG = parts[0][0].tensors[0]
        space = fresh(first_NG) if space is None else space
        hidden_NG = space("T_M", num_rows, first_NG.shape[1])
        for part, runs in parts:
            (part_NG,) = part.tensors
            for forward_rows, backward_rows in runs:
                hidden_NG[backward_rows].copy_(part_NG[forward_rows], non_blocking=True)
        return Hidden(tensors=[hidden_NG], expendable=True)

    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Computes the gradients of a chunk's N rows, (N, M), and of their routing weights, (N,).

        Returns these two, and as a third result the tensors that `weight_gradient` needs.

        The activation after the nonlinearity is computed again from T_M, the activation before it. If T_M may
        be overwritten, each block of rows of the result is written over the same block of T_M. A chunk then
        needs only two buffers of T_M's size: T_M itself and its gradient dT_M.

        grad_NM: (N, M), the gradient of the output, with M = d_model columns. It may be overwritten.
        expert_rows: the chunk's rows, with the parameters and memory to compute with.
        weight_N: (N,), the routing weight of each row.
        hidden: T_M, and whether it may be overwritten.
        """
        groups = expert_rows.groups
        (hidden_NG,) = hidden.tensors
        w1, w2, _, b2 = self.weights(expert_rows.parameters)
        num_hidden = w2.shape[2]
        grad_hidden_NG = expert_rows.new("dT_M", w1.shape[1])
        in_place = hidden.expendable and self._activates_in_place(grad_NM.device.type)
        active_NH = _first(hidden_NG, num_hidden, 1) if in_place else expert_rows.new("active", num_hidden)
        scale_N1 = weight_N.unsqueeze(1)
        fused = self._fused("input", grad_NM, w2, groups)
        # The gradient of w2 is (weight * grad)^T active = grad^T (weight * active). The kernel can store the
        # second form, which saves a pass over grad. The gradient of b2 needs weight * grad.
        weighs_active = fused is not None and b2 is None
        grad_weight_N = expert_rows.grad_weight_N
        if grad_weight_N is None:
            grad_weight_N = torch.empty_like(weight_N)
        if fused is not None:
            # active may overlap T_M: each thread reads its elements of T_M before it overwrites them.
            *_, grad_weight_N = grouped_gemm.hidden_gradient(
                grad_NM, w2, hidden_NG, scale_of(weight_N, grad_NM), groups.ends_E, activation=fused,
                weighs_active=weighs_active, out=grad_hidden_NG, active=active_NH,
                dots=grad_weight_N if grad_weight_N.dtype == torch.float32 else None,
            )  # fmt: skip
            grad_weight_N = grad_weight_N.to(weight_N.dtype)
        else:
            grad_active_NH = _first(grad_hidden_NG, num_hidden, 1)
            self.input_product(grad_NM, w2, groups, out=grad_active_NH, views=expert_rows.views)
            rows = self._scratch_rows(grad_NM.device.type)
            if in_place:
                scratch = expert_rows.new("scratch", num_hidden, min(rows, grad_NM.shape[0]))
            row_tensors = (hidden_NG, active_NH, grad_hidden_NG, grad_active_NH, grad_weight_N, scale_N1)
            # Computes a block of rows at a time, so that the block stays in the cache. grad_bH is a view of
            # the first columns of grad_bG. It has the gradient of the activated hidden. At the end of the
            # block, the gradient of T_M has overwritten it and fills all columns of grad_bG.
            for hidden_bG, active_bH, grad_bG, grad_bH, grad_weight_b, scale_b1 in _blocks(
                rows, *row_tensors
            ):
                block_bH = _first(scratch, hidden_bG.shape[0], 0) if in_place else active_bH
                self.activate(hidden_bG, block_bH)
                grad_weight_b.copy_(
                    row_dot(block_bH, grad_bH, expert_rows.new("products", num_hidden, grad_bH.shape[0]))
                )
                grad_bH.mul_(scale_b1)
                self.activation_gradient(grad_bG, hidden_bG)
                if in_place:
                    active_bH.copy_(block_bH)
        if b2 is not None and not self.shard.index:
            b2_M = expert_rows.views.of(b2)
            for expert, grad, grad_weight in groups.rows_by_expert(grad_NM, grad_weight_N):
                if grad_weight.dtype == grad.dtype:
                    grad_weight.addmv_(grad, b2_M[expert])
                else:
                    grad_weight.add_((grad @ b2_M[expert]).to(grad_weight.dtype))
        out = expert_rows.new("dT_DI", w1.shape[2]) if expert_rows.out is None else expert_rows.out
        self.input_product(grad_hidden_NG, w1, groups, out=out, views=expert_rows.views)
        if not weighs_active:
            grad_NM.mul_(scale_N1)
        return out, grad_weight_N, (expert_rows.rows_NM, grad_hidden_NG, active_NH, grad_NM)

    def weight_gradient(
        self, pending: tuple[Tensor, ...], groups: RowGroups, sums: Sequence[GradientSum | None]
    ) -> None:
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = pending
        w1, w2, b1, b2 = split_parameters(sums)
        if w1 is not None:
            w1.add_weight(grad_hidden_NG, rows_NM, groups)
        if w2 is not None:
            w2.add_weight(grad_out_NM, active_NH, groups)
        if b1 is not None:
            b1.add_bias(grad_hidden_NG, groups)
        if b2 is not None:
            b2.add_bias(grad_out_NM, groups)

    def weights(self, parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Returns (w1, w2, b1, b2) from the result of `operands`; None for missing biases.

        A weight is (E, O, I): E experts, O output features, I input features. A subclass that stores the
        weights in another way overrides this method.

        parameters: the tensors that `operands` returned.
        """
        return split_parameters(parameters)

    def extra_repr(self) -> str:
        experts, hidden, d_model = self.shapes()["w1"]
        return f"{experts} x ({d_model} -> {hidden} -> {d_model}), bias={self.has_bias}"


def _first(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Returns the first ``count`` entries of a tensor along dimension ``dim``, as a view."""
    return tensor if tensor.shape[dim] == count else tensor.narrow(dim, 0, count)


def _blocks(size: int, *rows: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yields blocks of at most ``size`` rows: each time a tuple with the same rows of every tensor."""
    num_rows = rows[0].shape[0]
    if num_rows <= size:
        return [rows] if num_rows else ()
    sizes = [min(size, num_rows - start) for start in range(0, num_rows, size)]
    return zip(*(tensor.split_with_sizes(sizes) for tensor in rows), strict=True)


def split_parameters(values: Sequence[V]) -> tuple[V, V, V | None, V | None]:
    """Returns (w1, w2, b1, b2) from values in this order; None for biases that are missing."""
    w1, w2, *biases = values
    b1, b2 = biases or (None, None)
    return w1, w2, b1, b2


def put_expert(parameter: Tensor, local_expert: int, values: Tensor, cut: tuple[int, Shard]) -> None:
    """Writes the values of one expert into a parameter, or only the values that this rank holds.

    If FSDP2 shards the experts over the ranks that hold copies of them, a rank has a part of the parameter.

    parameter: (E_local, ...) or this rank's part of it.
    local_expert: the expert's number on this rank.
    values: (...), the parameter's values for this expert.
    cut: the dimension of the parameter that FSDP2 shards, and this rank's part of it.
    """
    dim, own = cut
    local = local_part(parameter)
    if dim == 0:
        number = local_expert - own.index * local.shape[0]
        if 0 <= number < local.shape[0]:
            local[number] = values
    else:
        local[local_expert] = part_of_cut(values, (dim - 1, own))


def part_of_cut(values: Tensor, cut: tuple[int, Shard]) -> Tensor:
    """Returns the part of a tensor, of any shape, that this rank holds if FSDP2 shards it. It is a view.

    values: the whole tensor.
    cut: (the dimension that FSDP2 shards, this rank's part of that dimension).
    """
    dim, own = cut
    at = own.of(values.shape[dim])
    return values.narrow(dim, at.start, at.stop - at.start)


@torch.no_grad()
def keep_part(stacked: StackedExperts, experts: slice, shard: Shard) -> None:
    """Keeps a range of the experts and one part of their hidden columns; drops all other values.

    stacked: the experts, with all hidden columns. One tensor holds a weight of all of them.
    experts: the range of local experts to keep.
    shard: the part of the hidden columns to keep.
    """
    from pmoe.experts.dtensor_layout import replace_parameter

    num_experts = experts.stop - experts.start
    num_columns = stacked.all_hidden // shard.count
    for name, dim in (stacked.hidden_dims() or {}).items():
        parameter = stacked.get_parameter(name)
        parts = stacked.hidden_factor if dim == 1 else 1
        shape = [num_experts, *parameter.shape[1:]]
        if dim is not None:
            shape[dim] = parts * num_columns
        if parameter.is_meta:
            part = parameter.new_empty(shape)
        else:
            part = parameter[experts]
            if dim is not None:
                part = own_columns(part, dim, parts, shard)
            part = part.reshape(shape).clone()
        path, _, own_name = name.rpartition(".")
        replace_parameter(stacked.get_submodule(path), own_name, part)
    stacked.num_local_experts = num_experts
    stacked.shard = shard
    stacked.mark_parameters()
