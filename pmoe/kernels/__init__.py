"""Python functions that call pmoe's CUDA kernels (cuda/). Importing them needs no compiled extension.

    extension         loads the compiled extension `pmoe._cuda`, and finds which kernels each device can run
    expected          predicts which code a device would run for grouped products, without the device
    gemm              codes and checks that all products share
    operands          checks of the memory of tensors that kernels read and write
    registry          chooses the code of a grouped product: pmoe's kernels, torch's grouped_mm, or a loop
    grouped_gemm      grouped products: rows sorted by expert, each times the weight matrix of its expert
    scaled_products   grouped products of operands rounded to float8, by PyTorch's scaled_grouped_mm
    permute           copies tokens into the order of their experts, and sums the results of each token
    route             routing: softmax, top-k, rows of each expert, place of each row in the order of experts
    wire              messages of rows in narrower formats: packs them from tokens, unpacks them to rows
    counts            exchange of row counts: messages, agreed numbers, the order of arrived rows
    comet             COMET's fused kernels: dispatch + product, product + combine
    flashdmoe         FlashDMoE's kernels, which compute a whole forward or backward pass in one launch
    heap              device memory that other ranks write into while kernels of comet or flashdmoe run
    launch_order      lets launches that use the same heap wait for each other, also in CUDA graphs

`status` returns which kernels were built, which of them each device can run, and why it cannot run others.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from pmoe.kernels.extension import status

__all__ = ["status"]


def late_names(package: str, file_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` that imports a package's files when their names are first used.

    Python calls ``__getattr__`` for a name that the package lacks. The function imports the file of this name
    and returns the value. It also makes the value an attribute of the package, so it is called once for each
    name.

    package: the package's full name, such as "pmoe.kernels.permute".
    file_of: for each such name the file of the package that has it. {"permute": "operators"} says that
        pmoe.kernels.permute.permute is in operators.py.

    The returned function raises AttributeError for a name that is not in ``file_of``.
    """

    def value_of(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{file_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return value_of
