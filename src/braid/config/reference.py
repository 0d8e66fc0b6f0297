"""Generates the reference page docs/config.md from the schema."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from braid.sections import Section

from .explain import show_value
from .load import plain_data
from .schema import RunConfig
from .shape import allowed, describe, is_list, kind_of, sections_of

_HEAD = """\
# Config reference

All config keys. This page is generated from the schema by `braid schema --markdown`. For completion in
editors, start a config file with `# yaml-language-server: $schema=../docs/schema.json`
([schema.json](schema.json)).

* `braid show CONFIG.yaml` prints the resolved config with the origin of each value, and the plan derived from
  it.
* `key=value` on the command line overrides one key: `run.seed=1`, `data.train.0.size=5`,
  `eval.pass_at=[1,4]`. The value is YAML; a mapping or list replaces the whole value.
* Interpolations: other keys, including their defaults (`${rollout.group_size}`), environment variables
  (`${oc.env:HOME}`), arithmetic (`${mul:${rollout.group_size},2}`; also add, sub, div, int_div, min and max),
  negation (`${not:${eval.before}}`) and the time (`${now:%Y%m%d_%H%M}`). Quote them inside `{ }` and `[ ]`.
  `???` marks a value that must be set on the command line.
* YAML 1.2 rules apply: only `true` and `false` are booleans, and `1e-6` is a number.
* Unknown keys are errors. A key that has no effect in a run causes a warning.
"""


def reference_text() -> str:
    """The page as Markdown."""
    describe(RunConfig)
    return "\n".join([_HEAD, *_sections(RunConfig, ""), ""])


def _sections(section: type[Section], prefix: str) -> Iterator[str]:
    """A table for each section below `section`, those with plain keys first."""
    for name, field in section.model_fields.items():
        members = sections_of(field)
        if not members:
            continue
        path = f"{prefix}{name}" + ("[]" if is_list(field) else "")
        same = f" {_same_keys(_REPEATED[path], field)}" if path in _REPEATED else ""
        absent = " Not set by default." if field.default is None else ""
        yield f"## {path}\n\n{_text(field.description)}{same}{absent}\n"
        for member in () if same else members:
            if len(members) > 1:
                yield f"### kind: {kind_of(member)}\n\n{_first_paragraph(member.__doc__)}\n"
            yield from _table(member)
            yield from _sections(member, f"{path}.")


_REPEATED = {
    "data.eval[]": "data.train[]",
    "sft.data[]": "data.train[]",
    "sft.eval_data[]": "data.train[]",
    "prefer.data[]": "data.train[]",
    "prefer.eval_data[]": "data.train[]",
    "prefer.optimizer": "train.optimizer",
    "sft.optimizer": "train.optimizer",
    "sac.optimizer": "train.optimizer",
    "sac.critic_optimizer": "train.optimizer",
    "critic.train": "train",
    "eval.sampling": "rollout.sampling",
}
"""Section -> the section with the same keys, which is documented in full."""


def _same_keys(other: str, field: FieldInfo) -> str:
    """Refers to the section where the keys of `field` are documented, with the defaults that differ."""
    default = field.get_default(call_default_factory=True)
    changed = default.model_dump(exclude_defaults=True) if isinstance(default, Section) else {}
    differing = ", by default with " + ", ".join(f"{name}: {value}" for name, value in changed.items())
    return f"The keys are those of `{other}`{differing if changed else ''}."


def _table(section: type[Section]) -> Iterator[str]:
    rows = [_row(name, field) for name, field in section.model_fields.items() if not sections_of(field)]
    if rows:
        yield "| key | takes | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    default = "required"
    if not field.is_required():
        default = f"`{show_value(plain_data(field.get_default(call_default_factory=True)))}`"
    cells = (f"`{name}`", allowed(field), default, _text(field.description))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _first_paragraph(text: str | None) -> str:
    """What a kind is; its formula and its sources follow in the docstring."""
    return _text((text or "").partition("\n\n")[0])


def _text(text: str | None) -> str:
    return " ".join((text or "").split())
