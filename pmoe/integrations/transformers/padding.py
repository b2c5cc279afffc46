"""`skip_padding`: rows of padding in a batch of a transformers model are sent to no expert.

The attention mask is an argument of the model's forward, but its experts modules only get rows. So a forward
pre-hook of the model stores the mask for this thread, the experts modules read it, and a forward hook deletes
it:

    MixtralForCausalLM
      MixtralModel         pre-hook `begin`: stores the mask (B, L)     hook `end`: deletes it
        layers.0
          mlp.experts      rows (B * S, M): tokens are computed, padding gets zeros

Gradient checkpointing recomputes a decoder layer in backward. The mask is deleted by then, and the model may
have run other batches. So each function of the model that does gradient checkpointing (a checkpoint function)
is wrapped by `Carrying`, which stores the mask of the forward pass for the recomputation.

Letters: B sequences, S positions of this call, L positions including those in a key-value cache, T = B * S
rows, N of them tokens and not padding, K experts of each token, M model width.
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
"""The attribute of an experts module that holds the `CallPadding` of the model around it.

A CallPadding is neither a submodule nor a parameter. Copies and pickles of the model contain it.
"""

CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Names of attributes that hold a module's function for gradient checkpointing.

The first is that of transformers' own layers. The second is that of torch's CheckpointWrapper, which
accelerate puts around layers under FSDP.
"""

CACHES = ("cache", "past_key_values")
"""Names that releases of transformers give to forward's argument for the key-value cache."""


def skip_padding(model: nn.Module) -> SkippedPadding:
    """Keeps padding away from the experts of ``model``. ``attention_mask`` says which rows are padding.

    From the next call of the model on, rows of padding are neither sent nor computed. Their experts' output
    is 0, and ``tokens_per_expert`` and `pmoe.stats` do not count them. Outputs and gradients of all other
    tokens stay the same, because no token attends to padding. A second call of this function changes nothing.

    Labels at padding must be -100, so that they are not part of the loss. If padding is on the left, the
    label of the first token must also be -100, because transformers' losses predict the first token from the
    padding before it.

    model: a model of transformers, or a module that contains one (DistributedDataParallel, PEFT).

    The mask is the one that the innermost model with the experts gets: (B, L) for B sequences and L positions
    including cached ones; 0 is padding. Nothing is skipped

    - if the mask is None or has four dimensions, or if its length is not the number of cached and new
      positions together,
    - if the experts do not get one row for each position of the call's sequences,
    - if the model uses another experts implementation than "pmoe", or runs in a CUDA graph.

    Returns a handle; its ``remove()`` ends the skipping. Call `skip_padding` before torch.compile, and on all
    ranks or none.

    Raises ValueError if ``model`` has no experts that pmoe can run, and for models with attention that mixes
    padding into tokens (DeepSeek-V4).

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
    """The handle that `skip_padding` returns, to end the skipping. It does not keep the model alive."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def remove(self) -> None:
        """Ends the skipping, so that padding is sent to experts again. A second call changes nothing."""
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
    """Yields each experts module with the innermost transformers model that contains it.

    That model is the one to watch, because the attention mask that it gets has an element for each row of the
    experts. The second value is None if no transformers model contains the module, or if the innermost one
    takes no attention mask (an encoder of images, for example).
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
    """Raises ValueError for a model with compressed attention, which mixes padding into other tokens.

    Such layers attend to sums over neighbouring positions, padding included, and no mask prevents this. If
    padding were skipped, the results for tokens would change.

    owner: the model that directly contains the experts; None is accepted.
    """
    kinds = getattr(getattr(owner, "config", None), "layer_types", None) or ()
    compressed = sorted({kind for kind in kinds if "compressed" in kind})
    if compressed:
        raise ValueError(
            f"model ({type(owner).__name__}) must have no layers of {', '.join(compressed)}: they mix "
            "padding into the tokens beside it, so skipping padding would change these tokens. Do not call "
            "skip_padding for this model"
        )


def _of_owner(owner: nn.Module) -> CallPadding:
    """Returns the `CallPadding` of a model. If the model has none, makes one and registers its hooks."""
    for hook in owner._forward_pre_hooks.values():
        padding = getattr(hook, "__self__", None)
        if isinstance(padding, CallPadding):
            return padding
    padding = CallPadding()
    owner.register_forward_pre_hook(padding.begin, with_kwargs=True)
    owner.register_forward_hook(padding.end, always_call=True)
    return padding


def _remove_hooks(module: nn.Module) -> None:
    """Removes the hooks of `CallPadding` from a module.

    It searches the module's tables of hooks, because a copy of a model has the hooks but no handles for them.
    """
    for hooks, options in (
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        ours = [
            key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), CallPadding)
        ]
        for key in ours:
            for table in (hooks, *options):
                table.pop(key, None)


@functools.cache
def _arguments(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments of a class's forward method, without self."""
    return tuple(inspect.signature(forward).parameters)[1:]


# ---- a call of a model


class TokenRows:
    """A mask that says which rows in a model's call are tokens, and which are padding.

    is_token_T: (T,) bool for the T rows of the call. It must not share memory with the attention mask,
        because the caller may overwrite the attention mask before backward.
    """

    def __init__(self, is_token_T: Tensor) -> None:
        self.is_token_T = is_token_T
        self._tokens: Tensor | None = None

    def tokens(self, device: torch.device) -> Tensor | None:
        """Returns the indices of the rows that are tokens, (N,) int64 for N tokens, ascending.

        Returns None if all rows are tokens. In each call of the model, the host waits for the device once, at
        the first call of this method.
        """
        if self._tokens is None:
            with torch.no_grad(), hidden_from_checkpoints():
                self._tokens = self.is_token_T.nonzero().squeeze(1)
        if self._tokens.shape[0] == self.is_token_T.shape[0]:
            return None
        return self._tokens.to(device)


class CallPadding:
    """The forward hooks of one model, which tell the experts inside it which rows are tokens, not padding.

    The hooks store a mask of the rows in each call of the model, and the experts compute only the tokens. The
    masks are stored separately for each thread, with this object as key. The object itself has no state,
    because several threads may call the model, and recomputations of checkpoints run in autograd's threads.
    """

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the model: stores which rows of this call are tokens, for the experts."""
        rows = _rows_of_call(module, args, kwargs)
        _calls.by_padding[self] = rows
        if rows is not None and torch.is_grad_enabled():
            _wrap_checkpoints(module)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def end(self, *_: Any) -> None:
        """A forward hook of the model: deletes what `begin` stored, also if forward raised an error."""
        _calls.by_padding.pop(self, None)


class _Calls(threading.local):
    """The running calls of transformers models in this thread, each with its mask of tokens and padding.

    by_padding: the mask (`TokenRows`) of each running call, by the model's `CallPadding`; None if the model
        computes all rows, padding included.
    """

    def __init__(self) -> None:
        self.by_padding: dict[CallPadding, TokenRows | None] = {}


_calls = _Calls()


def _rows_of_call(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TokenRows | None:
    """Returns which rows of a model's call are tokens.

    module: the model.
    args, kwargs: the arguments of its forward.

    Returns None if the call has no attention mask or one that does not fit its tokens, or if a CUDA graph is
    being captured. All rows are then computed.
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
    # A static cache counts its positions in a tensor, not an int. Its masks have four dimensions anyway.
    if not isinstance(num_cached, int) or mask.shape != (num_sequences, num_cached + num_positions):
        return None
    return TokenRows((mask[:, num_cached:] != 0).reshape(-1))


def _seen(cache: Any) -> Any:
    """Returns how many positions a key-value cache holds: an int, or a tensor for some caches.

    Returns None if the cache does not know this number, as for a model without attention layers.
    """
    try:
        return cache.get_seq_length()
    except (AttributeError, ValueError):
        return None


# ---- the second pass of gradient checkpointing


class Carrying:
    """Wraps a function for gradient checkpointing, so that the recomputation skips the same padding.

    The forward pass and its recomputation then send the same rows to experts.

    checkpoint: the model's own function for gradient checkpointing, which this object calls.
    """

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
    """A context in which the experts that run in this thread read the token masks ``rows``.

    A mask says which rows of a running model's call are tokens and not padding. At the end of the context the
    thread has its earlier masks again.

    rows: the mask of each running call, by the model's `CallPadding`; None if the model computes all rows.
    """
    before = _calls.by_padding
    _calls.by_padding = dict(rows)
    try:
        yield
    finally:
        _calls.by_padding = before


def _wrap_checkpoints(module: nn.Module) -> None:
    """Wraps the functions for gradient checkpointing of a model and its layers by `Carrying`.

    The children of the layers are included.

    This runs at each call of the model, because a checkpoint function may be set at any time. To look at all
    modules would take too long.

    module: the model that is called.
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
"""A function that runs experts for some rows: hidden states (T, M), expert indices (T, K) and weights (T, K).

It returns outputs (T, M). Letters: T rows, K experts of each row, M model width.
"""


def run_tokens(
    module: nn.Module, run: RunExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs experts for the rows that are tokens. Returns outputs (T, M), with zeros for padding.

    Letters: T rows, K experts of each row, M model width.

    module: the experts module.
    run: computes the outputs of the rows that it gets.
    hidden_states: (T, M), the rows.
    top_k_index, top_k_weights: (T, K), the experts of each row and their weights.

    All rows are computed if `skip_padding` was not called for the model, or if the call of the model has
    another number of rows than T.
    """
    padding = module.__dict__.get(ATTRIBUTE)
    if padding is None:
        return run(hidden_states, top_k_index, top_k_weights)
    return _run_tokens(padding, run, hidden_states, top_k_index, top_k_weights)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _run_tokens(
    padding: CallPadding, run: RunExperts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs experts for the rows that are tokens. Returns outputs (T, M), with zeros for padding.

    There are T rows of width M, with K experts each. torch.compile leaves this function out of its graphs,
    because the number of tokens is known only at run time.

    padding: the object under which the model's hooks have stored which rows of this call are tokens.
    run: computes the outputs of the rows that it gets.
    hidden_states: (T, M), the rows.
    top_k_index, top_k_weights: (T, K), the experts of each row and their weights.
    """
    rows = _calls.by_padding.get(padding)
    if rows is None or not all(
        tensor.shape[:1] == rows.is_token_T.shape for tensor in (hidden_states, top_k_index, top_k_weights)
    ):
        return run(hidden_states, top_k_index, top_k_weights)
    tokens_N = rows.tokens(hidden_states.device)
    if tokens_N is None:
        return run(hidden_states, top_k_index, top_k_weights)
    y_NM = run(hidden_states[tokens_N], top_k_index[tokens_N], top_k_weights[tokens_N])
    return y_NM.new_zeros(hidden_states.shape).index_copy(0, tokens_N, y_NM)
