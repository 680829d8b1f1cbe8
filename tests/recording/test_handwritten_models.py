"""Models that nobody foresaw train as the plain loop trains them, to the last bit."""

from typing import Any

import pytest

from tests.support.beside_plain import assert_as_plain
from tests.support.handwritten import CASES

SHAPES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"remat": "never"}),
    (3, {}),
    (4, {"schedule": "1f1b", "driver": "lockstep"}),
    (2, {"schedule": "zb_v"}),
    (2, {"schedule": "interleaved", "driver": "lockstep", "remat": "never"}),
]


@pytest.mark.parametrize("name", CASES)
def test_open_models_train_as_the_plain_loop(name: str) -> None:
    case = CASES[name]
    like = None
    for partitions, settings in SHAPES:
        like = assert_as_plain(case, partitions, like=like, **settings)
