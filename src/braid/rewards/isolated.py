"""Scorers that parse a response as mathematics or run it as code, in child processes (braid.processes).

They run in a separate process, because such a response can keep sympy busy for hours or exhaust memory, and
because some of reasoning-gym's scorers `eval` it. The process has limits on time, memory and files. The first
request names the scorer; it reads the others as pickles, and replies in JSON, so that no reply can execute
code in the trainer. processes.py is the client.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from braid.generators import reasoning_gym
from braid.processes import connect, end_this_process
from braid.users import described

from .answers import last_boxes, tagged_answer
from .programs import load_code

MEMORY_BYTES = 4 * 2**30
"""Address-space limit of a scoring process."""
GRACE_S = 1.0
"""The process ends itself this long after a call's time limit, unless the client has killed it before."""

MARKED_NUMBER = re.compile(
    r"####[ \t]*+\$?([-+]?(?:[\d,]*+\.\d++|[\d,]*+(?<=\d))(?:/\d++)?)\.?[ \t]*+$", re.MULTILINE
)
"""An answer in the format of GSM8K, at the end of a line; does not match a heading such as `#### 1. Idea`.
Possessive, so that a megabyte of digits takes no longer to reject than to read."""


_SPELLINGS = {
    r"\\varnothing(?![A-Za-z])": r"\\emptyset",
    r"\\fbox(?=\s*\{)": r"\\boxed",
    r"\\lbrace(?![A-Za-z])": r"\\{",
    r"\\rbrace(?![A-Za-z])": r"\\}",
    r"\\R(?![A-Za-z])|\\(?:Bbb|mathbb) ?\{?R\}?": r"\\mathbb{R}",
    r"\\text\{\\\$\}|\{\\\$\}": r"\\$",
    r"(?<=\d)\\,(?=\d{3})": "",
    "∞": r"\\infty",
    "[€£¥₹]": "",
}
"""Notation that math-verify does not read, or reads as something else, and what stands for it."""
_MARKUP = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")
_WORD = r"(?!(?:and|sin|cos|tan|cot|sec|csc|log|exp|sqrt)\b)[A-Za-z]{3,}"
_PROSE = re.compile(rf"\d\s+{_WORD}(?![\w({{\\])|(?<![\\\w{{]){_WORD}:?\s+\\?[-$]?\w")
"""A number or a word beside a word, as in `5 dollars`, in text without markup."""


def load_math() -> Callable[[str, Sequence[str], bool], float]:
    r"""Return `score(text, references, is_formula)`: 1.0 if the answer in `text`, which has no reasoning,
    equals a reference for math-verify. The answer is what stands in the last `<answer>` tag; in this, or in
    `text`, it is the content of the last `\boxed`, else the last number marked by `####`, else what
    math-verify finds. `is_formula`: `text` is only the answer, and needs no markup.

    math-verify's own time limits are disabled: they work only in the main thread, and count a slow comparison
    as a wrong answer.
    """
    from math_verify import parse, verify

    parse = partial(parse, parsing_timeout=0, raise_on_error=True)

    def score(text: str, references: Sequence[str], is_formula: bool = False) -> float:
        golds = [gold for reference in references for gold in _reference(reference, parse)]
        failure = None
        for answer in _answer(text, parse, is_formula=is_formula):
            for gold in golds:
                try:
                    if verify(gold, answer, timeout_seconds=0, raise_on_error=True):
                        return 1.0
                except Exception as error:  # another reading of the same answer may still compare
                    failure = error
        if failure is not None:
            raise failure
        return 0.0

    return score


def _answer(text: str, parse: Callable[[str], list[Any]], *, is_formula: bool) -> list[Any]:
    tagged = tagged_answer(text)
    if tagged is not None:
        text, is_formula = tagged, True
    text = _respelled(text)
    if boxes := last_boxes(text):
        contents = [re.sub(r"(?<!\\)\$|\n", " ", box.content) for box in boxes]
        signs = ["%" if box.is_percent else "" for box in boxes]
        return parse(" and ".join(rf"$\boxed{{{c}}}${sign}" for c, sign in zip(contents, signs, strict=True)))
    if marked := MARKED_NUMBER.findall(text):
        return parse(f"${marked[-1]}$")
    return _formula(text, parse) if is_formula else parse(text)


def _reference(reference: str, parse: Callable[[str], list[Any]]) -> list[Any]:
    """Parse a reference as mathematics. Only the text after the last `####` is used (as in GSM8K)."""
    formulas = _formula(_respelled(reference.rpartition("####")[2]), parse)
    if not formulas:
        raise ValueError(f"the reference answer {reference!r} is not a mathematical expression")
    return formulas


def _formula(text: str, parse: Callable[[str], list[Any]]) -> list[Any]:
    """Parse a text that is only an answer: without markup as one formula, unless it is prose with a
    number."""
    text = text.strip()
    if _MARKUP.search(text) or _PROSE.search(text):
        return parse(text) or parse(f"${text}$")
    return parse(f"${text}$") or parse(text)


def _respelled(text: str) -> str:
    for notation, known in _SPELLINGS.items():
        text = re.sub(notation, known, text)
    return text


def load_reasoning_gym() -> Callable[..., float]:
    reasoning_gym()  # now, so that no call's time limit includes its import
    return score_by_generator


_DATASETS: dict[tuple[str, str], Any] = {}


def score_by_generator(
    generator: str, params: dict[str, Any], answer: str | None, entry: Mapping[str, Any]
) -> float:
    """Score of the answer by the own scorer of reasoning-gym's generator."""
    create_dataset = reasoning_gym(generator).create_dataset
    key = (generator, repr(params))
    if key not in _DATASETS:
        _DATASETS[key] = create_dataset(generator, size=1, seed=0, **params)
    return float(_DATASETS[key].score_answer(answer, entry))


SCORERS: dict[str, Callable[[], Callable[..., float]]] = {
    "math": load_math,
    "reasoning_gym": load_reasoning_gym,
    "code": load_code,
}


def main() -> None:
    """Serve requests until the other end closes the connection."""
    logging.disable()
    channel, _ = connect()
    name = channel.receive().decode()
    score, error = _tried(SCORERS[name])
    channel.reply(json.dumps([None, error]).encode())
    if error is not None:
        return
    limits = {resource.RLIMIT_AS: MEMORY_BYTES, resource.RLIMIT_CORE: 0}
    if name != "code":  # its sandboxes have their own limits
        limits[resource.RLIMIT_FSIZE] = 0
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    for request in channel.messages():
        timeout_s, arguments = pickle.loads(request)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)  # the default action ends the process
        reply = _tried(partial(score, *arguments))
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.reply(json.dumps(reply).encode())
    end_this_process()


def _tried(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """The function's value, or None and its error."""
    try:
        return function(), None
    except Exception as error:
        return None, described(error)


if __name__ == "__main__":
    main()
