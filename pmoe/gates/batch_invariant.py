"""Gates whose routing of a token has the same bits in every batch.

A gate always computes R tokens at a time, which are called a tile (`pmoe.kernels.fixed_tiles`). In forward
and backward it computes the logits, the choices and the weights in tiles. Only the auxiliary loss is computed
from all tokens at once, because it depends on the batch by definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pmoe.gates.base import Routing, TopKRouter, without_autocast
from pmoe.gates.deepseek import DeepSeekGate, sequence_balance_loss
from pmoe.gates.logits import router_logits, router_loss, router_z_loss
from pmoe.gates.sigmoid import SigmoidGate
from pmoe.gates.switch import SwitchGate
from pmoe.gates.topk import TopKGate
from pmoe.kernels.fixed_tiles import rows_of_tile, with_alignment
from pmoe.kernels.route import top_indices


class _GateInTiles(TopKRouter):
    """A gate that routes R tokens (a tile) at a time: a token's routing has the same bits in every batch."""

    def forward(self, x_TM: Tensor) -> Routing:
        with without_autocast(x_TM.device.type):
            num_rows = self.tile_rows(x_TM)
            parts = [self._routed(tile_RM, self.weight) for tile_RM in _tiles(x_TM, num_rows)]
            logits_TE, expert_TK, weight_TK = (
                torch.cat(tensors)[: x_TM.shape[0]] for tensors in zip(*parts, strict=True)
            )
            routing = Routing(
                expert=expert_TK, weight=weight_TK, l_aux=logits_TE.new_zeros(()), logits=logits_TE
            )
            return replace(routing, l_aux=self.loss(routing))

    def choose(self, logits_RE: Tensor) -> Tensor:
        """Returns the experts of each token, (R, K) int64, from the logits of a tile.

        logits_RE: (R, E), the logits of R tokens for E experts; K is the number of choices of a token.
        """
        return top_indices(logits_RE, self.top_k)

    def loss(self, routing: Routing) -> Tensor:
        """Returns the auxiliary loss of a batch, a scalar.

        routing: the routing of all tokens, with logits.
        """
        assert routing.logits is not None
        return router_loss(*self.balance_terms(routing), routing.logits, self.z_loss_weight)

    def tile_rows(self, x_TM: Tensor) -> int:
        """Returns R, the number of tokens of a tile.

        The first call for tokens of this width, dtype and device finds R by a test: a token's routing in a
        tile of R tokens must not depend on the other tokens of the tile.

        x_TM: (T, M), T tokens with M = d_model columns. Only their dtype, columns and device are read.
        """
        weight = self.weight
        options = (self.top_k, self.normalize)
        key = (type(self), tuple(weight.shape), weight.dtype, options)
        return rows_of_tile(key, self._results, x_TM.shape[1], x_TM)

    def _routed(self, tile_RM: Tensor, weight_EM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the logits (R, E), experts (R, K) and routing weights (R, K) of a tile of R tokens.

        tile_RM: (R, M), the tokens with M = d_model columns.
        weight_EM: (E, M), the router's weight for E experts; K is the number of choices of a token.
        """
        logits_RE = router_logits(tile_RM, with_alignment(weight_EM))
        expert_RK = self.choose(logits_RE)
        routing = Routing(expert=expert_RK, weight=logits_RE, l_aux=logits_RE, logits=logits_RE)
        return logits_RE, expert_RK, self.weights_of(routing, expert_RK)

    def _results(self, tile_RM: Tensor) -> list[Tensor]:
        """Runs the gate on one tile, forward and backward. Returns its results and the rows' gradient.

        `tile_rows` compares these tensors to test a size of tiles.

        tile_RM: (R, M), R tokens with M = d_model columns.
        """
        generator = torch.Generator().manual_seed(0)
        shape = self.weight.shape
        weight_EM = torch.randn(shape, generator=generator).to(self.weight.device, self.weight.dtype)
        with torch.inference_mode(False), torch.enable_grad():
            tile_RM = tile_RM.clone().requires_grad_()
            logits_RE, expert_RK, weight_RK = self._routed(tile_RM, weight_EM)
            (grad_RM,) = torch.autograd.grad(weight_RK, tile_RM, weight_RK.detach())
        return [logits_RE.detach(), expert_RK, weight_RK.detach(), grad_RM]


def _tiles(x_TM: Tensor, num_rows: int) -> Iterator[Tensor]:
    """Yields the tokens in tiles of ``num_rows`` tokens each. The last tile is filled up with zeros.

    Without tokens, one tile of zeros is yielded.

    x_TM: (T, M), T tokens with M = d_model columns.
    num_rows: the number of tokens of a tile.
    """
    num_tokens = x_TM.shape[0]
    for start in range(0, max(num_tokens, 1), num_rows):
        tile_RM = x_TM[start : start + num_rows]
        missing = num_rows - tile_RM.shape[0]
        yield F.pad(tile_RM, (0, 0, 0, missing)) if missing else with_alignment(tile_RM)


class BatchInvariantTopK(_GateInTiles, TopKGate):
    """A `TopKGate` whose routing of a token has the same bits in every batch."""


class BatchInvariantSwitch(_GateInTiles, SwitchGate):
    """A `SwitchGate` whose routing of a token has the same bits in every batch."""


class BatchInvariantSigmoid(_GateInTiles, SigmoidGate):
    """A `SigmoidGate` whose routing of a token has the same bits in every batch."""


class BatchInvariantDeepSeek(_GateInTiles, DeepSeekGate):
    """A `DeepSeekGate` whose routing of a token has the same bits in every batch."""

    def forward(self, x_TM: Tensor) -> Routing:
        routing = super().forward(x_TM)
        if self.training:
            chosen = routing.expert.reshape(-1)
            self.load.scatter_add_(0, chosen, torch.ones_like(chosen))
        return routing

    def choose(self, logits_RE: Tensor) -> Tensor:
        return top_indices(self._biased(logits_RE.detach().sigmoid()), self.top_k)

    def loss(self, routing: Routing) -> Tensor:
        assert routing.logits is not None
        loss = sequence_balance_loss(*self.balance_terms(routing), self.sequence_length)
        return loss + self.z_loss_weight * router_z_loss(routing.logits) if self.z_loss_weight else loss
