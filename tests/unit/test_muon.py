"""Muon for experts on one rank: the steps of torch's Muon on each matrix, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pmoe
from pmoe.training.muon import orthogonalized
from tests.kit import one_thread  # noqa: F401

M, H, E = 6, 10, 3


def layer(expert: str = "swiglu", dtype: torch.dtype = torch.float32) -> pmoe.MoELayer:
    torch.manual_seed(2)
    return pmoe.MoELayer(M, H, E, 2, expert=expert, dtype=dtype)


def steps(moe: pmoe.MoELayer, optimizers: list[Any], count: int = 3) -> None:
    for step in range(count):
        x = torch.randn(20, M, dtype=moe.experts.w1.dtype, generator=torch.Generator().manual_seed(step))
        moe.zero_grad()
        moe(x).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()


def matrices_of(moe: pmoe.MoELayer) -> list[Tensor]:
    """Returns each expert's matrices, the halves of w1 apart."""
    factor = moe.experts.hidden_factor
    return [
        *(half for w1 in moe.experts.w1 for half in w1.view(factor, H, M)),
        *moe.experts.w2,
    ]


@pytest.mark.parametrize("expert", ["ffn", "swiglu"])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_a_step_is_that_of_torch_on_each_matrix(expert: str, adjust: Any) -> None:
    moe, other = layer(expert), layer(expert)
    parts = [nn.Parameter(matrix.detach().clone()) for matrix in matrices_of(other)]
    torchs = torch.optim.Muon(parts, lr=0.02, adjust_lr_fn=adjust)
    optimizer = pmoe.ExpertMuon(moe, lr=0.02, adjust_lr_fn=adjust)
    for step in range(3):
        x = torch.randn(20, M, generator=torch.Generator().manual_seed(step))
        moe.zero_grad()
        moe(x).square().sum().backward()
        gradients = matrices_of_gradient(moe)
        for part, gradient in zip(parts, gradients, strict=True):
            part.grad = gradient.clone()
        optimizer.step()
        torchs.step()
    for mine, part in zip(matrices_of(moe), parts, strict=True):
        torch.testing.assert_close(mine, part, rtol=0, atol=0.02 * 0.02)  # bfloat16 products in another order


def matrices_of_gradient(moe: pmoe.MoELayer) -> list[Tensor]:
    factor = moe.experts.hidden_factor
    return [*(half for w1 in moe.experts.w1.grad for half in w1.view(factor, H, M)), *moe.experts.w2.grad]


def test_a_batch_is_orthogonalized_matrix_by_matrix() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 5, 9, dtype=torch.float64)
    for matrices in (batch, batch.mT):
        found = orthogonalized(matrices, 5, torch.float64)
        for matrix, one in zip(matrices, found, strict=True):
            x = matrix.clone() if matrix.shape[0] <= matrix.shape[1] else matrix.t().clone()
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.t()
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            wanted = x if matrix.shape[0] <= matrix.shape[1] else x.t()
            assert (one - wanted).abs().max() <= 1e-12 * wanted.abs().max()
        values = torch.linalg.svdvals(found)
        assert 0.6 < values.min() < values.max() < 1.3
    assert not orthogonalized(torch.zeros(2, 3, 4), 5).any()


def test_the_gradient_is_not_changed() -> None:
    moe = layer(dtype=torch.bfloat16)
    optimizer = pmoe.ExpertMuon(moe, nesterov=False, momentum=0.0)
    moe(torch.randn(8, M, dtype=torch.bfloat16)).sum().backward()
    before = moe.experts.w1.grad.clone()
    optimizer.step()
    assert torch.equal(moe.experts.w1.grad, before)


def test_biases_and_the_gate_are_left_to_others() -> None:
    moe = layer("ffn")
    before = {name: value.clone() for name, value in moe.state_dict().items()}
    steps(moe, [pmoe.ExpertMuon(moe)])
    changed = {name for name, value in moe.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"experts.w1", "experts.w2"}


def test_a_checkpoint_has_its_state(tmp_path: Path) -> None:
    moe, other = layer(), layer()
    optimizer = pmoe.ExpertMuon(moe, dtype=torch.float32)
    steps(moe, [optimizer])
    pmoe.save_checkpoint(tmp_path, moe, optimizer, step=1)
    again = pmoe.ExpertMuon(other, dtype=torch.float32)
    pmoe.load_checkpoint(tmp_path, other, again)
    steps(moe, [optimizer])
    steps(other, [again])
    assert torch.equal(moe.experts.w1, other.experts.w1)


def test_models_that_it_cannot_train_are_named() -> None:
    with pytest.raises(ValueError, match=r"model \(Linear\) must hold a MoELayer with stacked experts"):
        pmoe.ExpertMuon(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"a layer '' whose experts \(ModuleExperts\) must be plain stacked"):
        pmoe.ExpertMuon(pmoe.MoELayer(M, H, E, expert=lambda **_: nn.Linear(M, M)))
    with pytest.raises(ValueError, match=r"momentum \(1.0\) must be below 1"):
        pmoe.ExpertMuon(layer(), momentum=1.0)
    with pytest.raises(ValueError, match=r"ns_steps \(1000000000\) must be at least 1, and at most 99"):
        pmoe.ExpertMuon(layer(), ns_steps=10**9)
