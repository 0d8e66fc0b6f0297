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
from dataclasses import dataclass, field
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from braid.config.load import KINDS, interpolate
from braid.config.source import OVERRIDE, Written, apply_override, child, parse_path, place, read_file
from braid.errors import Problem, suggest

from .launcher import read_launcher
from .translate import NATIVE
from .trl_script import read_script

DEFAULTS = "defaults"
SEARCHPATH = "hydra.searchpath"
_SELF = "_self_"
_FLOW = re.compile(r"([{,]\s*[\w.-]+):(?=[^\s])")
"""Keys of a mapping without a space after the colon, which Hydra allows: `{a:1,b:2}`."""
_FLAGS = re.compile(r"(?:(?:override|optional)\s+)*")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)\s*$", re.MULTILINE)


def compose(path: Path, overrides: Sequence[str] = ()) -> Written:
    """Merge the file with its presets and apply the overrides, which may begin with `+` or `++`.

    Raises ConfigError when a file cannot be read; all other errors are in the result's `problems`.
    """
    written = {".sh": read_launcher, ".py": read_script}.get(path.suffix, read_file)(path)
    chosen, values = dict[str, str | None](), []
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
    composed = _Presets(path, written, chosen).whole()
    # What a script computes may be set.
    changed = {text.partition("=")[0] for text in values} if path.suffix in (".sh", ".py") else set[str]()
    composed.problems = [problem for problem in composed.problems if problem.key not in changed]
    for text in values:
        apply_override(composed, text, {f"{NATIVE}.{key}": kind for key, kind in KINDS.items()})
    return composed


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings; other values of `over` replace those of `under`."""
    out = dict(under)
    for key, value in over.items():
        below = out.get(key)
        out[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return out


@dataclass(frozen=True, slots=True)
class _Place:
    """Mount point of a file: the package of its keys, and the group folder in which its defaults are looked
    up. `chain` has the presets that lead to the file."""

    package: str = ""
    group: str = ""
    chain: tuple[str, ...] = ()

    def mounted(self, package: str, group: str) -> str:
        """Full path below which a preset's keys are mounted."""
        if package.startswith("_global_"):
            return package.removeprefix("_global_").lstrip(".")
        if package.startswith("_here_"):
            package = package.removeprefix("_here_").lstrip(".")
        elif not package:
            package = group.strip("/").replace("/", ".")
        return ".".join(part for part in (self.package, package) if part)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Entry of a defaults list: its name on the command line (`env@env.train`), the folder of its group, and
    the chosen option, None if it is skipped."""

    index: int
    choice: str
    group: str = ""
    option: str | None = None
    package: str = ""
    is_optional: bool = False


def _entries(defaults: Any, at: _Place, problems: list[Problem]) -> Iterator[_Entry]:
    if not isinstance(defaults, list | None):
        problems.append(Problem(DEFAULTS, "must be a list of presets, such as - env/libero_10@env.train"))
        return
    for i, line in enumerate(defaults or ()):
        if line == _SELF:
            yield _Entry(i, _SELF)
            continue
        if isinstance(line, str):
            name, option = line, None
        elif isinstance(line, dict) and len(line) == 1 and isinstance(next(iter(line.values())), str | None):
            name, option = next(iter(line.items()))
        else:
            message = f"invalid entry {line!r}; write group/preset@package or group@package: preset"
            problems.append(Problem(child(DEFAULTS, i), message))
            continue
        choice = _FLAGS.sub("", name, count=1)
        is_optional = "optional" in name.removesuffix(choice)
        group, at_sign, package = choice.partition("@")
        if isinstance(line, str):
            group, _, option = group.rpartition("/")
            choice = group + at_sign + package
        folder = group if group.startswith("/") else f"{at.group}/{group}"
        option = None if option is None else option.removesuffix(".yaml")
        yield _Entry(i, choice, folder.strip("/"), option, at.mounted(package, group), is_optional)


@dataclass(slots=True)
class _Presets:
    """Finds presets and merges files. `chosen` has the options of the command line."""

    path: Path
    primary: Written
    chosen: Mapping[str, str | None]
    _texts: list[Any] | None = field(default=None, init=False)
    _folders: list[Path] = field(default_factory=list, init=False)
    _problems: list[Problem] = field(default_factory=list, init=False)

    def whole(self) -> Written:
        """Merge the primary file with its presets. It keeps its `defaults` list, for the ledger, and the
        order of its sections."""
        out = self._compose(self.primary, _Place())
        out.tree = {key: out.tree[key] for key in (*self.primary.tree, *out.tree)}
        out.problems += self._problems
        # Entries of the search path that could not be resolved, or were not needed, stay as written.
        texts = self._texts or self._searchpath()
        if texts:
            kept = [text.replace("${", "\\${") if isinstance(text, str) else text for text in texts]
            out.tree["hydra"] = {**out.tree["hydra"], "searchpath": kept}
        return out

    def _compose(self, written: Written, at: _Place) -> Written:
        out = Written(problems=list(written.problems))
        body = written if not at.chain else _below(written, at.package)
        entries = list(_entries(written.tree.get(DEFAULTS), at, out.problems))
        if all(entry.choice != _SELF for entry in entries):
            entries.append(_Entry(len(entries), _SELF))
        for entry in entries:
            if entry.choice == _SELF:
                over = body
            else:
                option = entry.option if at.chain else self.chosen.get(entry.choice, entry.option)
                if option is None or entry.group.startswith("hydra"):
                    continue
                over = self._preset(entry, option, at, written)
                out.problems += over.problems
            out.tree = merged(out.tree, over.tree)
            out.origins |= over.origins
        return out

    def _preset(self, entry: _Entry, option: str, at: _Place, parent: Written) -> Written:
        name = f"{entry.group}/{option}".lstrip("/")
        if name in at.chain:
            circle = " -> ".join((*at.chain[at.chain.index(name) :], name))
            problem = f"presets form a cycle: {circle}; remove one of the entries"
        elif "${" in name:
            problem = f"{name!r}: interpolations are not supported in preset names; write out the name"
        elif (file := self._find(name)) is not None:
            package, mounted = _PACKAGE.search(file.read_text("utf-8", errors="replace")), entry.package
            if package and "@" not in entry.choice:
                mounted = at.mounted(package[1].replace("_group_", entry.group.replace("/", ".")), "")
            return self._compose(read_file(file), _Place(mounted, entry.group, (*at.chain, name)))
        elif entry.is_optional:
            return Written()
        else:
            problem = self._missing(name)
        origin = parent.origins.get(child(DEFAULTS, entry.index), self.path.name)
        return Written(problems=[Problem(DEFAULTS, problem, origin)])

    def _find(self, name: str) -> Path | None:
        """Find the preset's file: next to the primary file, else in the first search path folder that has it.
        The search path is resolved only if needed, so that an unset environment variable is an error only
        then."""
        beside = self.path.parent / f"{name}.yaml"
        if isfile(beside):
            return beside
        if self._texts is None:
            self._texts = self._resolved()
        return next((file for folder in self._folders if isfile(file := folder / f"{name}.yaml")), None)

    def _resolved(self) -> list[Any]:
        hydra = Written({"hydra": {"searchpath": self._searchpath()}}, dict(self.primary.origins))
        texts = interpolate(hydra, lambda tree: {**self.primary.tree, **tree})["hydra"]["searchpath"]
        self._problems += hydra.problems
        for i, text in enumerate(map(str, texts)):
            scheme, colon, rest = text.rpartition("://")
            if "${" in text:
                continue
            if colon and scheme != "file":
                key, message = child(SEARCHPATH, i), f"{text!r} is not a local folder; write file:///folder"
                self._problems.append(Problem(key, message, self.primary.origins.get(key, "")))
            else:
                self._folders.append(Path(rest))
        return list(texts)

    def _searchpath(self) -> list[Any]:
        hydra = self.primary.tree.get("hydra")
        texts = hydra.get("searchpath") if isinstance(hydra, dict) else None
        return texts if isinstance(texts, list) else []

    def _missing(self, name: str) -> str:
        folders = [self.path.parent, *self._folders]
        group, _, option = name.rpartition("/")
        files = (file for folder in folders for file in (folder / group).glob("*.yaml"))
        there = sorted({file.stem for file in files} - {self.path.stem})
        have = f"; available in {group or 'that folder'}: {', '.join(there[:8])}" if there else ""
        looked = ", ".join(map(str, folders))
        return f"no preset {name}.yaml{suggest(option, there)}; looked in {looked}{have}"


def _below(written: Written, package: str) -> Written:
    """A preset's own keys below its package, without its `defaults` list."""
    tree = {key: value for key, value in written.tree.items() if key != DEFAULTS}
    if not package:
        return Written(tree, dict(written.origins))
    out = Written(origins={f"{package}.{name}": origin for name, origin in written.origins.items()})
    place(out.tree, parse_path(package), tree)
    return out
