"""Commands that look at runs: `braid ls`, `samples`, `compare` and `diagnose`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from braid.config.explain import show_value
from braid.errors import ConfigError, Problem
from braid.inspection.comparison import (
    MIN_CHANGED,
    MISSING,
    Wins,
    compare_by_prompt,
    config_differences,
    metrics_at,
)
from braid.inspection.diagnosis import Finding, diagnose
from braid.inspection.folder import Run, Stage, find_runs
from braid.report.files import human_bytes, to_json
from braid.report.samples import Sample, read_samples
from braid.report.sinks.console import clock, printable
from braid.types import text_of

from .columns import print_beside, print_whole

_STYLES = {"finished": "green", "running": "cyan", "interrupted": "yellow", "stopped": "yellow"}


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for i, title in enumerate(columns):
        table.add_column(title, justify="left" if i < left else "right", no_wrap=True, overflow="ignore")
    return table


def _show(console: Console, table: Table, *, indent: int = 2) -> None:
    """Print a table whose values are whole, beyond the console's width if they need it."""
    padded = Padding(table, (0, 0, 0, indent), expand=False)
    width = Measurement.get(console, console.options.update(max_width=10_000), padded).maximum
    for line in console.render_lines(padded, console.options.update(width=width), pad=False):
        text = Text.assemble(*((part.text, part.style or "") for part in line))
        print_whole(console, text)


# braid ls


def print_runs(folders: Sequence[Path], *, as_json: bool) -> None:
    """List the runs in some folders, the latest last. Raises ConfigError if there is none."""
    runs = sorted((run for folder in folders for run in find_runs(folder)), key=_changed_at)
    if as_json:
        sys.stdout.write(to_json([_of_run(run) for run in runs], indent=2) + "\n")
        return
    if not runs:
        message = f"there is no run in {' '.join(map(str, folders))}; pass the folder that runs are in"
        raise ConfigError([Problem("FOLDER", message, "command line")])
    table = _table("run", "status", "round", "reward", "evaluation", "", "time", "changed", left=2)
    for run in runs:
        about = _of_run(run)
        first, last = about["eval_first"], about["eval_last"]
        table.add_row(
            printable(str(run.path)),
            Text(about["status"].replace("_", " "), _STYLES.get(about["status"], "red")),
            f"{_whole(about['round'])}/{_whole(about['num_rounds'])}",
            _number(about["reward"]),
            "" if last is None else f"{_number(first)} to {_number(last)}",
            (about["eval_name"] or "").removeprefix("eval/all/"),
            "" if about["wall_s"] is None else clock(about["wall_s"]),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(about["changed"])),
        )
    _show(Console(highlight=False), table, indent=0)


def _of_run(run: Run) -> dict[str, Any]:
    evaluated, rewards = run.evaluations, run.values("reward/mean")
    return {
        "run": str(run.path),
        "status": run.status,
        "round": run.summary.get("round"),
        "num_rounds": run.summary.get("num_rounds"),
        "reward": rewards[-1][1] if rewards else None,
        "eval_name": run.target_name,
        "eval_first": evaluated[0][1] if evaluated else None,
        "eval_last": evaluated[-1][1] if evaluated else None,
        "wall_s": run.summary.get("wall_s"),
        "changed": _changed_at(run),
        "error": run.summary.get("error"),
    }


def _changed_at(run: Run) -> float:
    files = (run.path / name for name in ("summary.json", "metrics.jsonl", "config.yaml"))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


# braid samples


Order = Literal["first", "best", "worst"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which trajectories to print: `most` of a round's (None: the last one with samples) that match, in the
    order of the file or of their reward. None matches all."""

    stage: Stage = "round"
    number: int | None = None
    order: Order = "first"
    most: int = 3
    status: str | None = None
    source: str | None = None
    uid: str | None = None
    contains: str | None = None

    def matches(self, sample: Sample) -> bool:
        trajectory = sample.trajectory
        return (
            self.status in (None, trajectory.status.value)
            and self.source in (None, trajectory.prompt.source)
            and self.uid in (None, trajectory.prompt.uid)
            and (self.contains is None or self.contains.lower() in _whole_text(sample).lower())
        )


def print_samples(run: Run, choice: Choice, *, is_whole: bool, as_json: bool) -> None:
    """Print trajectories of a round or an evaluation. Raises ConfigError if none is stored or matches."""
    number, file = run.samples_of(choice.stage, choice.number)
    with file.open(encoding="utf-8") as lines:
        samples = list(zip(read_samples(file), lines, strict=True))
    matching = [pair for pair in samples if choice.matches(pair[0])]
    if not matching:
        message = f"none of the {len(samples)} trajectories in {file} matches"
        raise ConfigError([Problem("samples", message, "command line")])
    chosen = matching
    if choice.order != "first":
        rated = [(r, pair) for pair in matching if (r := pair[0].trajectory.reward) is not None]
        rated.sort(key=lambda one: one[0], reverse=choice.order == "best")
        chosen = [pair for _, pair in rated]
    chosen = chosen[: choice.most]
    if as_json:
        sys.stdout.write("".join(line for _, line in chosen))
        return
    console = Console(highlight=False)
    what = "the evaluation after round" if choice.stage == "eval" else "round"
    how = "" if choice.order == "first" else f"{choice.order} "
    title = f"{how}{len(chosen)} of {len(matching)} trajectories of {what} {number}"
    if len(matching) < len(samples):
        title += f" that match, of {len(samples)}"
    print_whole(console, Text(title, "bold"))
    for sample, _ in chosen:
        console.print()
        _print_sample(console, sample, is_whole=is_whole)


def _whole_text(sample: Sample) -> str:
    parts = [sample.prompt_text]
    for context, output in zip(sample.context_texts, sample.output_texts, strict=True):
        parts += [context, output]
    return "\n".join(parts)


def _print_sample(console: Console, sample: Sample, *, is_whole: bool) -> None:
    trajectory = sample.trajectory
    style = {"finished": "green", "truncated": "yellow"}.get(trajectory.status.value, "red")
    head = Text.assemble(
        (f"{printable(trajectory.prompt.uid)}.{trajectory.sample}", "bold"),
        ("   reward ", "dim"),
        "-" if not trajectory.is_valid else f"{trajectory.reward:g}",
        ("   " + trajectory.status.value, style),
    )
    if trajectory.reason:
        head.append(f" ({printable(trajectory.reason)})", style)
    if len(trajectory.reward_parts) > 1:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward_parts.items())
        head.append(f"   {parts}", "dim")
    num_tokens = sum(len(turn.output_ids) for turn in trajectory.turns)
    if trajectory.turns:
        turns = len(trajectory.turns)
        head.append(f"   {num_tokens} tokens" + f" in {turns} turns" * (turns > 1), "dim")
    if advantages := sample.training.get("advantages"):
        head.append(f"   advantage {sum(advantages) / len(advantages):+.3g}", "dim")
    print_whole(console, head)
    for who, text in _parts(sample):
        text = printable(text.strip("\n"), keep_lines=True)
        if not is_whole and len(text) > 600:
            text = f"{text[:400]} ... ({len(text) - 500} characters; --full) ... {text[-100:]}"
        for line in text.split("\n"):
            print_beside(console, Text(f"  {who:<12}", "dim"), Text(line), least=24, indent=4)
            who = ""


def _parts(sample: Sample) -> Iterator[tuple[str, str]]:
    """(who, text) of the prompt and of each turn, with what the environment answered in between."""
    trajectory = sample.trajectory
    if trajectory.prompt.messages:
        for message in trajectory.prompt.messages:
            yield str(message["role"]), text_of(message["content"])
    else:
        yield "prompt", sample.prompt_text
    if trajectory.env_steps is not None:
        yield "env steps", f"{len(trajectory.env_steps.rewards)}"
    turns = zip(sample.context_texts, sample.output_texts, strict=True)
    for i, (context, output) in enumerate(turns):
        if i and context:
            yield "environment", context
        yield "policy", output


# braid compare


def print_comparison(runs: Sequence[Run], *, numbers: Sequence[int], num_most: int) -> None:
    """Print how runs differ: their configs, metrics, and answers to the prompts of an evaluation, each run
    against the first. One run: an evaluation against an earlier one.

    `numbers` are rounds whose evaluations are compared: one for all runs, or one each (of one run two); by
    default the last, and of one run the first and the last. Raises ConfigError if they are too many or too
    few, or a round has no evaluation.
    """
    console = Console(highlight=False)
    names = _names(runs)
    if len(runs) > 1:
        compared = [*runs]
        _print_differences(console, runs, names)
        last, rows = metrics_at(runs)
        about = f"   up to round {last}, means of the last five"
        print_whole(console, Text.assemble(("\nmetrics", "bold"), (about, "dim")))
        table = _table("", *names)
        for name, values in rows.items():
            form = human_bytes if name.endswith("_bytes") else _number
            table.add_row(name, *("-" if math.isnan(value) else form(value) for value in values))
        _show(console, table)
        console.print()
    else:
        compared = [*runs, *runs]
        numbers = numbers or [
            min(runs[0].samples("eval"), default=0),
            max(runs[0].samples("eval"), default=0),
        ]
    rounds: list[int | None] = [*numbers] if len(numbers) > 1 else [*(numbers or [None])] * len(compared)
    if len(rounds) != len(compared):
        message = f"{len(rounds)} rounds for {len(runs)} runs; name one for all, or one each (of one run two)"
        raise ConfigError([Problem("--eval", message, "command line")])
    files = [run.samples_of("eval", number) for run, number in zip(compared, rounds, strict=True)]
    titles = [f"round {number}" for number, _ in files]
    if len(runs) > 1:
        titles = [f"{name}, round {number}" for name, (number, _) in zip(names, files, strict=True)]
    for title, (_, file) in list(zip(titles, files, strict=True))[1:]:
        print_whole(console, Text(f"evaluation by prompt: {title} against {titles[0]}", "bold"))
        wins = compare_by_prompt(files[0][1], file, num_most)
        if wins is None:
            print_whole(console, Text("  no prompt is in both: other data.eval, or no valid answer"))
        else:
            _print_wins(console, wins)


def _names(runs: Sequence[Run]) -> list[str]:
    """A name of each run, with as many of its folders as make it unlike the others."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return [printable(name) for name in names]
    return [printable(str(run.path)) for run in runs]


def _print_differences(console: Console, runs: Sequence[Run], names: Sequence[str]) -> None:
    rows = config_differences(runs)
    print_whole(console, Text("config" + "   no key differs" * (not rows), "bold"))
    if rows:
        table = _table("", *names)
        for key, values in rows.items():
            texts = ("-" if value is MISSING else printable(show_value(value)) for value in values)
            table.add_row(key, *texts)
        _show(console, table)


def _print_wins(console: Console, wins: Wins) -> None:
    style = ("green" if wins.low > 0 else "red") if wins.is_certain else "yellow"
    verdict = ("better" if wins.low > 0 else "worse") if wins.is_certain else "no certain difference"
    if not wins.is_certain and 0 < wins.wins + wins.losses < MIN_CHANGED:
        verdict = "too few prompts changed to tell"
    line = Text.assemble(
        f"  {wins.num_prompts} prompts: {wins.first:.3f} to {wins.second:.3f}, ",
        (f"{wins.difference:+.3f}", style),
        f" (95 % interval {wins.low:+.3f} to {wins.high:+.3f}, paired bootstrap): ",
        (verdict, style),
    )
    print_whole(console, line)
    print_whole(console, Text(f"  won {wins.wins}, tied {wins.ties}, lost {wins.losses}"))
    if wins.num_unlike:
        print_whole(
            console, Text(f"  {wins.num_unlike} uids stand for other prompts and are left out", "yellow")
        )
    table = _table("prompts that changed most (braid samples RUN --eval --uid UID)", "")
    for uid, change in wins.most:
        table.add_row(printable(uid), Text(f"{change:+.3g}", "green" if change > 0 else "red"))
    if wins.most:
        _show(console, table)


# braid diagnose


def print_diagnosis(run: Run, *, as_json: bool) -> None:
    """Print what is wrong with a run."""
    findings = diagnose(run)
    if as_json:
        sys.stdout.write(to_json([asdict(finding) for finding in findings], indent=2) + "\n")
        return
    console = Console(highlight=False)
    num_rounds = sum(line["round"] > 0 for line in run.lines)
    about = f"{run.status.replace('_', ' ')}, {num_rounds} rounds"
    print_whole(console, Text.assemble((printable(str(run.path)), "bold"), (f"   {about}", "dim")))
    if not findings:
        few = "; with fewer than 6 rounds most rules say nothing" if num_rounds < 6 else ""
        print_whole(console, Text(f"  nothing was found that is known to go wrong{few}"))
    for finding in findings:
        console.print()
        _print_finding(console, finding)


def _print_finding(console: Console, finding: Finding) -> None:
    style = "bold red" if finding.severity == "problem" else "bold yellow"
    since = "" if finding.since is None else f"   since round {finding.since}"
    print_whole(console, Text.assemble((finding.title, style), (since, "dim")))
    for name, text in (("seen", finding.evidence), ("causes", finding.causes), ("change", finding.fix)):
        head = Text(f"  {name:<8}", "dim")
        print_beside(console, head, Text(printable(text)), least=24, indent=4)


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _whole(value: int | None) -> str:
    return "?" if value is None else str(value)
