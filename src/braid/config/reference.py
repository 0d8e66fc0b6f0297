"""Generates the reference page docs/config.md from the schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from .base import Section
from .explain import show_value
from .load import plain_data
from .schema import RunConfig
from .shape import allowed, kind_of, shape_of

_HEAD = """\
# Config reference

Every key of a config file. This page is written from the schema by `braid schema --markdown`; editors complete keys with
[schema.json](schema.json) when a file starts with `# yaml-language-server: $schema=../docs/schema.json`.

* `braid show CONFIG.yaml` prints a config with the origin of each value and everything that follows from it.
* `key=value` on the command line sets one value: `run.seed=1`, `data.train.0.size=5`, `eval.pass_at=[1,4]`. The value is
  YAML; a mapping or a list replaces what was there.
* Values may refer to others: `${rollout.group_size}` (defaults too), to the environment: `${oc.env:HOME}`, and compute:
  `${mul:${rollout.group_size},2}` with add, sub, mul, div, int_div, min and max, `${not:${eval.before}}`, and the time:
  `${now:%Y%m%d_%H%M}`. Inside `{ }` and `[ ]` put them in quotes. `???` stands for a value that must come from the command
  line.
* YAML is read as version 1.2 has it: only `true` and `false` are booleans, `1e-6` is a number.
* Unknown keys are errors, and a key that has no effect in a run is warned about.
"""


def reference_text() -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *_sections(RunConfig, ""), ""])


def _sections(section: type[Section], prefix: str) -> Iterator[str]:
    """A table for each section below `section`, those with plain keys first."""
    for name, field in section.model_fields.items():
        shape = shape_of(field)
        path = f"{prefix}{name}" + ("[]" if shape.is_list else "")
        if not shape.sections:
            continue
        absent = " Absent by default." if field.default is None else ""
        yield f"## {path}\n\n{_text(field.description)}{_repeated(path, field)}{absent}\n"
        if path in _REPEATED:
            continue
        for member in shape.sections:
            if len(shape.sections) > 1:
                yield f"### kind: {kind_of(member)}\n\n{_text(member.__doc__)}\n"
            yield from _table(member)
            yield from _sections(member, f"{path}.")


_REPEATED = {
    "data.eval[]": "data.train[]",
    "sft.data[]": "data.train[]",
    "sft.optimizer": "train.optimizer",
    "critic.train": "train",
    "eval.sampling": "rollout.sampling",
}
"""Section -> the section with the same keys, which is documented in full."""


def _repeated(path: str, field: FieldInfo) -> str:
    """Sentence that refers to the section where the keys of `path` are documented, with the defaults that
    differ."""
    if path not in _REPEATED:
        return ""
    default = field.get_default(call_default_factory=True)
    fields = type(default).model_fields if isinstance(default, Section) else {}
    differing = [
        f"{name}: {getattr(default, name)}"
        for name in fields
        if getattr(default, name) != fields[name].default
    ]
    return f" The keys are those of `{_REPEATED[path]}`" + (
        f", by default with {', '.join(differing)}." if differing else "."
    )


def _table(section: type[Section]) -> Iterator[str]:
    rows = [
        _row(name, field) for name, field in section.model_fields.items() if not _is_documented_below(field)
    ]
    if rows:
        yield "| key | takes | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _is_documented_below(field: FieldInfo) -> bool:
    return bool(shape_of(field).sections)


def _row(name: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{show_value(_default(field))}`"
    cells = (f"`{name}`", allowed(field), default, _text(field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(field: FieldInfo) -> Any:
    return plain_data(field.get_default(call_default_factory=True))


def _text(text: str | None) -> str:
    return " ".join((text or "").split())
