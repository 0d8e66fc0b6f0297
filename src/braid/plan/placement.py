"""The placement grammar: the devices of a role, and the processes on them.

    all                all devices, one process each
    3                  device 3
    0-3,5,14           devices 0 to 3, 5 and 14, one process each
    0-7:0-3            devices 0 to 7 for processes 0 to 3: two devices per process
    0-1:0-3,4-5        processes 0 to 3 with two per device, then processes 4 and 5 with one device each

Devices are numbered across nodes in ascending order; processes from 0 without gaps. Within a part, the larger
of the two counts must be a multiple of the smaller.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALL = "all"
MAX_DEVICES = 65_536
"""Larger numbers are treated as typing errors."""
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of one role. `processes[i]` are the device indices of its process i."""

    processes: tuple[tuple[int, ...], ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Its devices without duplicates, in ascending order."""
        return tuple(sorted({device for process in self.processes for device in process}))


def parse_placement(
    placement: Mapping[str, str], num_devices: int | None = None
) -> dict[str, Devices | None]:
    """Role -> its devices, from lines like `policy,rollout: 0-3`; None for `all` when the number of devices
    is unknown.

    Raises ValueError for a syntax error, a role with two lines, and devices beyond `num_devices`.
    """
    out: dict[str, Devices | None] = {}
    for line, text in placement.items():
        devices = parse_devices(text, num_devices)
        for role in split_roles(line):
            if role in out:
                raise ValueError(f"{role} is placed twice; remove one of them")
            out[role] = devices
    return out


def format_numbers(numbers: Iterable[int]) -> str:
    """Format device numbers in ascending order: (0, 1, 2, 5) is `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def split_roles(line: str) -> list[str]:
    """The names in `policy, rollout`. Raises ValueError if one is empty."""
    roles = [role.strip() for role in line.split(",")]
    if not all(roles):
        raise ValueError(f"{line!r} has an empty role name; write names like policy,rollout")
    return roles


def parse_devices(text: str, num_devices: int | None = None) -> Devices | None:
    """Parse the devices in `text`; None for `all` when their number is unknown. Raises ValueError as
    parse_placement does."""
    if text.strip() == ALL:
        if num_devices is not None and num_devices > MAX_DEVICES:
            raise ValueError(
                f"{text!r}: more than {MAX_DEVICES} devices, of {num_devices}; lower their number"
            )
        return None if num_devices is None else Devices(tuple((device,) for device in range(num_devices)))
    processes: list[tuple[int, ...]] = []
    last = -1
    for part in text.split(","):
        named, colon, numbered = part.partition(":")
        devices = _numbers(named, text)
        if devices[0] <= last:
            raise ValueError(
                f"{text!r}: list devices once and in ascending order; {devices[0]} is out of order"
            )
        last = devices[-1]
        if num_devices is not None and last >= num_devices:
            raise ValueError(
                f"{text!r}: no device {last}; the {num_devices} devices are 0 to {num_devices - 1}"
            )
        count = len(devices)
        if colon:
            ranks = _numbers(numbered, text)
            count = len(ranks)
            if ranks[0] != len(processes):
                raise ValueError(
                    f"{text!r}: processes are numbered from 0 without gaps; the processes in "
                    f"{part.strip()!r} must start at {len(processes)}"
                )
        processes += _shared_out(devices, count, part)
    return Devices(tuple(processes))


def _numbers(text: str, whole: str) -> list[int]:
    """`n` or `a-b` as numbers."""
    text = text.strip()
    if text == ALL:
        raise ValueError(f"{whole!r}: `all` cannot be combined with other devices; list the devices instead")
    ends = _RANGE.fullmatch(text)
    if ends is None:
        raise ValueError(
            f"invalid placement {whole!r}: {text!r} is not a number, a range like 0-3, or `all`; write for "
            "example all, 0-3, 0,2 or 0-7:0-3"
        )
    first, last = int(ends[1]), int(ends[2] or ends[1])
    if not 0 <= last - first < MAX_DEVICES:
        raise ValueError(
            f"{whole!r}: the range {text!r} is descending, or has more than {MAX_DEVICES} devices"
        )
    return list(range(first, last + 1))


def _shared_out(devices: list[int], num_processes: int, part: str) -> list[tuple[int, ...]]:
    """Devices of each process: several devices per process, or several processes per device."""
    if len(devices) % num_processes == 0:
        each = len(devices) // num_processes
        return [tuple(devices[i * each : (i + 1) * each]) for i in range(num_processes)]
    if num_processes % len(devices) == 0:
        each = num_processes // len(devices)
        return [(devices[i // each],) for i in range(num_processes)]
    raise ValueError(
        f"{part.strip()!r}: cannot divide {len(devices)} devices evenly among {num_processes} processes; "
        "make one count a multiple of the other"
    )
