"""Which of transformers' registries this release has, and pmoe's entries in them."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

NAME = "pmoe"
"""As experts_implementation and as ep_implementation."""

LEAST = (5, 7)
"""The first release of transformers whose models take experts implementations from the registry."""

EXPERTS = "transformers.integrations.moe"
EXPERT_PARALLEL = "transformers.distributed.expert_parallel"
QUANTISED = "transformers.integrations.finegrained_fp8"


def register() -> str:
    """Adds pmoe to the registries, and says to which. A second call changes nothing.

    Raises ImportError, saying what to install, where there is no transformers, or none with a registry of
    experts. Warns where the expert-parallel registry is missing.
    """
    version = _version()
    interface = getattr(_find(EXPERTS), "ExpertsInterface", None)
    if interface is None or _release(version) < LEAST:
        raise ImportError(
            f"transformers ({version}) must be at least {'.'.join(map(str, LEAST))}, whose registry of "
            'experts implementations takes others than its own: pip install -U "transformers>=5.23"'
        )
    from pmoe.integrations.transformers.run import experts_forward

    # FP8 experts ask a registry of their own, and would not find pmoe: they are refused with a reason.
    for each in (interface, getattr(_find(QUANTISED), "FP8ExpertsInterface", None)):
        if each is not None:
            each.register(NAME, experts_forward)
    parallel: Any = getattr(_find(EXPERT_PARALLEL), "EPImplementationInterface", None)
    if parallel is None:
        text = (
            f'transformers {version}: "{NAME}" is registered as an experts implementation only, on one rank; '
            'there is no registry of expert-parallel implementations: pip install -U "transformers>=5.23"'
        )
        warnings.warn(text, stacklevel=3)
        return text
    from pmoe.integrations.transformers.expert_parallel import PipelinedEP

    parallel.register(NAME, PipelinedEP)
    return (
        f'transformers {version}: "{NAME}" is registered as experts_implementation and as ep_implementation'
    )


def _version() -> str:
    try:
        return str(importlib.import_module("transformers").__version__)
    except ImportError as error:
        raise ImportError(
            f'transformers must be installed: pip install "transformers>=5.23" ({error})'
        ) from error


def _release(version: str) -> tuple[int, ...]:
    """Example: 5.10.0.dev0 -> (5, 10)"""
    return tuple(int(number) for number in version.split(".")[:2])


def _find(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
