"""The placement table of a plan: machine and device of each rank of each role, and its parallel groups."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from braid.plan.layout import Layout, RoleLayout, Worker
from braid.plan.placement import format_numbers

_MAX_GROUPS = 4
"""Most groups per parallel dimension that are printed."""
_MODES = {
    "in_process": "all roles in the driver process",
    "collocated": "all roles share the same devices, in turns",
    "disaggregated": "no two roles share a device",
    "hybrid": "several roles share some of the devices, in turns",
}


def placement_title(layout: Layout) -> str:
    """The placement mode with its description."""
    return f"{layout.mode}: {_MODES[layout.mode]}"


def placement_table(layout: Layout) -> RenderableType:
    """The placement as a table: one line per role and machine, or one per worker for roles whose workers do
    not have exactly one device each to themselves."""
    if layout.mode == "in_process":
        roles = ", ".join(f"{role.role} ({role.kind})" for role in layout.roles)
        return Text.assemble((roles, "bold"), ("  rank 0 on device 0", "dim"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("role", "backend", "ranks", "machine", "devices", "parallel groups", "offloaded"):
        table.add_column(name, justify="left", overflow="fold")
    for role in layout.roles:
        for i, workers in enumerate(_lines(role)):
            ranks = format_numbers(worker.rank for worker in workers)
            devices = format_numbers(device for worker in workers for device in worker.devices)
            node = str(workers[0].node) if workers[0].devices else ""
            about = (_groups(role), ", ".join(role.offload)) if i == 0 else ("", "")
            names = (role.role, role.kind) if i == 0 else ("", "")
            table.add_row(
                Text(names[0], style="bold"), names[1], ranks, node, devices or "external servers", *about
            )
    used = {device for role in layout.roles for device in role.devices}
    unused = sorted(set(range(layout.num_nodes * layout.devices_per_node)) - used)
    rest = f"; no role on {format_numbers(unused)}" if unused else ""
    return Group(table, Text(f"{layout.num_nodes} x {layout.devices_per_node} devices{rest}", style="dim"))


def _lines(role: RoleLayout) -> Iterator[list[Worker]]:
    """The workers of each line."""
    has_own = len(role.devices) == len(role.workers) == sum(len(worker.devices) for worker in role.workers)
    for _, workers in groupby(role.workers, key=lambda worker: worker.node if has_own else worker.rank):
        yield list(workers)


def _groups(role: RoleLayout) -> str:
    return "; ".join(
        f"{name} {_shown(groups)}" for name, groups in role.groups.items() if len(role.workers) > 1
    )


def _shown(groups: tuple[tuple[int, ...], ...]) -> str:
    shown = " | ".join(format_numbers(group) for group in groups[:_MAX_GROUPS])
    return shown + (f" | ... ({len(groups)})" if len(groups) > _MAX_GROUPS else "")
