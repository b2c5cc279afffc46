"""pmoe as an expert-parallel implementation of transformers, on two ranks: the library has spread the
experts.

Models are compared with one process that has all experts and runs the library's eager implementation.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.pool import ranks
from tests.tiny_transformers import MODELS, batch, gradients, make_model, padded, relative

ROOT = Path(__file__).resolve().parents[2]

SPREAD = {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "pmoe"}
SHARED = {"tp_size": 2, "ep_size": 2, "ep_implementation": "pmoe"}
"""Options with which both ranks share the experts, and compute the same batch."""

QUICK = {"pipeline": 2, "memory_reuse": "S4"}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function from the name of a model to a folder in which plain transformers has saved it."""
    folder = tmp_path_factory.mktemp("models")

    def path(name: str) -> Path:
        if not (folder / name).exists():
            make_model(name, "eager").save_pretrained(folder / name)
        return folder / name

    return path


def on_ranks(world: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a job on ranks. The first job waits until each rank has imported transformers."""
    return ranks(world).run(job, *args, timeout=240)


# ---- on a rank


def load(path: Path, name: str, spread: dict[str, Any], options: dict[str, Any]) -> Any:
    """Returns a model over both ranks, whose experts run by pmoe."""
    import transformers
    from transformers.distributed import DistributedConfig

    import pmoe.integrations.transformers as integration

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    integration.configure(**options)
    kind = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")
    sizes = {key: value for key, value in spread.items() if key != "experts_implementation"}
    return kind.from_pretrained(
        path,
        dtype=torch.float32,
        distributed_config=DistributedConfig(**sizes),
        experts_implementation=spread.get("experts_implementation"),
    )


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach()


def parts(ids: Tensor, num_batches: int = 2) -> list[Tensor]:
    """Returns unequal parts of a batch, for the ranks or for groups of ranks that share a part."""
    each = len(ids) // num_batches
    return [ids[i * each : (i + 1) * each, : 12 - 3 * i] for i in range(num_batches)]


def num_batches(world: int, spread: dict[str, Any]) -> int:
    return world // spread.get("tp_size", 1)


def seeded_step(model: Any, ids: Tensor, share: float = 1.0) -> Any:
    """Runs a step with a fixed seed, because Phi's router draws random numbers in training."""
    torch.manual_seed(3)
    output = model.train()(input_ids=ids, labels=ids)
    (share * output.loss).backward()
    return output


def step_job(
    rank: int, world: int, path: Path, name: str, spread: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    import pmoe.integrations.transformers as integration

    is_compiled = "compiled" in options
    model = load(path, name, spread, {key: value for key, value in options.items() if key != "compiled"})
    if is_compiled:
        torch._dynamo.reset()
        model.compile(**options["compiled"])
    own = parts(batch(4), num_batches(world, spread))[rank // spread.get("tp_size", 1)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r"FSDP2-wrapped module \(\w*Experts\) returned a view")
        output = seeded_step(model, own)
    found = {each: whole(gradient) for each, gradient in gradients(model)}
    layers = integration.layers(model)
    return {
        "loss": whole(output.loss),
        "logits": whole(output.logits),
        "gradients": found if rank == 0 else {},
        "layers": len(layers),
        "rows": [int(layer.tokens_per_expert.sum()) for layer in layers.values()],
        "ranks": {layer.ranks.size for layer in layers.values()},
        "traffic": min(layer.traffic.rows for layer in layers.values()),
    }


# ---- the same step


def assert_same_step(
    path: Path, name: str, spread: dict[str, Any], options: dict[str, Any], world: int = 2
) -> list[Any]:
    plain = make_model(name, "eager")
    batches = parts(batch(4), num_batches(world, spread))
    wanted = [seeded_step(plain, each, 1 / len(batches)) for each in batches]
    found = on_ranks(world, step_job, path, name, spread, options)
    travels = spread.get("ep_implementation") == "pmoe"
    for rank, each in enumerate(found):
        theirs = wanted[rank // spread.get("tp_size", 1)]
        assert relative(each["loss"], theirs.loss) < 1e-5
        assert relative(each["logits"], theirs.logits) < 1e-5
        assert each["layers"] == (1 if name == "DeepSeek-V3" else 2)
        assert each["ranks"] == {spread["ep_size"] if travels else 1} and (each["traffic"] > 0) == travels
    ours, theirs = found[0]["gradients"], dict(gradients(plain))
    assert ours.keys() == theirs.keys()
    worst = max((relative(ours[key], theirs[key]), key) for key in theirs)
    assert worst[0] < 1e-5, worst
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_loss_logits_and_every_gradient_equal_one_process(name: str, saved: Callable[[str], Path]) -> None:
    assert_same_step(saved(name), name, SPREAD, QUICK)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": 4, "memory_reuse": "S1", "memory_budget": "16MiB"},
        {"dispatch": "hierarchical_2d", "nodes": 1, "send_once": True},
        {"pipeline": 2, "balance": 1},
    ],
    ids=str,
)
def test_they_are_equal_however_the_pipeline_runs(
    options: dict[str, Any], saved: Callable[[str], Path]
) -> None:
    assert_same_step(saved("gpt-oss"), "gpt-oss", SPREAD, options)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "DeepSeek-V3"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_models_are_one_graph_where_the_library_does_not_break_it(
    name: str, backend: str, saved: Callable[[str], Path]
) -> None:
    compiled = {"compiled": {"backend": backend, "fullgraph": True}}
    assert_same_step(saved(name), name, SHARED, compiled | QUICK)


@pytest.mark.nightly
def test_compiled_models_are_equal_where_hooks_of_fsdp2_break_the_graph(
    saved: Callable[[str], Path],
) -> None:
    assert_same_step(saved("Mixtral"), "Mixtral", SPREAD, {"compiled": {"backend": "aot_eager"}, **QUICK})


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_ranks_that_share_a_batch_dispatch_disjoint_slices_of_it(
    name: str, saved: Callable[[str], Path]
) -> None:
    found = assert_same_step(saved(name), name, SHARED, QUICK)
    tokens, top_k = parts(batch(4), 1)[0].numel(), 2
    assert [each["rows"] for each in found] == [[tokens * top_k // 2] * 2] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "spread",
    [
        {"fsdp_size": 2},
        {"tp_size": 2},
        {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
        {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    ],
    ids=str,
)
def test_under_the_librarys_own_parallelism_pmoe_runs_the_experts_that_a_rank_has(
    spread: dict[str, Any], saved: Callable[[str], Path]
) -> None:
    assert_same_step(saved("gpt-oss"), "gpt-oss", spread | {"experts_implementation": "pmoe"}, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"fsdp_size": 4, "ep_size": 2},
        {"dp_replicate_size": 2, "fsdp_size": 2, "ep_size": 2},
        {"tp_size": 2, "fsdp_size": 2, "ep_size": 4},
    ],
    ids=str,
)
def test_copies_of_experts_are_sharded_and_reduced_by_the_library_on_four_ranks(
    sizes: dict[str, Any], saved: Callable[[str], Path]
) -> None:
    assert_same_step(saved("gpt-oss"), "gpt-oss", sizes | {"ep_implementation": "pmoe"}, QUICK, world=4)


# ---- padding that goes to no expert


def padded_parts(count: int) -> list[dict[str, Tensor]]:
    """Returns batches with masks that differ in their padding; the second rank's is all padding."""
    batches = [padded("left", (12, 7, 1)), padded("right", (0, 0, 0), seed=8)]
    return batches[:count]


def padded_step(model: Any, inputs: dict[str, Tensor], share: float = 1.0) -> Any:
    """Runs a step whose loss is that of the logits of tokens.

    The mean over the labels of a batch without tokens would be NaN.
    """
    model.train()
    output = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    logits = output.logits.full_tensor() if hasattr(output.logits, "full_tensor") else output.logits
    (share * (logits.square() * inputs["attention_mask"].unsqueeze(2)).sum()).backward()
    return output


def padded_job(
    rank: int, world: int, path: Path, name: str, spread: dict[str, Any], checkpointing: dict[str, Any] | None
) -> dict[str, Any]:
    import pmoe.integrations.transformers as integration

    model = load(path, name, spread, QUICK)
    integration.skip_padding(model)
    if checkpointing is not None:
        model.activation_checkpointing_enable(checkpointing)
    inputs = padded_parts(num_batches(world, spread))[rank // spread.get("tp_size", 1)]
    output = padded_step(model, inputs)
    found = {each: whole(gradient) for each, gradient in gradients(model)}
    rows = {int(layer.tokens_per_expert.sum()) for layer in integration.layers(model).values()}
    received = [int(layer.row_counts.recv.sum()) for layer in integration.layers(model).values()]
    return {
        "logits": whole(output.logits), "gradients": found if rank == 0 else {}, "rows": rows,
        "received": received,
    }  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "spread", "checkpointing"),
    [
        ("Mixtral", SPREAD, None),
        ("gpt-oss", SPREAD, {"use_reentrant": False}),
        ("Mixtral", SHARED, None),
        ("DeepSeek-V3", SHARED, {"use_reentrant": False}),
    ],
    ids=str,
)
def test_padding_of_one_rank_or_of_all_of_a_rank_goes_to_no_expert(
    name: str,
    spread: dict[str, Any],
    checkpointing: dict[str, Any] | None,
    saved: Callable[[str], Path],
) -> None:
    plain, batches = make_model(name, "eager"), padded_parts(num_batches(2, spread))
    wanted = [padded_step(plain, each, 1 / len(batches)) for each in batches]
    found = on_ranks(2, padded_job, saved(name), name, spread, checkpointing)
    shared = spread.get("tp_size", 1)
    for rank, each in enumerate(found):
        is_token = batches[rank // shared]["attention_mask"].bool()
        assert relative(each["logits"][is_token], wanted[rank // shared].logits[is_token]) < 1e-5
        assert each["rows"] == {20 * 2 // shared if is_token.any() else 0}
    for received in zip(*(each["received"] for each in found), strict=True):
        assert sum(received) == 20 * 2
    ours, theirs = found[0]["gradients"], dict(gradients(plain))
    assert ours.keys() == theirs.keys()
    worst = max((relative(ours[key], theirs[key]), key) for key in theirs)
    assert worst[0] < 1e-5, worst


def padded_generate_job(rank: int, world: int, path: Path) -> Tensor:
    import pmoe.integrations.transformers as integration

    model = load(path, "Mixtral", SPREAD, QUICK).eval()
    integration.skip_padding(model)
    inputs = padded("left", (12, 3, 5) if rank == 0 else (1, 2, 12))
    del inputs["labels"]
    text: Tensor = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    return text


def test_generate_behind_left_padding_gives_the_tokens_of_one_process(saved: Callable[[str], Path]) -> None:
    plain = make_model("Mixtral", "eager").eval()
    for rank, text in enumerate(on_ranks(2, padded_generate_job, saved("Mixtral"))):
        inputs = padded("left", (12, 3, 5) if rank == 0 else (1, 2, 12))
        del inputs["labels"]
        wanted = plain.generate(**inputs, max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert torch.equal(text, wanted)


# ---- inference and files


def generate_job(rank: int, world: int, path: Path, spread: dict[str, Any], out: Path) -> Tensor:
    model = load(path, "Mixtral", spread, QUICK).eval()
    ids = batch(4)
    ids = ids[:1] if "tp_size" in spread else parts(ids)[rank]
    text: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    model.save_pretrained(out)
    return text


@pytest.mark.parametrize("spread", [SPREAD, SHARED], ids=["own batches", "one batch"])
def test_generate_gives_the_tokens_of_one_process_and_what_is_saved_loads_in_plain_transformers(
    spread: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    import transformers

    plain, ids = make_model("Mixtral", "eager").eval(), batch(4)
    found = on_ranks(2, generate_job, saved("Mixtral"), spread, tmp_path)
    for rank, text in enumerate(found):
        own = ids[:1] if "tp_size" in spread else parts(ids)[rank]
        wanted = plain.generate(own, attention_mask=torch.ones_like(own), max_new_tokens=5, do_sample=False)
        assert torch.equal(text, wanted)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, plain(ids).logits)


# ---- float16


def halved_job(rank: int, world: int, path: Path, implementation: str, dtype: torch.dtype) -> Any:
    """Returns the warnings of a step on the same batch on all ranks, and the gradients by name."""
    import transformers
    from transformers.distributed import DistributedConfig

    importlib.import_module("pmoe.integrations.transformers").configure(**QUICK)
    spread = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation=implementation)
    model = transformers.MixtralForCausalLM.from_pretrained(path, dtype=dtype, distributed_config=spread)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        seeded_step(model, batch(4))
    texts = [str(one.message) for one in found if "FSDP2 divides" in str(one.message)]
    return texts, {name: whole(gradient).double() for name, gradient in gradients(model)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_gradients_of_float16_experts_that_fsdp2_divides_twice_are_warned_of(
    dtype: torch.dtype, saved: Callable[[str], Path]
) -> None:
    """FSDP2 of torch 2.13 halves them on two ranks. So it does with transformers' own implementation."""
    path = saved("Mixtral")
    plain = make_model("Mixtral", "eager")
    seeded_step(plain, batch(4))
    for implementation in ("pmoe", "all_to_all"):
        texts, found = on_ranks(2, halved_job, path, implementation, dtype)[0]
        for name, gradient in gradients(plain):
            share = 0.5 if dtype == torch.float16 and ".experts." in name else 1.0
            assert relative(found[name], share * gradient) < 2e-2, (implementation, name)
        is_warned = dtype == torch.float16 and implementation == "pmoe"
        assert len(texts) == is_warned, texts
        if is_warned:
            assert "experts in torch.float16 by 2 twice, also without pmoe" in texts[0]


# ---- Trainer


DDP = {"experts_implementation": "pmoe"}


def trainer_job(
    rank: int,
    world: int,
    path: Path,
    out: Path,
    spread: dict[str, Any],
    contexts: bool,
    is_padded: bool = False,
) -> tuple[list[float], list[float], int]:
    """Returns losses and gradient norms by step, and how often pmoe ran experts.

    Without an ep_implementation every rank has all experts, under DistributedDataParallel.

    is_padded: whether sequences have 1 to 12 tokens, two batches a step, and padding that pmoe's experts
        skip.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import transformers

    import pmoe

    layers = importlib.import_module("pmoe.integrations.transformers.layers")  # a function has that name, too

    if "ep_implementation" in spread:
        model = load(path, "Mixtral", spread, QUICK)
    else:
        model = transformers.MixtralForCausalLM.from_pretrained(path, dtype=torch.float32, **spread)
    checkpointing: dict[str, Any] = {"use_reentrant": False}
    if contexts:
        checkpointing["context_fn"] = pmoe.checkpoint_contexts
    arguments = transformers.TrainingArguments(
        output_dir=str(out), use_cpu=True, per_device_train_batch_size=4, max_steps=8, learning_rate=3e-2,
        logging_steps=1, save_steps=8, save_only_model=True, report_to=[], seed=1, disable_tqdm=True,
        gradient_checkpointing=True, gradient_checkpointing_kwargs=checkpointing,
        gradient_accumulation_steps=2 if is_padded else 1,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in batch(16)]
    if is_padded:
        inputs = padded("right", (12, 1, 7, 3, 10, 2, 5, 8) * 2)
        rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
    if is_padded and spread.get("experts_implementation") != "eager":
        importlib.import_module("pmoe.integrations.transformers").skip_padding(model)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows * 8)
    borrow = mock.Mock(wraps=layers.borrow)
    with mock.patch.object(layers, "borrow", borrow):
        trainer.train()
    steps = [each for each in trainer.state.log_history if "loss" in each]
    return [each["loss"] for each in steps], [each["grad_norm"] for each in steps], borrow.call_count


@pytest.mark.slow
def test_trainer_with_gradient_checkpointing_trains_as_the_eager_implementation_does(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    import transformers

    path, eager = saved("Mixtral"), {"experts_implementation": "eager"}
    losses, norms, calls = on_ranks(2, trainer_job, path, tmp_path / "eager", eager, False)[0]
    assert losses[-1] < 0.9 * losses[0] and calls == 0
    for spread, contexts in ((DDP, False), (SPREAD, False), (SPREAD, True)):
        out = tmp_path / f"{len(spread)} {contexts}"
        for found, found_norms, calls in on_ranks(2, trainer_job, path, out, spread, contexts):
            assert found == pytest.approx(losses, rel=1e-4) and found_norms == pytest.approx(norms, rel=1e-3)
            assert calls == 8 * 2 * 2  # steps, layers, and once more in backward
        trained, plain = (
            transformers.MixtralForCausalLM.from_pretrained(each / "checkpoint-8", **eager)
            for each in (out, tmp_path / "eager")
        )
        ids = batch(4)
        with torch.no_grad():
            assert relative(trained(ids).logits, plain(ids).logits) < 1e-3


@pytest.mark.slow
def test_trainer_that_skips_padding_trains_as_the_eager_implementation_does_with_it(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    path, eager = saved("Mixtral"), {"experts_implementation": "eager"}
    losses, norms, _ = on_ranks(2, trainer_job, path, tmp_path / "eager", eager, False, True)[0]
    for spread, contexts in ((DDP, False), (SPREAD, False), (SPREAD, True)):
        out = tmp_path / f"{len(spread)} {contexts}"
        for found, found_norms, calls in on_ranks(2, trainer_job, path, out, spread, contexts, True):
            assert found == pytest.approx(losses, rel=1e-4) and found_norms == pytest.approx(norms, rel=1e-3)
            assert calls == 8 * 2 * 2 * 2  # steps, batches, layers, and once more in backward


# ---- what is refused


def refused_job(rank: int, world: int, path: Path) -> tuple[str, str]:
    from transformers.models.mixtral import modeling_mixtral

    load(path, "Mixtral", SPREAD, QUICK)  # what is in order is taken
    init = modeling_mixtral.MixtralExperts.__init__

    def with_scales(self: Any, config: Any) -> None:
        init(self, config)
        self.scales = torch.nn.Parameter(torch.ones(8, 1))

    with mock.patch.object(modeling_mixtral.MixtralExperts, "__init__", with_scales):
        try:
            load(path, "Mixtral", SPREAD, QUICK)
            unknown = ""
        except ValueError as error:
            unknown = str(error)
    model = load(path, "Mixtral", SPREAD | {"ep_implementation": "all_to_all"}, QUICK)
    experts = model.model.layers[0].mlp.experts
    del experts.forward  # the library's own, which hands the experts this rank's part of their weights
    experts.config._experts_implementation = "pmoe"
    try:
        experts(torch.zeros(2, 32), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2))
        return unknown, ""
    except ValueError as error:
        return unknown, str(error)


def test_a_layout_that_pmoe_does_not_know_is_refused_before_weights_are_loaded(
    saved: Callable[[str], Path],
) -> None:
    for unknown, spread in on_ranks(2, refused_job, saved("Mixtral")):
        assert "(MixtralExperts) must hold down_proj, gate_up_proj and nothing else; it holds" in unknown
        assert "is a DTensor; experts must be given this rank's part" in spread


def bad_routing_job(rank: int, world: int, path: Path) -> str:
    model = load(path, "Mixtral", SPREAD, QUICK)
    if rank == 1:
        model.model.layers[1].mlp.gate.register_forward_hook(lambda _, __, out: (out[0], out[1], out[2] + 8))
    try:
        seeded_step(model, batch(2))
        return ""
    except ValueError as error:
        return str(error)


def test_routing_that_one_rank_gets_wrong_is_an_error_on_every_rank(saved: Callable[[str], Path]) -> None:
    for text in on_ranks(2, bad_routing_job, saved("Mixtral")):
        assert text == "rank 1: its gate returned expert indices outside 0..num_experts - 1"


# ---- the example

EXAMPLE = ROOT / "examples" / "mixtral.py"


def without_pmoe() -> str:
    """Returns the example as a user had it before pmoe."""
    lines = EXAMPLE.read_text().splitlines()
    added = [line for line in lines if line.endswith("# pmoe")]
    assert 1 <= len(added) <= 3
    left = "\n".join(line for line in lines if line not in added) + "\n"
    assert "pmoe" not in ast.unparse(ast.parse(left).body[1:])  # but for the docstring
    return left


def losses_of(printed: str) -> list[float]:
    return [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]


def example_job(rank: int, world: int, script: str) -> str:
    import transformers

    transformers.logging.disable_progress_bar()
    printed = io.StringIO()
    starts, ends = "torch.distributed.init_process_group", "torch.distributed.destroy_process_group"
    with (
        mock.patch(starts),
        mock.patch(ends),
        mock.patch("sys.argv", [script, "--steps=6"]),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def test_pmoe_adds_no_more_than_three_lines_to_a_training_script(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(without_pmoe())
    ours, theirs = (losses_of(on_ranks(2, example_job, str(each))[0]) for each in (EXAMPLE, plain))
    assert len(ours) == 6 and ours == pytest.approx(theirs, rel=1e-3)
    assert ours[-1] < ours[0]


@pytest.mark.nightly
def test_the_example_runs_under_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [*command, "--nproc_per_node=2", str(EXAMPLE)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    losses = losses_of(found.stdout)
    assert len(losses) == 30 and losses[-1] < 0.7 * losses[0]
