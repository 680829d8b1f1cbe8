"""The law of `ReachableState`: after `restore()`, all state that functions and modules can reach is as it was."""

import array
import functools
import itertools
import multiprocessing
import queue
import random
import threading
import time
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpipe.stages.reachable_state import ReachableState

TOTAL = 0
SEEN: dict[str, list[int]] = {"rows": []}


class Case(NamedTuple):
    """A root, a function that writes what the root reaches, and one that shows it in a comparable form."""

    root: object
    write: Callable[[], object]
    show: Callable[[], object]


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class Meter:
    total = 0
    history: list[int] = []  # noqa: RUF012  # one list for all meters is meant

    def __init__(self) -> None:
        self.sum, self.count = torch.zeros(()), 0

    def update(self, value: float) -> None:
        self.sum, self.count = self.sum + value, self.count + 1


class Slots:
    __slots__ = ("later", "n")
    later: int

    def __init__(self) -> None:
        self.n = 0

    def count(self) -> None:
        self.n, self.later = 1, 2


@dataclass
class Node:
    items: list[int] = field(default_factory=list)
    inner: "Node | None" = None


class Layer(nn.Module):
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.meter, self.node = Meter(), Node(inner=Node())
        self.register_buffer("centre", torch.zeros(3))
        self.linear = nn.Linear(2, 2)


def written_by(container: Any, write: Callable[[Any], object]) -> Case:
    """A case of a container that stands in an attribute of an object in an attribute of a module."""
    layer: Any = Layer()
    layer.node.holder = SimpleNamespace(container=container)

    def show() -> object:
        held = layer.node.holder.container
        assert held is container
        return list(held.items()) if isinstance(held, dict) else held.copy() if isinstance(held, set) else list(held)

    return Case(layer, lambda: write(container), show)


def add_keys(held: Any) -> None:
    held["new"] = 1
    held["a"] = 7


for name, made, write in (
    ("dict", lambda: {"a": 0}, add_keys),
    ("ordered dict", lambda: OrderedDict(a=0, b=1), lambda held: held.move_to_end("a")),
    ("default dict", lambda: defaultdict(int, a=0), add_keys),
    ("counter", lambda: Counter("ab"), lambda held: held.update("bcc")),
    ("list", lambda: [1, 2], lambda held: held.append(3)),
    ("set", lambda: {1, 2}, lambda held: held.add(3)),
    ("deque", lambda: deque([1, 2], maxlen=2), lambda held: held.append(3)),
    ("bytearray", lambda: bytearray(b"ab"), lambda held: held.extend(b"c")),
    ("array", lambda: array.array("d", [1.0]), lambda held: held.append(2.0)),
    ("numpy array", lambda: np.zeros(3), lambda held: held.__iadd__(1)),
    ("view of a numpy array", lambda: np.zeros((3, 2))[:, 1], lambda held: held.__iadd__(1)),
    ("numpy array of objects", lambda: np.array([[1], None], dtype=object), lambda held: held[0].append(2)),
):

    def of_container(made: Any = made, write: Any = write) -> Case:
        return written_by(made(), write)

    CASES[name] = of_container


def of(
    make: Callable[[], Any],
    write: Callable[[Any], object],
    show: Callable[[Any], object],
    root: Callable[[Any], object] = lambda held: held,
) -> Callable[[], Case]:
    """A case of one object, which the root is or leads to."""

    def made() -> Case:
        held = make()
        return Case(root(held), lambda: write(held), lambda: show(held))

    return made


def trained_leaf() -> Tensor:
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    return leaf


CASES |= {
    "attribute": of(Layer, lambda layer: setattr(layer, "n", 3), lambda layer: layer.n),
    "new attribute": of(Layer, lambda layer: setattr(layer, "extra", 3), lambda layer: sorted(vars(layer))),
    "nested objects": of(
        Layer, lambda layer: layer.node.inner.items.append(1), lambda layer: layer.node.inner.items.copy()
    ),
    "replaced object": of(Layer, lambda layer: setattr(layer, "node", Node([5])), lambda layer: id(layer.node)),
    "meter": of(
        Layer,
        lambda layer: layer.meter.update(2.0),
        lambda layer: (float(layer.meter.sum), layer.meter.count),
        lambda layer: [layer],
    ),
    "slots": of(
        Slots,
        Slots.count,
        lambda held: (held.n, hasattr(held, "later")),
        lambda held: (held,),
    ),
    "bound method": of(Meter, lambda held: held.update(1.0), lambda held: held.count, lambda held: held.update),
    "bound method of a builtin": of(
        list, lambda held: held.append(1), lambda held: held.copy(), lambda held: held.append
    ),
    "dict of modules": of(
        lambda: {"first": Layer(), "second": Layer()},
        lambda held: held["second"].centre.add_(1),
        lambda held: held["second"].centre.tolist(),
        lambda held: lambda: held,
    ),
    "buffer by data": of(Layer, lambda layer: layer.centre.data.fill_(2), lambda layer: layer.centre.tolist()),
    "buffer that is replaced": of(
        Layer,
        lambda layer: setattr(layer, "centre", torch.ones(3)),
        lambda layer: (id(layer.centre), layer.centre[0]),
    ),
    "hook that is registered": of(
        lambda: nn.Linear(2, 2),
        lambda layer: layer.register_forward_hook(print),
        lambda layer: len(layer._forward_hooks),
    ),
    "gradient of a leaf": of(
        trained_leaf, lambda leaf: leaf.sum().backward(), lambda leaf: leaf.grad.tolist(), lambda leaf: [leaf]
    ),
    "weight with max_norm": of(
        lambda: nn.Embedding(3, 2, max_norm=0.1),
        lambda layer: layer(torch.arange(3)),
        lambda layer: layer.weight.tolist(),
    ),
    "weak reference": of(Node, lambda held: held.items.append(1), lambda held: held.items.copy(), weakref.ref),
    "queue of values": of(
        queue.Queue,
        lambda held: held.put(1),
        lambda held: held.qsize(),
        lambda held: SimpleNamespace(held=held),
    ),
}


@case
def closure() -> Case:
    n, rows = 0, [1]

    def count() -> int:
        nonlocal n
        n += 1
        rows.append(n)
        return n

    return Case(count, count, lambda: (n, rows.copy()))


@case
def deleted_closure_variable() -> Case:
    n = 0

    def delete() -> None:
        nonlocal n
        del n

    return Case(delete, delete, lambda: repr(delete.__closure__))


@case
def hook_closure() -> Case:
    layer, calls = nn.Linear(2, 2), list[int]()
    layer.register_forward_hook(lambda module, given, made: calls.append(1))
    return Case({"a": layer}, lambda: layer(torch.ones(2)), lambda: calls.copy())


@case
def hook_of_a_parameter() -> Case:
    layer, calls = nn.Linear(2, 2), list[int]()
    layer.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(1))
    layer.bias.register_hook(lambda gradient: calls.append(2))
    return Case(layer, lambda: layer(torch.ones(2)).sum().backward(), lambda: sorted(calls))


def count_globally() -> None:
    global TOTAL
    TOTAL += 1
    SEEN["rows"].append(TOTAL)


def calls_another() -> None:
    count_globally()


@case
def globals_of_functions() -> Case:
    return Case(calls_another, calls_another, lambda: (TOTAL, SEEN["rows"].copy()))


NOTHING = None


@case
def deleted_global_that_is_none() -> Case:
    def delete() -> None:
        global NOTHING
        del NOTHING

    return Case(delete, delete, lambda: "NOTHING" in globals())


@case
def class_attributes() -> Case:
    held = Meter()

    def write() -> None:
        Meter.total += 1
        Meter.history.append(1)

    return Case(held, write, lambda: (Meter.total, Meter.history.copy()))


@case
def methods_of_classes() -> Case:
    class Counting:
        def call(self) -> None:
            self.step()

        def step(self) -> None:
            calls.append(1)

    calls = list[int]()
    return Case(Counting().call, Counting().call, lambda: calls.copy())


@case
def partial_function() -> Case:
    held = Meter()
    function = functools.partial(lambda meter, rows=(): meter.update(1.0), held, rows=[1])

    def write() -> None:
        function()
        function.keywords["rows"].append(2)

    return Case(function, write, lambda: (held.count, list(function.keywords["rows"])))


@case
def default_arguments() -> Case:
    def remember(value: int, known: list[int] = [], *, named: dict[str, int] = {}) -> None:  # noqa: B006
        known.append(value)
        named["last"] = value

    function: Any = remember
    return Case(function, lambda: remember(1), lambda: (function.__defaults__, function.__kwdefaults__))


@case
def attributes_of_a_function() -> Case:
    def count() -> None:
        count.n = getattr(count, "n", 0) + 1  # type: ignore[attr-defined]

    return Case(count, count, lambda: dict(vars(count)))


@case
def decorated_function() -> Case:
    calls = list[int]()

    @torch.no_grad()
    def count() -> None:
        calls.append(1)

    return Case(count, count, lambda: calls.copy())


@case
def buffer_with_other_memory() -> Case:
    layer, weights = Layer(), torch.zeros(3)
    layer.centre, view = weights, weights.view(3)

    def write() -> None:
        layer.centre.data = torch.ones(5)

    return Case(layer, write, lambda: (layer.centre.tolist(), layer.centre.data_ptr() == view.data_ptr()))


@case
def odd_tensors() -> Case:
    held = [
        torch.tensor([float("nan"), -0.0]), torch.ones(2).bfloat16(), torch.ones(2, dtype=torch.complex128),
        torch.ones(2, 3).t(), torch.zeros(1).expand(4), torch.eye(2).to_sparse(), torch.ones(2, requires_grad=True),
        torch.tensor([True]),
    ]  # fmt: skip

    def write() -> None:
        for tensor in held:
            tensor.data = tensor.data.clone()
            tensor.data.zero_()

    return Case(held, write, lambda: [repr(tensor.detach()) for tensor in held])


@case
def workspace() -> Case:
    layer: Any = Layer()
    layer.workspace = torch.zeros(2, 2)
    layer.workspace.scratch = torch.zeros(2)

    def write() -> None:
        layer.workspace.normal_()
        layer.workspace.scratch.add_(1)

    return Case(layer, write, lambda: (layer.workspace.tolist(), layer.workspace.scratch.tolist()))


@case
def optimizer() -> Case:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())

    def step() -> None:
        layer(torch.ones(2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 2

    step()
    moments = optimizer.state[layer.bias]
    return Case(
        optimizer, step, lambda: (optimizer.param_groups[0]["lr"], float(moments["step"]), moments["exp_avg"])
    )


@case
def generators_of_random_numbers() -> Case:
    held: list[Any] = [random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()]

    def write() -> object:
        return held[0].random(), held[1].random(), held[2].rand(), torch.rand(1, generator=held[3])

    def show() -> object:
        kept = ReachableState.of({"": held})
        drawn = repr(write())
        kept.restore()
        return drawn

    return Case(held, write, show)


@case
def global_generators() -> Case:
    def states() -> object:
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()

    return Case(None, lambda: (random.random(), np.random.rand(), torch.rand(1)), states)


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_everything_is_as_it_was_after_restore(make: Callable[[], Case]) -> None:
    root, write, show = make()
    before = repr(show())
    state = ReachableState.of({"layer 0": root})
    for _ in range(2):  # a state can be restored again
        write()
        assert repr(show()) != before
        assert ReachableState.of({"layer 0": root}).changed_since(state)
        state.restore()
        assert repr(show()) == before
    assert not ReachableState.of({"layer 0": root}).changed_since(state)
    assert not state.uncopyable


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.count(3), lambda: iter([1, 2, 3]), lambda: iter((1, 2, 3)), lambda: iter(range(5)),
        lambda: iter({1: 2, 3: 4}.items()), lambda: iter("abc"), lambda: reversed([1, 2, 3]), lambda: iter({1, 2}),
    ],
)  # fmt: skip
def test_iterators_are_put_back_wherever_they_are_referred_to(make: Callable[[], Iterator[object]]) -> None:
    it = make()
    holder = SimpleNamespace(it=it, items=[it])

    def draw() -> object:
        return next(it)

    first = next(make())
    state = ReachableState.of({"loss_fn": draw, "layer 0": holder})
    for _ in range(2):
        assert next(it) == first
        assert holder.items[0] is holder.it is it
        state.restore()


def generator() -> Iterator[int]:
    yield from range(9)


@pytest.mark.parametrize(
    "make",
    [
        generator, lambda: zip([1, 2], [3, 4], strict=True), lambda: map(str, [1]), lambda: enumerate("ab"),
        lambda: itertools.cycle([1]), queue.SimpleQueue, lambda: (iter([1]),),
        lambda: multiprocessing.Value("i"),
    ],
)  # fmt: skip
def test_state_that_cannot_be_copied_is_reported_with_its_place(make: Callable[[], object]) -> None:
    layer: Any = Layer()
    layer.meter.source = make()
    (place,) = ReachableState.of({"layer 1 (1: Layer)": layer}).uncopyable
    assert place.startswith("layer 1 (1: Layer), its attribute meter.source")


def test_what_another_thread_may_change_is_reported_and_not_restored() -> None:
    holder: Any = SimpleNamespace(queue=queue.Queue(1))
    holder.thread = threading.Thread(target=lambda: [holder.queue.put(at) for at in range(3)], daemon=True)
    holder.thread.start()
    while not holder.queue.not_full._waiters:
        time.sleep(0.001)
    state = ReachableState.of({"loss_fn": holder})
    assert sorted(state.uncopyable) == [
        "loss_fn, its attribute queue (a Queue)", "loss_fn, its attribute thread (a Thread)"
    ]  # fmt: skip
    assert holder.queue.get() == 0
    state.restore()
    assert [holder.queue.get() for _ in range(2)] == [1, 2]
    holder.thread.join()
    assert not ReachableState.of({"loss_fn": holder}).uncopyable


def test_places_are_named() -> None:
    layer: Any = Layer()
    layer.by, layer.hooked = {"calls": [0]}, Meter()
    layer.register_forward_hook(lambda module, given, made: module)
    state = ReachableState.of({"layer 1 (1: Layer)": layer, "loss_fn": calls_another})
    layer.n += 1
    layer.by["calls"].append(1)
    layer.node.items = [1]
    layer.centre.add_(1)
    calls_another()
    changed = ReachableState.of({"layer 1 (1: Layer)": layer, "loss_fn": calls_another}).changed_since(state)
    assert sorted(changed) == [
        "layer 1 (1: Layer), its attribute by['calls']",
        "layer 1 (1: Layer), its attribute centre",
        "layer 1 (1: Layer), its attribute n",
        "layer 1 (1: Layer), its attribute node.items",
        "loss_fn, global SEEN['rows']",
        "loss_fn, global TOTAL",
    ]
    state.restore()


class NoLength(tuple[object, ...]):
    __slots__ = ()

    def __len__(self) -> int:
        raise NotImplementedError


class NoIteration(list[object]):
    def __iter__(self) -> Iterator[object]:
        raise RuntimeError

    def __len__(self) -> int:
        raise RuntimeError


class NoItems(dict[str, object]):
    def items(self) -> Any:
        raise RuntimeError

    keys = values = __iter__ = __getitem__ = __setitem__ = items  # type: ignore[assignment]


class NoComparison:
    n = 0

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> object:
        raise RuntimeError

    def __bool__(self) -> bool:
        raise RuntimeError


def test_broken_containers_are_read_through_their_builtin_class() -> None:
    odd, inner, items, values = NoComparison(), [1], NoIteration([0]), NoItems()
    holder = SimpleNamespace(all=[NoLength((inner, odd)), items, values, odd])
    state = ReachableState.of({"": holder})
    inner.append(2)
    list.append(items, 3)
    dict.__setitem__(values, "new", 1)
    odd.n = 3
    holder.all.pop()
    state.restore()
    assert inner == [1]
    assert list(list.__iter__(items)) == [0]
    assert not dict.__contains__(values, "new")
    assert vars(odd) == {}
    assert holder.all[3] is odd
    assert not state.uncopyable


def test_parameters_are_copied_on_request_only() -> None:
    layer = nn.Linear(2, 2)
    assert ReachableState.of({"": layer}).nbytes == 0
    state = ReachableState.of({"": layer}, parameters_too=[layer.weight])
    before = layer.weight.detach().clone()
    layer.weight.data.add_(1)
    state.restore()
    assert torch.equal(layer.weight, before)


def test_a_later_state_shares_the_copies_of_what_has_not_changed() -> None:
    layer = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    state = ReachableState.of({"": layer})
    layer[0](torch.randn(8, 4))
    later = ReachableState.of({"": layer}, like=state)
    assert later.nbytes == 4 * 4 * 2 + 8
    later.restore()
    assert not later.changed_since(ReachableState.of({"": layer}))


def test_restore_does_not_raise_the_version_of_a_tensor_that_a_graph_has_saved() -> None:
    weight, held = torch.ones(2, requires_grad=True), torch.ones(2)
    state = ReachableState.of({"": [held]})
    loss = (weight * held).sum()
    held.data.zero_()
    state.restore()
    loss.backward()
    assert torch.equal(weight.grad, torch.ones(2))  # type: ignore[arg-type]


def test_what_is_too_large_to_walk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe.stages.reachable_state.MOST", 50)
    (place,) = ReachableState.of({"layer 0": [[] for _ in range(100)]}).uncopyable
    assert "more than 50 objects" in place


def test_lazy_parameters_and_meta_tensors_are_left_alone() -> None:
    layer = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(), nn.Linear(2, 2, device="meta"))
    state = ReachableState.of({"": layer})
    state.restore()
    assert state.nbytes == 8  # num_batches_tracked
