"""Closing report of a run: evaluation results and answers before and after training, and the paths of its
files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from rich.console import Group as Stack
from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from .samples import Sample, read_samples
from .sinks.console import printable

Results = Mapping[str, Mapping[str, float]]
"""Evaluation: source -> name (mean@n, pass@k, ...) -> value."""

NUM_ANSWERS = 3
"""Number of prompts whose answers are shown."""


def what_was_learned(first: Results, last: Results) -> RenderableType:
    """Build a table of the first and last evaluation results of each source."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("evaluation", no_wrap=True)
    for title in ("", "first", "last", "change"):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    has_one = len(last) <= 2  # one source: same results as `all`
    for source, values in last.items():
        if has_one and source == "all":
            continue
        names = [name for name in values if "@" in name]
        for i, name in enumerate(names):
            before, after = first.get(source, {}).get(name), values[name]
            table.add_row(
                printable(source) if i == 0 else "",
                name,
                _number(before),
                _number(after),
                _change(before, after),
            )
    return table


def answers(first: Path, last: Path) -> RenderableType | None:
    """Build a table of the first prompts of two evaluations with their answers; None if there are none."""
    rows = list(islice(_pairs(first, last), NUM_ANSWERS))
    if not rows:
        return None
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim", expand=False)
    for title, ratio in (("prompt", 3), ("answer before", 4), ("answer after", 4)):
        table.add_column(title, ratio=ratio, overflow="fold")
    for before, after in rows:
        table.add_row(_prompt(after), _answer(before), _answer(after))
    return table


def closing(
    status: str,
    *,
    time_text: str,
    learned: RenderableType | None,
    shown: RenderableType | None,
    files: Mapping[str, str],
) -> RenderableType:
    """Stack the parts of the closing report."""
    style = {"finished": "bold green", "interrupted": "bold yellow"}.get(status, "bold red")
    parts: list[RenderableType] = [
        Rule(style="dim"),
        Text.assemble((status.replace("_", " "), style), (f" after {time_text}", "")),
    ]
    for part in (learned, shown):
        if part is not None:
            parts += [Text(), part]
    places = Table.grid(padding=(0, 3, 0, 0))
    places.add_column(style="dim", no_wrap=True)
    for what, where in files.items():
        places.add_row(what, Text(where, overflow="fold"))
    return Stack(*parts, Text(), places)


def _pairs(first: Path, last: Path) -> Iterator[tuple[Sample, Sample]]:
    """Yield the first samples of the prompts in both files, in order; text only."""
    if not (first.exists() and last.exists()) or first == last:
        return
    old = {s.trajectory.prompt.uid: s for s in read_samples(first) if s.trajectory.sample == 0}
    for sample in read_samples(last):
        before = old.get(sample.trajectory.prompt.uid)
        if sample.trajectory.sample == 0 and before is not None and sample.trajectory.turns:
            yield before, sample


def _prompt(sample: Sample) -> Text:
    messages = sample.trajectory.prompt.messages
    text = messages[-1]["content"] if messages else sample.prompt_text
    return Text(_cut(printable(text)))


def _answer(sample: Sample) -> Text:
    trajectory = sample.trajectory
    if not trajectory.is_valid:
        return Text(_cut(f"invalid: {printable(trajectory.reason)}"), "yellow")
    answer = Text(_cut(printable(trajectory.answer_text)))
    return answer.append(f"  {trajectory.reward:g}", "dim")


def _cut(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _number(value: float | None) -> str:
    return "-" if value is None or value != value else f"{value:.3f}"


def _change(before: float | None, after: float) -> Text:
    if before is None or before != before or after != after:
        return Text("-")
    change = after - before
    return Text(f"{change:+.3f}", "green" if change > 0 else "red" if change < 0 else "dim")
