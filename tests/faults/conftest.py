"""The weights that a run has without any interruption."""

from __future__ import annotations

import pytest
from tests.faults.test_worker_deaths import ROUNDS, Unbroken, driven, run_config, weights


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """Weights of an uninterrupted run of ROUNDS rounds, made once per session."""
    folder = tmp_path_factory.mktemp("unbroken")
    with driven(run_config(folder, run={"max_rounds": 1000}), ROUNDS) as (driver, processes):
        driver.kill()
    return Unbroken([weights(folder, number) for number in range(1, ROUNDS + 1)], processes)
