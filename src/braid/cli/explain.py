"""`braid explain`: how every key of a foreign config was translated, or what one key does in each dialect."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from braid.config.schema import RunConfig
from braid.config.shape import allowed, describe, fields_of
from braid.errors import ConfigError, Problem, suggest
from braid_dialects.load import DIALECTS
from braid_dialects.table import ABSENT, Dialect, Entry, Rule

from .columns import print_beside
from .show import shown

_STYLES = {
    "applied": "green",
    "unused": "yellow",
    "implied": "cyan",
    "no effect": "yellow",
    "unsupported": "red",
    "refused": "bold red",
}
_MAX_KEY, _MAX_VALUE, _MIN_ROOM = 36, 24, 50
"""Column widths of keys and values, and the least width of a translation beside them, in characters."""


def print_ledger(
    ledger: Sequence[Entry], *, title: str, note: str = "", console: Console | None = None
) -> None:
    """Print one line per key, grouped by section of the file, then the number of keys per disposition.

    Long lines are truncated or wrapped to the console's width; on a narrow console the translation is below
    its key.
    """
    console = console or Console(highlight=False)
    for section, group in groupby(ledger, key=lambda entry: entry.path.rpartition(".")[0]):
        rows = [(entry.path.rpartition(".")[2], shown(entry.value), entry) for entry in group]
        if section:
            console.print(Text(section, style="bold"))
        key_width = min(max(len(name) for name, *_ in rows), _MAX_KEY)
        value_width = min(max(len(value) for _, value, _ in rows), _MAX_VALUE)
        for name, value, entry in rows:
            head = Text(f"  {name:<{key_width}}  ")
            cell = Text(" ".join(value.split()), style="bold")
            cell.truncate(value_width, overflow="ellipsis", pad=True)
            head += cell + "  "
            print_beside(console, head, _became(entry), least=_MIN_ROOM, indent=6)
    counts = Counter(entry.disposition for entry in ledger)
    words = [
        Text.assemble(f"{counts[name]} ", (name, style)) for name, style in _STYLES.items() if counts[name]
    ]
    if note:
        console.print(Text(f"\n{title}: {note}", style="dim"))
    console.print(Text(f"\n{title}: {len(ledger)} keys, ") + Text(", ").join(words))


def print_key(key: str, console: Console | None = None) -> None:
    """Print what a key does in braid's own format and in each dialect that has it. Raises ConfigError if it
    is unknown everywhere."""
    console = console or Console(highlight=False)
    describe(RunConfig)
    is_known = False
    for dialect in _tables():
        rule = dialect.rule_of(key)
        if rule is not None:
            is_known = True
            _print_facts(console, dialect.title, key, _facts(rule, key, dialect))
    for path, field in fields_of(RunConfig):
        if path == key:
            is_known = True
            facts = [("takes", allowed(field)), ("does", field.description or ""), *_sources_of(path)]
            _print_facts(console, "braid", key, facts)
    if not is_known:
        raise ConfigError([Problem(key, f"unknown key in every config format{_near(key)}")])


def _became(entry: Entry) -> Text:
    """The native keys and values with the note, or the disposition with its reason."""
    style = _STYLES[entry.disposition]
    if entry.disposition != "applied":
        return Text(f"{entry.disposition}: {entry.note}" if entry.note else entry.disposition, style=style)
    said = Text(", ".join(f"{path}={shown(value)}" for path, value in entry.native.items()), style=style)
    return said.append(f"  {entry.note}", style="dim") if entry.note else said


def _print_facts(console: Console, language: str, key: str, facts: Sequence[tuple[str, str]]) -> None:
    console.print(Text.assemble((language, "bold cyan"), "  ", (key, "bold")))
    for name, text in facts:
        for i, line in enumerate(textwrap.wrap(text, max(console.width - 12, 20), break_on_hyphens=False)):
            console.print(Text(f"  {name if i == 0 else '':<9} {line}"), no_wrap=True, crop=False)
    console.print()


def _facts(rule: Rule, key: str, dialect: Dialect) -> list[tuple[str, str]]:
    """(label, text) of everything that a dialect's table says about a key."""
    others = [alias for alias, name in dialect.aliases.items() if name == rule.path]
    facts = [("also", ", ".join(name for name in (rule.path, *others) if name != key))]
    facts.append(("takes", rule.takes.words))
    if rule.disposition == "unsupported":
        facts.append(("instead", f"not supported; {rule.note}"))
    elif rule.disposition != "applied":
        facts.append((rule.disposition, rule.note))
    else:
        natives = dialect.natives(rule)
        facts.append(("default", "" if rule.default is ABSENT else shown(rule.default)))
        facts += [("becomes", ", ".join(natives)), ("note", rule.note)]
        # If several kinds of a section have the key, the first describes it.
        field = next((field for path, field in fields_of(RunConfig) if path in natives[:1]), None)
        facts.append(("does", "" if field is None else field.description or ""))
    return [(name, text) for name, text in facts if text]


def _tables() -> list[Dialect]:
    """All dialects, those of a system's pipelines one after the other."""
    return [table for dialect in DIALECTS.values() for table in (dialect, *dialect.others)]


def _sources_of(native: str) -> list[tuple[str, str]]:
    """(dialect, foreign keys) that translate to a native key."""
    return [
        (dialect.title, ", ".join(paths))
        for dialect in _tables()
        if (paths := [p for p, rule in dialect.rules.items() if native in dialect.natives(rule)])
    ]


def _near(key: str) -> str:
    """A suggestion: up to four keys with the same last component, or else the closest known name."""
    names = {path for path, _ in fields_of(RunConfig)}
    names.update(path for dialect in _tables() for path in (*dialect.rules, *dialect.aliases))
    same = sorted(name for name in names if name.rpartition(".")[2] == key.rpartition(".")[2])
    return f"; there is {', '.join(same[:4])}" if same else suggest(key, names)
