"""The placement grammar: devices and processes of roles, and every error."""

from __future__ import annotations

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import resolve
from braid.plan.placement import parse_devices, parse_placement, split_roles


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("3", [[3]]),
        ("0-3", [[0], [1], [2], [3]]),
        ("0,2", [[0], [2]]),
        ("0-3,5,14", [[0], [1], [2], [3], [5], [14]]),
        (" 1 - 2 , 4 ", [[1], [2], [4]]),
        ("0-7:0-3", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("0-1:0-3", [[0], [0], [1], [1]]),
        ("0-1:0-3,4-5", [[0], [0], [1], [1], [4], [5]]),
        ("0-1:0,2-3:1-2", [[0, 1], [2], [3]]),
        ("all", [[0], [1], [2], [3], [4], [5], [6], [7], [8], [9], [10], [11], [12], [13], [14], [15]]),
    ],
)
def test_a_placement_says_the_devices_of_each_process(text: str, processes: list[list[int]]) -> None:
    devices = parse_devices(text, 16)
    assert devices is not None
    assert [list(process) for process in devices.processes] == processes
    assert devices.numbers == tuple(sorted({number for process in processes for number in process}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a number, a range like 0-3, or `all`"),
        ("0-", "is not a number"),
        ("-1", "is not a number"),
        ("1.5", "is not a number"),
        ("__import__('os')", "is not a number"),
        ("3-0", "is descending"),
        ("0-999999999999", "more than 65536 devices"),
        ("0,2,1", "once and in ascending order; 1 is out of order"),
        ("0-3,3", "once and in ascending order; 3 is out of order"),
        ("all,3", "`all` cannot be combined"),
        ("0-3:1-4", "processes are numbered from 0 without gaps"),
        ("0-1:0-1,2-3:3-4", "must start at 2"),
        ("0-2:0-1", "cannot divide 3 devices evenly among 2 processes"),
        ("0-16", "no device 16; the 16 devices are 0 to 15"),
    ],
)
def test_a_wrong_placement_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_devices(text, 16 if text != "all,3" else None)


def test_all_of_very_many_devices_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="more than 65536 devices"):
        parse_devices("all", 10**30)


def test_all_of_an_unknown_number_of_devices_is_left_open() -> None:
    assert parse_devices("all") is None
    assert parse_placement({"policy,rollout": "all"}) == {"policy": None, "rollout": None}


def test_roles_of_one_line_share_its_devices_and_each_role_has_one_line() -> None:
    placed = parse_placement({"policy, rollout": "0-3", "reward": "4"})
    assert placed["policy"] == placed["rollout"]
    assert placed["reward"] is not None
    assert placed["reward"].numbers == (4,)
    with pytest.raises(ValueError, match="policy is placed twice"):
        parse_placement({"policy": "0", "policy,rollout": "1"})
    with pytest.raises(ValueError, match="empty role name"):
        split_roles("policy,,rollout")


@given(st.text(max_size=20))
def test_any_text_is_a_placement_on_the_devices_that_there_are_or_an_error(text: str) -> None:
    devices = None
    with contextlib.suppress(ValueError):
        devices = parse_devices(text, 8)
    assert devices is None or set(devices.numbers) <= set(range(8))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("{policy: 0-a}", "invalid placement"),
        ("{policy: '8'}", "no device 8; the 8 devices are 0 to 7"),
        ("{polcy: '0'}", "unknown role 'polcy', did you mean 'policy'?"),
    ],
)
def test_a_config_with_a_wrong_placement_cannot_be_planned(placement: str, message: str) -> None:
    overrides = [
        f"cluster.placement={placement}",
        "cluster.devices_per_node=8",
        "model.build={}",
        "run.max_rounds=1",
    ]
    loaded = load_config(None, [*overrides, "data.train=[{kind: procedural, generator: chain_sum}]"])
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(loaded.config)
