"""The gate of DeepSeek-V3 (arXiv 2412.19437, 2.1.2): sigmoid scores, and biases that balance the load.

The bias of each expert is updated from the number of choices that fell on it, not by a gradient.

Letters: G groups of experts, X experts of a group, B sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pmoe.arguments import check_count, check_kind, check_not_negative, check_positive, plain_int
from pmoe.gates.base import KeptType, Routing, TopKRouter, without_autocast
from pmoe.gates.logits import router_logits, router_z_loss
from pmoe.gates.sigmoid import sigmoid_shares
from pmoe.kernels.route import top_indices

SumOfLoads = Callable[[Tensor, dist.ProcessGroup | None, str], None]
"""The type of a function that replaces a tensor by its sum over the ranks of a group, which is a collective.

The third argument says what the sum is for, in words. A layer gives its gate a function that raises an error
if other ranks do not come to the sum.
"""


def all_reduce(values: Tensor, group: dist.ProcessGroup | None, doing: str) -> None:
    """Replaces each value by its sum over the ranks of a group. A collective (`SumOfLoads`).

    values: a tensor of any shape, (E,) for the loads of E experts.
    group: the ranks; None for the default group.
    doing: what the sum is for, in words. It is not used here.
    """
    dist.all_reduce(values, group=group)


class DeepSeekGate(TopKRouter):
    """Chooses the top_k experts with the largest sigmoid(x . w_e) + b_e. Ties go to the lowest expert index.

    x is a token, w_e the row of the gate's weight for expert e, and b_e the expert's bias. The weights are
    the sigmoids of the chosen experts without b_e, divided by their sum and multiplied by ``routed_scaling``
    (Eq. 13-16). There are E experts.

    weight: parameter (E, M), the rows w_e. M = d_model.
    bias: buffer (E,) float32, the b_e, part of the state dict. It stays float32 if the module is cast.
    load: buffer (E,) int64, how often each expert was chosen in training mode since the last `update_bias`,
        including choices that the layer drops. It is not part of the state dict.
    sum_over_ranks: function by which `update_bias` sums ``load``, (E,), over ranks. A layer sets one that
        raises an error if other ranks do not come to the sum.

    Args:
        num_groups, top_groups: neighbouring experts form ``num_groups`` groups of equal size. A token only
            goes to experts of its ``top_groups`` best groups. The score of a group is the sum of its two
            largest sigmoid(x . w_e) + b_e.
        routed_scaling: the sum of a token's weights; 2.5 is usual with this gate.
        update_speed: gamma in the paper: how much `update_bias` increases or decreases each bias.
        sequence_length: number of consecutive tokens in x that form a sequence. The last sequence may be
            shorter. None means that the whole batch is one sequence.
        normalize: False does not divide the sigmoids by their sum. None means True if top_k is above 1, as in
            `TopKGate`.
        z_loss_weight: factor of `router_z_loss` in the auxiliary loss.

    The auxiliary loss is the complementary sequence-wise balance loss (Eq. 17-20) without its factor alpha,
    averaged over sequences (`sequence_balance_loss`). It counts the top_k experts that would be chosen
    without bias and groups. Like the losses of other gates it is 1 if all experts are chosen equally often.
    0.0001 is a usual alpha.

    Call `update_bias` once in each optimizer step. Activation checkpointing runs forward twice, and so counts
    each choice twice, except under `pmoe.checkpoint_contexts`. Counting twice does no harm if all forward
    passes between two updates are counted twice.

    `torch.nn.parallel.DistributedDataParallel` must have broadcast_buffers=False. Otherwise it overwrites
    ``load`` on all ranks by rank 0's ``load``.

    Raises ValueError for top_k above the number of experts in top_groups groups, num_groups that does not
    divide num_experts, top_groups above num_groups, a routed_scaling that is not positive, or a negative
    update_speed.
    """

    num_groups: int
    top_groups: int
    routed_scaling: float
    update_speed: float
    sequence_length: int | None

    saved_scores = 3
    sum_over_ranks: SumOfLoads = staticmethod(all_reduce)
    # In bfloat16, a step of 0.001 would be lost in a bias of 1, and a load of 257 would be rounded to 256.
    bias: KeptType = KeptType(torch.float32)
    load: KeptType = KeptType(torch.int64)

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int = 1,
        *,
        num_groups: int = 1,
        top_groups: int = 1,
        routed_scaling: float = 1.0,
        update_speed: float = 0.001,
        sequence_length: int | None = None,
        normalize: bool | None = None,
        z_loss_weight: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            d_model, num_experts, top_k, normalize=normalize, z_loss_weight=z_loss_weight, **options
        )
        _check_groups(num_experts, top_k, num_groups, top_groups)
        if routed_scaling is None:
            raise TypeError("routed_scaling (None) must be a number")
        check_positive(routed_scaling=routed_scaling)
        check_not_negative(update_speed=update_speed)
        if sequence_length is not None:
            check_count(sequence_length=sequence_length)
        self.num_groups = num_groups
        self.top_groups = top_groups
        self.routed_scaling = routed_scaling
        self.update_speed = update_speed
        self.sequence_length = plain_int(sequence_length)
        self.register_buffer("bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        load_E = torch.zeros(num_experts, device=device, dtype=torch.int64)
        self.register_buffer("load", load_E, persistent=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.bias.zero_()
        self.load.zero_()

    def forward(self, x_TM: Tensor) -> Routing:
        with without_autocast(x_TM.device.type):
            logits_TE = router_logits(x_TM, self.weight)
            expert_TK = top_indices(self._biased(logits_TE.detach().sigmoid()), self.top_k)
            weight_TK = self._weights(logits_TE, expert_TK)
            l_aux = sequence_balance_loss(
                sigmoid_shares(logits_TE), top_indices(logits_TE, self.top_k), self.sequence_length
            )
            if self.z_loss_weight:
                l_aux = l_aux + self.z_loss_weight * router_z_loss(logits_TE)
        if self.training:
            chosen = expert_TK.reshape(-1)
            self._leave_meta(chosen.device)
            self.load.scatter_add_(0, chosen, torch.ones_like(chosen))
        return Routing(expert=expert_TK, weight=weight_TK, l_aux=l_aux, logits=logits_TE)

    def weights_of(self, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Returns the weights of the experts in expert_TK: their sigmoids without the bias, scaled.

        routing: the result of the call, with its logits.
        expert_TK: (T, K) int64, K experts for each of T tokens. The result has the same shape.
        """
        assert routing.logits is not None
        return self._weights(routing.logits, expert_TK)

    def balance_terms(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns the sigmoids of each token, divided by their sum, (T, E), and its best experts, (T, K).

        There are T tokens with K choices each, and E experts. As in l_aux, the best experts are those that
        would be chosen without bias and groups.

        routing: the result of the call, with its logits.
        """
        assert routing.logits is not None
        return sigmoid_shares(routing.logits), top_indices(routing.logits, self.top_k)

    def _weights(self, logits_TE: Tensor, expert_TK: Tensor) -> Tensor:
        """Returns the routing weights of the experts in expert_TK, (T, K): scaled sigmoids without the bias.

        logits_TE: (T, E), the logits of T tokens for E experts.
        expert_TK: (T, K) int64, K experts of each token.
        """
        chosen_TK = logits_TE.gather(-1, expert_TK)
        weight_TK = sigmoid_shares(chosen_TK) if self.normalize else chosen_TK.sigmoid()
        return weight_TK * self.routed_scaling

    @torch.no_grad()
    def update_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Adds update_speed * sign(mean load - load) to each expert's bias, then sets the load to 0.

        An expert that was chosen less often than the mean gets a higher bias, and so more tokens. Collective.

        group: the ranks whose loads are added up first. None means the default group, or this rank alone if
            torch.distributed is not initialised.

        All ranks of the group change the bias by the same numbers, so it stays equal on all of them. The cost
        is one all-reduce of a number for each expert. The host does not wait for the device.
        """
        check_kind((dist.ProcessGroup, type(None)), "None or a process group", group=group)
        self._leave_meta(self.bias.device)
        if dist.is_available() and dist.is_initialized():
            self.sum_over_ranks(self.load, group, "summing the loads of DeepSeekGate.update_bias")
        below_mean_E = self.load.sum() - self.load * self.load.numel()  # exact, in integers
        self.bias.add_(self.update_speed * below_mean_E.sign())
        self.load.zero_()

    def _leave_meta(self, device: torch.device) -> None:
        """Replaces a ``load`` on the meta device by zeros on another device.

        The load is not part of the state dict, so ``load_state_dict(state, assign=True)`` on a gate that was
        built on the meta device leaves it there. Nothing could be counted in it.

        device: the device of the gate's other tensors.
        """
        if self.load.is_meta and device.type != "meta":
            self.load = torch.zeros_like(self.load, device=device)

    def _biased(self, score_TE: Tensor) -> Tensor:
        """Returns score + bias, (T, E), for T tokens and E experts.

        For experts outside a token's best groups the result is negative infinity, so that the token does not
        choose them.

        score_TE: (T, E), the sigmoids.
        """
        biased_TE = score_TE + self.bias
        if self.top_groups == self.num_groups:
            return biased_TE
        num_tokens, num_experts = biased_TE.shape
        size = num_experts // self.num_groups
        grouped_TGX = biased_TE.view(num_tokens, self.num_groups, size)
        group_score_TG = grouped_TGX.topk(min(2, size), dim=-1).values.sum(-1)
        group = top_indices(group_score_TG, self.top_groups)
        outside_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(-1, group, False)
        return grouped_TGX.masked_fill(outside_TG.unsqueeze(-1), -math.inf).view(num_tokens, num_experts)


def sequence_balance_loss(share_TE: Tensor, expert_TK: Tensor, sequence_length: int | None = None) -> Tensor:
    """Returns the mean over sequences of E * sum_e f_e P_e, a scalar (Eq. 17-20 with alpha = 1).

    For E experts, f_e is the share of a sequence's choices that fell on expert e, and P_e the mean of
    share_TE[:, e] over the sequence. The loss is 1 if all experts are chosen equally often. Without tokens it
    is 0, and still has a gradient (of zeros).

    share_TE: (T, E), the scores of T tokens. The scores of each token are divided by their sum over the
        experts, so they add up to 1.
    expert_TK: (T, K) int64, the K choices of each token.
    sequence_length: number of tokens of a sequence; None means that all tokens are one sequence.
    """
    num_tokens = share_TE.shape[0]
    length = max(sequence_length or num_tokens, 1)
    num_sequences = max(-(-num_tokens // length), 1)
    sequence_T = torch.arange(num_tokens, device=share_TE.device) // length
    starts_B = torch.arange(num_sequences, device=share_TE.device) * length
    lengths_B = (num_tokens - starts_B).clamp(min=1, max=length)
    return sequence_losses(share_TE, expert_TK, sequence_T, lengths_B).sum() / num_sequences


def sequence_losses(share_TE: Tensor, expert_TK: Tensor, sequence_T: Tensor, lengths_B: Tensor) -> Tensor:
    """Returns E * sum_e f_e P_e of each sequence, (B,) for B sequences: see `sequence_balance_loss`.

    f_e is the share of a sequence's choices that fell on expert e, and P_e the mean of share_TE[:, e] over
    the sequence.

    share_TE: (T, E), the scores of T tokens for E experts. The scores of each token are divided by their sum
        over the experts, so they add up to 1.
    expert_TK: (T, K) int64, the K choices of each token.
    sequence_T: (T,) int64, the index of the sequence that each token belongs to, from 0 to B - 1.
    lengths_B: (B,) int64, the number of tokens of each sequence, at least 1.
    """
    num_experts = share_TE.shape[1]
    num_sequences = lengths_B.shape[0]
    place = (sequence_T.unsqueeze(1) * num_experts + expert_TK).reshape(-1)
    counts_BE = share_TE.new_zeros(num_sequences * num_experts)
    counts_BE = counts_BE.scatter_add_(0, place, share_TE.new_ones(()).expand(place.shape[0]))
    sums_BE = share_TE.new_zeros(num_sequences, num_experts).index_add(0, sequence_T, share_TE)
    loss_B = (counts_BE.view(num_sequences, num_experts) * sums_BE).sum(-1) / lengths_B.square()
    return loss_B * (num_experts / expert_TK.shape[1])


def _check_groups(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    """Raises TypeError or ValueError unless ``top_groups`` groups together have at least top_k experts.

    num_groups must divide num_experts, and be at least top_groups.
    """
    check_count(num_groups=num_groups, top_groups=top_groups)
    if num_experts % num_groups:
        raise ValueError(f"num_groups ({num_groups}) must divide num_experts ({num_experts})")
    if top_groups > num_groups:
        raise ValueError(f"top_groups ({top_groups}) must be at most num_groups ({num_groups})")
    reachable = top_groups * (num_experts // num_groups)
    if top_k > reachable:
        raise ValueError(
            f"top_k ({top_k}) must be at most the number of experts in top_groups groups ({reachable})"
        )
