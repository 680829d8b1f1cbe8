"""Law 1 over models that mix everything a layer may do; the benchmark of the same name runs more of them."""

from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.law1_mixed import check, generate_task, run_pipe, run_plain, differences, Way


@settings(max_examples=55, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=True))
def test_models_that_mix_everything_give_the_bits_of_k_1_and_of_the_plain_loop(draw: Random) -> None:
    task, found = check(draw)
    wrong = {way: names for way, names in found.items() if names}
    assert not wrong, f"{task.model.kinds}: {wrong}"
