"""Models of transformers whose padding goes to no expert, against the same models that compute it."""

from __future__ import annotations

import copy
import functools
import importlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pmoe
from tests.tiny_transformers import (
    LENGTHS,
    MODELS,
    SIZES,
    as_by_default,  # noqa: F401 (a fixture)
    batch,
    gradients,
    integration,
    make_model,
    padded,
    relative,
)

pytestmark = pytest.mark.timeout(300)  # the first test imports transformers, which takes its time

ALIKE = 1e-5
"""Largest relative difference, in float32."""


def skipping(name: str, **changes: Any) -> Any:
    model = make_model(name, "pmoe", **changes)
    integration.skip_padding(model)
    return model


def step(model: Any, inputs: dict[str, Tensor], share: float = 1.0) -> Any:
    """Runs a forward and a backward pass in training mode, with a fixed seed: Phi's router draws random
    numbers.
    """
    torch.manual_seed(3)
    output = model.train()(**inputs)
    (share * output.loss).backward()
    return output


def rows(model: nn.Module) -> set[int]:
    """Returns the numbers of rows that the experts of the layers got in the last call."""
    return {int(layer.tokens_per_expert.sum()) for layer in integration.layers(model).values()}


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    found, wanted = dict(gradients(ours)), dict(gradients(theirs))
    assert found.keys() == wanted.keys()
    worst = max((relative(found[name], wanted[name]), name) for name in wanted)
    assert worst[0] < ALIKE, worst


# ---- the same model


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_have_the_logits_loss_and_gradients_that_they_had_and_padding_is_not_computed(
    name: str, side: str
) -> None:
    changes = {} if name == "DeepSeek-V3" else {"output_router_logits": True}
    inputs = padded(side)
    is_token = inputs["attention_mask"].bool()
    ours, theirs = skipping(name, **changes), make_model(name, "pmoe", **changes)
    found, wanted = step(ours, inputs), step(theirs, inputs)
    assert relative(found.loss, wanted.loss) < 1e-6
    assert relative(found.logits[is_token], wanted.logits[is_token]) < ALIKE
    if changes:
        assert relative(found.aux_loss, wanted.aux_loss) < 1e-6
    assert_same_gradients(ours, theirs)
    assert rows(ours) == {sum(LENGTHS) * 2} and rows(theirs) == {is_token.numel() * 2}
    for stats in pmoe.stats(ours).layers:
        assert sum(stats.tokens_per_expert) == sum(LENGTHS) * 2 and stats.drop_rate == 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3"])
def test_they_are_the_same_under_both_kinds_of_attention(name: str, attention: str, side: str) -> None:
    inputs = padded(side)
    ours, theirs = skipping(name), make_model(name, "pmoe")
    for model in (ours, theirs):
        model.set_attn_implementation(attention)
    found, wanted = step(ours, inputs), step(theirs, inputs)
    assert relative(found.loss, wanted.loss) < 1e-6
    assert_same_gradients(ours, theirs)
    assert rows(ours) == {sum(LENGTHS) * 2}


def test_they_are_the_same_however_the_pipeline_runs() -> None:
    inputs = padded("left")
    for options in ({"pipeline": 4, "memory_reuse": "S1"}, {"pipeline": 2, "memory_reuse": "S4"}):
        integration.configure(**options)
        ours, theirs = skipping("gpt-oss"), make_model("gpt-oss", "pmoe")
        step(ours, inputs)
        step(theirs, inputs)
        assert_same_gradients(ours, theirs)
        assert rows(ours) == {sum(LENGTHS) * 2}


def test_a_batch_of_padding_alone_computes_nothing_and_has_gradients() -> None:
    inputs = padded("right") | {"attention_mask": torch.zeros(4, 12, dtype=torch.int64)}
    del inputs["labels"]
    model = skipping("Mixtral").train()
    model(**inputs).logits.square().mean().backward()
    assert rows(model) == {0}
    found = {name: gradient for name, gradient in gradients(model) if ".experts." in name}
    assert len(found) == 4 and not any(gradient.any() for gradient in found.values())


@pytest.mark.parametrize("experts", ["eager", "pmoe"])
def test_transformers_auxiliary_loss_of_padding_alone_is_not_a_number(experts: str) -> None:
    """It is 0 / 0, a limit of transformers that docs/training.md states."""
    inputs = padded("right") | {"attention_mask": torch.zeros(4, 12, dtype=torch.int64)}
    model = make_model("OLMoE", experts, output_router_logits=True)
    assert model(**inputs).aux_loss.isnan()


def test_under_autocast_outputs_have_the_type_that_they_had() -> None:
    inputs = padded("left")
    ours, theirs = skipping("Mixtral").eval(), make_model("Mixtral", "pmoe").eval()
    is_token = inputs["attention_mask"].bool()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found, wanted = ours(**inputs).logits, theirs(**inputs).logits
    assert found.dtype == wanted.dtype
    assert relative(found[is_token], wanted[is_token]) < 0.02


# ---- generation


@pytest.mark.sampled(6)
@pytest.mark.parametrize("how", ["greedy", "beams", "without a cache", "in parts"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3-MoE", "OLMoE", "gpt-oss", "DeepSeek-V3"])
def test_generate_gives_the_same_tokens_behind_left_padding(name: str, how: str) -> None:
    options: dict[str, Any] = {
        "greedy": {},
        "beams": {"num_beams": 3},
        "without a cache": {"use_cache": False},
        "in parts": {"prefill_chunk_size": 5},
    }[how]
    inputs = padded("left")
    del inputs["labels"]
    ours, theirs = skipping(name).eval(), make_model(name, "pmoe").eval()
    seen: list[int] = []
    integration_rows = importlib.import_module("pmoe.integrations.transformers.padding")
    run = integration_rows._run_tokens

    def counted(*args: Any) -> Any:
        output = run(*args)
        seen.extend(rows(ours))
        return output

    texts = []
    for model in (theirs, ours):
        with mock.patch.object(integration_rows, "_run_tokens", counted):
            texts.append(
                model.generate(**inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False, **options)
            )
    assert torch.equal(*texts) and texts[0].shape == (4, 20)
    if how == "greedy":  # the prompt, then a token of each sequence at a time
        assert seen[-1] == 4 * 2 and sum(LENGTHS) * 2 in seen
    if how == "in parts":  # the first five columns have five tokens
        assert 5 * 2 in seen


# ---- checkpoints

KINDS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "with contexts": {"use_reentrant": False, "context_fn": pmoe.checkpoint_contexts},
}


def wrapped_by_torch(model: Any, options: dict[str, Any]) -> None:
    """Wraps a model's layers in checkpoints, as accelerate does under FSDP."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper

    is_reentrant = options["use_reentrant"]
    kinds = torch_wrapper.CheckpointImpl
    kind = kinds.REENTRANT if is_reentrant else kinds.NO_REENTRANT
    more = {key: value for key, value in options.items() if key != "use_reentrant"}
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch_wrapper.checkpoint_wrapper(layer, checkpoint_impl=kind, **more)
    model.config.use_cache = False  # which transformers' own checkpoints see to
    model.enable_input_require_grads()


@pytest.mark.parametrize("by", ["transformers", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_second_pass_of_a_checkpoint_skips_the_padding_of_its_first(kind: str, by: str) -> None:
    """Several forward passes come before their backward passes.

    All batches have the same size, and two have the same tokens with other masks.
    """
    ours, theirs = skipping("Mixtral").train(), make_model("Mixtral", "pmoe").train()
    if by == "torch":
        wrapped_by_torch(ours, KINDS[kind])
    else:
        ours.activation_checkpointing_enable(KINDS[kind])
    batches = [padded("left"), padded("right", (2, 5, 12, 4), seed=8), padded("left", (1, 2, 12, 9))]
    batches[2]["input_ids"] = batches[0]["input_ids"]
    computed: list[int] = []
    layers = importlib.import_module("pmoe.integrations.transformers.layers")
    run = layers._run

    def counted(module: Any, group: Any, hidden_states: Tensor, *routing: Tensor) -> Tensor:
        computed.append(len(hidden_states))
        output: Tensor = run(module, group, hidden_states, *routing)
        return output

    with mock.patch.object(layers, "_run", counted):
        losses = [ours(**inputs).loss for inputs in batches]
        first = list(computed)
        for inputs in batches:
            inputs["attention_mask"].fill_(1)  # whoever made it may use it again
        for loss in losses[1:] + losses[:1]:
            loss.backward()
    per_batch = [23, 23, 24]
    assert first == [count for count in per_batch for _ in range(2)]
    assert sorted(computed) == sorted(first * 2)
    for inputs, side, lengths in zip(
        batches, ("left", "right", "left"), (LENGTHS, (2, 5, 12, 4), (1, 2, 12, 9)), strict=True
    ):
        inputs["attention_mask"] = padded(side, lengths)["attention_mask"]
        theirs(**inputs).loss.backward()
    names = {name: name.replace("_checkpoint_wrapped_module.", "") for name, _ in ours.named_parameters()}
    found = {names[name]: gradient for name, gradient in gradients(ours)}
    wanted = dict(gradients(theirs))
    assert found.keys() == wanted.keys()
    assert all(relative(found[name], wanted[name]) < ALIKE for name in wanted)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_around_the_whole_model_is_run_again_with_its_mask(is_reentrant: bool) -> None:
    ours, theirs = skipping("OLMoE").train(), make_model("OLMoE", "pmoe").train()
    inputs = padded("left")

    def loss(embeds: Tensor) -> Tensor:
        found: Tensor = ours(
            inputs_embeds=embeds, attention_mask=inputs["attention_mask"], labels=inputs["labels"]
        ).loss
        return found

    embeds = ours.model.embed_tokens(inputs["input_ids"])
    checkpoint(loss, embeds, use_reentrant=is_reentrant).backward()
    step(theirs, inputs)
    assert_same_gradients(ours, theirs)
    assert rows(ours) == {sum(LENGTHS) * 2}


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_a_checkpoint_that_is_not_known_is_no_wrong_result(is_reentrant: bool) -> None:
    """A user's own checkpoint is inside a layer, and in its second pass no mask is known."""
    ours, theirs = skipping("Mixtral").train(), make_model("Mixtral", "pmoe").train()
    for layer in ours.model.layers:
        layer.mlp.forward = functools.partial(checkpoint, layer.mlp.forward, use_reentrant=is_reentrant)
    step(theirs, padded("left"))
    if is_reentrant:  # which computes padding then, and nothing comes of it
        step(ours, padded("left"))
        assert_same_gradients(ours, theirs)
    else:
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            step(ours, padded("left"))


# ---- masks and rows that do not fit


def masks() -> dict[str, Any]:
    mask = padded("left")["attention_mask"]
    causal = (torch.ones(12, 12).tril().bool() & mask.bool()[:, None, None, :]).float()
    return {
        "none": {},
        "four dimensions": {"attention_mask": (1 - causal) * torch.finfo(torch.float32).min},
        "all ones": {"attention_mask": torch.ones_like(mask)},
    }


@pytest.mark.parametrize("kind", ["none", "four dimensions", "all ones"])
def test_without_a_mask_of_two_dimensions_nothing_is_skipped(kind: str) -> None:
    given = padded("left")
    del given["attention_mask"]
    ours, theirs = skipping("Mixtral"), make_model("Mixtral", "pmoe")
    found, wanted = step(ours, given | masks()[kind]), step(theirs, given | masks()[kind])
    assert torch.equal(found.logits, wanted.logits)
    assert rows(ours) == {48 * 2}


def test_packed_sequences_are_all_tokens() -> None:
    ids = batch(1, length=12)
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    inputs = {"input_ids": ids, "labels": ids, "position_ids": places}
    found, wanted = step(skipping("Mixtral"), inputs), step(make_model("Mixtral", "pmoe"), inputs)
    assert torch.equal(found.logits, wanted.logits)


def test_a_mask_by_position_of_bools_or_of_numbers_of_documents_is_taken() -> None:
    model, inputs = skipping("Mixtral").eval(), padded("left")
    mask = inputs["attention_mask"]
    with torch.no_grad():
        for given in (mask.bool(), mask * torch.tensor([1, 2, 3, 4]).unsqueeze(1), mask.float()):
            model(inputs["input_ids"], given)
            assert rows(model) == {sum(LENGTHS) * 2}
            model.model(inputs["input_ids"], given)
            assert rows(model) == {sum(LENGTHS) * 2}
            model(inputs_embeds=model.model.embed_tokens(inputs["input_ids"]), attention_mask=given)
            assert rows(model) == {sum(LENGTHS) * 2}


def test_where_rows_are_not_those_of_the_mask_nothing_is_skipped() -> None:
    model, plain = skipping("Mixtral").eval(), make_model("Mixtral", "pmoe").eval()
    inputs = padded("left")
    block = model.model.layers[0].mlp
    forward = block.forward

    def half(x: Tensor) -> Tensor:  # a model may compute some rows elsewhere
        return torch.cat([forward(part.contiguous()) for part in x.split(6, dim=1)], dim=1)

    block.forward = half
    with torch.no_grad():
        found, wanted = model(**inputs), plain(**inputs)
        assert relative(found.loss, wanted.loss) < 1e-6
        assert {int(each.tokens_per_expert.sum()) for each in integration.layers(model).values()} == {48, 46}


@pytest.mark.parametrize("columns", [11, 13, 24])
def test_a_mask_of_another_length_than_the_tokens_and_the_cache_is_not_taken(columns: int) -> None:
    """The model's attention decides which columns of such a mask count, and models differ in that."""
    model = skipping("Mixtral").eval()
    padding = importlib.import_module("pmoe.integrations.transformers.padding")
    ids, mask = padded("left")["input_ids"], torch.zeros(4, columns, dtype=torch.int64)
    given = {"input_ids": ids, "attention_mask": mask}
    assert padding._rows_of_call(model.model, (), given) is None
    assert padding._rows_of_call(model.model, (ids, mask), {}) is None
    cache = model(input_ids=ids[:, :1], use_cache=True).cache
    fits = padding._rows_of_call(model.model, (), given | {"cache": cache})
    assert (fits is not None) == (columns == 13)


def test_outside_of_a_call_and_after_an_error_no_mask_is_left() -> None:
    model, inputs = skipping("Mixtral").eval(), padded("left")
    experts = model.model.layers[0].mlp.experts
    broken = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        model(**inputs)
    broken.remove()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 32, generator=generator)
    with torch.no_grad():
        experts(x, torch.zeros(48, 2, dtype=torch.int64) + torch.tensor([0, 1]), torch.ones(48, 2))
    assert int(integration.layers(model)["model.layers.0.mlp.experts"].tokens_per_expert.sum()) == 96


def test_other_implementations_of_experts_compute_all_rows() -> None:
    model, plain, inputs = skipping("Mixtral").eval(), make_model("Mixtral", "eager").eval(), padded("left")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, plain(**inputs).logits)


# ---- several models, several threads


class Pair(nn.Module):
    """A student, and a teacher that is called inside the student's forward, with another mask."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, input_ids: Tensor, attention_mask: Tensor, other_mask: Tensor) -> tuple[Tensor, Tensor]:
        hook = self.student.model.layers[0].register_forward_pre_hook(
            lambda *_: taught.append(self.teacher(input_ids, attention_mask=other_mask).logits)
        )
        taught: list[Tensor] = []
        logits = self.student(input_ids, attention_mask=attention_mask).logits
        hook.remove()
        return logits, taught[0]


def test_a_model_inside_of_a_models_call_has_its_own_mask() -> None:
    left, right = padded("left"), padded("right")["attention_mask"]
    pair = Pair(make_model("Mixtral", "pmoe"), make_model("Mixtral", "pmoe", seed=1)).eval()
    plain = copy.deepcopy(pair)
    integration.skip_padding(pair)
    given = {"input_ids": left["input_ids"], "attention_mask": left["attention_mask"], "other_mask": right}
    with torch.no_grad():
        for found, wanted, mask in zip(
            pair(**given), plain(**given), (left["attention_mask"], right), strict=True
        ):
            assert relative(found[mask.bool()], wanted[mask.bool()]) < ALIKE
    assert rows(pair) == {sum(LENGTHS) * 2}


def test_a_teacher_that_computes_its_padding_does_so_inside_of_a_call_that_skips() -> None:
    left = padded("left")
    pair = Pair(make_model("Mixtral", "pmoe"), make_model("Mixtral", "pmoe", seed=1)).eval()
    plain = copy.deepcopy(pair)
    integration.skip_padding(pair.student)
    mask = torch.ones_like(left["attention_mask"])
    given = {"input_ids": left["input_ids"], "attention_mask": left["attention_mask"], "other_mask": mask}
    with torch.no_grad():
        assert torch.equal(pair(**given)[1], plain(**given)[1])
    assert rows(pair.student) == {sum(LENGTHS) * 2} and rows(pair.teacher) == {48 * 2}


def test_threads_that_share_a_model_have_their_own_masks() -> None:
    model, plain = skipping("Mixtral").eval(), make_model("Mixtral", "pmoe").eval()
    batches = [padded("left"), padded("right", (2, 5, 12, 4), seed=8)]
    both = threading.Barrier(2, timeout=60)

    def meet(*_: Any) -> None:
        both.wait()

    for layer in model.model.layers:  # no call is through before the other one has begun its last layer
        layer.mlp.register_forward_pre_hook(meet)
    found = dict[int, Tensor]()

    def call(i: int) -> None:
        with torch.no_grad():
            found[i] = model(**batches[i]).logits

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for i, inputs in enumerate(batches):
        is_token = inputs["attention_mask"].bool()
        with torch.no_grad():
            assert relative(found[i][is_token], plain(**inputs).logits[is_token]) < ALIKE


# ---- copies, switching on and off


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_copies_and_pickles_of_a_model_skip_by_themselves(make: Callable[[Any], Any]) -> None:
    model, inputs = skipping("Mixtral"), padded("left")
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # by a hook of transformers that cannot be pickled
    wanted = step(model, inputs)
    other = make(model)
    other.zero_grad()
    integration.skip_padding(model).remove()
    assert torch.equal(step(other, inputs).logits, wanted.logits)
    assert rows(other) == {sum(LENGTHS) * 2}
    assert_same_gradients(other, model)
    integration.skip_padding(other).remove()
    step(other, inputs)
    assert rows(other) == {48 * 2}


def hooks(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs",
                     "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):  # fmt: skip
            yield from vars(module)[name].items()
        yield from (key for key in vars(module) if "pmoe" in key)
        yield vars(module).get("_gradient_checkpointing_func")


def test_a_second_call_changes_nothing_and_remove_leaves_the_model_as_it_was() -> None:
    model, inputs = make_model("Mixtral", "pmoe"), padded("left")
    model.activation_checkpointing_enable({"use_reentrant": False})
    state, before = list(model.state_dict()), list(hooks(model))
    handle = integration.skip_padding(model)
    once = list(hooks(model))
    assert integration.skip_padding(nn.Sequential(model)) is not handle and list(hooks(model)) == once
    step(model, inputs)
    assert list(model.state_dict()) == state and rows(model) == {sum(LENGTHS) * 2}
    handle.remove()
    handle.remove()
    assert list(hooks(model)) == before
    step(model, inputs)
    assert rows(model) == {48 * 2}
    integration.skip_padding(model)
    step(model, inputs)
    assert rows(model) == {sum(LENGTHS) * 2}


def test_a_handle_does_not_keep_its_model() -> None:
    handle = integration.skip_padding(make_model("Mixtral", "pmoe"))
    handle.remove()


def test_what_has_no_experts_of_transformers_is_refused() -> None:
    import transformers

    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
                                 num_attention_heads=4)
    )  # fmt: skip
    for model in (llama, make_model("Mixtral", "pmoe").model.layers[0]):
        with pytest.raises(ValueError, match=r"model \(\w+\) must be or contain a model of transformers"):
            integration.skip_padding(model)
    with pytest.raises(TypeError, match="model"):
        integration.skip_padding("mixtral")


def test_a_model_whose_tokens_see_padding_is_refused() -> None:
    """DeepSeek-V4 attends to sums of neighbouring positions: with padding on the left, its logits would
    change.
    """
    import transformers

    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 8, "head_dim": 8, "q_lora_rank": 8}
    config = transformers.DeepseekV4Config(**(SIZES | sizes))
    assert any("compressed" in kind for kind in config.layer_types)
    model = transformers.DeepseekV4ForCausalLM(config)
    before = list(hooks(model))
    with pytest.raises(
        ValueError, match=r"\(DeepseekV4Model\) must have no layers of heavily_compressed_attention"
    ):
        integration.skip_padding(model)
    assert list(hooks(model)) == before


# ---- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_compiled_model_skips_too(checkpointing: bool) -> None:
    ours, theirs = skipping("Mixtral"), make_model("Mixtral", "pmoe")
    if checkpointing:
        ours.activation_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager")
    for side, lengths in (("left", LENGTHS), ("right", (2, 5, 12, 4)), ("left", (1, 12, 2, 3))):
        ours.zero_grad()
        theirs.zero_grad()
        inputs = padded(side, lengths)
        found, wanted = step(compiled, inputs), step(theirs, inputs)
        assert relative(found.loss, wanted.loss) < 1e-6
        assert_same_gradients(ours, theirs)
        assert rows(ours) == {sum(lengths) * 2}
