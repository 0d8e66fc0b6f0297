"""Scripts and files of verl are read, explained and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.cli.main import main
from braid.errors import ConfigError
from braid_dialects.load import Read, read_config

from .test_supervised import BUILD

SCRIPTS = Path(__file__).parent / "scripts"
A = "actor_rollout_ref"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MODEL", "DATA_DIR", "NNODES", "RAY_DATA_HOME", "MODEL_PATH", "CKPTS_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def read(name: str, *overrides: str, **chosen: Any) -> Read:
    return read_config(SCRIPTS / f"verl_{name}.sh", overrides, **chosen)


def test_a_script_of_grpo_keeps_the_meaning_of_its_sizes_and_defaults() -> None:
    made = read("gsm8k")
    config: Any = made.loaded.config
    assert (made.language, made.title) == ("verl", "verl 0.7")
    assert {entry.disposition for entry in made.ledger} <= {"applied", "unused", "implied", "no effect"}
    assert (config.rollout.prompts_per_round, config.rollout.group_size, config.train.steps_per_pass) == (
        1024,
        5,
        4,
    )
    assert (config.train.micro_batch_rows, config.train.micro_batch_tokens) == (40, 40 * 1536)
    assert dict(config.cluster.placement) == {"policy,reference,rollout": "0-7"}
    assert config.rollout.engine.replicas == 4
    algorithm = config.algorithm
    assert (algorithm.advantage.kind, algorithm.kl_in, algorithm.kl_coef) == ("grpo", "loss", 0.001)
    assert (algorithm.kl_estimator, algorithm.kl_clamp, algorithm.aggregation) == ("k3", 10.0, "token_mean")
    assert (algorithm.policy_loss.kind, algorithm.policy_loss.dual_clip) == ("ppo_clip", 3.0)
    assert (config.train.optimizer.weight_decay, config.train.gradient_checkpointing) == (0.01, True)
    assert (config.eval.before, config.eval.every_rounds, config.eval.sampling.greedy) == (True, 5, True)
    assert [part.kind for part in config.reward.parts] == ["exact"]


def test_a_script_of_dapo_is_read_with_its_variables_arrays_and_sums() -> None:
    config: Any = read("dapo", "trainer.nnodes=2").loaded.config
    assert (config.data.max_prompt_tokens, config.rollout.sampling.max_new_tokens) == (2048, 20_480)
    assert (config.train.micro_batch_tokens, config.train.sequence_parallel) == (22_528 // 8, 8)
    assert (config.cluster.num_nodes, config.train.steps_per_pass) == (2, 16)
    assert (config.rollout.filter.then, config.rollout.filter.min_std) == ("resample", 0.0)
    # the penalty comes before the scale, which makes it 1.0
    assert config.reward.overlong is not None
    assert (config.reward.scale, config.reward.shift, config.reward.overlong.penalty) == (2.0, -1.0, 0.5)
    assert config.algorithm.kl_coef == 0
    assert config.run.resume == "latest"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{A}.actor.ppo_mini_batch_size=300"], r"ppo_mini_batch_size: data\.train_batch_size=1024 is not a multiple of 300"),
        ([f"{A}.rollout.tensor_model_parallel_size=3"], r"tensor_model_parallel_size: the 8 GPUs are not a multiple of 3"),
        ([f"{A}.actor.kl_loss_coeff=1"], r"kl_loss_coeff: unknown key of verl, did you mean .*kl_loss_coef"),
        (["algorithm.use_kl_in_reward=True"], r"use_kl_in_reward: braid has one KL term"),
        (["custom_reward_function.path=mine.py"], r"custom_reward_function\.path: .*kind: function, path: FILE\.py:NAME"),
        (["trainer.device=npu"], r"trainer\.device: 'npu' is not supported"),
        (["trainer.logger=mlflow"], r"trainer\.logger: .*mlflow"),
        (["trainer.resume_mode=resume_path"], r"resume_mode: needs the folder of a checkpoint"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_refused_in_verl_s_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read("gsm8k", *overrides)


def test_old_keys_tell_the_version_and_its_defaults(tmp_path: Path) -> None:
    tree = {"data": {"train_files": "gsm8k.parquet", "val_batch_size": 8}, A: {"model": {"path": "m"}}}
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(tree))
    old, new = (read_config(tmp_path / "old.yaml", dialect=name) for name in (None, "verl@0.7"))
    assert (old.title, old.version_from) == ("verl 0.2", "told by data.val_batch_size")
    assert (old.loaded.config.algorithm.entropy_coef, new.loaded.config.algorithm.entropy_coef) == (
        0.001,
        0.0,
    )
    assert (old.loaded.config.algorithm.kl_in, new.loaded.config.algorithm.kl_coef) == ("reward", 0.0)


def test_megatron_s_config_of_verl_chooses_the_backend(tmp_path: Path) -> None:
    script = (SCRIPTS / "verl_gsm8k.sh").read_text()
    start = "python3 -m verl.trainer.main_ppo"
    assert start in script
    text = script.replace(start, f"{start} --config-path=config --config-name='ppo_megatron_trainer.yaml'")
    (tmp_path / "run.sh").write_text(text)
    config: Any = read_config(
        tmp_path / "run.sh", [f"{A}.actor.megatron.tensor_model_parallel_size=4"]
    ).loaded.config
    assert (config.train.backend.kind, config.train.backend.tensor_parallel) == ("megatron", 4)
    (tmp_path / "run.sh").write_text(text.replace("ppo_megatron_trainer", "mine"))
    with pytest.raises(ConfigError, match="the script launches a config file"):
        read_config(tmp_path / "run.sh", dialect="verl")


def test_a_file_without_the_policy_s_section_is_not_taken_for_verl_s(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(yaml.safe_dump({"trainer": {"epochs": 2, "logger": "console"}}))
    assert read_config(tmp_path / "one.yaml").language == "skyrl"


TINY = (
    "data.train_files=rows.jsonl", "data.val_files=rows.jsonl", "data.train_batch_size=4", "data.max_prompt_length=16",
    "data.max_response_length=8", f"{A}.rollout.n=2", f"{A}.actor.ppo_mini_batch_size=2", f"{A}.actor.ulysses_sequence_parallel_size=1",
    "trainer.total_training_steps=2", "trainer.nnodes=1", "trainer.n_gpus_per_node=1", f"{A}.rollout.tensor_model_parallel_size=1",
    "trainer.logger=console", "trainer.experiment_name=run", "trainer.default_local_dir=checkpoints", f"{A}.model.custom_chat_template=plain.jinja", "trainer.resume_mode=disable",
    "braid.model.path=null", f"braid.model.build={json.dumps(BUILD)}", "braid.run.output_dir=out", "braid.report.console=none",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "overrides"), [
    ("gsm8k", ["data.train_files=gsm8k.jsonl"]),
    ("dapo", ["reward_model.reward_kwargs.overlong_buffer_cfg.len=4", "algorithm.filter_groups.max_num_gen_batches=1"]),
])  # fmt: skip
def test_a_script_trains_two_rounds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    overrides: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {
            "data_source": name,
            "prompt": [{"role": "user", "content": a}],
            "reward_model": {"ground_truth": "1"},
        }
        for a in "abcdefgh"
    ]
    for file in ("rows", "gsm8k"):
        (tmp_path / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.jinja").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    chosen = ["--backend", "single", "--engine", "native"]
    script = str(SCRIPTS / f"verl_{name}.sh")
    assert main(["train", script, *TINY, *overrides, *chosen]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    assert sum("policy/loss" in line for line in lines) == 2
