"""ROLL's pipeline for distillation on answers of a file: a file with the sections `student` and `teacher`.

The student is trained as the model of supervised fine-tuning is, whose keys it has under other names
(roll_sft.py); the teacher is the reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import roll_facts as facts
from .conditions import needs, unless
from .conversions import unless_null
from .roll_facts import ROLE, TRAIN
from .roll_sft import ROLL_SFT
from .roll_workers import WORKERS
from .rows import always, ignored, missing, rows, to
from .table import Source, table

_OBJECTIVES = {
    "forward_kl": "forward_kl", "reverse_kl": "kl", "adaptive_kl": "adaptive_kl",
    "skewed_forward_kl": "skewed_forward_kl", "skewed_reverse_kl": "skewed_kl", "js_divergence": "jensen_shannon",
}  # fmt: skip
_SKEWED = ("skewed_forward_kl", "skewed_reverse_kl")

# One rule per line.
# fmt: off
_DISTILLATION = rows(
    to("teacher_pretrain", "reference.path", "path?", unless_null()),
    to("reference.model_args.model_name_or_path", "reference.path", "path?",
       unless(lambda s: s["teacher_pretrain"] is not None, "overridden by teacher_pretrain"), unless_null()),
    to("logits_topk", "sft.distillation.top_k", "natural", lambda v, _: v or None, default=64,
       note="0: the whole vocabulary; then teacher and student have the same devices and strategy"),
    to("distill_loss_weight", "sft.distillation.weight", "fraction", default=0.5,
       note="(1 - w) cross-entropy + w divergence, each the sum / tokens of the step"),
    to("kd_objective", "sft.distillation.divergence", _OBJECTIVES, default="forward_kl",
       note="over all tokens of the response; ROLL's mask leaves out the first and adds the one after the last"),
    to("adaptive_kl_alpha", "sft.distillation.mixture", "fraction", needs("kd_objective", "adaptive_kl"), default=0.5),
    to("skew_lambda", "sft.distillation.mixture", "fraction",
       unless(lambda s: s["kd_objective"] not in _SKEWED, "kd_objective is not skewed"), default=0.1),
    missing("kd_temperature", "set it to 1", default=1.0),
    missing("teacher_temperature", "set it to 1", default=1.0),
    missing("distill_on_prompt", "set it to false", default=False),
    always("logits_transfer_backend", "rows carry the teacher's likeliest tokens to the student", "text"),
    ignored("reference.{training_args,generating_args}.*", "the teacher is not trained"),
)
# fmt: on
_RULES = dict(ROLL_SFT.rules)
_RULES |= {rule.path: rule for rule in rows(WORKERS) if rule.path.startswith("reference.")}
_RULES |= table(_DISTILLATION)
_EPOCHS = "sft_train.training_args.num_train_epochs"
_RULES[_EPOCHS] = replace(
    _RULES[_EPOCHS], note="each pass ends with a smaller step of the rows that are left, which ROLL drops"
)
_DEFAULTS = {"prompt_key": "question", "response_key": "answer", "max_grad_norm": 0.0}
"""Keys of supervised fine-tuning with another default."""


def _role(source: Source) -> str:
    """The teacher for its keys, else the student."""
    return "reference" if facts.role_of(source) == "reference" else "sft_train"


def _base(source: Source) -> dict[str, Any]:
    """As for supervised fine-tuning, with shuffled rows, and the teacher's micro-batches."""
    made: dict[str, Any] = {**ROLL_SFT.base(source), "sft.shuffle": True}
    made["reference.train.backend.kind"] = facts.backend(source, "reference")
    if whole := source["sequence_length"]:
        made["reference.train.infer_batch_tokens"] = whole * source["reference.infer_batch_size"]
    return made


ROLL_DISTILLATION = replace(
    ROLL_SFT,
    rules={
        path: replace(rule, default=_DEFAULTS[path]) if path in _DEFAULTS else rule
        for path, rule in _RULES.items()
    },
    base=_base,
    places={
        **ROLL_SFT.places,
        "backend": lambda s: facts.backend(s, _role(s)),
        "train": lambda s: TRAIN[_role(s)],
        "placed": lambda s: ROLE.get(_role(s), "policy"),
    },
    aliases={
        **ROLL_SFT.aliases,
        "student_pretrain": "pretrain",
        "question_key": "prompt_key",
        "answer_key": "response_key",
        **{
            f"{role}.{path.partition('.')[2]}": path
            for role, known in (("student", "sft_train"), ("teacher", "reference"))
            for path in _RULES
            if path.startswith(f"{known}.")
        },
    },
    spelled={
        "sft_train.": "student.",
        "reference.": "teacher.",
        "pretrain": "student_pretrain",
        "prompt_key": "question_key",
        "response_key": "answer_key",
    },
)
