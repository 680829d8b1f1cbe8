"""Values as JSON and back, and the code that may not be there."""

import json
import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import gpipe
from gpipe.checkpoint.files import DTYPES, TensorFiles, encode_file
from gpipe.checkpoint.manifest import Encoder, decode
from tests.support.plain_loop import same_bits

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.booleans(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    kept: dict[str, Tensor] = {}

    def keep(where: str, tensor: Tensor) -> str:
        kept[where] = tensor
        return where

    mistakes: list[str] = []
    text = json.dumps(Encoder(keep, mistakes)(value, "value"), allow_nan=False)
    assert mistakes == []
    return decode(json.loads(text), kept.__getitem__)


def same(one: Any, other: Any) -> bool:
    """Whether two values are the same, their types and NaN and the sign of zero included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


@given(VALUES)
def test_values_come_back_the_same(value: Any) -> None:
    assert same(there_and_back(value), value)


ODD_NAN = struct.unpack(">d", bytes.fromhex("fff8000000000007"))[0]


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, ODD_NAN, 2**200, -0.0, 5e-324, Counter("abba"), {"$tensor": "x"}, ()]
)
def test_examples_come_back_the_same(value: Any) -> None:
    assert same(there_and_back(value), value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 1, 2)])
def test_tensors_come_back_the_same(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(
        0, 2 if dtype == torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator
    )
    tensor = raw.view(dtype).reshape(shape)
    assert same_bits(there_and_back(tensor), tensor)
    path = tmp_path / "file.safetensors"
    with path.open("wb") as file:
        for piece in encode_file({"tensor": tensor, "other": torch.ones(3, dtype=torch.uint8)}):
            file.write(piece)
    files = TensorFiles([path])
    assert files.findings == []
    assert same_bits(files.read("tensor"), tensor)


def test_an_extra_without_end_or_of_endless_digits_is_refused(tmp_path: Path) -> None:
    around: list[Any] = [1]
    around.append({"again": around})
    pipe = gpipe.GPipe([torch.nn.Linear(2, 1)], 1, 2)
    for extra in (around, {"count": 10**5000}):
        with pytest.raises((RecursionError, ValueError)):
            gpipe.save(tmp_path, pipe, extra=extra)
        assert gpipe.find_checkpoint(tmp_path) is None
