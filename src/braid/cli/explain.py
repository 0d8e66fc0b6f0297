"""`braid explain`: what became of every key of a foreign config, or what one key does in each language."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from braid.config.explain import show_value
from braid.config.schema import RunConfig
from braid.config.shape import allowed, fields_of
from braid.dialects.load import DIALECTS
from braid.dialects.table import ABSENT, Apply, Dialect, Entry, Implied, NoEffect, Rule
from braid.errors import ConfigError, Problem, suggest

_STYLES = {"applied": "green", "implied": "cyan", "no effect": "yellow", "unsupported": "red"}


def as_json(ledger: Sequence[Entry]) -> str:
    """The ledger as JSON text: a list of objects with path, value, disposition, native and note."""
    rows = [
        {
            "path": entry.path,
            "value": entry.value,
            "disposition": entry.disposition,
            "native": dict(entry.native),
            "note": entry.note,
        }
        for entry in ledger
    ]
    return json.dumps(rows, indent=2, ensure_ascii=False) + "\n"


def print_ledger(ledger: Sequence[Entry], *, title: str, console: Console | None = None) -> None:
    """A line per key, then how many there are of each disposition."""
    console = console or Console(highlight=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("key", "value", "", "became"):
        table.add_column(name, overflow="fold")
    for entry in ledger:
        word = Text(entry.disposition, _STYLES[entry.disposition])
        table.add_row(Text(entry.path), Text(show_value(entry.value)), word, _became(entry))
    console.print(table)
    counts = Counter(entry.disposition for entry in ledger)
    parts = [f"{counts[name]} {name}" for name in _STYLES if counts[name]]
    console.print(f"\n{title}: {len(ledger)} keys, " + ", ".join(parts))


def print_key(key: str, console: Console | None = None) -> None:
    """What one key does, natively and in each language that has it. Raises ConfigError when none has."""
    console = console or Console(highlight=False)
    found = False
    for dialect in DIALECTS.values():
        rule = dialect.rule_of(dialect.aliases.get(key, key))
        if rule is not None:
            found = True
            _print_rule(console, dialect, key, rule)
    for path, field in fields_of(RunConfig):
        if path == key:
            found = True
            console.print(Text.assemble(("braid", "bold cyan"), f"  {key}"))
            console.print(f"  takes    {allowed(field)}", markup=False)
            console.print(f"  does     {' '.join((field.description or '').split())}\n", markup=False)
    if not found:
        known = [path for path, _ in fields_of(RunConfig)]
        known += [path for dialect in DIALECTS.values() for path in (*dialect.rules, *dialect.aliases)]
        raise ConfigError([Problem(key, f"no language has this key{suggest(key, known)}")])


def _became(entry: Entry) -> Text:
    native = ", ".join(f"{path}={show_value(value)}" for path, value in entry.native.items())
    return Text.assemble(native, "  " if native and entry.note else "", (entry.note, "dim"))


def _print_rule(console: Console, dialect: Dialect, key: str, rule: Rule) -> None:
    console.print(Text.assemble((dialect.title, "bold cyan"), f"  {key}"))
    if rule.path != key:
        console.print(f"  spelled  {rule.path}", markup=False)
    console.print(f"  takes    {rule.takes.words}", markup=False)
    for name, text in _facts(rule).items():
        console.print(f"  {name:<8} {text}", markup=False)
    console.print()


def _facts(rule: Rule) -> Mapping[str, Any]:
    match rule:
        case Apply(native=native, note=note, default=default):
            facts = {"becomes": native or "see the note"}
            facts |= {} if default is ABSENT else {"default": show_value(default)}
            return facts | ({"note": note} if note else {}) | _described(native)
        case Implied(why=why):
            return {"implied": why}
        case NoEffect(why=why):
            return {"effect": f"none: {why}"}
    return {"not": f"supported: {rule.instead}"}


def _described(native: str) -> dict[str, str]:
    for path, field in fields_of(RunConfig):
        if path == native:
            return {"does": " ".join((field.description or "").split())}
    return {}
