"""The scripts in examples/clusters, started by each engine that is installed."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from tests.engines.matrix import ENGINES, EXAMPLES, FAULTS, reference, try_fault, try_start


@pytest.fixture(scope="module")
def weights_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, torch.Tensor]]:
    """Returns the weights of the training without a fault, for a number of ranks."""
    return cache(lambda processes: reference(tmp_path_factory.mktemp("reference"), processes))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_training_ends_with_equal_weights(
    name: str, fault: str, weights_of: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    engine = ENGINES[name]
    if engine.missing:
        pytest.skip(engine.missing)
    weights = weights_of(engine.processes)
    happened, right = try_fault(engine, weights, tmp_path, fault) if fault else try_start(engine, weights, tmp_path)
    assert right, happened


def test_the_trainjob_has_only_fields_that_kubeflow_knows() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    job = yaml.safe_load((EXAMPLES / "trainjob.yaml").read_text())
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # Unknown fields would be dropped.
