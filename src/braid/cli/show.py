"""`braid show`: print a config with the origin of each value, then the plan derived from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass
from itertools import groupby, takewhile
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from braid.algorithms.recipes import RECIPES, Recipe
from braid.config.explain import show_value
from braid.config.load import Loaded
from braid.config.schema import RunConfig
from braid.config.secrets import distinct, hidden
from braid.config.source import DEFAULT, OVERRIDE, KeyPath, leaves, path_text
from braid.kinds import Kind
from braid.plan import Plan, unused_keys, why_unused
from braid.report.files import human_bytes
from braid.types import Trajectory

from .columns import Row, print_rows, print_whole
from .figures import figures, human_count
from .placement_table import placement_table, placement_title

_WIDE = 120
"""Console width from which origins are printed in full, in characters."""
_NOTES = ("how the context begins the turn", "all that is sampled", "without reasoning and end of turn")
"""What the texts are that rewards read."""


def as_json(loaded: Loaded, plan: Plan, example: Trajectory | None = None) -> str:
    """Everything that `print_plan` prints, as JSON."""
    data = {
        "config": loaded.to_show(),
        "origins": dict(loaded.origins),
        "plan": hidden(plan.to_json(), distinct(loaded.secrets)),
        "figures": [asdict(figure) for figure in figures(loaded.config, plan)],
        **({} if example is None else {"reward_example": {"uid": example.prompt.uid, **_read(example)}}),
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def print_plan(
    loaded: Loaded,
    plan: Plan,
    example: Trajectory | None = None,
    *,
    show_defaults: bool,
    read_as: str = "",
    console: Console | None = None,
) -> None:
    """Print the config (only values that the user set, unless `show_defaults`), derived numbers, the
    placement table, the algorithm's components, memory, what rewards read of the `example`, and warnings."""
    console = console or Console(highlight=False, soft_wrap=False)
    hints = [read_as, "" if show_defaults else "values that you set; --all also shows defaults"]
    hint = "; ".join(filter(None, hints))
    parts: list[tuple[str, str, list[Row] | RenderableType]] = [
        ("config", hint, list(_config(loaded, plan, show_defaults, console.width))),
        ("derived", f"braid {plan.verb}", _figures(loaded.config, plan)),
    ]
    if plan.verb == "train":
        parts.append(("placement", placement_title(plan.layout), placement_table(plan.layout)))
        if loaded.config.sac is None:
            parts.append(("algorithm", f"recipe {loaded.config.algorithm.recipe}", _algorithm(loaded, plan)))
    parts.append(("memory", "persistent state, without activations", _memory(loaded.config, plan)))
    if example is not None:
        lines = [
            (Text(name), Text(repr(text), style="bold"), Text(note, style="dim"))
            for (name, text), note in zip(_read(example).items(), _NOTES, strict=True)
        ]
        parts.append(("rewards read", f"{example.prompt.uid} answered with its reference", lines))
    for title, note, body in parts:
        print_whole(console, Text.assemble((title, "bold cyan"), "  ", (note, "dim")))
        if isinstance(body, list):
            print_rows(console, body, indent=2)
            console.print()
        else:
            console.print(Padding(body, (0, 0, 1, 2), expand=False))
    if plan.warnings:
        console.print(Text("warnings", "bold cyan"))
    for warning in plan.warnings:  # each is one line, of which a setting can be copied
        text = f"  {warning.key}: {warning.message} [{warning.origin}]"
        console.print(Text(text, style="yellow"), soft_wrap=True)


def _read(example: Trajectory) -> dict[str, str]:
    """The texts of a turn, as rewards read them."""
    return {"prefill": example.prefill, "text": example.sampled_text, "answer": example.answer_text}


def _config(loaded: Loaded, plan: Plan, show_defaults: bool, width: int) -> Iterator[Row]:
    """The config as an indented tree of key, value and origin; defaults and unused keys are dimmed."""
    unused = unused_keys(loaded.config, plan)
    above: KeyPath = ()
    for path, value, origin in _lines(loaded):
        if origin == DEFAULT and not show_defaults:
            continue
        pairs = zip(above[:-1], path[:-1], strict=False)
        common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for depth in range(common, len(path) - 1):
            yield Text(_key(path[: depth + 1]), style="bold"), Text(), Text()
        is_unused = bool(why_unused(unused, path_text(path)))
        dim = "dim" if origin == DEFAULT or is_unused else ""
        if width < _WIDE:  # only the key of a foreign config, without its position in the file
            origin = origin.rpartition(" ")[2]
        note = Text(origin + ", unused" * is_unused, style="yellow" if origin == OVERRIDE else "dim")
        yield Text(_key(path), style=dim), Text(value, style=dim), note
        above = path


def _lines(loaded: Loaded) -> Iterator[tuple[KeyPath, str, str]]:
    """(key path, value, origin) of every leaf; a list of plain values counts as one leaf."""
    for (path, is_item), group in groupby(leaves(loaded.to_show()), key=_line_of):
        entries = list(group)
        values = [shown(value) for _, value in entries]
        origins = dict.fromkeys(loaded.origins[path_text(leaf)] for leaf, _ in entries)
        yield path, f"[{', '.join(values)}]" if is_item else values[0], ", ".join(origins)


def _line_of(leaf: tuple[KeyPath, Any]) -> tuple[KeyPath, bool]:
    """The path of the line that shows a leaf, and whether the leaf is a list item on it."""
    path = leaf[0]
    is_item = isinstance(path[-1], int)
    return (path[:-1] if is_item else path), is_item


def _key(path: KeyPath) -> str:
    """The last component of a path, indented by its depth."""
    return "  " * (len(path) - 1) + ("- " if isinstance(path[-1], int) else "") + str(path[-1])


def shown(value: Any) -> str:
    """The value as the user would write it, whole and on one line."""
    match value:
        case None | bool():
            return show_value(value)
        case str():
            return value if value and value == value.strip() else repr(value)
        case Mapping():
            return f"{{{', '.join(f'{key}: {shown(one)}' for key, one in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(shown, value))}]"
        case _:
            return repr(value) if not is_dataclass(value) or isinstance(value, type) else shown(asdict(value))


def _figures(config: RunConfig, plan: Plan) -> list[Row]:
    return [
        (Text(figure.name), Text(figure.value, style="bold"), Text(figure.how, style="dim"))
        for figure in figures(config, plan)
    ]


def _algorithm(loaded: Loaded, plan: Plan) -> list[Row]:
    """The recipe's components, with the origin of those set in the config; unused ones are dimmed."""
    recipe, config = plan.recipe, loaded.config.algorithm
    idle = unused_keys(loaded.config, plan)
    derived: dict[str, str] = dict.fromkeys(("logprob_level", "entropy_level", "advantage"), "env")
    derived["corrections"] = "pipeline" if loaded.config.max_lag else "rollout.engine.dtype"
    rows: list[Row] = []
    named = _parts(RECIPES[config.recipe])
    for (part, setting), value in _parts(recipe).items():
        key = ".".join(name for name in ("algorithm", part, setting) if name)
        is_set = (chosen := getattr(config, part)) is not None
        if isinstance(chosen, Kind):
            is_set = (setting or "kind") in chosen.model_fields_set
        style = "dim" if key in idle else "bold" if is_set else ""
        if is_set:
            origin = loaded.origin(key if setting or not isinstance(chosen, Kind) else f"{key}.kind")
        else:
            origin = "recipe" if named.get((part, setting), value) == value else derived[part]
        origin += ", unused" if key in idle else ""
        name = Text(f"  {setting}" if setting else part, style="dim" if key in idle else "")
        text = Text("off" if value is None else shown(value), style=style)
        rows.append((name, text, Text(origin, style="dim")))
    return rows


def _parts(recipe: Recipe) -> dict[tuple[str, str], Any]:
    """The recipe's parts, and after a kind its settings: (part, setting, or empty for the part itself) ->
    value."""
    parts: dict[tuple[str, str], Any] = {}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        parts[field.name, ""] = value.kind if isinstance(value, Kind) else value
        if isinstance(value, Kind):
            settings = value.model_dump(mode="json", exclude={"kind"})
            parts |= {(field.name, name): item for name, item in settings.items()}
    return parts


def _memory(config: RunConfig, plan: Plan) -> RenderableType:
    if not plan.memory:
        return Text(config.model.kind.unknown_size, style="dim")
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
