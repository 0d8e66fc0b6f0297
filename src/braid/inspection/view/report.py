"""A run as one HTML file: the page of `braid view` with its scripts inside, and the answers to what can be
asked of it. Its policy allows these scripts by their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from braid.errors import ConfigError
from braid.report.files import human_bytes, to_json, write_atomically

from .answers import Answers
from .server import PAGE, SCRIPTS

BYTES = 8 * 2**20
"""Bytes of trajectories and images in a file. Evaluations and rounds are taken from both ends inwards, as
long as they fit."""


def write_report(run: Path, file: Path, *, num_bytes: int = BYTES) -> Path:
    """Write the report of a run and return its path. Raises ConfigError if it cannot be written."""
    answers = Answers([run])
    try:
        write_atomically(file, [_page(_embedded(answers, num_bytes), run.resolve().name)], is_private=True)
    except OSError as error:
        raise ConfigError(f"--report {file}: {error.strerror}; choose another file") from error
    finally:
        answers.close()
    return file


def _embedded(answers: Answers, num_bytes: int) -> dict[str, Any]:
    """Question with its values, as base.js writes it, -> answer."""
    answers.refresh()
    stored = answers("rounds", {"run": "0"})
    embedded = {
        "runs": answers("runs", {}),
        "metrics run=0": answers("metrics", {"run": "0"}),
        "config": answers("config", {}),
    }
    kept, left = [], num_bytes
    for about in _from_both_ends(stored["rounds"]):
        answered = dict(_of_round(answers, about["stage"], about["round"]))
        size = len(to_json(answered))
        if size <= left:
            left -= size
            kept.append(about)
            embedded |= answered
    kept.sort(key=stored["rounds"].index)
    embedded["rounds run=0"] = stored | {"rounds": kept}
    for stage in ("eval", "round"):
        numbers = [str(about["round"]) for about in kept if about["stage"] == stage]
        for before, after in zip(numbers[:1], numbers[-1:], strict=True):
            values = {"run": "0", "round": before, "other_run": "0", "other_round": after, "stage": stage}
            embedded[_key("change", dict(sorted(values.items())))] = answers("change", values)
    missing = len(stored["rounds"]) - len(kept)
    if missing:
        embedded["runs"][0]["note"] = (
            f"without the trajectories of {missing} of {len(stored['rounds'])} rounds and evaluations: "
            f"a report has {human_bytes(num_bytes)} of them at most"
        )
    return embedded


def _from_both_ends(rounds: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Evaluations, then rounds, each as last, first, last but one, second, ..."""
    for stage in ("eval", "round"):
        left = [about for about in rounds if about["stage"] == stage]
        while left:
            yield left.pop()
            if left:
                yield left.pop(0)


def _of_round(answers: Answers, stage: str, number: int) -> Iterator[tuple[str, Any]]:
    """What can be asked of one round."""
    place = {"run": "0", "stage": stage, "round": str(number)}
    listed = answers("list", place | {"limit": "1000"})
    yield _key("list", place), listed
    images: set[str] = set()
    for row in listed["rows"]:
        values = place | {"line": str(row["line"])}
        whole = answers("trajectory", values)
        yield _key("trajectory", values), whole
        images |= {name.removeprefix("images/") for name in re.findall(r'"(images/[\w.-]+)"', to_json(whole))}
    for name in sorted(images):
        file = answers.file("0", "images", name)
        kind = {"jpg": "jpeg"}.get(file.suffix[1:], file.suffix[1:])
        yield (
            f"file 0 images {name}",
            f"data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}",
        )
    if stage == "round":
        yield (
            _key("timeline", {"round": str(number), "run": "0"}),
            answers("timeline", {"run": "0", "round": str(number)}),
        )


def _key(question: str, values: dict[str, str]) -> str:
    return " ".join([question, *(f"{name}={value}" for name, value in values.items())])


def _page(embedded: dict[str, Any], name: str) -> str:
    def read(path: str) -> str:
        return PAGE.joinpath(path).read_text("utf-8")

    style = read("vendor/uPlot.min.css") + read("app/page.css")
    scripts = [read("vendor/uPlot.iife.min.js"), read("vendor/htm_preact.js"), joined_scripts()]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    data = to_json(embedded).replace("<", "\\u003c")
    title = re.sub(r"[^\w. -]", "_", name)
    charts, elements, page = scripts
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n'
        f"<style>{style}</style>\n<body>\n"
        f'<script type="application/json" id="answers">{data}</script>\n'
        f'<script>{charts}</script>\n<script>{elements}</script>\n<script type="module">{page}</script>\n'
        "</body>\n</html>\n"
    )


def joined_scripts() -> str:
    """The page's modules as one, in the order of their imports, without these: no two modules name a thing
    alike at their top level."""
    texts = (PAGE.joinpath(f"app/{name}").read_text("utf-8") for name in SCRIPTS)
    return "\n".join(
        re.sub(r"^import [^;]*;\n|^export (?=\w)", "", text, flags=re.MULTILINE) for text in texts
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
