"""The check that `make test-processors` runs on simulated processors, on one model and on this one."""

from tests.processors.same_bits import differing, forgetting, in_plain_torch


def test_no_pipe_differs_from_the_plain_loop() -> None:
    assert not differing([in_plain_torch(0)])


def test_the_check_can_forget_memory_layouts() -> None:
    with forgetting():
        differing([in_plain_torch(0)], [2])
