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

All config keys. This page is generated from the schema by `braid schema --markdown`. For completion in editors, start a
config file with `# yaml-language-server: $schema=../docs/schema.json` ([schema.json](schema.json)).

* `braid show CONFIG.yaml` prints the resolved config with the origin of each value, and the plan derived from it.
* `key=value` on the command line overrides one key: `run.seed=1`, `data.train.0.size=5`, `eval.pass_at=[1,4]`. The value
  is YAML; a mapping or list replaces the whole value.
* Interpolations: other keys, including their defaults (`${rollout.group_size}`), environment variables
  (`${oc.env:HOME}`), arithmetic (`${mul:${rollout.group_size},2}`; also add, sub, div, int_div, min and max), negation
  (`${not:${eval.before}}`) and the time (`${now:%Y%m%d_%H%M}`). Quote them inside `{ }` and `[ ]`. `???` marks a value
  that must be set on the command line.
* YAML 1.2 rules apply: only `true` and `false` are booleans, and `1e-6` is a number.
* Unknown keys are errors. A key that has no effect in a run causes a warning.
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
        absent = " Not set by default." if field.default is None else ""
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
