"""Values of many kinds, by the names that the table has for them. A function makes each anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import nn

M, H, E, K, T = 6, 8, 4, 2, 5

VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "-1": lambda: -1,
    "0": lambda: 0,
    "1": lambda: 1,
    "2": lambda: 2,
    "huge": lambda: 1 << 62,
    "0.5": lambda: 0.5,
    "True": lambda: True,
    "False": lambda: False,
    "numpy.int": lambda: np.int64(2),
    "numpy.float": lambda: np.float64(1.5),
    "numpy.bool": lambda: np.bool_(True),
    "numpy.array": lambda: np.ones(2),
    "text": lambda: "no such",
    "spaces": lambda: " topk ",
    "empty": lambda: "",
    "bytes": lambda: b"topk",
    "-inf": lambda: -math.inf,
    "1e300": lambda: 1e300,
    "10**400": lambda: 10**400,
    "fraction": lambda: Fraction(1, 2),
    "numpy.uint8": lambda: np.uint8(2),
    "numpy.nan": lambda: np.float32("nan"),
    "10**400GiB": lambda: "9" * 400 + "GiB",
    "list": lambda: [1],
    "()": lambda: (),
    "{}": lambda: {},
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "scalar": lambda: torch.tensor(2),
    "sparse": lambda: torch.eye(M).to_sparse(),
    "complex": lambda: torch.ones(T, M, dtype=torch.complex64),
    "integers": lambda: torch.ones(T, M, dtype=torch.int64),
    "meta": lambda: torch.ones(T, M, device="meta"),
    "tensor": lambda: torch.ones(T, M),
    "module": lambda: nn.Linear(M, M),
}
