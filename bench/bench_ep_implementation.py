"""Expert parallelism of transformers: pmoe beside transformers' own all-to-all, on a modelled link.

    python bench/bench_ep_implementation.py [--link 1.0] [--rounds 5] [--tokens 2048] [--layers 2]

Two gloo ranks of one thread each train the same random Mixtral in float32, with other tokens on each rank.
Experts are spread over the ranks, and FSDP2 shards the rest. The link holds every all-to-all back. It is so
slow that all rows of a forward pass travel as long as transformers computes in it without a link
(``--link 1``), or a multiple of that. The implementations are compared in turns:

    all_to_all       transformers' own: one all-to-all there, the experts, one back
    pmoe             the default options
    pmoe, 4, S4      pipeline=4, memory_reuse="S4"

For each one it prints the losses of the first steps, the seconds of a step with the link and without it, and
the peak bytes of a step above the parameters, counted by the allocator's events.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a clone without installing

from bench.links import INFINITE, Link, launch
from bench.timing import OUT, interleaved, table, write_json
from pmoe.measure.step_memory import step_peak_bytes

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "all_to_all": ("all_to_all", {}),
    "pmoe": ("pmoe", {}),
    "pmoe, 4, S4": ("pmoe", {"pipeline": 4, "memory_reuse": "S4"}),
}
"""For each variant, transformers' ep_implementation and the options of pmoe."""

RANKS, SEQUENCE = 2, 64


@dataclass(frozen=True)
class Setting:
    """Sizes of the model and of the batch.

    tokens: those of each rank, in sequences of `SEQUENCE` tokens.
    link: seconds of all messages of a forward pass, over the seconds of its computation.
    steps: number of steps whose losses are compared.
    """

    tokens: int = 2048
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    link: float = 1.0
    rounds: int = 5
    steps: int = 3

    @property
    def forward_bytes(self) -> float:
        """Bytes that a rank sends in a forward pass: half of its rows there and back, in float32."""
        return self.layers * 2 * self.tokens * self.top_k / RANKS * self.hidden * 4

    def config(self) -> Any:
        from transformers import MixtralConfig

        return MixtralConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=self.experts,
            num_experts_per_tok=self.top_k,
        )


class Loss(nn.Module):
    """A language model whose output is its loss.

    options: pmoe's options, which all models of transformers share, so each call sets them.
    """

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, ids: Tensor) -> Tensor:
        from pmoe.integrations.transformers import configure

        configure(**self.options)
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def load(folder: str, variant: str) -> Loss:
    import transformers
    from transformers.distributed import DistributedConfig  # type: ignore[attr-defined]  # no re-export

    import pmoe.integrations.transformers  # noqa: F401  # registers "pmoe"

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    implementation, options = VARIANTS[variant]
    spread = DistributedConfig(fsdp_size=RANKS, ep_size=RANKS, ep_implementation=implementation)
    model = transformers.MixtralForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=spread
    )
    return Loss(model.train(), options)


def losses_of(model: Loss, ids: Tensor, steps: int) -> list[float]:
    """Trains some steps. Returns the mean loss of all ranks in each of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
    return losses


def run_rank(link: Link, setting: Setting, folder: str) -> dict[str, Any]:
    """Measures all variants on one rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(256, (setting.tokens // SEQUENCE, SEQUENCE), generator=generator)
    link.set_rate(INFINITE)
    models = {variant: load(folder, variant) for variant in VARIANTS}
    losses = {name: losses_of(model, ids, setting.steps) for name, model in models.items()}
    peaks = {name: step_peak_bytes(model, ids, torch.ones(())) for name, model in models.items()}

    def step(model: Loss) -> None:
        model.zero_grad(set_to_none=True)
        model(ids).backward()

    steps = {name: lambda model=model: step(model) for name, model in models.items()}
    free = interleaved(steps, setting.rounds)
    with torch.no_grad():
        forward = interleaved({"forward": lambda: models["all_to_all"](ids)}, setting.rounds)["forward"]
    rate = setting.forward_bytes / (setting.link * forward.median)
    link.set_rate(rate)
    slow = interleaved(steps, setting.rounds)
    return {"losses": losses, "peaks": peaks, "free": free, "slow": slow, "rate": rate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in asdict(Setting()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--out", type=Path, default=OUT / "ep_implementation.json", help="file for JSON")
    arguments = vars(parser.parse_args())
    out = arguments.pop("out")
    setting = Setting(**arguments)
    with tempfile.TemporaryDirectory() as folder:
        from transformers import MixtralForCausalLM

        torch.manual_seed(0)
        MixtralForCausalLM(setting.config()).save_pretrained(folder)
        found = launch(RANKS, run_rank, "modelled", INFINITE, (setting, folder), timeout_seconds=3600)
    first = found[0]
    rows = [
        {
            "implementation": name,
            "losses": " ".join(f"{loss:.5f}" for loss in first["losses"][name]),
            "step, ms": 1e3 * first["slow"][name].median,
            "of all_to_all": first["slow"][name].median / first["slow"]["all_to_all"].median,
            "without link, ms": 1e3 * first["free"][name].median,
            "peak, MiB": max(each["peaks"][name] for each in found) / 2**20,
        }
        for name in VARIANTS
    ]
    print(f"{first['rate'] / 1e6:.1f} MB/s a rank, {RANKS} ranks, {setting}")
    print(table(rows))
    write_json(out, setting=asdict(setting), rate=first["rate"], rows=rows, ranks=found)


if __name__ == "__main__":
    main()
