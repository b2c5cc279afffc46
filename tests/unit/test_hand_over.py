"""Gradients of a compiled backward graph reach autograd as soon as their operators have run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pmoe.graph import run
from pmoe.graph.hand_over import GradientPass, HandOver, PendingGradient


class Graph(torch.autograd.Function):
    """Stands for a compiled graph: the gradient of input i is full of i + 1, the last input's comes first.

    journal: what ran, in order.
    """

    @staticmethod
    def forward(ctx: Any, journal: list[str], *inputs: Tensor) -> Tensor:
        ctx.journal = journal
        ctx.shapes = [each.shape for each in inputs]
        return torch.stack([each.sum() for each in inputs]).sum()

    @staticmethod
    def backward(ctx: Any, _grad: Tensor) -> Any:
        def steps() -> Iterator[tuple[int, list[Tensor]]]:
            for number in reversed(range(len(ctx.shapes))):
                ctx.journal.append(f"computes {number}")
                yield number, [torch.full(ctx.shapes[number], number + 1.0)]
            ctx.journal.append("ends")

        running = GradientPass(steps())
        torch.autograd.Variable._execution_engine.queue_callback(running.finish)
        pending = (
            PendingGradient.of(running, number, torch.empty(0), each)
            for number, each in enumerate(ctx.shapes)
        )
        return None, *pending


def graph_of(journal: list[str], inputs: list[Tensor]) -> Tensor:
    result: Tensor = Graph.apply(journal, *(HandOver.apply(each) for each in inputs))
    return result


def parameters(journal: list[str], count: int = 3) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(4)) for _ in range(count)]
    for number, parameter in enumerate(made):
        parameter.register_post_accumulate_grad_hook(
            lambda _, number=number: journal.append(f"has {number}")  # type: ignore[misc]
        )
    return made


def test_hooks_of_a_gradient_run_before_the_graph_goes_on() -> None:
    journal: list[str] = []
    made = parameters(journal)
    graph_of(journal, [*made]).backward()
    assert journal == ["computes 2", "has 2", "computes 1", "has 1", "computes 0", "has 0", "ends"]
    assert [each.grad.tolist() for each in made if each.grad is not None] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_a_graph_runs_to_its_end_if_few_gradients_are_asked_for() -> None:
    """Its messages must be sent, whatever this rank asks for."""
    journal: list[str] = []
    made = parameters(journal)
    (grad,) = torch.autograd.grad(graph_of(journal, [*made]), [made[1]])
    assert grad.eq(2).all() and made[1].grad is None
    assert journal == ["computes 2", "computes 1", "computes 0", "ends"]


def test_a_gradient_becomes_grad_without_a_copy() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    gradient = [torch.ones(4)]
    address = gradient[0].data_ptr()
    running = GradientPass(iter([(0, gradient)]))

    class Early(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, _grad: Tensor) -> Tensor:
            return PendingGradient.of(running, 0, torch.empty(0), (4,))

    Early.apply(HandOver.apply(parameter)).backward()
    assert parameter.grad is not None and parameter.grad.data_ptr() == address


def test_gradients_of_two_uses_are_added() -> None:
    journal: list[str] = []
    (shared,) = parameters(journal, 1)
    (graph_of(journal, [shared]) + graph_of(journal, [shared]) + 3 * shared.sum()).backward()
    assert shared.grad is not None and shared.grad.eq(1 + 1 + 3).all()
    assert journal.count("has 0") == 1


def test_an_operator_on_a_pending_gradient_computes_it() -> None:
    running = GradientPass(iter([(0, [torch.ones(3)])]))
    pending = PendingGradient.of(running, 0, torch.empty(0), (3,))
    assert (pending + 1).tolist() == [2.0] * 3 and type(pending + 1) is Tensor


def test_a_pending_gradient_cannot_be_read_after_its_backward_pass() -> None:
    running = GradientPass(iter([(0, [torch.ones(3)])]))
    pending = PendingGradient.of(running, 0, torch.empty(0), (3,))
    del running
    with pytest.raises(RuntimeError, match="must be read in the backward pass that returns it"):
        pending + 1


def test_two_threads_may_ask_for_gradients() -> None:
    """As on a GPU, where inputs on the CPU have a thread of their own."""
    running = GradientPass((number, [torch.full((2,), float(number))]) for number in range(200))
    got: dict[int, float] = {}

    def ask(numbers: range) -> None:
        got.update({number: float(running.run_to(number).pop()[0]) for number in numbers})

    threads = [threading.Thread(target=ask, args=(range(start, 200, 2),)) for start in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {number: float(number) for number in range(200)}


# ---- by torch.compile


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def stops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the gradients up to which graphs ran, in order."""
    seen: list[int] = []
    run_to: Callable[[GradientPass, int], Any] = GradientPass.run_to

    def watched(self: GradientPass, number: int) -> Any:
        seen.append(number)
        return run_to(self, number)

    monkeypatch.setattr(GradientPass, "run_to", watched)
    return seen


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    run.PROGRAMS.clear()
    return torch.compile(module, backend="pmoe")


def test_a_compiled_graph_equals_eager_to_the_bit_and_stops_at_each_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(1)
    seen = stops(monkeypatch)
    net = Net()
    call = compiled(net)
    for sequences in (4, 4, 5, 3):  # the graph for 5 has symbols as sizes
        x = torch.randn(sequences, 6, requires_grad=True)
        x_of_graph = x.detach().clone().requires_grad_()
        net.zero_grad()
        net(x).square().sum().backward()
        expected = [each.grad for each in net.parameters()]
        net.zero_grad()
        seen.clear()
        call(x_of_graph).square().sum().backward()
        assert len(seen) == len(expected) + 1
        assert all(torch.equal(a, b.grad) for a, b in zip(expected, net.parameters(), strict=True))
        assert torch.equal(x.grad, x_of_graph.grad)


def test_gradients_are_accumulated_over_two_passes_of_one_graph() -> None:
    net = Net()
    call = compiled(net)
    first, second = torch.randn(4, 6), torch.randn(4, 6)
    (call(first).sum() + call(second).square().sum()).backward()
    got = [each.grad for each in net.parameters()]
    net.zero_grad()
    (net(first).sum() + net(second).square().sum()).backward()
    for each, parameter in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(each, parameter.grad)


class InPlace(Net):
    """Changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


def test_an_input_that_the_graph_changes_in_place_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stops(monkeypatch)
    net = InPlace()
    results = []
    for call in (net, compiled(net)):
        net.zero_grad()
        x = torch.ones(4, 6, requires_grad=True)
        y = x * 3
        call(y).sum().backward()
        assert y.eq(6).all()
        results.append([x.grad, *(each.grad for each in net.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert not seen


def test_a_hook_that_fails_ends_the_pass_at_once_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    call = compiled(net)

    def fails(_: Tensor) -> None:
        raise RuntimeError("the hook failed")

    call(torch.randn(4, 6)).sum().backward()  # the order of its gradients is known from now on
    left: list[bool] = []
    steps = run.GraphRunner._steps

    def watched(self: run.GraphRunner, boxed: list[Any]) -> Any:
        try:
            yield from steps(self, boxed)
        except GeneratorExit:
            left.append(True)
            raise

    monkeypatch.setattr(run.GraphRunner, "_steps", watched)
    handle = net.layers[1].weight.register_post_accumulate_grad_hook(fails)
    with pytest.raises(RuntimeError, match="the hook failed"):
        call(torch.randn(4, 6)).sum().backward()
    assert left
    handle.remove()
    net.zero_grad()
    call(torch.randn(4, 6)).sum().backward()
    assert all(each.grad is not None for each in net.parameters())
