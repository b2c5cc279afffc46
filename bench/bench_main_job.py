"""Tokens a second of the model of `make train`, with MoE blocks of pmoe and of other libraries.

    python bench/bench_main_job.py

All models have the same sizes, weights and data. A step is that of examples/train_lm.py, its optimizer
included. The experts have no biases, because those of transformers without a gate have none. The blocks:

    pmoe            pmoe.MoELayer; on two ranks with pipeline=True, with n = 1 chunk, and with n = 2
    plain           bench.plain, one rank only
    transformers    its experts implementations ("eager", "grouped_mm") with the gate of pmoe; on two ranks
                    its expert parallelism (ep_implementation="all_to_all")
    DeepSpeed-MoE   deepspeed.moe.layer.MoE without dropped tokens, if deepspeed is installed

On two ranks all-to-alls pass a modelled link, on which the messages of a step take as long as the experts'
products. Gradients are reduced without a link.

Two ranks have a bound. A step takes at least as long as pmoe's with n = 1 without a link, and as much longer
as the messages of a pass take longer than its products. "/ bound" is the time / this bound.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import train_lm
from lm_arguments import parse_arguments
from lm_data import load_corpus
from lm_model import ByteGPT
from lm_ranks import Ranks
from lm_report import History

import pmoe
from bench.links import INFINITE, launch
from bench.plain import PlainMoE
from bench.timing import OUT, Timing, interleaved, table, write_json

IMPLEMENTATIONS = ("eager", "grouped_mm")


class Block(nn.Module):
    """An MoE block of the model: maps (B, C, M) to the same shape, and sets l_aux."""

    l_aux: Tensor | float = 0.0

    def __init__(
        self, forward: Callable[[Tensor], tuple[Tensor, Tensor | float]], **modules: nn.Module
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        y, self.l_aux = self._forward(x)
        return y


class Model(ByteGPT):
    """The example's model with other blocks in place of its MoE layers."""

    def replace(
        self, make: Callable[[dict[str, Tensor]], nn.Module], weights: list[dict[str, Tensor]]
    ) -> None:
        """Replaces each MoE layer by the block that ``make`` returns for its weights (`drawn`)."""
        blocks = [block for block in self.blocks if isinstance(block.ffn, pmoe.MoELayer)]
        for block, values in zip(blocks, weights, strict=True):
            block.ffn = make(values)
        self.replaced = [block.ffn for block in blocks]

    def auxiliary_loss(self) -> Tensor:
        return sum((block.l_aux for block in self.replaced), self.head.weight.new_zeros(()))


def drawn(arguments: argparse.Namespace, num_layers: int) -> list[dict[str, Tensor]]:
    """Returns weights of the gate and of all experts for each MoE layer, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    d_model, d_hidden = arguments.d_model, arguments.d_hidden // arguments.top_k
    shapes = {
        "gate": (arguments.num_experts, d_model),
        "w1": (arguments.num_experts, d_hidden, d_model),
        "w2": (arguments.num_experts, d_model, d_hidden),
    }

    def values(shape: tuple[int, ...]) -> Tensor:
        return (2 * torch.rand(shape, generator=generator) - 1) / shape[-1] ** 0.5

    return [{name: values(shape) for name, shape in shapes.items()} for _ in range(num_layers)]


def local(values: Tensor, ranks: Ranks) -> Tensor:
    """Returns this rank's part of the weights of all experts."""
    return values.chunk(ranks.world)[ranks.rank].clone()


def pmoe_layer(
    arguments: argparse.Namespace, values: dict[str, Tensor], ranks: Ranks, **options: Any
) -> pmoe.MoELayer:
    experts, d_hidden, d_model = values["w1"].shape
    layer = pmoe.MoELayer(d_model, d_hidden, experts, arguments.top_k, bias=False, **options)
    with torch.no_grad():
        layer.gate.weight.copy_(values["gate"])
        layer.experts.w1.copy_(local(values["w1"], ranks))
        layer.experts.w2.copy_(local(values["w2"], ranks))
    return layer


def plain(arguments: argparse.Namespace, values: dict[str, Tensor], ranks: Ranks) -> nn.Module:
    moe = PlainMoE(pmoe_layer(arguments, values, ranks), "listed")

    def forward(x: Tensor) -> tuple[Tensor, float]:
        return moe(x.reshape(-1, x.shape[-1])).view_as(x), 0.0

    return Block(forward, moe=moe)


def transformers_block(
    implementation: str, arguments: argparse.Namespace, values: dict[str, Tensor], ranks: Ranks
) -> nn.Module:
    from transformers.distributed.expert_parallel import AllToAllEP
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    num_experts, d_hidden, d_model = values["w1"].shape
    config = SimpleNamespace(
        n_routed_experts=num_experts // ranks.world,
        hidden_size=d_model,
        moe_intermediate_size=d_hidden,
        moe_latent_size=None,
        mlp_hidden_act="gelu",
        _experts_implementation=implementation,
    )
    experts = NemotronHExperts(config)
    with torch.no_grad():
        experts.up_proj.copy_(local(values["w1"], ranks))
        experts.down_proj.copy_(local(values["w2"], ranks))
    gate = pmoe.gates.TopKGate(d_model, num_experts, arguments.top_k)
    gate.weight.data.copy_(values["gate"])
    run: Callable[..., Tensor] = experts
    if ranks.world > 1:
        from torch.distributed.device_mesh import init_device_mesh

        meshes = init_device_mesh("cpu", (ranks.world, 1), mesh_dim_names=("ep", "tp"))
        run = AllToAllEP(experts, meshes["ep"], meshes["tp"])
        for parameter in experts.parameters():
            parameter.allreduce = False

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        x_TM = x.reshape(-1, d_model)
        routing = gate(x_TM)
        return run(x_TM, routing.expert, routing.weight).view_as(x), routing.l_aux

    return Block(forward, gate=gate, experts=experts)


def deepspeed_block(arguments: argparse.Namespace, values: dict[str, Tensor], ranks: Ranks) -> nn.Module:
    import deepspeed
    from deepspeed.moe.layer import MoE

    num_experts, d_hidden, d_model = values["w1"].shape
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False)
    linear = functools.partial(nn.Linear, bias=False)
    expert = nn.Sequential(linear(d_model, d_hidden), nn.GELU(), linear(d_hidden, d_model))
    moe = MoE(
        d_model,
        expert,
        num_experts,
        ep_size=ranks.world,
        k=arguments.top_k,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )
    moe.set_deepspeed_parallelism()
    with torch.no_grad():
        moe.deepspeed_moe.gate.wg.weight.copy_(values["gate"])
        of_rank = (local(values[name], ranks) for name in ("w1", "w2"))
        for own, w1, w2 in zip(moe.deepspeed_moe.experts.deepspeed_experts, *of_rank, strict=True):
            own[0].weight.copy_(w1)
            own[2].weight.copy_(w2)
    for parameter in moe.deepspeed_moe.experts.parameters():
        parameter.allreduce = ranks.world == 1

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        y, l_aux, _ = moe(x)
        return y, l_aux

    return Block(forward, moe=moe)


Make = Callable[[dict[str, Tensor]], nn.Module]


def makers(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, Make]:
    """Returns for each name the function that makes an MoE block from its weights (`drawn`)."""
    degrees: dict[str, object] = {"pmoe": False}
    if ranks.world > 1:
        degrees = {"pmoe": True, "pmoe n=1": False, "pmoe n=2": 2}
    made: dict[str, Make] = {}
    for name, n in degrees.items():
        made[name] = lambda values, n=n: pmoe_layer(arguments, values, ranks, pipeline=n)
    if ranks.world == 1:
        made["plain"] = lambda values: plain(arguments, values, ranks)
    for name in IMPLEMENTATIONS:
        made[f"transformers {name}"] = functools.partial(
            lambda name, values: transformers_block(name, arguments, values, ranks), name
        )
    if importlib.util.find_spec("deepspeed") is not None:
        made["DeepSpeed-MoE"] = lambda values: deepspeed_block(arguments, values, ranks)
    return made


def trainings(arguments: argparse.Namespace, ranks: Ranks) -> dict[str, train_lm.Run]:
    """Returns a training run for each name, before its first step."""
    corpus = load_corpus(None, arguments.context)
    names = ("d_model", "d_hidden", "layers", "heads", "context", "num_experts", "top_k")
    runs = {}
    for name, make in makers(arguments, ranks).items():
        torch.manual_seed(0)
        model = Model(**{key: getattr(arguments, key) for key in names})
        model.replace(make, drawn(arguments, len(model.moe_layers())))
        runs[name] = train_lm.Run(
            arguments=arguments,
            ranks=ranks,
            corpus=corpus,
            model=model,
            optimizer=train_lm.build_optimizer(model, arguments),
            history=History(),
        )
    return runs


@torch.no_grad()  # pipeline=True measures in the first step with gradients, which must be behind the link
def check(runs: dict[str, train_lm.Run]) -> None:
    """Raises AssertionError if a model's loss of the first batch is not that of pmoe."""
    losses = {}
    for name, run in runs.items():
        text = run.corpus.train
        context, batch = run.arguments.context, run.arguments.batch
        offsets = train_lm.training_offsets(len(text), context, batch, seed=0, step=0)
        losses[name] = train_lm.mean_loss(run, text, run.ranks.slice(offsets)).item()
    for loss in losses.values():
        assert abs(loss - losses["pmoe"]) < 1e-4 * loss, losses


def measure(runs: dict[str, train_lm.Run], rounds: int) -> dict[str, Timing]:
    def step(run: train_lm.Run) -> None:
        train_lm.train_step(run, stop_here=False)
        run.step += 1

    steps = {name: functools.partial(step, run) for name, run in runs.items()}
    return interleaved(steps, rounds, warmup=3)


def product_seconds(arguments: argparse.Namespace, tokens: int, num_experts: int) -> tuple[float, float]:
    """Returns the median seconds of the experts' products of one layer in forward and in backward."""
    rows = tokens * arguments.top_k // num_experts
    weights = drawn(arguments, 1)[0]
    w1, w2 = (weights[name][:num_experts] for name in ("w1", "w2"))
    x = torch.randn(num_experts, rows, arguments.d_model)
    hidden = torch.randn(num_experts, rows, w1.shape[1])

    def forward() -> None:
        for e in range(num_experts):
            torch.mm(x[e], w1[e].t())
            torch.mm(hidden[e], w2[e].t())

    def backward() -> None:
        forward()
        for e in range(num_experts):
            torch.mm(x[e].t(), hidden[e])
            torch.mm(hidden[e].t(), x[e])

    times = interleaved({"forward": forward, "backward": backward}, 15, barrier=lambda: None)
    return times["forward"].median, times["backward"].median


def on_one_rank(arguments: argparse.Namespace, rounds: int) -> dict[str, Timing]:
    torch.set_num_threads(1)
    arguments = argparse.Namespace(**{**vars(arguments), "batch": arguments.batch // 2})
    if not dist.is_initialized():  # DeepSpeed needs a group
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    runs = trainings(arguments, Ranks(rank=0, world=1, device=torch.device("cpu")))
    check(runs)
    return measure(runs, rounds)


def on_two_ranks(link: Any, arguments: argparse.Namespace, rounds: int) -> dict[str, Any]:
    ranks = Ranks(rank=dist.get_rank(), world=2, device=torch.device("cpu"))
    tokens = arguments.batch * arguments.context // 2
    runs = trainings(arguments, ranks)
    link.set_rate(INFINITE)
    check(runs)
    free = measure({"pmoe n=1": runs["pmoe n=1"]}, rounds)["pmoe n=1"].median
    seconds = torch.tensor(product_seconds(arguments, tokens, arguments.num_experts // 2))
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    forward, backward = seconds.tolist()
    # Half of the rows travel: to the other rank and back, in each pass.
    num_bytes = 2 * (tokens * arguments.top_k // 2) * arguments.d_model * 4
    rate = 2 * num_bytes / (forward + backward)
    link.set_rate(rate)
    times = measure(runs, rounds)
    num_layers = len(runs["pmoe"].model.replaced)
    message = num_bytes / rate
    bound = free + num_layers * (max(message - forward, 0) + max(message - backward, 0))
    ran = runs["pmoe"].model.replaced[0].ran
    return {
        "times": times,
        "without a link": free,
        "products": [forward, backward],
        "messages of a pass": message,
        "rate": rate,
        "bound": bound,
        "n of pipeline=True": [ran.forward, ran.backward],
    }


def rows_of(times: dict[str, Timing], tokens: int, bound: float | None = None) -> list[dict[str, Any]]:
    return [
        {
            "blocks": name,
            "tokens a second": round(tokens / timing.median),
            "step ms": timing.median * 1e3,
            "spread": timing.spread,
            "pmoe is faster by": times["pmoe"].speedup_over(timing),
            **({} if bound is None else {"/ bound": timing.median / bound}),
        }
        for name, timing in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    arguments = parse_arguments([])
    tokens = arguments.batch * arguments.context
    results: dict[str, Any] = {}
    if 2 in args.ranks:
        measured, _ = launch(2, on_two_ranks, "modelled", INFINITE, (arguments, args.rounds))
        rows = rows_of(measured["times"], tokens, measured["bound"])
        n = measured["n of pipeline=True"]
        print(f"two ranks, {tokens} tokens a step; n = {n}; bound {measured['bound'] * 1e3:.1f} ms")
        print(table(rows))
        results["two ranks"] = {**measured, "rows": rows}
    if 1 in args.ranks:
        times = on_one_rank(arguments, args.rounds)
        rows = rows_of(times, tokens // 2)
        print(f"one rank, {tokens // 2} tokens a step, one thread")
        print(table(rows))
        results["one rank"] = {"times": times, "rows": rows}
    versions = {}
    for name in ("torch", "transformers", "deepspeed"):
        if importlib.util.find_spec(name) is not None:
            versions[name] = importlib.metadata.version(name)
    path = args.out / "main_job.json"
    write_json(path, versions=versions, settings={k: str(v) for k, v in vars(arguments).items()}, **results)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
