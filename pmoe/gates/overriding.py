"""Base class of gates that run another gate, and replace the experts that this gate chose."""

from __future__ import annotations

import abc
from dataclasses import replace

from torch import Tensor, nn

from pmoe.arguments import check_kind
from pmoe.gates.base import Gate, PartitionName, Routing


class OverridingGate(Gate):
    """Base class of gates that run an inner gate and replace its choices: for benchmarks and tests.

    The inner gate runs in full and gives the routing weights and l_aux. So a call takes as long as with the
    inner gate alone, and the inner gate's parameters get gradients. l_aux is the loss of the inner gate's own
    choices. The k-th weight of a token becomes the weight of the token's k-th new expert.

    If the layer has a ``capacity_factor``, it applies the capacity to the new choices.

    gate: the inner gate, a module that gives each token top_k experts.

    Raises TypeError if ``gate`` is not a module. Raises ValueError for a gate that gives tokens different
    numbers of experts, that mixes tokens (`SoftGate`), or that applies the capacity itself.
    """

    partition: PartitionName = "none"
    gate: nn.Module

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        check_kind(nn.Module, "a torch.nn.Module, such as pmoe.gates.TopKGate", gate=gate)
        for flag in ("picks_tokens", "mixes_tokens", "decides_capacity"):
            if getattr(gate, flag, False):
                raise ValueError(
                    f"gate ({type(gate).__name__}) must give each token top_k experts and leave the capacity "
                    f"to the layer, but its {flag} is True: pass for example pmoe.gates.TopKGate"
                )
        self.gate = gate
        needs_token_ids: bool = getattr(gate, "needs_token_ids", False)
        saved_scores: int = getattr(gate, "saved_scores", 1)
        self.needs_token_ids = needs_token_ids
        self.saved_scores = saved_scores

    @abc.abstractmethod
    def choices(self, expert_TK: Tensor) -> Tensor:
        """Returns the experts of each token, (T, K) int64 on the same device, distinct for each token.

        expert_TK: (T, K) int64, the experts that the inner gate chose.
        """

    def forward(self, x_TM: Tensor, *args: Tensor) -> Routing:
        """Routes the T tokens x_TM, (T, M), by the inner gate, and then replaces its choices. M = d_model.

        args: the tokens' ids, (T,), if the inner gate needs them.
        """
        routing = self.gate(x_TM, *args)
        check_kind(Routing, "a module that returns a pmoe.Routing", gate=routing)
        decided: Routing = routing
        return replace(decided, expert=self.choices(decided.expert))

    def reset_parameters(self) -> None:
        self.gate.reset_parameters()  # type: ignore[operator]  # a Gate has it; a user's module may not
