"""RLinf's evaluations of robot policies: the policy is that of `rollout.model`, the simulator that of
`env.eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.config.model import VlaConfig
from braid.envs.kinds import LiberoEnv
from braid.errors import ConfigError
from braid.plan import resolve
from braid_dialects.load import Read, read_config

from .embodied import COMMON, EVALUATION, FILES, PRESETS, Flat, nested


def read(folder: Path, flat: Flat, **chosen: Any) -> Read:
    path = folder / "evaluation.yaml"
    path.write_text(yaml.safe_dump(nested(flat), sort_keys=False), "utf-8")
    return read_config(path, dialect="rlinf", **chosen)


def dispositions(result: Read) -> dict[str, str]:
    return {entry.path: entry.disposition for entry in result.ledger}


def _mixed() -> Flat:
    """A whole training file with `only_eval`, whose `rollout.model` and `env.eval` are of another task."""
    flat = {
        key: value
        for key, value in (COMMON | FILES["libero_10_ppo_openpi"]).items()
        if key not in ("defaults", "model")
    }
    flat |= {f"actor.model.{key}": value for key, value in PRESETS["model/pi0"].items()}
    for use in ("train", "eval"):
        flat |= {
            f"env.{use}.{key}": value for key, value in PRESETS["env/libero_10"].items() if key not in flat
        }
    return flat | {key: value for key, value in EVALUATION.items() if key.startswith(("env.eval.", "rollout.model."))} | {
        "runner.only_eval": True, "env.train.ignore_terminations": False,
    }  # fmt: skip


@pytest.mark.parametrize("flat", [EVALUATION, _mixed()], ids=["evaluation", "training file"])
def test_the_policy_is_rollout_model_and_the_simulator_env_eval(tmp_path: Path, flat: Flat) -> None:
    result = read(tmp_path, flat)
    config = result.loaded.config
    assert config.run.eval_only
    assert isinstance(config.env, LiberoEnv)
    assert (config.env.suite, config.env.max_episode_steps, config.env.ignore_terminations) == (
        "libero_goal",
        320,
        True,
    )
    assert config.env.num_envs == 20
    assert config.env.eval_reset_seeds is not None
    vla = config.model.vla
    assert isinstance(vla, VlaConfig)
    assert (config.model.path, vla.num_action_chunks, vla.denoise_steps) == ("/path/to/model/goal", 5, 7)
    resolve(config, verb="eval", num_gpus=0)
    rows = dispositions(result)
    for key in ("rollout.model.num_steps", "rollout.model.model_type", "env.eval.task_suite_name"):
        assert rows[key] == "applied", key
    training = {
        key: disposition
        for key, disposition in rows.items()
        if key.startswith(("actor.model.", "env.train."))
    }
    assert set(training.values()) <= {"no effect"}
    assert bool(training) == ("actor.model.num_steps" in flat)


def test_rollout_model_with_a_path_alone_leaves_the_rest_to_actor_model(tmp_path: Path) -> None:
    flat = {key: value for key, value in _mixed().items() if not key.startswith("rollout.model.")}
    result = read(
        tmp_path, flat | {"rollout.model.model_path": "/path/to/model/goal", "rollout.model.precision": None}
    )
    config = result.loaded.config
    assert isinstance(config.model.vla, VlaConfig)
    assert (config.model.path, config.model.vla.num_action_chunks) == ("/path/to/model/goal", 10)
    rows = dispositions(result)
    assert (rows["actor.model.model_path"], rows["actor.model.num_action_chunks"]) == ("no effect", "applied")


def test_what_braid_lacks_is_refused_with_the_keys_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.model\.openpi\.config_name: .*pi0\.5 is not supported"):
        read(tmp_path, EVALUATION | {"rollout.model.openpi.config_name": "pi05_libero"})
    with pytest.raises(
        ConfigError,
        match=r"rollout\.model\.num_step: unknown key of RLinf, did you mean 'rollout\.model\.num_steps'",
    ):
        read(tmp_path, EVALUATION | {"rollout.model.num_step": 4})
    with pytest.raises(ConfigError, match=r"env\.eval\.env_type: 'robotwin' is not supported"):
        read(tmp_path, EVALUATION | {"env.eval.env_type": "robotwin"})


def test_training_reads_actor_model_and_env_train(tmp_path: Path) -> None:
    flat = _mixed() | {
        "runner.only_eval": False,
        "env.eval.task_suite_name": "libero_10",
        "env.eval.max_episode_steps": 512,
    }
    config = read(tmp_path, flat, backend="single").loaded.config
    assert isinstance(config.env, LiberoEnv)
    assert isinstance(config.model.vla, VlaConfig)
    assert (config.env.suite, config.model.vla.denoise_steps) == ("libero_10", 4)
