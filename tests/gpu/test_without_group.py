"""One GPU without any process group: nothing travels, nothing of torch.distributed is needed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.gpu.support import (
    LAYERS,
    NEEDS_GPU,
    ROUNDED,
    check_backward_runs_ahead,
    check_waiting,
    make_batch,
    make_layer,
    plain_step,
    relative_norm,
    step,
)

pytestmark = NEEDS_GPU


@pytest.fixture(autouse=True)
def no_group() -> None:
    assert not dist.is_initialized()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["n=1", "n=3", "top-1", "swiglu", "no bias"])
def test_output_and_gradients_equal_the_plain_layer(name: str, dtype: torch.dtype) -> None:
    """Both errors against the plain layer in float64: at most twice that of the plain layer in this type."""
    options = LAYERS[name]()
    layer, (x, grad) = make_layer(dtype, **options), make_batch(dtype=dtype)
    got, expert_TK = step(layer, x, grad), layer.gate(x).expert
    kind = options.get("expert", "ffn")
    expected = plain_step(layer, x, grad, torch.float64, expert_TK, kind=kind)
    plain = plain_step(layer, x, grad, dtype, expert_TK, kind=kind)
    # Where a sum runs in another order, luck decides which is closer: 200 roundings, but for bfloat16, whose
    # sums run in float32, the rounding of a stored result.
    least = 2 * ROUNDED[dtype] if dtype == torch.bfloat16 else 200 * ROUNDED[dtype]
    for tensor in got:
        error, allowed = (relative_norm(found[tensor], expected[tensor]) for found in (got, plain))
        assert error <= max(2 * allowed, least), f"{tensor}: {error} against {allowed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_forward_waits_once_and_backward_never(name: str, dtype: torch.dtype) -> None:
    check_waiting(make_layer(dtype, **LAYERS[name]()), *make_batch(dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_returns_before_the_device_begins_it(dtype: torch.dtype) -> None:
    check_backward_runs_ahead(make_layer(dtype, pipeline=3), *make_batch(dtype=dtype))
