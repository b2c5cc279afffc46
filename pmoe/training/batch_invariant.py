"""`make_batch_invariant`: makes the bits of a token's output independent of the rest of its batch."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from pmoe.arguments import check_kind
from pmoe.layer import MoELayer
from pmoe.layer.batch_invariant import change, check_invariant

ModelType = TypeVar("ModelType", bound=nn.Module)


def make_batch_invariant(model: ModelType) -> ModelType:
    """Makes all MoELayers of a model batch-invariant, in place. Returns the model.

    The bits of a token's output then do not depend on

    - the other tokens of the call, and the token's place among them;
    - n (the number of chunks), the restore pair (how backward gets the rows and the hidden activation) and
      the number of ranks.

    The same is true of the token's gradient, a part of the gradient of the layer's input. The gradients of
    parameters are sums over the tokens of a batch, so they are not invariant. They are the same in two runs
    with the same batch and the same n.

    All this is true for one kind of machine, one version of torch and one number of threads. It is true of
    the layers only: other modules of the model are not changed. Parameters, state dicts and optimizers stay
    valid. Call this function on every rank.

    model: a model, or a single `pmoe.MoELayer`.

    Raises TypeError if ``model`` is no module. Raises ValueError, before anything is changed, if the model
    has no MoELayer, or if a layer has an option or a module that cannot be batch-invariant. The message names
    the layer and the reason.
    """
    check_kind(nn.Module, "a torch.nn.Module", model=model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    if not layers:
        raise ValueError(f"model ({type(model).__name__}) must be or contain a pmoe.MoELayer")
    for name, layer in layers.items():
        check_invariant(layer.layer_modules, name)
    for layer in layers.values():
        change(layer)
    return model
