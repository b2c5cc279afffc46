"""Low-rank adapters of stacked experts (LoRA, arXiv 2106.09685), computed chunk by chunk.

An adapter of rank R changes a weight of expert e by a product of two small matrices. Only these are trained:

    weight of expert e = W[e] + scale * B[e] @ A[e]        scale = alpha / R, with a constant alpha

The product B @ A is never computed. Instead, rows x are multiplied by A, then by B, and the result is added
to the product of x and W. For the first weight W1, where A stands for A[e] and B for scale * B[e]:

    forward    T_M  = x W1^T + (x A^T) B^T                 x A^T is small: (N, R) for the N rows of a chunk
    backward   dT_DI = dT_M W1 + (dT_M B) A
               gradient of B = dT_M^T (x A^T),  gradient of A = (dT_M B)^T x

The second weight W2 has an A and a B of its own. W1 and W2 are not trained, so they need no gradients.

If each expert's hidden columns are split over ranks (FSMoE's ESP), two of the four matrices are split, too.
Each of these ranks holds the two others whole, and computes a part of their gradients:

    A of W1    (R, M)    whole, gradients are summed      A of W2    (R, H)    split along H
    B of W1    (G, R)    split along G                    B of W2    (M, R)    whole, gradients are summed

Letters: N rows, E experts of this rank, M = d_model, H hidden columns, G columns of T_M, the hidden
activation before the nonlinearity (H, or 2H for gated experts); O output and I input features of a weight; R
rank of an adapter.
"""

from __future__ import annotations

import functools
import math
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from pmoe.experts.base import WHOLE, ExpertRows, Experts, Hidden, Shard
from pmoe.experts.columns import own_columns
from pmoe.experts.dtensor_layout import is_of_other_place, replace_parameter
from pmoe.experts.expert_autograd import saves_plainly
from pmoe.experts.ffn import FFNExperts
from pmoe.experts.operands import local_part, value_names
from pmoe.experts.products import (
    NO_VIEWS,
    ExpertViews,
    GradientSum,
    RowGroups,
    expert_input_gradient,
    expert_product,
)
from pmoe.experts.stacked import HIDDEN_DIMS, UNCUT, StackedExperts, part_of_cut, put_expert
from pmoe.experts.swiglu import SwiGLUExperts
from pmoe.kernels.registry import Form
from pmoe.schedule.buffer_sizes import HiddenColumns

WEIGHTS = ("w1", "w2")
"""The weights that may have an adapter."""

ADAPTERS = "adapters."
"""The prefix of all adapters' parameters in the names of the experts' parameters."""

HIDDEN_OF_MATRICES: dict[str, int | None] = {"w1_A": None, "w1_B": -2, "w2_A": -1, "w2_B": None}
"""Maps an adapter's matrices to the dimension that counts hidden columns, from the end; None if none does."""


PLACE = "pmoe.adapter"
"""The key of the record in the metadata of a state dict that says which part of all adapters it has."""

OWN_FILES = (
    "save and load with pmoe.save_checkpoint and pmoe.load_checkpoint(folder, pmoe.lora_adapters(model)), "
    "both on every rank and after pmoe.parallelize, or let every rank load its own file"
)
"""The end of error messages: what to do if a rank's adapters would get another rank's values."""


class Adapter(nn.Module):
    """One adapter of a layer's experts: the matrices A and B of each weight that it changes.

    It adds (alpha / R) * B @ A to a weight. ``w1_A`` and ``w1_B`` belong to the weight w1, (E, O, I) for E
    experts of this rank with O output and I input features:

        for each expert     w1_A (E, R, I)    w1_B (E, O, R)
        shared by all       w1_A (R, I)       w1_B (O, R)

    A has random values and B zeros, so that a new adapter changes nothing.

    shapes: (E, O, I) of each weight that gets an adapter, by name.
    rank: R, the number of rows of A.
    alpha: the factor of B @ A is alpha / R.
    shared: whether all experts of all ranks share one adapter.
    shard: the part of the hidden columns that this rank holds; ``shapes`` have only these columns.
    device, dtype: the device and dtype of the parameters.
    num_ranks: the number of ranks over which the experts are spread.
    first_expert: the number of this rank's first expert among all experts.
    copy_parts: for each matrix that FSDP2 shards over the ranks with the same experts, by name: the dimension
        that is sharded, and this rank's part of this dimension (`Experts.copy_parts`).
    left_out: FSDP2's records of the matrices while the adapter is removed from experts that FSDP2 shards.
    targets: the names of the weights that get an adapter.
    """

    num_ranks: int = 1
    first_expert: int = 0
    shard: Shard = WHOLE
    copy_parts: Mapping[str, tuple[int, Shard]] = {}
    left_out: Sequence[Any] = ()
    alpha: float
    targets: tuple[str, ...]

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int, int]],
        *,
        rank: int,
        alpha: float,
        shared: bool,
        shard: Shard,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.shard = shard
        self.rank = rank
        self.alpha = alpha
        self.shared = shared
        self.targets = tuple(shapes)
        self.register_state_dict_post_hook(_record_place)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_check_place)  # type: ignore[no-untyped-call]
        for name, (experts, out_features, in_features) in shapes.items():
            lead = () if shared else (experts,)
            for letter, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                values = torch.empty(*lead, *shape, device=device, dtype=dtype)
                self.register_parameter(f"{name}_{letter}", nn.Parameter(values))

    @property
    def scale(self) -> float:
        """The factor of the product B @ A: alpha / rank."""
        return self.alpha / self.rank

    @property
    def is_plain(self) -> bool:
        """Whether the parameters are plain tensors and no DTensors."""
        return not any(hasattr(parameter, "to_local") for parameter in self.parameters())

    @property
    def differs_between_ranks(self) -> bool:
        """Whether ranks hold different values, because their experts or hidden columns differ."""
        return self.shard.count > 1 or (self.num_ranks > 1 and not self.shared)

    def hidden_dims(self) -> dict[str, int | None]:
        """Returns, by matrix name, the dimension that counts hidden columns; None if there is none."""
        num_dims = 2 if self.shared else 3
        return {
            name: None if dim is None else num_dims + dim
            for name, dim in HIDDEN_OF_MATRICES.items()
            if name in self._parameters
        }

    def of(self, weight: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Returns the adapter's matrices A and B of one weight.

        weight: "w1" or "w2".
        """
        return self.get_parameter(f"{weight}_A"), self.get_parameter(f"{weight}_B")

    @torch.no_grad()
    def initialise(self, local_expert: int | None) -> None:
        """Draws A of one expert from the CPU's generator, as `torch.nn.Linear` does, and sets B to zero.

        A rank that holds a part of the hidden columns draws the whole A and takes its columns. So the values
        do not depend on the number of ranks that share the columns.

        local_expert: the expert's number on this rank; None draws an adapter that all experts share.
        """
        for weight in self.targets:
            down, up = self.of(weight)
            if down.is_meta:
                continue
            shard = WHOLE if HIDDEN_OF_MATRICES[f"{weight}_A"] is None else self.shard
            in_features = down.shape[-1]
            if self.is_plain:
                in_features *= shard.count
            bound = 1 / math.sqrt(in_features)
            dtype = torch.promote_types(down.dtype, torch.float32)
            whole = torch.empty(self.rank, in_features, dtype=dtype, device="cpu").uniform_(-bound, bound)
            values = whole[:, shard.of(in_features)]
            cut = self.copy_parts.get(f"{weight}_A", UNCUT)
            if local_expert is None:
                local_part(down).copy_(part_of_cut(values, cut))
            else:
                put_expert(down, local_expert, values, cut)
            local_part(up).zero_()

    def get_extra_state(self) -> dict[str, Any]:
        """Returns the values that a state dict needs in addition to the matrices, by name.

        They are ``alpha``, ``rank``, ``shared``, ``experts`` and ``part``. ``experts`` is [number of this
        rank's first expert, number behind its last expert]; None if all experts share one adapter. ``part``
        is [number of this rank's part of the hidden columns, number of parts]; None if the rank has all
        columns. ``experts`` and ``part`` are None if the matrices are DTensors: a distributed checkpoint then
        has those of all ranks. If it is no distributed checkpoint, `_check_place` checks whose they are.
        """
        down, _ = self.of(self.targets[0])
        is_whole = self.shared or not self.is_plain
        experts = None if is_whole else [self.first_expert, self.first_expert + down.shape[0]]
        part = [self.shard.index, self.shard.count] if self.is_plain and self.shard.count > 1 else None
        state = {"alpha": self.alpha, "rank": self.rank, "shared": self.shared, "experts": experts}
        return {**state, "part": part}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes alpha from a state dict, because the matrices in it were trained with this alpha.

        Raises ValueError if the state dict has an adapter of another rank (number of rows of A), of other
        experts, or of other hidden columns.
        """
        own = self.get_extra_state()
        for name in ("rank", "shared"):
            if state[name] != own[name]:
                raise ValueError(
                    f"{name} ({own[name]}) of the adapter must be that of the state dict, {state[name]}: "
                    f"call pmoe.add_lora(model, {name}={state[name]!r}, ...) before loading"
                )
        if None not in (state["experts"], own["experts"]) and state["experts"] != own["experts"]:
            first, end = state["experts"]
            raise ValueError(
                f"a state dict of the adapters of experts {first} to {end - 1} must not be loaded into those "
                f"of experts {own['experts'][0]} to {own['experts'][1] - 1}: {OWN_FILES}"
            )
        part = state.get("part")  # state dicts of earlier releases do not have it
        if part is not None and own["part"] is not None and part != own["part"]:
            raise ValueError(
                f"a state dict of part {part[0]} of {part[1]} of the adapters' hidden columns "
                f"must not be loaded into part {own['part'][0]} of {own['part'][1]}: {OWN_FILES}"
            )
        self.alpha = state["alpha"]

    def extra_repr(self) -> str:
        kind = "shared by all experts" if self.shared else "for each expert"
        return f"rank={self.rank}, alpha={self.alpha}, {kind}, targets={', '.join(self.targets)}"


def _place(adapter: Adapter) -> dict[str, list[int]]:
    """Returns a dict that says which part of a layer's adapters this rank holds.

    Each value is [index of the part, how many parts there are]. The keys: "experts", for the division of
    experts among ranks; "columns", for the division of their hidden columns; "copy", for FSDP2's division of
    matrices among the ranks with the same experts.
    """
    copy = next((own for _, own in adapter.copy_parts.values()), WHOLE)
    num_ranks = 1 if adapter.shared else adapter.num_ranks
    local = 1 if adapter.shared else adapter.get_parameter(f"{adapter.targets[0]}_A").shape[0]
    if not adapter.is_plain:
        local = max(local // num_ranks, 1)  # a DTensor has the shape of all ranks' experts
    return {
        "experts": [0 if adapter.shared else adapter.first_expert // local, num_ranks],
        "columns": [adapter.shard.index, adapter.shard.count],
        "copy": [copy.index, copy.count],
    }


def _record_place(adapter: Adapter, state: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Records in a state dict's metadata which part of all adapters it has. A hook of ``state_dict()``."""
    local_metadata[PLACE] = _place(adapter)


def _check_place(
    adapter: Adapter, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: object
) -> None:
    """Checks that adapters loaded as DTensors from a file are this rank's. A hook of ``load_state_dict()``.

    torch copies the local values of a DTensor, even if a rank with another part of the adapters has written
    the file.

    adapter: the module that loads.
    state: the state dict of the whole model.
    prefix: the name of the module in the model, with a dot at the end.
    local_metadata: the metadata of the module; empty if the state dict has none.

    Raises ValueError if the file has the adapters of another rank.
    """
    saved = local_metadata.get(PLACE)
    is_other_place = any(
        is_of_other_place(state.get(f"{prefix}{name}"), parameter)
        for name, parameter in adapter.named_parameters()
    )
    if saved is None or not is_other_place:
        return
    own = _place(adapter)
    for kind, part in saved.items():
        if part != own[kind]:
            raise ValueError(
                f"{prefix.rstrip('.') or 'adapter'}: a state dict with part {part[0]} of {part[1]} of the "
                f"adapters ({kind}) must not be loaded where part {own[kind][0]} of {own[kind][1]} belongs: "
                f"{OWN_FILES}"
            )


def adapter_of_calls(layer: nn.Module) -> str:
    """Returns the name of the active adapter of a layer, which its calls use; "" if there is none."""
    experts = getattr(layer, "experts", None)
    return experts.active if isinstance(experts, LoraExperts) else ""


def switched_adapter(before: Collection[str], now: str) -> RuntimeError:
    """Returns the error for a recomputation that uses another adapter than its forward pass used.

    before: the names of adapters that forward passes used; "" for none.
    now: the name of the active adapter, which the recomputation uses; "" for none.
    """
    used = " or ".join(repr(name) if name else "none" for name in sorted(before))
    again = repr(now) if now else "none"
    return RuntimeError(
        f"a checkpoint runs a layer again with the adapter {again}, and its forward pass used {used}: "
        "gradients would belong to another output. Run backward before pmoe.use_lora, pmoe.merge_lora or "
        "pmoe.remove_lora, and before or after a block with pmoe.disable_lora"
    )


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of all experts with its adapter. The matrix of expert e is base[e] + up[e] @ down[e].

    base: (E, O, I), a matrix for each of E experts, with O output and I input features.
    down: A, (E, R, I) with the adapter's rank R, or (R, I) if all experts share it.
    up: scale * B, (E, O, R), or (O, R) if all experts share it.
    """

    base: Tensor
    down: Tensor
    up: Tensor

    @property
    def shape(self) -> torch.Size:
        """(E, O, I), the shape of the weight: E experts, O output and I input features."""
        return self.base.shape

    def lowered(self, rows_NI: Tensor, groups: RowGroups) -> Tensor:
        """Returns rows @ A^T, (N, R): N rows multiplied by the first matrix of a rank-R adapter.

        rows_NI: (N, I), the rows of I input features, sorted by expert.
        groups: where each expert's rows begin and end.
        """
        if self.down.dim() == 2:
            return rows_NI @ self.down.t()
        return expert_product(rows_NI, self.down, groups)

    def lowered_gradient(self, grad_NO: Tensor, groups: RowGroups) -> Tensor:
        """Returns scale * grad @ B, (N, R): the gradient of rows @ A^T, for N rows and an adapter of rank R.

        grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
        groups: where each expert's rows begin and end.
        """
        if self.up.dim() == 2:
            return grad_NO @ self.up
        return expert_input_gradient(grad_NO, self.up, groups)

    def add_gradients(
        self,
        grad_NO: Tensor,
        rows_NI: Tensor,
        groups: RowGroups,
        of_down: GradientSum | None,
        of_up: GradientSum | None,
    ) -> None:
        """Computes gradients of ``down`` (A) and ``up`` (scale * B) for some rows, and adds them to the sums.

        grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
        rows_NI: (N, I), the rows of I input features that the results were computed from.
        groups: where each expert's rows begin and end.
        of_down, of_up: the sums of both gradients; None for a matrix that needs no gradient.
        """
        if of_up is not None:
            _add_weight(of_up, grad_NO, self.lowered(rows_NI, groups), groups)
        if of_down is not None:
            _add_weight(of_down, self.lowered_gradient(grad_NO, groups), rows_NI, groups)


def _add_weight(total: GradientSum, grad_NO: Tensor, rows_NI: Tensor, groups: RowGroups) -> None:
    """Adds grad^T @ rows to the gradient of a matrix: for each expert, or over all rows if experts share it.

    total: the sum of the matrix's gradient.
    grad_NO: (N, O), the gradient of N results of O columns, sorted by expert.
    rows_NI: (N, I), the rows of I columns that the results were computed from.
    groups: where each expert's rows begin and end.
    """
    if total.total.dim() == 2:
        total.add(grad_NO.t() @ rows_NI)
    else:
        total.add_weight(grad_NO, rows_NI, groups)


def _add_product(out_NO: Tensor, rows_NR: Tensor, matrix: Tensor, groups: RowGroups) -> None:
    """Adds rows @ matrix[e] to ``out``, for the rows of each expert e.

    out_NO: (N, O), changed in place: N rows of O columns.
    rows_NR: (N, R), the rows that are multiplied, sorted by expert; R is the adapter's rank.
    matrix: (E, R, O) for E experts, or (R, O) if all experts share it.
    groups: where each expert's rows begin and end.
    """
    if matrix.dim() == 2:
        out_NO.addmm_(rows_NR, matrix)
    elif out_NO.is_cuda:
        out_NO.add_(expert_input_gradient(rows_NR, matrix, groups))
    else:
        for expert, rows, out in groups.rows_by_expert(rows_NR, out_NO):
            out.addmm_(rows, matrix[expert])


def adapted_product(
    rows_NI: Tensor,
    weight: Tensor | AdaptedWeight,
    groups: RowGroups,
    bias_EO: Tensor | None = None,
    out: Tensor | None = None,
    scale_N: Tensor | None = None,
    *,
    views: ExpertViews = NO_VIEWS,
) -> Tensor:
    """Returns (rows @ weight[e]^T + bias[e]) * scale for the rows of each expert e: (N, O).

    It is `expert_product` for a weight that may have an adapter.

    rows_NI: (N, I), N rows of I input features, sorted by expert.
    weight: the matrices of E experts, (E, O, I) with O output features, alone or with an adapter.
    groups: where each expert's rows begin and end.
    bias_EO: (E, O); None adds nothing.
    out: (N, O), memory for the result; None allocates it.
    scale_N: (N,), a factor for each row; None is 1.
    views: the views of weights and biases that the pass has made already.
    """
    if isinstance(weight, Tensor):
        return expert_product(rows_NI, weight, groups, bias_EO, out, scale_N, views=views)
    out = expert_product(rows_NI, weight.base, groups, bias_EO, out, views=views)
    _add_product(out, weight.lowered(rows_NI, groups), weight.up.transpose(-2, -1), groups)
    return out if scale_N is None else out.mul_(scale_N.unsqueeze(1))


def adapted_input_gradient(
    grad_NO: Tensor,
    weight: Tensor | AdaptedWeight,
    groups: RowGroups,
    out: Tensor | None = None,
    *,
    views: ExpertViews = NO_VIEWS,
) -> Tensor:
    """Returns grad @ weight[e] for the rows of each expert e: the gradient of the rows, (N, I).

    It is `expert_input_gradient` for a weight that may have an adapter.

    grad_NO: (N, O), the gradient of N results of O output features, sorted by expert.
    weight: the matrices of E experts, (E, O, I) with I input features, alone or with an adapter.
    groups: where each expert's rows begin and end.
    out: (N, I), memory for the result; None allocates it.
    views: the views of weights that the pass has made already.
    """
    if isinstance(weight, Tensor):
        return expert_input_gradient(grad_NO, weight, groups, out, views=views)
    out = expert_input_gradient(grad_NO, weight.base, groups, out, views=views)
    _add_product(out, weight.lowered_gradient(grad_NO, groups), weight.down, groups)
    return out


class LoraExperts(StackedExperts):
    """Stacked experts with low-rank adapters, of which at most one is active.

    A call computes with a list of tensors (`operands`): the weights, the biases and then, if an adapter is
    active, its A and scale * B for w1 and for w2. A weight that the adapter does not change has matrices of
    rank 0 in the list.

    adapters: the adapters by name.
    active: the name of the active adapter, which the layer uses in its calls; "" for none.
    setting: a text that describes the active adapter. Ranks compare it to check that they use the same
        adapter.
    sum_shared: a function that sums gradients over the ranks that the experts are spread over, in place. It
        is a collective, for the gradients of a shared adapter.
    sum_whole: a function that sums gradients over the ranks that each expert's hidden columns are split over,
        in place. It is a collective, for the gradients of matrices that these ranks hold whole.
    num_ranks: the number of ranks that the experts are spread over.
    """

    adapters: nn.ModuleDict
    active: str
    setting: str
    sum_shared: Callable[[Sequence[Tensor]], None]
    sum_whole: Callable[[Sequence[Tensor]], None]
    num_ranks: int
    operand_names: tuple[str, ...]
    replicated_dims: dict[str, int | None]
    product: Callable[..., Tensor] = staticmethod(adapted_product)
    input_product: Callable[..., Tensor] = staticmethod(adapted_input_gradient)
    fuses = False  # a kernel that computes a product and the nonlinearity cannot add an adapter between them

    def adapter(self, name: str) -> Adapter:
        """Returns the adapter called ``name``."""
        adapter = self.adapters[name]
        assert isinstance(adapter, Adapter)
        return adapter

    def activate_adapter(self, name: str) -> None:
        """Makes the adapter ``name`` the active one, which later calls use; "" for no adapter."""
        self.active = name
        self.setting = f"{name}: {self.adapter(name).extra_repr()}" if name else "none"
        self.note_operands()

    @property
    def factor(self) -> float:  # type: ignore[override]
        """The number by which the active adapter's B @ A is multiplied (scale); 1 if no adapter is active."""
        return self.adapter(self.active).scale if self.active else 1.0

    @property
    def num_scaled(self) -> int:  # type: ignore[override]
        """The number of elements of the matrices B, which a call copies to multiply them by a factor.

        0 if no adapter is active, or if the adapter's factor is 1.
        """
        if not self.active or self.adapter(self.active).scale == 1:
            return 0
        adapter = self.adapter(self.active)
        return sum(
            local_part(adapter.of(weight)[1]).numel() * adapter.copy_parts.get(f"{weight}_B", UNCUT)[1].count
            for weight in adapter.targets
        )

    def note_operands(self) -> None:
        own_names = tuple(name for name in HIDDEN_DIMS if name[0] == "w" or self.has_bias)
        self.operand_names = own_names
        self.replicated_dims = {
            f"{ADAPTERS}{name}.{own}": dim
            for name in self.adapters
            if self.adapter(name).shared
            for own, dim in self.adapter(name).hidden_dims().items()
        }
        if self.active:
            adapter = self.adapter(self.active)
            own_names += tuple(
                f"{ADAPTERS}{self.active}.{weight}_{letter}" for weight in adapter.targets for letter in "AB"
            )
        self.operand_names = own_names

    @property
    def call_names(self) -> tuple[str, ...]:
        """The names of the tensors with which a call computes, in the order of `operands`.

        If an adapter is active, each of w1 and w2 has two matrices in the list, even if the adapter does not
        change the weight: the matrices then have rank 0.
        """
        matrices = [f"{ADAPTERS}{self.active}.{weight}_{letter}" for weight in WEIGHTS for letter in "AB"]
        return (*self.operand_names[: self.num_own], *(matrices if self.active else ()))

    @property
    def num_own(self) -> int:
        """The number of weights and biases, which come first among the tensors with which a call computes."""
        return sum(not name.startswith(ADAPTERS) for name in self.operand_names)

    def operands(self) -> list[Tensor]:
        values = super().operands()
        if not self.active:
            return values
        adapter = self.adapter(self.active)
        matrices = values[self.num_own :]
        like = values[0]
        if adapter.shared and self.num_ranks > 1:
            matrices = _with_summed_gradients(self.sum_shared, matrices)
        if self.shard.count > 1:
            is_whole = [dim is None for dim in adapter.hidden_dims().values()]
            summed = iter(_with_summed_gradients(self.sum_whole, list(compress(matrices, is_whole))))
            matrices = [
                next(summed) if whole else matrix for matrix, whole in zip(matrices, is_whole, strict=True)
            ]
        of_weight = dict(zip(adapter.targets, zip(matrices[::2], matrices[1::2], strict=True), strict=True))
        call_values = values[: self.num_own]
        for weight, value in zip(WEIGHTS, values, strict=False):
            experts, out_features, in_features = value.shape
            none = (like.new_empty(experts, 0, in_features), like.new_empty(experts, out_features, 0))
            down, up = of_weight.get(weight, none)
            scaled = up if adapter.scale == 1 or not up.numel() else up * adapter.scale
            call_values += [down.to(like.dtype), scaled.to(like.dtype)]
        if torch.is_grad_enabled() and not saves_plainly():
            trained = [at for at, value in enumerate(call_values) if value.requires_grad]
            # One matrix is enough: the backward pass of the call reads all saved tensors, and so makes the
            # comparison of `_OfAdapter`.
            if trained:
                last = trained[-1]
                call_values[last] = _OfAdapter.apply(self, call_values[last])  # type: ignore[no-untyped-call]
        return call_values

    def check_operands(self, values: Sequence[Tensor]) -> None:
        super().check_operands(values[: self.num_own])

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return (pair for pair in self.named_parameters() if not pair[0].startswith(ADAPTERS))

    def used_parameters(self) -> Iterable[nn.Parameter]:
        of_others = {
            id(parameter)
            for name in self.adapters
            if name != self.active
            for parameter in self.adapter(name).parameters()
        }
        return (parameter for parameter in self.parameters() if id(parameter) not in of_others)

    def hidden_dims(self) -> Mapping[str, int | None] | None:
        own_names = [name for name in value_names(self) if not name.startswith(ADAPTERS)]
        if not set(own_names) <= set(HIDDEN_DIMS):
            return None
        of_adapters = {
            f"{ADAPTERS}{name}.{own}": dim
            for name in self.adapters
            if not self.adapter(name).shared
            for own, dim in self.adapter(name).hidden_dims().items()
        }
        return {**{name: HIDDEN_DIMS[name] for name in own_names}, **of_adapters}

    def keep(self, experts: slice, shard: Shard) -> None:
        super().keep(experts, shard)
        for name, dim in self.replicated_dims.items():
            if dim is not None:
                path, _, own_name = name.rpartition(".")
                halves = self.hidden_factor if dim == 0 else 1
                part = own_columns(self.get_parameter(name).detach(), dim, halves, shard)
                replace_parameter(self.get_submodule(path), own_name, part.clone())
        self.mark_parameters()

    def use_ranks(
        self,
        sum_shared: Callable[[Sequence[Tensor]], None],
        sum_whole: Callable[[Sequence[Tensor]], None],
        num_ranks: int,
        first_expert: int,
    ) -> None:
        self.sum_shared = sum_shared
        self.sum_whole = sum_whole
        self.num_ranks = num_ranks
        self._first_expert = first_expert  # private, because ranks compare public attributes
        self.mark_parameters()

    def mark_parameters(self) -> None:
        super().mark_parameters()
        for name in self.adapters:
            adapter = self.adapter(name)
            adapter.num_ranks = self.num_ranks
            adapter.first_expert = self._first_expert
            adapter.shard = self.shard
            start = f"{ADAPTERS}{name}."
            adapter.copy_parts = {
                own.removeprefix(start): cut for own, cut in self.copy_parts.items() if own.startswith(start)
            }
            for own, dim in adapter.hidden_dims().items():
                parameter = adapter.get_parameter(own)
                copies_of_columns = self.shard.count if dim is None else 1
                copies_of_experts = self.num_ranks if adapter.shared else 1
                parameter.num_copies = copies_of_columns * copies_of_experts  # type: ignore[attr-defined]
                if not adapter.shared:
                    parameter.stacked = True  # type: ignore[attr-defined]

    def initialise_expert(self, local_expert: int) -> None:
        super().initialise_expert(local_expert)
        for name in self.adapters:
            if not self.adapter(name).shared:
                self.adapter(name).initialise(local_expert)

    def reset_replicated(self) -> None:
        for name in self.adapters:
            if self.adapter(name).shared:
                self.adapter(name).initialise(None)

    def columns(self, device_type: str) -> HiddenColumns:
        rank = self.adapter(self.active).rank if self.active else 0
        return super().columns(device_type)._replace(adapter=rank)

    def weights(self, parameters: Sequence[Tensor]) -> Any:
        """Returns (w1, w2, b1, b2) from the result of `operands`; None for missing biases.

        A weight with an adapter is an `AdaptedWeight`; any other is a tensor (E, O, I) for E experts with O
        output and I input features.

        parameters: the tensors that `operands` returned.
        """
        w1, w2, b1, b2 = super().weights(parameters[: self.num_own])
        matrices = parameters[self.num_own :]
        if not matrices:
            return w1, w2, b1, b2
        down_1, up_1, down_2, up_2 = matrices
        return _adapted(w1, down_1, up_1), _adapted(w2, down_2, up_2), b1, b2

    def input_gradient(
        self, grad_NM: Tensor, expert_rows: ExpertRows, weight_N: Tensor, hidden: Hidden
    ) -> tuple[Tensor, Tensor, Any]:
        out, grad_weight_N, pending = super().input_gradient(grad_NM, expert_rows, weight_N, hidden)
        return out, grad_weight_N, (pending, expert_rows.parameters)

    def weight_gradient(self, pending: Any, groups: RowGroups, sums: Sequence[GradientSum | None]) -> None:
        of_rows, parameters = pending
        own_sums = sums[: self.num_own]
        super().weight_gradient(of_rows, groups, own_sums)
        rows_NM, grad_hidden_NG, active_NH, grad_out_NM = of_rows
        w1, w2, _, _ = self.weights(parameters)
        products = ((w1, grad_hidden_NG, rows_NM), (w2, grad_out_NM, active_NH))
        of_adapters = sums[self.num_own :]
        for (weight, grad, rows), of_down, of_up in zip(
            products, of_adapters[::2], of_adapters[1::2], strict=False
        ):
            if isinstance(weight, AdaptedWeight):
                weight.add_gradients(grad, rows, groups, of_down, of_up)

    def _fused(
        self, form: Form, rows: Tensor, weight: Tensor, groups: RowGroups, bias: Tensor | None = None
    ) -> str | None:
        return None


class LoraFFNExperts(LoraExperts, FFNExperts):
    """Feed-forward experts with low-rank adapters."""


class LoraSwiGLUExperts(LoraExperts, SwiGLUExperts):
    """Gated experts with low-rank adapters."""


CLASSES: dict[type[StackedExperts], type[LoraExperts]] = {
    FFNExperts: LoraFFNExperts,
    SwiGLUExperts: LoraSwiGLUExperts,
}
"""Maps a class of experts to the class that these experts get together with their first adapter."""


def _adapted(weight: Tensor, down: Tensor, up: Tensor) -> Tensor | AdaptedWeight:
    """Returns a weight together with its adapter, or the weight alone if the adapter has rank 0.

    weight: (E, O, I), a matrix for each of E experts, with O output and I input features.
    down, up: the adapter's matrices A and scale * B.
    """
    return AdaptedWeight(weight, down, up) if down.shape[-2] else weight


def check_no_adapters(experts: Experts, what: str) -> None:
    """Raises ValueError if experts have adapters, for a function that reads the weights alone.

    The adapters would be lost without a message.

    what: the name of the function's argument that has the experts, for the message.
    """
    if isinstance(experts, LoraExperts) and experts.adapters:
        raise ValueError(
            f"{what} (experts with adapters {', '.join(experts.adapters)}) must have plain experts, because "
            "only the weights would be read: call pmoe.merge_lora(model) or pmoe.remove_lora(model) first"
        )


def with_adapters(experts: Experts) -> LoraExperts:
    """Turns experts, in place, into experts that can have adapters, and returns them.

    Only their class is replaced; parameters stay the same.
    """
    if isinstance(experts, LoraExperts):
        return experts
    assert isinstance(experts, StackedExperts)
    experts.__class__ = CLASSES[type(experts)]
    assert isinstance(experts, LoraExperts)
    experts.adapters = nn.ModuleDict()
    experts.num_ranks = 1
    experts._first_expert = 0
    experts.activate_adapter("")
    return experts


def without_adapters(experts: LoraExperts) -> None:
    """Gives experts their original class back. Called after their last adapter was removed."""
    for name in ("adapters", "sum_shared", "sum_whole", "num_ranks", "_first_expert", "active", "setting"):
        delattr(experts, name)
    experts.replicated_dims = {}
    own_class = next(own for own, kind in CLASSES.items() if kind is type(experts))
    experts.__class__ = own_class  # type: ignore[assignment]
    experts.note_operands()


def _with_summed_gradients(
    sum_gradients: Callable[[Sequence[Tensor]], None], matrices: Sequence[Tensor]
) -> list[Tensor]:
    """Returns matrices of any shape whose gradients are summed over ranks in backward.

    sum_gradients: sums gradients over the ranks that hold copies of the matrices, in place; a collective.
    """
    if not matrices:
        return []
    anchor = torch.empty(0, device=matrices[0].device, requires_grad=True)
    return list(SumOverRanks.apply(sum_gradients, anchor, *matrices))  # type: ignore[no-untyped-call]


class SumOverRanks(torch.autograd.Function):
    """Returns matrices of which several ranks hold a copy; backward sums their gradients over ranks.

    Each of these ranks computes with its own experts, or with its own hidden columns, so each has a part of
    the gradient. ``anchor`` is an empty tensor that requires a gradient. So the outputs require gradients
    even on a rank that has frozen the adapter, and every rank starts the same collectives.
    """

    @staticmethod
    def forward(
        ctx: Any, sum_gradients: Callable[[Sequence[Tensor]], None], anchor: Tensor, *matrices: Tensor
    ) -> Any:
        ctx.sum_gradients = sum_gradients
        return tuple(matrix.detach() for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sums = [gradient.contiguous() for gradient in gradients]
        ctx.sum_gradients(sums)
        return None, None, *sums


class _OfAdapter(torch.autograd.Function):
    """Returns a matrix of an adapter, and remembers the adapter's name for the backward pass of the call.

    Under activation checkpointing, autograd keeps this node of the forward pass, with the name, but takes the
    saved tensors from the recomputation. So a tensor with a number that stands for the name is saved, too.
    Backward compares this number with the name in the node. The two do not fit if the recomputation used
    another adapter. With use_reentrant=True the node of the forward pass is not kept, and
    `pmoe.checkpointing.routing_check` makes the comparison.
    """

    @staticmethod
    def forward(ctx: Any, experts: LoraExperts, matrix: Tensor) -> Tensor:
        ctx.save_for_backward(_number_tensor(experts.active))
        ctx.check_unchanged = functools.partial(_check_adapter, weakref.ref(ctx), experts, experts.active)
        return matrix.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def number_of_adapter(name: str) -> int:
    """Returns a number for the name of an adapter. Different names almost always have different numbers."""
    return zlib.crc32(name.encode())


def _number_tensor(name: str) -> Tensor:
    """Returns the number that stands for an adapter's name, as an int64 scalar on the host."""
    return torch.tensor(number_of_adapter(name), device="cpu")


def _check_adapter(node: Callable[[], Any], experts: LoraExperts, name: str) -> None:
    """Raises RuntimeError if a call was recomputed with another adapter than its forward pass used.

    node: returns the forward pass's node of the autograd graph that remembers the adapter (`_OfAdapter`).
    experts: the experts of the call.
    name: the name of the adapter that the forward pass used.
    """
    (number,) = node().saved_tensors
    if not torch.equal(number, _number_tensor(name)):
        raise switched_adapter({name}, experts.active)
