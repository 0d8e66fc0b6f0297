"""The documentation's files learn, with a tiny model, tiny data, and overrides of paths, sizes and rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.needs import WITH_VLLM

from braid.config.load import load_config
from braid.trainer import commands
from braid_dialects.load import read_config

from .conftest import IN_ONE_PROCESS, SEEDS

pytestmark = pytest.mark.slow

LETTERS = "abcdefgh"
DIGITS = "0123"
GUESSING = {
    "run": {"name": "guessing", "device": "cpu", "output_dir": "."},
    "model": {
        "build": {
            "architecture": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2,
            "num_kv_heads": 1, "head_dim": 32, "characters": f"{LETTERS}{DIGITS}# ",
        }
    },
    "sft": {
        "data": [{"kind": "file", "path": "guesses.jsonl", "answer_key": None, "response_key": "response"}],
        "steps": 150,
        "rows_per_step": 32,
        "optimizer": {"lr": 3e-3},
    },
    "report": {"console": "none", "tensorboard": False},
}  # fmt: skip
"""A model that has learned the format of an answer, `#### 2`, but not the answers: it is right one time in
four."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and, in the three systems' forms, the data: letters that all have one
    answer."""
    folder = tmp_path_factory.mktemp("home")
    guesses = [{"prompt": letter, "response": f"#### {digit}"} for letter in LETTERS for digit in DIGITS]
    _write_lines(folder / "guesses.jsonl", guesses)
    answers = dict.fromkeys(LETTERS, DIGITS[2])
    _write_lines(folder / "boba.jsonl", [{"prompt": k, "solutions": [v]} for k, v in answers.items()])
    _write_lines(
        folder / "roll.json",
        [{"instruction": k, "ground_truth": v, "tag": "letters"} for k, v in answers.items()],
        whole=True,
    )
    _write_parquet(folder / "data" / "gsm8k", answers)
    config = {**GUESSING, "run": {**GUESSING["run"], "base_dir": str(folder), "output_dir": str(folder)}}
    (folder / "guessing.yaml").write_text(yaml.safe_dump(config))
    run = commands.sft(load_config(folder / "guessing.yaml"))
    model = commands.export(run.run_dir, output=folder / "model")
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    return folder


def _write_lines(path: Path, rows: list[dict[str, Any]], *, whole: bool = False) -> None:
    text = json.dumps(rows) if whole else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text, "utf-8")


def _write_parquet(folder: Path, answers: dict[str, str]) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "gsm8k",
            "prompt": [{"role": "user", "content": letter}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": digit},
            "extra_info": {"split": "train"},
        }
        for letter, digit in answers.items()
    ]
    folder.mkdir(parents=True)
    for name in ("train", "validation"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")


def trained(
    name: str, dialect: Any, overrides: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, **chosen: Any
) -> Path:
    """The folder of a run of a page's file, on the CPU, where `~` is `home`."""
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    native = ["braid.run.device=cpu", "braid.report.console=none"]
    read = read_config(SEEDS / name, [*overrides, *native], dialect=dialect, **chosen)
    return commands.train(read.loaded).run_dir


def learned(
    name: str, dialect: Any, overrides: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, float]:
    """Share of right answers before and after a run of a page's file."""
    native = ["braid.eval.samples_per_prompt=16", "braid.eval.before=true"]
    run_dir = trained(name, dialect, [*overrides, *native], home, monkeypatch, **IN_ONE_PROCESS)
    evals = json.loads((run_dir / "summary.json").read_text())["eval"]
    return evals["first"]["all"]["mean@16"], evals["last"]["all"]["mean@16"]


def check(scores: tuple[float, float]) -> None:
    before, after = scores
    assert before < 0.45  # a guess is right one time in four
    assert after > 0.9


@pytest.mark.nightly
def test_rlinf_s_math_file_learns_with_grpo(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [
        f"runner.output_dir={home}/rlinf",
        f"rollout.model_dir={home}/model",
        f"actor.tokenizer.tokenizer_model={home}/model",
        f"data.train_data_paths=[{home}/boba.jsonl]",
        f"data.val_data_paths=[{home}/boba.jsonl]",
        "runner.max_steps=20",
        "runner.max_epochs=100",
        "runner.seq_length=16",
        "runner.val_check_interval=50",
        "data.max_prompt_length=8",
        "data.rollout_batch_size=8",
        "algorithm.group_size=8",
        "actor.optim.lr=2e-3",
    ]
    check(learned("rlinf-math-000.yaml", "rlinf", overrides, home, monkeypatch))


ROLL_SIZES = (
    "rollout_batch_size=8",
    "prompt_length=8",
    "response_length=8",
    "actor_train.device_mapping=[0]",
    "actor_train.training_args.per_device_train_batch_size=8",
    "actor_train.training_args.gradient_accumulation_steps=8",
)


@pytest.mark.nightly
def test_roll_s_rlvr_file_learns(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [
        f"output_dir={home}/roll",
        f"pretrain={home}/model",
        f"actor_train.data_args.file_name={home}/roll.json",
        f"+validation.data_args.file_name={home}/roll.json",
        "max_steps=40",
        "eval_steps=40",
        *ROLL_SIZES,
        "actor_train.training_args.learning_rate=2e-3",
        "actor_train.training_args.warmup_steps=2",
    ]
    check(learned("roll-rlvr-002.yaml", "roll", overrides, home, monkeypatch))


def test_roll_s_full_kl_penalty_runs_in_one_process(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [
        f"output_dir={home}/full",
        f"pretrain={home}/model",
        f"actor_train.data_args.file_name={home}/roll.json",
        "+add_token_level_kl=true",
        "+kl_penalty=full",
        "max_steps=2",
        *ROLL_SIZES,
        "actor_train.training_args.learning_rate=2e-3",
        "actor_train.training_args.warmup_steps=0",
    ]
    run_dir = trained("roll-rlvr-002.yaml", "roll", overrides, home, monkeypatch, **IN_ONE_PROCESS)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, second = [line["reward/kl"] for line in lines if "reward/kl" in line]
    assert first == 0.0
    assert second > 1e-4


def test_roll_s_domains_have_their_shares_of_every_round(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"instruction": k, "ground_truth": "2", "tag": "few" if k == "a" else "many"} for k in LETTERS]
    _write_lines(home / "domains.json", rows, whole=True)
    worker = "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker"
    overrides = [
        f"output_dir={home}/domains",
        f"pretrain={home}/model",
        f"actor_train.data_args.file_name={home}/domains.json",
        "+actor_train.data_args.domain_interleave_probs={math_rule: 0.75, general: 0.25}",
        f"+rewards={{math_rule: {{worker_cls: {worker}, tag_included: [few, absent]}}, "
        f"general: {{worker_cls: {worker}, tag_included: [many]}}}}",
        "max_steps=2",
        *ROLL_SIZES,
        "actor_train.training_args.warmup_steps=0",
        "braid.report.samples_every_rounds=1",
    ]
    run_dir = trained("roll-rlvr-002.yaml", "roll", overrides, home, monkeypatch, **IN_ONE_PROCESS)
    for number in (1, 2):
        lines = (run_dir / "samples" / f"round_{number:06d}.jsonl").read_text().splitlines()
        sources = [json.loads(line)["source"] for line in lines]
        assert sources.count("few") == 3 * sources.count("many") > 0


@pytest.mark.nightly
@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_skyrl_s_file_learns_with_grpo_and_with_a_critic(
    estimator: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        f"trainer.run_name={estimator}",
        f"trainer.policy.model.path={home}/model",
        f"trainer.ckpt_path={home}/skyrl-{estimator}",
        f"trainer.algorithm.advantage_estimator={estimator}",
        "trainer.logger=console",
        "trainer.epochs=24",
        "trainer.eval_interval=24",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "trainer.critic_mini_batch_size=8",
        "trainer.max_prompt_length=8",
        "generator.sampling_params.max_generate_length=8",
        "trainer.policy.optimizer_config.lr=2e-3",
        "trainer.critic.optimizer_config.lr=2e-3",
        f"trainer.critic.model.path={home}/model",
    ]
    check(learned("skyrl-004.yaml", "skyrl", overrides, home, monkeypatch))


MEGATRON_CPU = Path(__file__).parents[1] / "megatron_cpu"


def placements(
    name: str, dialect: Any, overrides: list[str], home: Path, monkeypatch: pytest.MonkeyPatch, **chosen: str
) -> dict[str, tuple[str, list[int]]]:
    """Two rounds of a page's file on workers, with its own backend. Role -> (backend or engine, devices)."""
    native = ["braid.run.num_threads=1", "braid.run.max_rounds=2"]
    run_dir = trained(name, dialect, [*overrides, *native], home, monkeypatch, **chosen)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = [line for line in lines if "policy/grad_norm" in line]
    assert [line["round"] for line in rounds] == [1, 2]
    assert all(line["status/invalid"] == 0 for line in rounds)
    roles = json.loads((run_dir / "plan.json").read_text())["layout"]["roles"]
    return {
        role["role"]: (role["kind"], [d for worker in role["workers"] for d in worker["devices"]])
        for role in roles
    }


@pytest.mark.nightly
@pytest.mark.xdist_group("workers")
def test_rlinf_s_math_file_runs_on_megatron_collocated_with_rollout(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("PYTHONPATH", str(MEGATRON_CPU))
    monkeypatch.setattr("braid.plan.available.count_gpus", lambda: 2)
    overrides = [
        f"runner.output_dir={home}/rlinf-megatron",
        f"rollout.model_dir={home}/model",
        f"actor.tokenizer.tokenizer_model={home}/model",
        f"data.train_data_paths=[{home}/boba.jsonl]",
        f"data.val_data_paths=[{home}/boba.jsonl]",
        "cluster.num_gpus_per_node=2",
        "runner.seq_length=16",
        "data.max_prompt_length=8",
        "data.rollout_batch_size=8",
    ]
    placed = placements("rlinf-math-000.yaml", "rlinf", overrides, home, monkeypatch, engine="native")
    assert placed == {"policy": ("megatron", [0, 1]), "rollout": ("native", [0, 1])}


@WITH_VLLM
@pytest.mark.nightly
@pytest.mark.xdist_group("workers")
def test_roll_s_rlvr_file_runs_on_deepspeed_beside_vllm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [
        f"output_dir={home}/roll-deepspeed",
        f"pretrain={home}/model",
        f"actor_train.data_args.file_name={home}/roll.json",
        "rollout_batch_size=8",
        "prompt_length=8",
        "response_length=8",
        "actor_train.device_mapping=list(range(0,2))",
        "actor_train.training_args.gradient_accumulation_steps=32",
        "actor_infer.device_mapping=[2]",
        "actor_infer.strategy_args.strategy_config.max_model_len=64",
        "actor_infer.strategy_args.strategy_config.block_size=32",  # 16 is none of vLLM's on a CPU
        "actor_infer.model_args.dtype=fp32",  # vLLM's bf16 wants instructions that not every CPU has
    ]
    placed = placements("roll-rlvr-002.yaml", "roll", overrides, home, monkeypatch, backend="deepspeed")
    ranks = ("deepspeed", [0, 1])
    assert placed == {"policy": ranks, "critic": ranks, "rollout": ("vllm", [2])}


@pytest.mark.nightly
@WITH_VLLM
@pytest.mark.xdist_group("workers")
def test_skyrl_s_file_runs_on_fsdp2_collocated_with_its_reference_and_vllm(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [
        f"trainer.policy.model.path={home}/model",
        f"trainer.ckpt_path={home}/skyrl-fsdp2",
        "trainer.run_name=fsdp2",
        "trainer.epochs=2",
        "trainer.logger=console",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.placement.ref_num_gpus_per_node=2",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "trainer.critic_mini_batch_size=8",
        "trainer.max_prompt_length=8",
        "generator.num_inference_engines=2",
        "generator.inference_engine_tensor_parallel_size=1",
        "generator.weight_sync_backend=gloo",
        "generator.model_dtype=float32",  # vLLM's bf16 wants instructions that not every CPU has
        "generator.sampling_params.max_generate_length=8",
    ]
    placed = placements("skyrl-004.yaml", "skyrl", overrides, home, monkeypatch)
    assert placed == {
        "policy": ("fsdp2", [0, 1]),
        "reference": ("fsdp2", [0, 1]),
        "rollout": ("vllm", [0, 1]),
    }
