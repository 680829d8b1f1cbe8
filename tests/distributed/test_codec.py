"""The law of the codec: what comes out lies in memory as what went in, with its dtype, shape, bits and identities."""

from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gpipe.distributed.codec import check_shape, decode, encode
from gpipe.stages.boundary import UNDEFINED, BoundaryValue, Gradients
from gpipe.stages.messages import Message
from gpipe.stages.tree import Tree

LAW = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip
sizes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def random_bits(dtype: torch.dtype, size: Sequence[int], seed: int) -> Tensor:
    """Any bits: NaN of all kinds and negative zeros among them. A bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(size).numel()
    if dtype is torch.bool:
        return torch.randint(2, (count,), generator=generator).bool().view(size)
    data = torch.randint(256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(size)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype and shape, lying in memory in any way that torch has."""
    dtype, size, seed = draw(st.sampled_from(DTYPES)), draw(sizes), draw(st.integers(0, 2**31))
    tensor = random_bits(dtype, size, seed)
    for way in draw(st.lists(st.sampled_from([*OF_ANY, *OF_AXES]), max_size=3)):
        if tensor.dim() or way in OF_ANY:
            tensor = way(tensor)
    if draw(st.booleans()) and (tensor.is_floating_point() or tensor.is_complex()) and dtype.itemsize > 1:
        tensor = tensor.detach().requires_grad_()
    return tensor


def offset(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)
    return torch.cat([flat, flat, flat])[len(flat) : 2 * len(flat)].view(tensor.shape)


def spread(tensor: Tensor) -> Tensor:
    """With gaps between all elements."""
    room = tensor.new_zeros((*tensor.shape, 3))
    room[..., 1] = tensor
    return room[..., 1]


OF_ANY: list[Callable[[Tensor], Tensor]] = [
    offset,
    spread,
    lambda t: t.conj(),
    lambda t: t.conj().imag if t.is_complex() else t,  # a real tensor with the negative bit
    lambda t: t.unsqueeze(0).expand(3, *t.shape),
    lambda t: t.unsqueeze(-1).expand(*t.shape, 3),
]
OF_AXES: list[Callable[[Tensor], Tensor]] = [
    lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    lambda t: t.movedim(0, -1),
    lambda t: t[..., ::2],
    lambda t: t[:, 1:] if t.dim() > 1 else t[1:],
    lambda t: t[..., :1],
]


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=5),
    st.binary(max_size=5), st.sampled_from(DTYPES),
)  # fmt: skip


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Tuples, lists and dicts of tensors, some of which come again, and of plain values."""
    shared = draw(st.lists(tensors(), min_size=1, max_size=3))
    leaves = st.one_of(st.sampled_from(shared), tensors(), plain)
    keys = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.none())
    nested = st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=6,
    )
    return draw(nested)


def there_and_back(message: Message, gap: int = 0) -> Message:
    """A message by both of its ways: through a stream, behind `gap` other bytes, and through shared memory."""
    encoded = encode(message)
    stream = bytearray(gap) + b"".join(map(bytes, encoded.pieces()))
    assert len(stream) == gap + encoded.size
    by_stream = decode(encoded.layout, stream, gap)
    stream[:] = b"\xff" * len(stream)  # used again
    memory = bytearray(b"\xff" * (encoded.size + 100))
    encoded.write(torch.frombuffer(memory, dtype=torch.uint8))
    by_memory = decode(encoded.layout, memory)
    memory[:] = b"\xff" * len(memory)
    assert_same(by_stream, by_memory)
    return by_stream


def assert_same(one: Message, other: Message, *, strides: bool = True) -> None:
    """The same trees of the same tensors, with the same tensor in the same places."""
    items = [pytree.tree_flatten(m.value if isinstance(m, BoundaryValue) else m) for m in (one, other)]
    (left, spec), (right, other_spec) = items
    assert spec == other_spec
    pairs = list(zip(left, right, strict=True))
    for a, b in pairs:
        assert type(a) is type(b)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            assert torch.equal(bits_of(a), bits_of(b))
            assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
            assert not strides or a.stride() == b.stride()
            assert a.data_ptr() % 64 == b.data_ptr() % 64
        else:
            assert repr(a) == repr(b)  # NaN is NaN
    places = [
        [next(at for at, other in enumerate(half) if other is item) for item in half if isinstance(item, Tensor)]
        for half in (left, right)
    ]
    assert places[0] == places[1]


def bits_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1).view(torch.uint8)


@settings(LAW, max_examples=400)
@given(tensors(), st.integers(0, 70))
def test_a_tensor_comes_as_it_left(tensor: Tensor, gap: int) -> None:
    back = there_and_back(BoundaryValue(tensor, []), gap)
    assert_same(back, BoundaryValue(tensor, []))
    assert isinstance(back, BoundaryValue)
    assert [id(leaf) for leaf in back.leaves] == [id(back.value)] * tensor.requires_grad
    assert back.value.is_leaf


@settings(LAW, max_examples=200)
@given(trees(), st.integers(0, 70))
@example((), 0)
@example({}, 0)
@example(None, 0)
@example({"a": [()], 2: {}}, 0)
@example([torch.ones(3)] * 3, 5)
def test_a_tree_comes_as_it_left(tree: Tree, gap: int) -> None:
    back = there_and_back(BoundaryValue(tree, []), gap)
    assert_same(back, BoundaryValue(tree, []))
    assert isinstance(back, BoundaryValue)
    wanted = {id(t): t for t in pytree.tree_leaves(back.value) if isinstance(t, Tensor) and t.requires_grad}
    assert [id(leaf) for leaf in back.leaves] == list(wanted)


@settings(LAW, max_examples=100)
@given(st.lists(st.none() | st.just(UNDEFINED) | tensors(), max_size=4))
def test_gradients_come_as_they_left(found: Gradients) -> None:
    gradients: Gradients = [one.detach() if isinstance(one, Tensor) else one for one in found]
    assert_same(there_and_back(gradients), gradients)


def test_of_elements_that_overlap_only_the_bits_arrive_and_repeated_ones_travel_once() -> None:
    assert encode(BoundaryValue(torch.ones(1000, 1).expand(1000, 1000), [])).size == 4000
    numbers = torch.arange(12.0)
    for tensor in (
        numbers.unfold(0, 4, 2),
        numbers.as_strided((3, 4), (2, 1)),
        numbers.as_strided((2, 3, 2), (1, 1, 0)),
        numbers.as_strided((1,), (3,)),
        numbers.as_strided((0,), (3,)),
    ):
        assert_same(there_and_back(BoundaryValue(tensor, [])), BoundaryValue(tensor, []), strides=False)


def test_containers_and_keys_stay_what_they_are_also_where_they_are_equal() -> None:
    """The layout that is kept for one is not the other's."""
    counts = defaultdict(int, {(1, "a"): 2})
    for value in (torch.Size([2, 3]), {None: torch.Size(())}, {(1, (True, 2.5)): 3}, counts, deque([1], maxlen=3)):
        back = there_and_back(BoundaryValue(value, []))
        assert isinstance(back, BoundaryValue)
        assert back.value == value
        assert isinstance(value, torch.Size) or type(back.value) is type(value)
    for key in (1, True, "1", 1, (1,), (True,), True, 1.0):
        back = there_and_back(BoundaryValue({key: torch.ones(1)}, []))
        assert isinstance(back, BoundaryValue)
        assert isinstance(back.value, dict)
        assert [(found, type(found)) for found in back.value] == [(key, type(key))]


def test_complex_numbers_of_16_bytes_may_lie_at_any_address() -> None:
    """The processor reads them from multiples of 16 alone, and a message may end anywhere: it was killed."""
    tensor = torch.randn(33, 5, dtype=torch.complex128)
    for gap in range(17):
        assert_same(there_and_back(BoundaryValue(tensor, []), gap), BoundaryValue(tensor, []))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.bool])
def test_a_tensor_may_lie_at_any_address(dtype: torch.dtype) -> None:
    """Also at none that a multiple of its items could reach, as over a file that was read."""
    memory = torch.zeros(200, dtype=torch.uint8)
    for ahead in range(65):
        tensor = torch.empty(0, dtype=dtype).set_(memory.untyped_storage()[ahead:], 0, (2, 4), (4, 1))
        back = there_and_back(BoundaryValue(tensor, []))
        assert_same(back, BoundaryValue(tensor, []))
        assert isinstance(back, BoundaryValue)
        assert back.value.data_ptr() % 64 == ahead % 64


def test_a_tensor_may_lie_where_devices_lay_it() -> None:
    """They align by 512 bytes: a part of a tensor there lies at any multiple of its items below that."""
    for ahead in range(0, 512, 4):
        check_shape((torch.float32, (16,), (1,), False, ahead))


Pair = namedtuple("Pair", "a b")


@dataclass
class Held:
    tensor: Tensor


class Colour(Enum):
    RED = 1


REFUSED: list[tuple[Any, str]] = [
    ({1, 2}, "set"),
    (nn.Tanh(), "Tanh"),
    (np.ones(3), "ndarray"),
    (np.float32(1), "float32"),
    (Colour.RED, "Colour"),
    (Held(torch.ones(1)), "Held"),
    (len, "builtin_function"),
    (torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
    (nn.Parameter(torch.ones(2)), "Parameter"),
    (Pair(1, torch.ones(2)), "Pair"),
    ({Colour.RED: torch.ones(2)}, "Colour"),
    (defaultdict[Any, Any](lambda: 0, {1: torch.ones(2)}), "function"),
]


def test_what_cannot_travel_is_refused_by_name_when_it_leaves() -> None:
    for value, named in REFUSED:
        for whole in (value, (torch.ones(1), value)):
            with pytest.raises(TypeError, match=named):
                encode(BoundaryValue(whole, []))
