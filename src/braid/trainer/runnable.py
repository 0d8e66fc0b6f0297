"""Whether this machine can run a config, as far as the plan and the models' configs tell: the list of checks
that precede everything that a run starts or writes. Imports transformers only where a check needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.errors import ModelError, Problem
from braid.models.folders import check_folder, local_path, read
from braid.plan import Plan
from braid.plan.available import machine_problems


def run_problems(config: RunConfig, plan: Plan) -> list[Problem]:
    """All problems of packages, devices, kernels and models."""
    return [
        *(Problem(key, why) for key, why in machine_problems(config, plan)),
        *_missing_folders(config, plan),
        *_unsupported_architectures(config, plan),
    ]


def _missing_folders(config: RunConfig, plan: Plan) -> Iterator[Problem]:
    """Missing model folders of roles other than the policy, whose folder is checked when the tokenizer is
    loaded."""
    folders = {
        "critic.path": config.critic.path if plan.needs_critic else None,
        **(config.reference.folders if plan.needs_reference else {}),
    }
    if plan.verb != "sft":
        parts = chain(config.reward.models(), config.reward.judges())
        folders |= {f"reward.parts[{i}].path": part.path for i, part in parts}
    for key, path in folders.items():
        try:
            if path is not None:
                check_folder(local_path(path, key), key, needs_weights=True)
        except ModelError as error:
            yield Problem(key, str(error))


def _unsupported_architectures(config: RunConfig, plan: Plan) -> Iterator[Problem]:
    """Models that the backend of a role does not support or cannot divide."""
    policy, critic = config.model.source, config.critic.path
    models: list[tuple[TrainingRole, str, str | None]] = [("policy", "model.path", policy)]
    if plan.needs_critic:
        models.append(("critic", "model.path" if critic is None else "critic.path", critic or policy))
    if plan.needs_reference:
        references: Mapping[str, str | None] = config.reference.folders or {"model.path": policy}
        models.extend(("reference", key, folder) for key, folder in references.items())
    for role, key, folder in models:
        train = train_config(config, role)
        if not train.backend.checks_models or config.model.kind.is_robot:
            continue
        from transformers import AutoConfig

        from braid.models.build import config_of

        try:
            if folder is None:
                assert config.model.build is not None, "a language model has a folder or a build spec"
                model = config_of(config.model.build)
            else:
                remote = {"trust_remote_code": config.model.trust_remote_code}
                model = read(
                    local_path(folder, key),
                    key,
                    "causal language model",
                    AutoConfig.from_pretrained,
                    **remote,
                )
            train.backend.check_model(model.get_text_config(decoder=True))
        except ModelError as error:
            yield Problem("train.backend" if role == "policy" else f"{role}.train.backend", str(error))
