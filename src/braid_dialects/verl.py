"""The config language of verl: files and scripts of `main_ppo`, and of the recipe DAPO.

verl's batch sizes count prompts, its micro batch sizes count samples of one GPU. All roles share all devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import verl_facts as facts
from .rows import rows
from .table import Dialect, Source, table
from .verl_algorithm import ACTOR_LOSS, ALGORITHMS
from .verl_data import DATA, REWARD
from .verl_facts import A
from .verl_rollout import ENGINE, SAMPLING
from .verl_trainer import CHOSEN, OTHERS, TRAINER
from .verl_workers import WORKERS

_ROLLOUT = f"{A}.rollout"


def _aliases() -> dict[str, str]:
    """Spellings of other releases."""
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    return {
        **{f"{at}.{key}": f"{overlong}.{key}"
           for at in ("reward_model.overlong_buffer", "custom_reward_function.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg")
           for key in ("enable", "len", "penalty_factor", "log")},
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward.reward_kwargs.max_resp_len": "reward_model.reward_kwargs.max_resp_len",
        **{f"reward.custom_reward_function.{key}": f"custom_reward_function.{key}" for key in ("path", "name", "reward_kwargs")},
        **{f"reward.reward_model.{key}": f"reward_model.{key}" for key in ("enable",)},
        f"{A}.actor.optim.warmup_style": f"{A}.actor.optim.lr_scheduler_type",
        "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    }  # fmt: skip


def _base(source: Source) -> dict[str, Any]:
    """Paths relative to the working directory, and the backend of the command line."""
    out: dict[str, Any] = {"run.base_dir": str(Path.cwd())}
    if facts.reads_images(source):
        out["model.vision.train"] = "none" if source[f"{A}.model.lora_rank"] else "all"
    if source.backend is not None:
        out |= {f"{path}.backend.kind": source.backend for path in facts.models(source)}
    return out


_OLD = {f"{A}.actor.entropy_coeff": 0.001, f"{A}.model.enable_gradient_checkpointing": False, f"{_ROLLOUT}.enforce_eager": True,
        "algorithm.use_kl_in_reward": None}  # fmt: skip
"""Defaults of 0.2 that have changed since."""
_MARKS = (f"{A}.actor.use_token_level_loss", f"{A}.actor.fsdp_config.grad_offload", "data.val_batch_size")
"""Keys of 0.2 that later releases no longer have."""


def _of_file(dialect: Dialect, values: Mapping[str, Any], version: str | None) -> Dialect:
    """verl's dialect in the version that is given, or that the file's keys tell."""
    why = "set by --dialect"
    if version is None:
        mark = next((key for key in _MARKS if key in values), None)
        newer = f"{A}.actor.strategy" in values or "algorithm.use_kl_in_reward" in values
        version = "0.2" if mark and not newer else "0.7"
        why = (
            f"told by {mark}"
            if version == "0.2"
            else "the newest, no key tells another; --dialect verl@0.2 sets it"
        )
    rules = dict(dialect.rules)
    if version == "0.2":
        rules |= {path: replace(rules[path], default=default) for path, default in _OLD.items()}
    return replace(dialect, rules=rules, version=version, version_from=why)


VERL = Dialect(
    name="verl",
    title="verl",
    rules=table(
        rows(CHOSEN, DATA, WORKERS, ACTOR_LOSS, ALGORITHMS, ENGINE, SAMPLING, REWARD, TRAINER, OTHERS)
    ),
    base=_base,
    places={
        "engine": facts.engine,
        "backend": facts.backend,
        "train": lambda s: facts.TRAIN[facts.role_of(s)],
        "trained": facts.trained,
        "models": facts.models,
        "trackers": facts.trackers,
    },
    aliases=_aliases(),
    of_file=_of_file,
    versions=("0.2", "0.7"),
    telling=(A,),
)
