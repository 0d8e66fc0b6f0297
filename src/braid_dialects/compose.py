"""Hydra `defaults` lists: presets mounted at a package, found next to the file or in `hydra.searchpath`.

    defaults:
      - env/libero_10@env.train     the file env/libero_10.yaml, with its keys below env.train
      - model/qwen@_global_         mounted at the top level; @_here_: where this file itself is mounted
      - env@env.eval: libero_10     the same, written as group and option; null skips the entry
      - _self_                      position of the file's own keys; without it they come last, and win

Later entries win. A preset may itself have a `defaults` list. `env@env.train=other` on the command line
selects another option. Interpolations in presets are resolved later, against the composed config.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from braid.config.load import interpolate
from braid.config.source import OVERRIDE, Written, apply_override, child, parse_path, place, read_file
from braid.errors import Problem, suggest

DEFAULTS = "defaults"
SEARCHPATH = "hydra.searchpath"
_SELF = "_self_"
_FLOW = re.compile(r"([{,]\s*[\w.-]+):(?=[^\s])")
"""Keys of a mapping without a space after the colon, which Hydra allows: `{a:1,b:2}`."""
_FLAGS = re.compile(r"^(?:(?:override|optional)\s+)+")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)


def compose(path: Path, overrides: Sequence[str] = ()) -> Written:
    """Merge the file with its presets and apply the overrides, which may begin with `+` or `++`.

    Raises ConfigError when a file cannot be read; all other errors are in the result's `problems`.
    """
    written, chosen, values = read_file(path), dict[str, str | None](), []
    presets = _Presets(path, written)
    keys = {entry.choice for entry in _entries(written.tree.get(DEFAULTS), _Place(), []) if entry.option}
    for text in overrides:
        text = re.sub(r"^\+{1,2}(?=[\w.])", "", text)
        name, _, option = text.partition("=")
        if name in keys:
            chosen[name] = None if option in ("", "null") else option
        elif "@" in name:
            message = f"no such entry in the defaults list of the file{suggest(name, keys)}"
            written.problems.append(Problem(name, message, OVERRIDE))
        else:
            values.append(_FLOW.sub(r"\1: ", text) if option.startswith("{") else text)
    composed = presets.compose(written, _Place(), chosen)
    for text in values:
        apply_override(composed, text)
    return composed


@dataclass(frozen=True, slots=True)
class _Place:
    """Mount point of a file: the package of its keys, and the group folder in which its defaults are looked
    up."""

    package: str = ""
    group: str = ""
    chain: tuple[str, ...] = ()
    """Presets that lead to this file, to detect cycles."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of a defaults list. `option` is None for `_self_` and for skipped entries."""

    choice: str
    """Its name on the command line: `env@env.train`."""
    group: str
    option: str | None
    package: str
    is_optional: bool = False
    index: int = 0


def _entries(defaults: Any, at: _Place, problems: list[Problem]) -> Iterator[_Entry]:
    """Parse the defaults list of a file mounted at `at`."""
    if not isinstance(defaults, list | None):
        problems.append(Problem(DEFAULTS, "must be a list of presets, such as - env/libero_10@env.train"))
        return
    for i, line in enumerate(defaults or ()):
        match line:
            case "_self_":
                yield _Entry(_SELF, "", None, "", index=i)
            case str():
                config, at_sign, package = line.partition("@")
                group, _, option = _FLAGS.sub("", config).rpartition("/")
                yield _entry(group + at_sign + package, option, at, i, _FLAGS.match(line))
            case dict() if len(line) == 1 and isinstance(next(iter(line.values())), str | None):
                ((name, option),) = line.items()
                yield _entry(_FLAGS.sub("", name), option, at, i, _FLAGS.match(name))
            case _:
                message = f"invalid entry {line!r}; write group/preset@package or group@package: preset"
                problems.append(Problem(child(DEFAULTS, i), message))


def _entry(choice: str, option: str | None, at: _Place, index: int, flags: re.Match[str] | None) -> _Entry:
    """Build the entry for `group@package` and its option."""
    group, _, package = choice.partition("@")
    is_absolute = group.startswith("/") or not at.group
    full = group.strip("/") if is_absolute else f"{at.group}/{group}".strip("/")
    is_optional = flags is not None and "optional" in flags[0]
    name = None if option is None else option.removesuffix(".yaml")
    return _Entry(choice, full, name, _mounted(package, group, at), is_optional, index)


def _mounted(package: str, group: str, at: _Place) -> str:
    """Full path below which a preset's keys are mounted."""
    if package.startswith("_global_"):
        return package.removeprefix("_global_").lstrip(".")
    if package.startswith("_here_"):
        package = package.removeprefix("_here_").lstrip(".")
    elif not package:
        package = group.strip("/").replace("/", ".")
    return ".".join(part for part in (at.package, package) if part)


@dataclass(slots=True)
class _Presets:
    """Finds presets and merges files."""

    path: Path
    primary: Written
    _texts: list[Any] | None = field(default=None, init=False)
    _folders: list[Path] = field(default_factory=list, init=False)
    _problems: list[Problem] = field(default_factory=list, init=False)

    def compose(self, written: Written, at: _Place, chosen: Mapping[str, str | None]) -> Written:
        """Merge `written`, mounted at `at`, with its presets. The primary file keeps its `defaults` list, for
        the ledger, and the order of its sections."""
        out = Written(problems=list(written.problems))
        own = _below(written, at)
        is_placed = False
        for entry in _entries(written.tree.get(DEFAULTS), at, out.problems):
            if entry.choice == _SELF:
                _lay(out, own)
                is_placed = True
                continue
            if entry.choice in chosen:
                entry = replace(entry, option=chosen[entry.choice])
            if entry.option is not None and not entry.group.startswith("hydra"):
                _lay(out, self._preset(entry, at, written))
        if not is_placed:
            _lay(out, own)
        if not at.chain:
            out.tree = {key: out.tree[key] for key in (*written.tree, *out.tree)}
            out.problems += self._problems
            self._keep_searchpath(out)
        return out

    def _preset(self, entry: _Entry, at: _Place, parent: Written) -> Written:
        name = f"{entry.group}/{entry.option}".lstrip("/")
        origin = parent.origins.get(child(DEFAULTS, entry.index), self.path.name)
        if name in at.chain:
            circle = " -> ".join((*at.chain[at.chain.index(name) :], name))
            problem = f"presets form a cycle: {circle}; remove one of the entries"
        elif "${" in name:
            problem = f"{name!r}: interpolations are not supported in preset names; write out the name"
        elif (file := self._find(name)) is not None:
            package, mounted = _PACKAGE.search(file.read_text("utf-8", errors="replace")), entry.package
            if package and "@" not in entry.choice:
                mounted = _mounted(package[1].replace("_group_", entry.group.replace("/", ".")), "", at)
            return self.compose(read_file(file), _Place(mounted, entry.group, (*at.chain, name)), {})
        else:
            problem = "" if entry.is_optional else self._missing(name)
        return Written(problems=[Problem(DEFAULTS, problem, origin)] if problem else [])

    def _find(self, name: str) -> Path | None:
        """Find the preset's file: next to the primary file, else in the first search path folder that has
        it."""
        beside = self.path.parent / f"{name}.yaml"
        if beside.is_file():
            return beside
        return next((file for folder in self.folders if (file := folder / f"{name}.yaml").is_file()), None)

    @property
    def folders(self) -> list[Path]:
        """Folders of the search path, without the file's own. Resolved on first use, so that an unset
        environment variable is an error only when it is needed."""
        if self._texts is None:
            hydra = Written({"hydra": {"searchpath": self._searchpath()}}, dict(self.primary.origins))
            resolved = interpolate(hydra, lambda tree: {**self.primary.tree, **tree})
            self._problems += hydra.problems
            self._texts = list(resolved["hydra"]["searchpath"])
            for i, text in enumerate(map(str, self._texts)):
                scheme, colon, rest = text.rpartition("://")
                if colon and scheme != "file" and "${" not in text:
                    key, message = child(SEARCHPATH, i), f"{text!r} is not a local folder"
                    origin = self.primary.origins.get(key, "")
                    self._problems.append(Problem(key, f"{message}; write file:///folder", origin))
                elif "${" not in text:
                    self._folders.append(Path(rest))
        return self._folders

    def _searchpath(self) -> list[Any]:
        hydra = self.primary.tree.get("hydra")
        texts = hydra.get("searchpath") if isinstance(hydra, dict) else None
        return texts if isinstance(texts, list) else []

    def _missing(self, name: str) -> str:
        folders = [self.path.parent, *self.folders]
        group, _, option = name.rpartition("/")
        there = sorted(
            {file.stem for folder in folders for file in (folder / group).glob("*.yaml")} - {self.path.stem}
        )
        have = f"; available in {group or 'that folder'}: {', '.join(there[:8])}" if there else ""
        looked = ", ".join(str(folder) for folder in folders)
        return f"no preset {name}.yaml{suggest(option, there)}; looked in {looked}{have}"

    def _keep_searchpath(self, out: Written) -> None:
        """Store the resolved search path in `out`. Entries that could not be resolved, or were not needed,
        stay as written."""
        hydra = out.tree.get("hydra")
        texts = self._texts or self._searchpath()
        if texts and isinstance(hydra, dict):
            kept = [text.replace("${", "\\${") if isinstance(text, str) else text for text in texts]
            out.tree["hydra"] = {**hydra, "searchpath": kept}


def _below(written: Written, at: _Place) -> Written:
    """Mount a file's own keys below its package. A preset's `defaults` list is dropped."""
    tree = written.tree if not at.chain else {k: v for k, v in written.tree.items() if k != DEFAULTS}
    out = Written(origins={f"{at.package}.{name}": origin for name, origin in written.origins.items()})
    if at.package:
        place(out.tree, parse_path(at.package), tree)
    return out if at.package else Written(tree, dict(written.origins))


def _lay(under: Written, over: Written) -> None:
    under.tree = merged(under.tree, over.tree)
    under.origins |= over.origins
    under.problems += over.problems


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings; other values of `over` replace those of `under`."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out
