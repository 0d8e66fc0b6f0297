"""The weights that a run has without any interruption."""

from __future__ import annotations

import pytest
import torch
from tests.faults.test_worker_deaths import ROUNDS, run_config, weights

from braid.config.load import load_config
from braid.controller import commands


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """The policy's weights after each round of the run of run_config."""
    folder = tmp_path_factory.mktemp("unbroken")
    commands.train(load_config(run_config(folder)))
    return [weights(folder, number) for number in range(1, ROUNDS + 1)]
