"""`braid show`: print a config with the origin of each value, then the plan derived from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import groupby, takewhile
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from braid.algorithms.recipes import RECIPES
from braid.config.explain import show_value
from braid.config.load import Loaded
from braid.config.schema import RunConfig
from braid.config.secrets import distinct, hidden
from braid.config.source import DEFAULT, OVERRIDE, KeyPath, leaves, path_text
from braid.plan import Plan, merge_recipe, unused_keys, why_unused

from .figures import figures, human_bytes, human_count
from .placement_table import placement_table, placement_title

_VALUE_WIDTH, _ORIGIN_WIDTH = 28, 20
"""Column widths of values and origins on narrow terminals, in characters."""


def as_json(loaded: Loaded, plan: Plan) -> str:
    """Everything that `print_plan` prints, as JSON."""
    data = {
        "config": loaded.to_show(),
        "origins": dict(loaded.origins),
        "plan": hidden(plan.to_json(), distinct(loaded.secrets)),
        "figures": [asdict(figure) for figure in figures(loaded.config, plan)],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def print_plan(loaded: Loaded, plan: Plan, *, show_defaults: bool, console: Console | None = None) -> None:
    """Print the config (only values that the user set, unless `show_defaults`), derived numbers, the
    placement table, the algorithm's components, memory and warnings."""
    console = console or Console(highlight=False, soft_wrap=False)
    parts = [
        (
            "config",
            "" if show_defaults else "values that you set; --all also shows defaults",
            _config(loaded, plan, show_defaults, console.width - 2),
        ),
        ("derived", f"braid {plan.verb}", _figures(loaded.config, plan)),
    ]
    if plan.verb == "train":
        parts.append(("placement", placement_title(plan.layout), placement_table(plan.layout)))
        parts.append(("algorithm", f"recipe {loaded.config.algorithm.recipe}", _algorithm(loaded, plan)))
    parts.append(("memory", "persistent state, without activations", _memory(loaded.config, plan)))
    if plan.warnings:
        parts.append(("warnings", "", _warnings(plan)))
    for title, note, body in parts:
        console.print(Text.assemble((title, "bold cyan"), "  ", (note, "dim")))
        console.print(Padding(body, (0, 0, 1, 2), expand=False))


def _table(*justify: Any) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for side in justify:
        table.add_column(justify=side, overflow="fold")
    return table


def _config(loaded: Loaded, plan: Plan, show_defaults: bool, width: int) -> RenderableType:
    """The config as an indented tree of key, value and origin; defaults and unused keys are dimmed."""
    unused = unused_keys(loaded.config, plan)
    rows: list[tuple[Text, Text, Text, bool]] = []
    above: KeyPath = ()
    for path, value, origin in _lines(loaded):
        if origin == DEFAULT and not show_defaults:
            continue
        common = len(
            list(takewhile(lambda pair: pair[0] == pair[1], zip(above[:-1], path[:-1], strict=False)))
        )
        rows += [
            (Text(f"{'  ' * depth}{_key(path[depth])}", style="bold"), Text(), Text(), False)
            for depth in range(common, len(path) - 1)
        ]
        is_unused = bool(why_unused(unused, path_text(path)))
        dim = "dim" if origin == DEFAULT or is_unused else ""
        key = Text(f"{'  ' * (len(path) - 1)}{_key(path[-1])}", style=dim)
        style = "yellow" if origin == OVERRIDE else "dim"
        rows.append((key, Text(value, style=dim), Text(origin, style=style), is_unused))
        above = path
    table = _table("left", "left", "left")
    keys = max((len(key) for key, *_ in rows), default=0)
    values = max((len(value) for _, value, *_ in rows), default=0)
    room = max(width - keys - min(values, _VALUE_WIDTH) - 4, _ORIGIN_WIDTH)
    for key, value, origin, is_unused in rows:
        note = ", unused" if is_unused else ""
        shown_origin = short_origin(origin.plain, room - len(note)) + note
        table.add_row(key, value, Text(shown_origin, style=origin.style))
    return table


def short_origin(origin: str, room: int) -> str:
    """Shorten an origin to `room` characters: first drop the file position of a foreign key, then truncate on
    the left."""
    if len(origin) > room and " " in origin:
        origin = origin.rpartition(" ")[2]
    return origin if len(origin) <= room else f"…{origin[-(room - 1) :]}"


def _lines(loaded: Loaded) -> Iterator[tuple[KeyPath, str, str]]:
    """(key path, value, origin) of every leaf; a list of plain values counts as one leaf."""
    entries = ((path, value, loaded.origins[path_text(path)]) for path, value in leaves(loaded.to_show()))
    for (path, is_item), group in groupby(entries, key=_line_of):
        found = list(group)
        values = [shown(value) for _, value, _ in found]
        yield (
            path,
            f"[{', '.join(values)}]" if is_item else values[0],
            ", ".join(dict.fromkeys(o for *_, o in found)),
        )


def _line_of(entry: tuple[KeyPath, Any, str]) -> tuple[KeyPath, bool]:
    """The path of the line that shows an entry, and whether the entry is a list item on it."""
    path = entry[0]
    is_item = isinstance(path[-1], int)
    return (path[:-1] if is_item else path), is_item


def _key(key: str | int) -> str:
    return f"- {key}" if isinstance(key, int) else key


def shown(value: Any) -> str:
    """The value as the user would write it, on one line."""
    return value if isinstance(value, str) and value and value == value.strip() else show_value(value)


def _figures(config: RunConfig, plan: Plan) -> RenderableType:
    table = _table("left", "left", "left")
    for figure in figures(config, plan):
        table.add_row(figure.name, Text(figure.value, style="bold"), Text(figure.how, style="dim"))
    return table


def _algorithm(loaded: Loaded, plan: Plan) -> RenderableType:
    """The recipe's components, with the origin of those set in the config; unused ones are dimmed."""
    recipe, config = merge_recipe(loaded.config), loaded.config.algorithm
    idle = unused_keys(loaded.config, plan)
    table = _table("left", "left", "left")
    for field in fields(recipe):
        key, value = f"algorithm.{field.name}", getattr(recipe, field.name)
        is_set = getattr(config, field.name) is not None
        style = "dim" if key in idle else "bold" if is_set else ""
        source = "recipe" if value == getattr(RECIPES[config.recipe], field.name) else "pipeline"
        origin = (loaded.origins[key] if is_set else source) + (", unused" if key in idle else "")
        table.add_row(
            Text(field.name, style="dim" if key in idle else ""),
            Text("off" if value is None else shown(value), style=style),
            Text(origin, style="dim"),
        )
    return table


def _memory(config: RunConfig, plan: Plan) -> RenderableType:
    if not plan.memory:
        what = "an MLP: negligible" if config.model.mlp else "unknown: the model is not in a local folder"
        return Text(what, style="dim")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("")
    for name in ("parameters", "weights", "gradients", "AdamW", "total"):
        table.add_column(name, justify="right")
    for role in plan.memory:
        sizes = (role.weights_bytes, role.gradients_bytes, role.optimizer_bytes, role.total_bytes)
        table.add_row(role.role, human_count(role.parameters), *[human_bytes(n) if n else "" for n in sizes])
    total = sum(role.total_bytes for role in plan.memory)
    if len(plan.memory) > 1:
        table.add_row("all", "", "", "", "", Text(human_bytes(total), style="bold"))
    return Group(table, Text(f"weights in {config.model.dtype}", style="dim"))


def _warnings(plan: Plan) -> RenderableType:
    return Group(*[Text(f"{w.key}: {w.message} [{w.origin}]", style="yellow") for w in plan.warnings])
