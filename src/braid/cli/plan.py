"""`braid plan`: what a run needs, before it is run: memory by device, role and part, disk, what limits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from braid.config.schema import RunConfig
from braid.plan import Plan
from braid.plan.advice import Change, changes
from braid.plan.disk import checkpoint_bytes, free_disk, plan_disk
from braid.plan.memory import PROCESS, DeviceMemory, plan_memory
from braid.plan.placement import format_numbers
from braid.plan.times import Lengths, Rates, plan_times, round_s
from braid.report.files import human_bytes

from .columns import Row, print_rows


@dataclass(frozen=True, slots=True)
class Measured:
    """The machine's rates, and the lengths at which they were measured."""

    rates: Rates
    lengths: Lengths


def as_json(
    config: RunConfig, plan: Plan, *, capacity: int | None = None, measured: Measured | None = None
) -> str:
    """Everything that `print_forecast` prints, as JSON; bytes as numbers."""
    devices = plan_memory(config, plan, capacity=capacity)
    data = {
        "verb": plan.verb,
        "devices": [_device(device) for device in devices],
        "changes": [
            {**asdict(change), "value": _assignment(change).partition("=")[2]}
            for change in changes(config, plan, capacity=capacity)
        ],
        **({} if measured is None else _times_json(config, plan, measured)),
        "disk": [asdict(files) for files in plan_disk(config, plan)],
        "free_disk_bytes": free_disk(config),
    }
    return json.dumps(data, indent=2) + "\n"


def _times_json(config: RunConfig, plan: Plan, measured: Measured) -> dict[str, Any]:
    times = plan_times(config, plan, measured.rates, measured.lengths)
    return {"times": [asdict(time) for time in times], "round_s": round_s(plan, times), **asdict(measured)}


def _device(device: DeviceMemory) -> dict[str, Any]:
    return {
        "devices": list(device.devices),
        "capacity_bytes": device.capacity,
        "peak_bytes": device.peak,
        "stage": device.stage,
        "uses": [{**asdict(use), "stages": sorted(use.stages)} for use in device.uses],
    }


def print_forecast(
    config: RunConfig,
    plan: Plan,
    *,
    capacity: int | None = None,
    measured: Measured | None = None,
    console: Console | None = None,
) -> None:
    """Print memory, what limits, time if it was measured, what would help, and disk."""
    console = console or Console(highlight=False)
    devices = plan_memory(config, plan, capacity=capacity)
    if not devices:
        _title(console, "memory", "")
        console.print(Text(f"  {_why_unknown(config, plan)}\n", "dim"))
    for device in devices:
        what = "this machine" if plan.layout.mode == "in_process" and not plan.layout.has_gpus else "device"
        name = what if what == "this machine" else f"{what} {format_numbers(device.devices)}"
        _title(console, "memory", f"{name}, allocated at full length")
        console.print(Padding(_memory_table(device), (0, 0, 0, 2), expand=False))
        style = "bold red" if device.fits is False else ""
        console.print(Text(f"  {limit_of(device)}\n", style), soft_wrap=True)
    if measured is not None:
        _print_times(console, config, plan, measured)
    if helpful := changes(config, plan, capacity=capacity):
        _title(console, "changes that would help most", "each planned anew, alone")
        print_rows(console, [_change_row(change) for change in helpful], indent=2)
        console.print()
    _title(console, "disk", f"{human_bytes(free_disk(config))} are free")
    rows = [
        (Text(files.what), Text(human_bytes(files.num_bytes), "bold"), Text(files.how, "dim"))
        for files in plan_disk(config, plan)
    ]
    print_rows(console, rows, indent=2)


def _print_times(console: Console, config: RunConfig, plan: Plan, measured: Measured) -> None:
    lengths, times = measured.lengths, plan_times(config, plan, measured.rates, measured.lengths)
    note = f"of a round, with prompts of {lengths.prompt:,} tokens and answers of {lengths.answer:,}"
    _title(console, "time", f"{note}; without rewards and environments")
    total = round_s(plan, times)
    lines = [*((time.stage, time.seconds, time.how) for time in times), ("all", total, _how_all(plan, total))]
    rows = [
        (Text(name), Text("unknown" if value is None else f"{value:.3g} s", "bold"), Text(how, "dim"))
        for name, value, how in lines
    ]
    saved = checkpoint_bytes(config, plan)
    seconds = Text(f"{saved / measured.rates.disk_bytes_per_s:.3g} s", "bold")
    rows.append((Text("checkpoint"), seconds, Text(f"{human_bytes(saved)}, in rounds that save one", "dim")))
    print_rows(console, rows, indent=2)
    console.print()


def _how_all(plan: Plan, total: float | None) -> str:
    how = "the longer of rollout and training, and the sync" if plan.is_pipelined else "one after the other"
    if total is None or not plan.last_round:
        return how
    return f"{how}; {plan.last_round:,} rounds take {total * plan.last_round / 3600:.3g} h"


def _change_row(change: Change) -> Row:
    saved = f"{human_bytes(change.after)}, {1 - change.after / change.before:.0%} less"
    return Text(_assignment(change)), Text(saved, "bold"), Text(change.cost, "dim")


def _assignment(change: Change) -> str:
    """The change as it is written on the command line."""
    value = change.value
    if isinstance(value, BaseModel):
        value = value.model_dump(include={"rank"})
    return f"{change.key}={value if isinstance(value, str) else json.dumps(value)}"


def _title(console: Console, title: str, note: str) -> None:
    console.print(Text.assemble((title, "bold cyan"), "  ", (note, "dim")))


def _why_unknown(config: RunConfig, plan: Plan) -> str:
    if plan.model_size is None:
        return config.model.kind.unknown_size
    return "the folder's config.json does not say the size of the vocabulary (vocab_size)"


_ORDER = ("rollout", "log-probs", "critic update", "policy update", "weight sync")
"""Stages as a round takes them."""


def _memory_table(device: DeviceMemory) -> Table:
    """A line for each part of a role, a column for each stage."""
    stages = sorted({stage for use in device.uses for stage in use.stages}, key=_ORDER.index)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in ("role", "part"):
        table.add_column(name, overflow="fold")
    for stage in stages:
        style = "bold" if stage == device.stage else ""
        table.add_column(stage.replace(" ", "\n"), justify="right", style=style, no_wrap=True)
    parts: dict[tuple[str, str], dict[str, int]] = {}
    for use in sorted(device.uses, key=lambda use: use.role == PROCESS):
        cells = parts.setdefault((use.role, use.part), {})
        cells.update(dict.fromkeys(use.stages, use.num_bytes))
    shown = ""
    for (role, part), cells in parts.items():
        values = [human_bytes(cells[stage]) if stage in cells else "" for stage in stages]
        table.add_row("" if role == shown else role, part, *values)
        shown = role
    table.add_row("all", "", *[human_bytes(device.at(stage)) for stage in stages])
    return table


def limit_of(device: DeviceMemory) -> str:
    """What limits, in a sentence."""
    largest = device.largest
    what = f"{device.stage} needs most: {human_bytes(device.peak)}"
    what += f", of which {human_bytes(largest.num_bytes)} are {largest.part} of the {largest.role}"
    if device.capacity is None:
        return f"{what}; the memory of the device is not known (--device-memory GIB)"
    share = f"{device.peak / device.capacity:.0%} of {human_bytes(device.capacity)}"
    return f"{what}. {'It fits' if device.fits else 'It does not fit'}: {share}"
