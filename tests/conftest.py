"""For every test: one thread, fixed seeds, long timeouts of Ray, and a working Ctrl-C."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Generator
from pathlib import Path

import braid  # noqa: F401  # has the threads of torch wait passively, so it comes before torch

# isort: split
import numpy as np
import pytest
import torch
from hypothesis import settings
from tests.leftovers import nothing_is_left
from tests.smoke import mark_smoke

__all__ = ["nothing_is_left"]

torch.set_num_threads(1)
# However long a loaded machine takes to start Ray; also where a test starts it without braid.
os.environ.update(
    RAY_gcs_server_port_wait_time_s="600",
    RAY_raylet_start_wait_time_s="600",
    RAY_agent_register_timeout_ms="600000",
)
# A shell script's background jobs ignore SIGINT, and those of nohup SIGHUP; all processes of tests would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Properties are tried on the same examples each time, however slow the machine is: on few, and on many with
# --hypothesis-profile=thorough, as in make nightly.
settings.register_profile("braid", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("thorough", deadline=None, derandomize=True, max_examples=200)
settings.load_profile("braid")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # libraries under test draw from the global generator
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> None:
    """For tests with workers or engines, and all tests of processes; see tests.leftovers."""
    about_processes = request.path.parent.name in ("faults", "cluster", "weights")
    if about_processes or request.node.get_closest_marker("xdist_group") is not None:
        request.getfixturevalue("nothing_is_left")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_smoke(items, Path(__file__).parent, is_whole=not any("::" in argument for argument in config.args))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--at-most",
        type=int,
        metavar="N",
        help="of each test run at most N of its parameters, the last included",
    )


class _AtMost:
    """Deselects most parameters of tests that have many; `make check` runs two of each."""

    def __init__(self, number: int) -> None:
        self._number = number

    @pytest.hookimpl(trylast=True)  # after -m has selected
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        by_test: dict[str, list[pytest.Item]] = {}
        for item in items:
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
        left_out = {item for same in by_test.values() for item in same[self._number - 1 : -1]}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The summary's line on a test that hung says where."""
    report = yield
    if (
        call.excinfo is not None
        and call.excinfo.typename == "Failed"
        and "pytest-timeout" in str(call.excinfo.value)
    ):
        lines = [f"{Path(entry.path).name}:{entry.lineno + 1}" for entry in call.excinfo.traceback]
        report.longrepr.reprcrash.message += f" At {' > '.join(lines[-8:])}"  # type: ignore[union-attr]
    return report


class _Failures:
    """Writes a failure's name and message at once: a run that is stopped from outside never reaches its
    summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else report.longreprtext
            seconds = f"{report.duration:.0f} s"
            self._terminal.write_line(f"\n{report.nodeid} ({report.when}, {seconds}): {message[:2000]}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.at_most:
        config.pluginmanager.register(_AtMost(config.option.at_most))
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and config.get_verbosity() < 0:
        config.pluginmanager.register(_Failures(terminal))
