"""Columns of text whose values stay whole: a path or a list that does not fit in its column goes on beyond
it, and beyond the terminal's width, where the terminal itself breaks it, so that it can be copied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

Row = tuple[Text, Text, Text]
"""Name, value and note."""
_GAP, _LEAST_NOTE, _LEAST_VALUE = 2, 24, 12
"""Spaces between columns; widths below which a column is not narrowed, in characters."""


def print_rows(console: Console, rows: Sequence[Row], *, indent: int) -> None:
    """Print rows as columns. Names and values are never broken; notes wrap at spaces, and are below values
    that reach into their column."""
    name_width, value_width, note_width = (max((len(row[i]) for row in rows), default=0) for i in range(3))
    start = indent + name_width + _GAP
    room = console.width - start - _GAP
    if value_width + note_width > room:
        note_width = min(note_width, max(_LEAST_NOTE, room - value_width))
        value_width = min(value_width, room - note_width)
        if value_width < _LEAST_VALUE:  # all notes are below their values
            value_width = -_GAP
    note_start = start + value_width + _GAP
    for name, value, note in rows:
        line = Text(" " * indent) + name
        if value.plain or note.plain:
            line.pad_right(start - len(line))
            line += value
        notes = list(wrapped(note, max(console.width - note_start, 1))) if note.plain else []
        if notes and len(line) <= note_start - _GAP and value_width > 0:
            line.pad_right(note_start - len(line))
            line += notes.pop(0)
        print_whole(console, line)
        for more in notes:
            print_whole(console, Text(" " * note_start) + more)


def print_beside(console: Console, head: Text, body: Text, *, least: int, indent: int) -> None:
    """Print `body` beside `head`, or below it with an indent if less than `least` characters or its longest
    word would fit."""
    room = console.width - len(head)
    if room < max(least, max(map(len, body.plain.split()), default=0)):
        head.rstrip()
        print_whole(console, head)
        head, room = Text(" " * indent), console.width - indent
    for i, line in enumerate(wrapped(body, max(room, 1))):
        print_whole(console, (head if i == 0 else Text(" " * len(head))) + line)


def wrapped(text: Text, width: int) -> Iterator[Text]:
    """The lines of a text that is broken at spaces: a longer word is a line of its own."""
    breaks, start = list[int](), 0
    for word in re.finditer(r"\S+", text.plain):
        if word.end() - start > width and word.start() > start:
            start = word.start()
            breaks.append(start)
    for line in text.divide(breaks):
        line.rstrip()
        yield line


def print_whole(console: Console, line: Text) -> None:
    """Print one line, however long."""
    line.rstrip()
    console.print(line, no_wrap=True, overflow="ignore", crop=False)
