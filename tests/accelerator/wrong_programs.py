"""Wrong stream programs with one error each, and correct versions of them: the detector distinguishes them.

    python -m tests.accelerator.wrong_programs

They use only torch.
"""

from collections.abc import Callable

import torch

from tests.accelerator import load

SIMULATOR = load()
A, B = torch.device("sim", 0), torch.device("sim", 1)


def two_streams_write_one_tensor(right: bool) -> None:
    """Double use: one stream adds to what another adds to."""
    total, one, other = torch.zeros(4, device=A), torch.Stream(A), torch.Stream(A)
    for stream in (one, other):
        stream.wait_stream(torch.accelerator.current_stream(A))
    with one:
        total += 1
    if right:
        other.wait_stream(one)
    with other:
        total += 1


def memory_is_given_away_too_early(right: bool) -> None:
    """Early free: a stream still reads what its owner drops, and its owner makes something new."""
    side, given = torch.Stream(A), torch.ones(1024, device=A)
    side.wait_stream(torch.accelerator.current_stream(A))
    with side:
        given * 2
    if right:
        given.record_stream(side)
    del given
    torch.zeros(1024, device=A)


def a_copy_between_devices_is_not_waited_for(right: bool) -> None:
    """Missing wait: the target's side stream reads what is still on its way from another device."""
    side = torch.Stream(B)
    with side:
        arrived = torch.ones(4, device=A).to(B, non_blocking=True)
    if right:
        torch.accelerator.current_stream(B).wait_stream(side)
    arrived.record_stream(torch.accelerator.current_stream(B))
    arrived + 1


def an_event_is_recorded_too_late(right: bool) -> None:
    """Late event: what waits for it has waited for nothing."""
    side, event, made = torch.Stream(A), torch.Event(A), torch.zeros(4, device=A)
    side.wait_stream(torch.accelerator.current_stream(A))
    with side:
        made.fill_(1)
        if right:
            event.record(side)
    torch.accelerator.current_stream(A).wait_event(event)
    made + 1
    with side:
        event.record(side)


def a_pool_is_used_again(right: bool) -> None:
    """Reuse: a buffer of a pool is filled for the next batch while a stream copies the last one out of it."""
    buffer, copying = torch.zeros(64, device=A), torch.Stream(A)
    for _ in range(2):
        if right:
            torch.accelerator.current_stream(A).wait_stream(copying)
        buffer.fill_(1)
        copying.wait_stream(torch.accelerator.current_stream(A))
        with copying:
            buffer.to(B, non_blocking=True)


PROGRAMS: list[Callable[[bool], None]] = [
    two_streams_write_one_tensor,
    memory_is_given_away_too_early,
    a_copy_between_devices_is_not_waited_for,
    an_event_is_recorded_too_late,
    a_pool_is_used_again,
]


def main() -> None:
    failed = 0
    for program in PROGRAMS:
        for right in (True, False):
            program(right)
            reports = SIMULATOR.take_reports()
            failed += bool(reports) == right
            said = reports[0].splitlines()[0] if reports else "nothing"
            print(f"{program.__name__}, {'right' if right else 'wrong'}: {said}")
            for device in (A, B):
                torch.accelerator.synchronize(device)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
