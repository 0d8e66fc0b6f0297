"""Of the site: links to files outside docs/ become their paths, since the site has no page for them."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(_path, markdown)


def _path(link: re.Match[str]) -> str:
    text, path = link.groups()
    return text if text.strip("`") in path else f"{text} (`{path}`)"
