"""`braid convert`: translate a foreign config to braid's own format, with a comment on each value that names
its foreign key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from braid.config.load import Loaded, plain_data, with_defaults, yaml_text
from braid.config.source import DEFAULT, child, leaves, map_values, path_text, place
from braid_dialects.load import Read
from braid_dialects.translate import DEFAULT_OF, WHOLE

_COMMENT_COLUMN, _MAX_KEYS = 56, 3


def native_text(read: Read, folder: Path | None) -> str:
    """Native YAML that resolves to the same plan.

    `folder` is where the file will be written (None: unknown); run.base_dir is left out if the two are the
    same. Holds the values of the foreign file, and the foreign system's defaults where they differ from
    braid's.
    """
    loaded = read.loaded
    tree = _said(loaded)
    place(tree, ("run", "base_dir"), str(loaded.base_dir))
    if folder is not None and folder.resolve() == loaded.base_dir.resolve():
        del tree["run"]["base_dir"]
    source = "" if loaded.path is None else f" {loaded.path.name}"
    head = f"# Converted from the {read.title} config{source}; comments name the original keys.\n"
    return head + _commented(yaml_text(tree), _comments(read))


def _said(loaded: Loaded) -> dict[str, Any]:
    """The config without unset values and without foreign defaults that equal braid's."""
    tree: dict[str, Any] = {}
    defaults = dict(leaves(with_defaults({"model": {}})))
    for path, value in leaves(map_values(plain_data(loaded.config), loaded.references.get)):
        origin = loaded.origins[path_text(path)]
        is_foreign = origin.endswith(WHOLE) or DEFAULT_OF in origin
        is_item = any(isinstance(key, int) for key in path)
        if origin == DEFAULT or (is_foreign and not is_item and defaults.get(path, ...) == value):
            continue
        place(tree, path, value)
    return tree


def _comments(read: Read) -> dict[str, str]:
    """Native path -> the foreign keys, or the foreign default, that its value comes from."""
    keys: dict[str, list[str]] = {}
    for entry in read.ledger:
        for native in entry.native:
            keys.setdefault(native, []).append(entry.path)
    comments = {}
    for path, names in keys.items():
        more = [f"and {len(names) - _MAX_KEYS + 1} more"] if len(names) > _MAX_KEYS else []
        comments[path] = ", ".join(names[: _MAX_KEYS - len(more)] + more)
    for path, origin in read.loaded.origins.items():
        if DEFAULT_OF in origin or origin.endswith(WHOLE):
            comments.setdefault(path.partition("[")[0], origin)
    return comments


def _commented(text: str, comments: Mapping[str, str]) -> str:
    """The YAML text with the comments appended to the lines of their keys."""
    lines = text.splitlines()
    node = yaml.compose(text, Loader=yaml.BaseLoader)
    for path, number in _places(node, ""):
        if path in comments:
            lines[number] = f"{lines[number]:<{_COMMENT_COLUMN}}  # {comments[path]}"
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _places(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, int]]:
    """(key path, 0-based line number) of every mapping key."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            path = child(prefix, key.value)
            yield path, key.start_mark.line
            yield from _places(value, path)
