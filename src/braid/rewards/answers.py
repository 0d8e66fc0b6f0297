"""Where an answer is stated: in `<answer>` tags, in boxes. All scans take linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TAG = re.compile(r"<(/?)answer>")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(r"\$?(?:\\[)\]])?\s*(?:[,;]|[,;]?\s*\b(?:and|or)\b)\s*(?:\\[(\[])?\$?\s*")
_PERCENT = re.compile(r"\$?(?:\\[)\]])?\s*\\?%")


@dataclass(frozen=True, slots=True)
class Box:
    r"""The content of a `\boxed{...}`, and whether a percent sign follows it."""

    content: str
    is_percent: bool


def tagged_answer(text: str) -> str | None:
    """The content of the last `<answer>` tag, which may lack its end (a stop string); None without a tag."""
    start, end = None, len(text)
    for tag in _TAG.finditer(text):
        if not tag[1]:
            start, end = tag.end(), len(text)
        elif start is not None and end == len(text):
            end = tag.start()
    return None if start is None else text[start:end].strip()


def last_boxes(text: str) -> list[Box]:
    r"""The last `\boxed{...}` or `\fbox{...}` that is closed, after those before it that "and", "or" or a
    comma connect with it."""
    open_braces: list[tuple[int, int] | None] = []  # of boxes: their start, and that of their content
    boxes: list[tuple[int, int, int]] = []  # start, start of the content, end of the content
    for mark in _BRACE.finditer(text):
        if mark[0] == "}" and open_braces:
            if (box := open_braces.pop()) is not None:
                while boxes and boxes[-1][0] > box[0]:
                    boxes.pop()  # inside this one
                boxes.append((*box, mark.start()))
        elif mark[0][-1] == "{" and mark[0] != "\\{":
            open_braces.append((mark.start(), mark.end()) if len(mark[0]) > 1 else None)
    first = len(boxes) - 1
    while first > 0 and _BETWEEN.fullmatch(text, boxes[first - 1][2] + 1, boxes[first][0]):
        first -= 1
    return [
        Box(text[start:end], _PERCENT.match(text, end + 1) is not None)
        for _, start, end in boxes[max(first, 0) :]
    ]
