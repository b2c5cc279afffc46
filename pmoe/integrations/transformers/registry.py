"""Registers pmoe in the registries that the installed release of transformers has.

Every supported release has a registry of experts implementations, which run all experts on one rank. Newer
releases also have a registry of expert-parallel implementations, which spread experts over ranks.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from pmoe.warn import warn_of_untested_release

EXPERTS = "transformers.integrations.moe"
"""The module of transformers that has the registry of experts implementations."""
EXPERT_PARALLEL = "transformers.distributed.expert_parallel"
"""The module of transformers that has the registry of expert-parallel implementations."""


def register() -> None:
    """Adds "pmoe" to the registries of transformers. A second call changes nothing.

    Raises ImportError if transformers is not installed or too old. Warns if the release has no registry of
    expert-parallel implementations, and, once, if it is newer than the releases with which pmoe was tested.
    """
    try:
        version: str = importlib.import_module("transformers").__version__
    except ImportError as error:
        raise ImportError(
            f'transformers must be installed: pip install "transformers>=5.23" ({error})'
        ) from error
    interface = _find(EXPERTS, "ExpertsInterface")
    release = tuple(map(int, version.split(".")[:2]))  # 5.10.0.dev0 -> (5, 10)
    if interface is None or release < (5, 7):
        raise ImportError(
            f"transformers ({version}) must be at least 5.7: older releases have no registry to which pmoe "
            'could add its experts implementation. pip install -U "transformers>=5.23"'
        )
    from pmoe.integrations.transformers.in_graph import run_experts_module

    warn_of_untested_release("transformers", version)
    # transformers looks up implementations for FP8 experts in another registry. pmoe does not support FP8,
    # but is added there too: the error is then pmoe's, which gives the reason, and not "unknown name".
    for registry in (interface, _find("transformers.integrations.finegrained_fp8", "FP8ExpertsInterface")):
        if registry is not None:
            registry.register("pmoe", run_experts_module)
    parallel = _find(EXPERT_PARALLEL, "EPImplementationInterface")
    if parallel is None:
        warnings.warn(
            f'transformers {version}: "pmoe" is registered as an experts implementation only, which runs on '
            "one rank; this release has no registry of expert-parallel implementations. To spread experts "
            'over ranks: pip install -U "transformers>=5.23"',
            stacklevel=3,
        )
        return
    from pmoe.integrations.transformers.expert_parallel import PipelinedEP

    parallel.register("pmoe", PipelinedEP)


def _find(module: str, name: str) -> Any:
    """Returns an attribute of a module; None if the release of transformers lacks one of the two.

    module, name: the names of the module and of the attribute.
    """
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
