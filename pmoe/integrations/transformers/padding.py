"""`skip_padding`: padding in a batch of a transformers model goes to no expert.

Only the model's own forward gets the attention mask; its experts get rows. So a hook before that forward
keeps the mask for the thread, the experts inside look it up, and a hook behind the forward drops it:

    MixtralForCausalLM
      MixtralModel         begin: the mask (B, L) of this call        end: forgotten
        layers.0
          mlp.experts      rows (B * S, M): those of tokens are computed, the others are zeros

A checkpoint runs a decoder layer again in backward. The model's forward has ended by then, and may have run
for other batches. So each checkpoint function of the model is wrapped (`Carrying`): the function that it
keeps for the second pass carries the mask of the first one.

Letters: B sequences, S positions of this call, L positions with those in a cache, T = B * S rows, N of them
tokens, K choices, M model width.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pmoe.arguments import check_module
from pmoe.checkpointing.replay import hidden_from_checkpoints
from pmoe.engine.lanes.run import is_captured

ATTRIBUTE = "_pmoe_padding"
"""The attribute of an experts module that holds the `CallPadding` of its model. That is no submodule or
parameter. Copies and pickles of the model keep it."""

CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of modules that hold a checkpoint function.

The first is that of transformers' own layers, the second that of torch's CheckpointWrapper, which accelerate
puts around layers under FSDP.
"""

CACHES = ("cache", "past_key_values")
"""Names of the argument for a cache, in different releases of transformers."""


def skip_padding(model: nn.Module) -> SkippedPadding:
    """Keeps padding, which ``attention_mask`` hides, away from the experts of ``model``.

    From the next call of the model on, rows of padding are not sent and not computed, their experts' output
    is 0, and ``tokens_per_expert`` and `pmoe.stats` do not count them. Outputs and gradients of the other
    tokens do not change, because no token attends to padding. A second `skip_padding` changes nothing.

    Labels of padding must be -100. With padding on the left, the first token's label must be -100 too:
    transformers' losses predict it from the padding before it.

    model: a model of transformers, or a module that contains one (DistributedDataParallel, PEFT). The mask
    (B, L) is the one that reaches the inner model with the experts; 0 is padding. Nothing is skipped

    - if the mask is None, has four dimensions, or is not as long as the call's tokens and its cache,
    - if experts get other rows than those of the call's tokens,
    - with another implementation of experts than "pmoe", or in a CUDA graph.

    Returns a handle, whose ``remove()`` ends the skipping. Call `skip_padding` before torch.compile, and on
    every rank or on none.

    Raises ValueError if ``model`` has no experts of transformers' registry, and for models whose attention
    mixes padding into tokens (DeepSeek-V4's).

    Example: handle = skip_padding(model)
    """
    check_module(model=model)
    owners = dict(_owners(model))
    if not any(owner is not None for owner in owners.values()):
        raise ValueError(
            f"model ({type(model).__name__}) must be or contain a model of transformers that has experts and "
            "whose forward takes attention_mask; skip_padding found none. Pass the whole model, such as a "
            "MixtralForCausalLM, not a layer of it. Once the model has been called, "
            "pmoe.integrations.transformers.layers(model) names the experts that pmoe runs"
        )
    for owner in owners.values():
        _check_layers(owner)
    for experts, owner in owners.items():
        if owner is not None:
            vars(experts)[ATTRIBUTE] = _of_owner(owner)
    return SkippedPadding(model)


class SkippedPadding:
    """The handle that `skip_padding` returns. It does not keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def remove(self) -> None:
        """Ends the skipping: padding goes to experts again. A second call changes nothing."""
        model = self._model()
        for module in () if model is None else model.modules():
            vars(module).pop(ATTRIBUTE, None)
            _remove_hooks(module)
            for name in CHECKPOINTS:
                carrying = vars(module).get(name)
                if isinstance(carrying, Carrying):
                    setattr(module, name, carrying.checkpoint)


# ---- the modules of a model


def _owners(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yields each experts module of transformers' registry, with the innermost model that contains it.

    That model's mask fits the rows. None instead of the model if it takes no mask (an encoder of images), or
    if no model contains the module.
    """
    from transformers.modeling_utils import PreTrainedModel

    names = dict(model.named_modules())
    for name, module in names.items():
        if not (hasattr(module, "has_bias") and hasattr(module, "is_transposed")):
            continue
        above = [name[:at] for at, letter in enumerate(name) if letter == "."][::-1]
        owners = (names[path] for path in [*above, ""] if isinstance(names[path], PreTrainedModel))
        owner = next(owners, None)
        takes_mask = owner is not None and "attention_mask" in _arguments(type(owner).forward)
        yield module, owner if takes_mask else None


def _check_layers(owner: nn.Module | None) -> None:
    """Raises ValueError for attention over sums of neighbouring positions: masks do not keep padding out."""
    kinds = getattr(getattr(owner, "config", None), "layer_types", None) or ()
    compressed = sorted({kind for kind in kinds if "compressed" in kind})
    if compressed:
        raise ValueError(
            f"model ({type(owner).__name__}) must have no layers of {', '.join(compressed)}: they mix "
            "padding into the tokens beside it, so skipping padding would change these tokens. Do not call "
            "skip_padding for this model"
        )


def _of_owner(owner: nn.Module) -> CallPadding:
    """Returns the `CallPadding` of a model. If there is none, makes one and registers its hooks."""
    for hook in owner._forward_pre_hooks.values():
        padding = getattr(hook, "__self__", None)
        if isinstance(padding, CallPadding):
            return padding
    padding = CallPadding()
    owner.register_forward_pre_hook(padding.begin, with_kwargs=True)
    owner.register_forward_hook(padding.end, always_call=True)
    return padding


def _remove_hooks(module: nn.Module) -> None:
    """Removes hooks without their handles, because a copy of a model has hooks and no handles of them."""
    for hooks, options in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        ours = [
            key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), CallPadding)
        ]
        for key in ours:
            for each in (hooks, *options):
                each.pop(key, None)


@functools.cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that a class's forward takes by position, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


# ---- a call of a model


class TokenRows:
    """The rows of a call that are tokens, as opposed to padding.

    is_token_T: (T,) bool. It is a copy, because a caller may overwrite the mask before backward.
    """

    def __init__(self, is_token_T: Tensor) -> None:
        self.is_token_T = is_token_T
        self._tokens: Tensor | None = None

    def tokens(self, device: torch.device) -> Tensor | None:
        """Returns (N,) int64, the rows that are tokens, in order; None if all rows are.

        The host waits for the device once in each call of the model.
        """
        if self._tokens is None:
            with torch.no_grad(), hidden_from_checkpoints():
                self._tokens = self.is_token_T.nonzero().squeeze(1)
        if self._tokens.shape[0] == self.is_token_T.shape[0]:
            return None
        return self._tokens.to(device)


class CallPadding:
    """The hooks of one model, and the key by which its experts find the rows of the present call.

    It has no state, because several threads may call a model, and autograd's threads run the second pass of a
    checkpoint.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook: remembers which rows are tokens."""
        rows = _rows_of_call(module, args, kwargs)
        _calls.by_padding[self] = rows
        if rows is not None and torch.is_grad_enabled():
            _wrap_checkpoints(module)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def end(self, *_: Any) -> None:
        """A forward hook, called after errors, too."""
        _calls.by_padding.pop(self, None)


class _Calls(threading.local):
    """This thread's rows of each model that runs now; None where all rows are computed."""

    def __init__(self) -> None:
        self.by_padding: dict[CallPadding, TokenRows | None] = {}


_calls = _Calls()


def _rows_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TokenRows | None:
    """Returns the rows of a call that are tokens; None if there is no mask that fits the rows.

    module: the model. args, kwargs: the arguments of its forward.
    """
    arguments = dict(zip(_arguments(type(module).forward), args, strict=False)) | dict(kwargs)
    mask = arguments.get("attention_mask")
    tokens = (
        arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments.get("input_ids")
    )
    if type(mask) is not Tensor or mask.dim() != 2 or mask.is_meta:
        return None
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or is_captured(mask.device):
        return None
    cache = next((arguments[name] for name in CACHES if arguments.get(name) is not None), None)
    num_cached = 0 if cache is None else _seen(cache)
    num_sequences, num_positions = tokens.shape[:2]
    # A static cache has a count on the device, no int. Its masks have four dimensions anyway.
    if not isinstance(num_cached, int) or mask.shape != (num_sequences, num_cached + num_positions):
        return None
    return TokenRows((mask[:, num_cached:] != 0).reshape(-1))


def _seen(cache: Any) -> Any:
    """Returns how many positions a cache holds; None if it cannot tell, as one without attention layers."""
    try:
        return cache.get_seq_length()
    except (AttributeError, ValueError):
        return None


# ---- the second pass of a checkpoint


class Carrying:
    """A checkpoint function whose second pass skips the rows that its first pass skipped."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        rows = dict(_calls.by_padding)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _calls_are(rows):
                return function(*args, **kwargs)

        return self.checkpoint(run, *args, **kwargs)


@contextmanager
def _calls_are(rows: dict[CallPadding, TokenRows | None]) -> Iterator[None]:
    """Makes these rows the ones of this thread, inside the block."""
    before = _calls.by_padding
    _calls.by_padding = dict(rows)
    try:
        yield
    finally:
        _calls.by_padding = before


def _wrap_checkpoints(module: nn.Module) -> None:
    """Wraps the checkpoint functions of the model, of its layers and of the layers' direct children.

    It runs at each call, because a checkpoint function may be set at any time. A look at all modules would
    take too long.
    """
    layers = [layer for child in module.children() if isinstance(child, nn.ModuleList) for layer in child]
    inside = [part for layer in layers for part in layer._modules.values() if part is not None]
    for owner in (module, *layers, *inside):
        attributes = vars(owner)
        for name in CHECKPOINTS:
            checkpoint = attributes.get(name)
            if checkpoint is not None and not isinstance(checkpoint, Carrying):
                attributes[name] = Carrying(checkpoint)


# ---- a call of experts

RunExperts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function from hidden states (T, M), expert indices (T, K) and weights (T, K) to outputs (T, M)."""


def run_tokens(
    module: nn.Module, run: RunExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs the rows that are tokens; returns (T, M), their results and zeros for padding.

    module: the experts module.
    run: computes the rows that it is given.
    hidden_states, top_k_index, top_k_weights: (T, M), (T, K) and (T, K).

    All rows are run if the model skips no padding, or if its call has another number of rows.
    """
    padding = module.__dict__.get(ATTRIBUTE)
    if padding is None:
        return run(hidden_states, top_k_index, top_k_weights)
    return _run_tokens(padding, run, hidden_states, top_k_index, top_k_weights)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _run_tokens(
    padding: CallPadding, run: RunExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs the rows that are tokens, outside of a compiled graph: their number is known only at run time."""
    rows = _calls.by_padding.get(padding)
    if rows is None or not all(
        each.shape[:1] == rows.is_token_T.shape for each in (hidden_states, top_k_index, top_k_weights)
    ):
        return run(hidden_states, top_k_index, top_k_weights)
    tokens_N = rows.tokens(hidden_states.device)
    if tokens_N is None:
        return run(hidden_states, top_k_index, top_k_weights)
    y_NM = run(hidden_states[tokens_N], top_k_index[tokens_N], top_k_weights[tokens_N])
    return y_NM.new_zeros(hidden_states.shape).index_copy(0, tokens_N, y_NM)
