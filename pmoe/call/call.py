"""The record of one call of a layer, before it is decided how the call will be run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from pmoe.call.modules import LayerModules
from pmoe.checkpointing.replay import Replay

if TYPE_CHECKING:
    from pmoe.call.decision import LastCall


class CalledLayer(nn.Module):
    """Base class of a layer, which keeps a record of its last call.

    last: the record. Its fields are None before the first call.
    """

    last: LastCall


class Call(NamedTuple):
    """The arguments of one call of a layer, and the modules that the call uses.

    layer                 the layer that was called
    modules               the layer's modules and options
    scheduled             ``modules``, but without the shared expert if the layer calls it as a module.
                          Otherwise a task of the schedule computes the shared expert
                          (`LayerModules.calls_shared_expert`)
    x                     (..., M), the input, M = d_model. It is not checked yet: a rank reports a wrong
                          input to the other ranks together with its row counts
    token_ids             (...) int64, the ids by which some gates route tokens; or None
    mask                  (...) bool, True where x has a token; None if all rows are tokens. It is not
                          checked yet
    reference             a parameter whose dtype and device the input must have
                          (`LayerModules.reference_parameter`); None if there is none
    parameters_need_grad  whether autograd needs gradients of parameters of experts or callbacks
                          (`LayerModules.asks_for_gradients`)
    checks_values         whether values are checked. False while torch.distributed.pipelining runs the layer
                          on memory that was never written (`pmoe.call.shape_run`)
    may_run_again         whether activation checkpointing may run the call a second time
                          (`pmoe.checkpointing.replay.may_run_again`)
    replay                computes each decision of the call, such as the routing. In the second pass of
                          activation checkpointing it returns the decisions of the first pass
    """

    layer: CalledLayer
    modules: LayerModules
    scheduled: LayerModules
    x: Tensor
    token_ids: Tensor | None
    mask: Tensor | None
    reference: Tensor | None
    parameters_need_grad: bool
    checks_values: bool
    may_run_again: bool
    replay: Replay
