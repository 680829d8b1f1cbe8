"""The device path, on a simulated accelerator: same bits, and each order between streams is given, and needed.

What runs on it does so in a process of its own, since torch has one kind of accelerator in each.
"""

import subprocess
import sys
import tempfile
from itertools import product

import pytest

from gpipe.schedule.schedules import SCHEDULES
from tests.accelerator import built, lacking
from tests.accelerator.mutations import NOTICED, Order, orders, program_without
from tests.support import progress
from tests.support.kinds import KINDS

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())

LATER, LATEST = 100_000, 200_000  # from here on, models given whole are drawn, and what is cast
ON_HOST = 300_000  # and from here on, weights on the host
BLOCK, FEWER = 30, 10  # pipes that are drawn, in one process
ORDERS = [order for order in orders() if order.elsewhere is None]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    built()


def ask(module: str, *arguments: object) -> tuple[int, str]:
    """What a program here says, with its errors where it fails, and how it ends."""
    command = [sys.executable, "-m", f"tests.accelerator.{module}", *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        done = progress.run(command, stdout=subprocess.PIPE, stderr=errors)
        errors.seek(0)
        return done.returncode, done.stdout + (errors.read() if done.returncode else "")


@pytest.mark.parametrize("first", range(0, 88 * BLOCK, BLOCK))
def test_drawn_pipes_have_the_bits_of_the_devices_plain_loop_and_nothing_is_reported(first: int) -> None:
    code, said = ask("matrix", "--first", first, "--count", BLOCK)
    assert code == 0, said


@pytest.mark.parametrize("first", range(ON_HOST, ON_HOST + 24 * BLOCK, BLOCK))
def test_drawn_pipes_with_weights_on_the_host_have_the_bits_of_the_loop(first: int) -> None:
    code, said = ask("matrix", "--first", first, "--count", BLOCK)
    assert code == 0, said


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_an_order_left_out_is_reported(order: Order) -> None:
    _, said = ask(*program_without(order))
    assert said.startswith(NOTICED), said


@pytest.mark.parametrize(
    ("part", "world"),
    [*product(["replicas", "sharded"], [2, 4]), *product(["stories", "schedules"], [1, 2, 3, 4])],
)
def test_ranks_that_are_processes_have_the_bits_of_one_process_and_nothing_is_reported(part: str, world: int) -> None:
    code, said = ask("processes", "--part", part, "--world", world)
    assert code == 0, said


@pytest.mark.parametrize("first", [*range(LATER, LATER + 400, FEWER), *range(LATEST, LATEST + 100, FEWER)])
def test_drawn_pipes_of_whole_models_and_of_casts_have_the_bits_of_the_loop(first: int) -> None:
    code, said = ask("matrix", "--first", first, "--count", FEWER)
    assert code == 0, said


def test_trainer_over_devices_leaves_what_it_leaves_on_one() -> None:
    code, said = ask("trainer")
    assert code == 0, said


def test_lightnings_trainer_over_devices_leaves_what_it_leaves_on_one() -> None:
    pytest.importorskip("lightning", reason="the extra of Lightning is not installed")
    code, said = ask("lightning_trainer")
    assert code == 0, said


def test_what_is_put_on_parameters_and_tensors_is_kept_where_they_are_moved() -> None:
    code, said = ask("kept")
    assert code == 0, said


def test_wrong_programs_are_reported_and_right_ones_are_not() -> None:
    code, said = ask("wrong_programs")
    assert code == 0, said


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_device_never_holds_much_more_than_the_table_states_whatever_m_is(schedule: str) -> None:
    code, said = ask("memory", "--schedule", schedule)
    assert code == 0, said


@pytest.mark.parametrize("part", range(9))
def test_what_users_do_is_as_on_cpus_and_no_report_is_false(part: int) -> None:
    code, said = ask("users", "--count", 2, *(f"--only={name}" for name in [*KINDS][part::9]))
    assert code == 0, said
