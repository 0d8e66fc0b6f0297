"""The config language of ROLL's RLVR and agentic pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from . import roll_facts as facts
from .roll_agentic import AGENTIC, missing_tags
from .roll_agentic import base as agentic_base
from .roll_data import DATA, REWARDS, missing_keys, reward_parts
from .roll_distill import ROLL_DISTILLATION
from .roll_facts import ROLE, TRAIN, role_of
from .roll_pipeline import ALGORITHM, ALIASES, OTHER_PIPELINES, PIPELINE
from .roll_sft import ROLL_SFT
from .roll_workers import WORKERS
from .rows import rows
from .table import Dialect, Source, table

NO_MODEL = "(none: set pretrain)"
"""Placeholder for the model folder in a file that names none: the file can be explained, but not run."""
_DATA = {"actor_train": "data.train[0]", "validation": "data.eval[0]"}
_SAMPLING = {"actor_infer": "rollout.sampling", "validation": "eval.sampling"}


def _base(source: Source) -> dict[str, Any]:
    """Native settings that depend on several keys: data, rewards, evaluation, micro-batches, offloading."""
    made: dict[str, Any] = {"model.path": NO_MODEL, "reward.parts": reward_parts(source)}
    made |= agentic_base(source)
    if source["is_pure_opd"]:
        made["reward.scale"] = 0.0  # rewards are only reported
    if facts.reads_images(source):
        made |= facts.image_limits(source)
    for role, native in _DATA.items():
        if source[f"{role}.data_args.file_name"]:
            made |= {f"{native}.kind": "file", f"{native}.answer_key": "ground_truth"}
            made[f"{native}.prompt_key"] = facts.column_of(source, role)
            if facts.reads_images(source):
                columns = facts.columns_of_images(source, role)
                made |= {f"{native}.{name}": column for name, column in columns.items()}
            elif len(facts.domains(source)) > 1:
                made[f"{native}.source_key"] = source[f"{role}.data_args.tag"] or "tag"
    is_colocated = set(facts.devices(source, "actor_train")) & set(facts.devices(source, "actor_infer"))
    if is_colocated and not facts.is_one_process(source):
        made |= {f"train.offload.{what}": True for what in ("weights", "gradients", "optimizer")}
    return made | _micro_batches(source)


def _micro_batches(source: Source) -> dict[str, Any]:
    """Micro-batch token limits: as many tokens as the configured number of rows can have, so that they never
    bind. Backends of the critic and the reference."""
    whole, made = source["prompt_length"] + facts.max_new_tokens(source), dict[str, Any]()
    if facts.is_agentic(source):
        whole = facts.context(source)
    has_reference = facts.kl_place(source) and source.has("reference")
    for role in (*facts.trained_roles(source), *(["reference"] if has_reference else [])):
        native, rows_of = TRAIN[role], source[f"{role}.training_args.per_device_train_batch_size"]
        if role != "reference":
            made[f"{native}.micro_batch_tokens"] = whole * rows_of
        if role != "actor_train":
            made[f"{native}.backend.kind"] = facts.backend(source, role)
        made[f"{native}.infer_batch_tokens"] = whole * source[f"{role}.infer_batch_size"]
    return made


_PIPELINES = {
    "preference (DPO) pipeline of ROLL": "chosen_key rejected_key ipo",
}
"""Pipelines that braid lacks -> keys and sections that only they have."""
_RULES = table(rows(PIPELINE, ALGORITHM, WORKERS, DATA, REWARDS, AGENTIC, OTHER_PIPELINES))
_TEACHER = {
    f"teacher.{key.removeprefix('reference.')}": key for key in _RULES if key.startswith("reference.")
}
_STUDENT = {
    f"student_{key.removeprefix('actor_')}": key
    for key in _RULES
    if key.startswith(("actor_train.", "actor_infer."))
}


def _of_file(dialect: Dialect, values: Mapping[str, Any], _: str | None) -> Dialect:
    """Supervised fine-tuning and distillation on a file have separate tables. In on-policy distillation, the keys of
    the teacher are those of the reference; without it, ROLL does not read them. A file with a student is one of
    pure distillation, whose launcher sets is_pure_opd, and the student is the actor."""
    if any(path.startswith("sft_train.") for path in values):
        return ROLL_SFT
    if any(path.startswith("student.") for path in values):
        return ROLL_DISTILLATION
    is_pure = values.get("is_pure_opd", any(path.startswith("student_train.") for path in values))
    if is_pure:
        rules = {**dialect.rules, "is_pure_opd": replace(dialect.rules["is_pure_opd"], default=True)}
        dialect = replace(dialect, aliases={**dialect.aliases, **_STUDENT}, rules=rules)
    has_reference = any(path.startswith("reference.") for path in values)
    if not (is_pure or values.get("use_opd")) or has_reference:
        return dialect
    aliases = {**dialect.aliases, **_TEACHER}
    return replace(dialect, aliases=aliases, spelled={**dialect.spelled, "reference.": "teacher."})


def _missing_teacher(source: Source) -> Iterator[tuple[str, str]]:
    """Distillation without a teacher."""
    if facts.distils(source) and not source["reference.model_args.model_name_or_path"]:
        key = "is_pure_opd" if source["is_pure_opd"] else "use_opd"
        yield key, "needs a teacher: set teacher.model_args.model_name_or_path"


ROLL = Dialect(
    name="roll",
    title="ROLL",
    rules=_RULES,
    base=_base,
    places={
        "engine": facts.engine,
        "backend": lambda s: facts.backend(s, role_of(s)),
        "train": lambda s: TRAIN[role_of(s)],
        "trained": lambda s: [TRAIN[role] for role in facts.trained_roles(s)],
        "placed": lambda s: ROLE[role_of(s)],
        "data": lambda s: _DATA[role_of(s)],
        "tag": lambda s: s.at.split(".")[1],
        "tracker": lambda s: s["track_with"],
        "limit": lambda s: ["rollout.sampling.max_new_tokens"] if s["sequence_length"] else [],
        "sampling": lambda s: _SAMPLING[role_of(s)],
    },
    checks=(missing_keys, missing_tags, _missing_teacher),
    aliases=ALIASES,
    of_file=_of_file,
    others=(ROLL_SFT, ROLL_DISTILLATION),
    absent={
        key: (f"the {name}", lambda _: True) for name, keys in _PIPELINES.items() for key in keys.split()
    },
)
