"""What a user writes, as both type checkers read it: tests/unit/test_types.py. Nobody runs this file.

A line that ends in "# found" is wrong, and each checker must find it; all others must pass.
"""
# pyright: strict, reportUnknownMemberType=false
# Strict but for members of torch whose types torch does not tell.

from __future__ import annotations

import argparse
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from typing_extensions import assert_type

import pmoe
import pmoe.convert
from pmoe.experts import ActivationName, ExpertName
from pmoe.gates import GATES, DeepSeekGate, ExternalGate, GateName, TopKGate
from pmoe.schedule.restore import StrategyName


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.moe = pmoe.MoELayer(width, 4 * width, num_experts=8, top_k=2, pipeline=True, memory_reuse="S4")

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return x + self.moe(normed)


def train(blocks: list[Block], mesh: DeviceMesh, batches: list[Tensor]) -> float:
    model = pmoe.parallelize(nn.Sequential(*blocks), mesh)
    assert_type(model, nn.Sequential)
    optimizer = torch.optim.AdamW(pmoe.parameter_groups(model), lr=1e-3)
    loaded = pmoe.load_checkpoint("runs", model, optimizer)
    total = 0.0
    for step, x in enumerate(batches, loaded.step):
        loss = F.mse_loss(model(x), x) + 0.01 * sum(block.moe.l_aux for block in blocks)
        loss.backward()
        total += pmoe.clip_grad_norm_(model, 1.0).item()
        optimizer.step()
        for block in blocks:
            block.moe.l_aux = None
        pmoe.save_checkpoint("runs", model, optimizer, step=step, extra={"loss": loss.item()})
    return total


def call(layer: pmoe.MoELayer, x: Tensor, ids: Tensor) -> None:
    assert_type(layer(x), Tensor)
    assert_type(layer(x, ids), Tensor)
    assert_type(layer(x, token_ids=ids), Tensor)
    assert_type(layer.l_aux, Tensor)
    assert_type(0.01 * layer.l_aux, Tensor)
    assert_type(layer.tokens_per_expert, Tensor)
    assert_type(layer.predict_memory(512, memory_reuse="S1").peak, int)
    assert_type(layer.num_local_experts, int)
    if layer.ran is not None:
        print(layer.ran.path, layer.ran.forward)
    print(pmoe.stats(layer, all_ranks=True), layer.experts.num_local_experts)
    with pmoe.recording() as journal:
        layer(x)
    print(len(journal.spans))


# ---- options that are words

layer = pmoe.MoELayer(
    64,
    256,
    8,
    gate="noisy_topk",
    expert="swiglu",
    activation="silu",
    pipeline="solve",
    fused="forward",
    dispatch="auto",
    combine="hierarchical_2d",
    order="einsum",
    device="cuda",
    dtype=torch.bfloat16,
)
layer.pipeline = 4
layer.pipeline = False
layer.memory_reuse = "S2"
layer.memory_reuse = pmoe.Restore("keep", "recompute")
layer.memory_budget = "2GiB"
layer.fused = "auto"
gates: list[GateName] = [*GATES]

parser = argparse.ArgumentParser()
parser.add_argument("--gate", choices=gates, default="topk")
parser.add_argument("--reuse", choices=["S1", "S2", "S3", "S4"])
arguments = parser.parse_args()
pmoe.MoELayer(64, 256, 8, gate=arguments.gate, memory_reuse=arguments.reuse or False)


def of_words(gate: str, expert: ExpertName, activation: ActivationName, reuse: StrategyName | None) -> None:
    pmoe.MoELayer(64, 256, 8, gate=gate)  # found
    pmoe.MoELayer(64, 256, 8, gate=cast(GateName, gate), expert=expert, activation=activation)
    pmoe.MoELayer(64, 256, 8, memory_reuse=reuse or False)
    pmoe.MoELayer(64, 256, 8, memory_reuse=reuse)  # found


pmoe.convert.to_pmoe({}, "mixtral")
pmoe.gates.ExpertChoiceGate(64, 8, normalize_over="tokens")
pmoe.gates.XMoEGate(64, 8, score="sigmoid")


# ---- parts of one's own


class OwnGate(pmoe.Gate):
    partition = "none"

    def forward(self, x_TM: Tensor) -> pmoe.Routing:
        expert_T1 = x_TM.argmax(-1, keepdim=True)
        weight_T1 = torch.ones_like(x_TM[:, :1])
        return pmoe.Routing(expert=expert_T1, weight=weight_T1, l_aux=weight_T1.new_zeros(()))


class ById(pmoe.Gate):
    needs_token_ids = True

    def forward(self, x_TM: Tensor, token_ids_T: Tensor) -> pmoe.Routing:
        return OwnGate()(x_TM[token_ids_T])


class Halved(pmoe.Callback):
    def before_dispatch(self, rows: Tensor, chunk: int) -> Tensor:
        return rows.bfloat16()


class Expert(nn.Module):
    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()


def of_parts(x: Tensor, ids: Tensor) -> None:
    assert_type(OwnGate()(x), pmoe.Routing)
    assert_type(ById()(x, ids), pmoe.Routing)
    assert_type(TopKGate(64, 8)(x), pmoe.Routing)
    assert_type(Halved().before_dispatch(x, 0), Tensor)
    pmoe.MoELayer(64, 256, 8, gate=OwnGate(), expert=Expert, callbacks=[Halved()])
    external = ExternalGate()
    with external.routing(ids, x):
        print(external(x).expert)
    balanced = DeepSeekGate(64, 8)
    balanced.update_bias()
    assert_type(balanced.bias, Tensor)


# ---- what is wrong

pmoe.save_checkpont("runs", layer, step=1)  # found
print(pmoe.gates.TopkGate)  # found
pmoe.MoElayer(64, 256, 8)  # found
pmoe.save_checkpoint("runs", layer)  # found
pmoe.stats(layer, every_rank=True)  # found
pmoe.MoELayer(64, 256, num_expert=8)  # found
pmoe.MoELayer(64, 256, "8")  # found
pmoe.MoELayer(64, 256, 8, gate="tpok")  # found
pmoe.MoELayer(64, 256, 8, expert="fnn")  # found
pmoe.MoELayer(64, 256, 8, activation="selu")  # found
pmoe.MoELayer(64, 256, 8, pipeline="sovle")  # found
pmoe.MoELayer(64, 256, 8, memory_reuse="S5")  # found
pmoe.MoELayer(64, 256, 8, fused="always")  # found
pmoe.MoELayer(64, 256, 8, dispatch="flatt")  # found
pmoe.MoELayer(64, 256, 8, combine="auto")  # found
pmoe.MoELayer(64, 256, 8, order="sort")  # found
pmoe.MoELayer(64, 256, 8, callbacks=[nn.Identity()])  # found
layer.memory_reuse = "S5"  # found
layer.pipeline = "sovle"  # found
layer.fused = "always"  # found
layer.l_aux = 0.0  # found
layer.predict_memory(512, memory_reuse="S5")  # found
layer([1.0])  # found
layer(torch.ones(1), mask_of_tokens=None)  # found
TopKGate(64, 8)([1.0])  # found
pmoe.Restore("keep", "communicate")  # found
pmoe.convert.to_pmoe({}, "mixtrl")  # found
pmoe.gates.ExpertChoiceGate(64, 8, normalize_over="token")  # found
pmoe.gates.XMoEGate(64, 8, score="tanh")  # found
