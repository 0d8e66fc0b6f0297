"""Scripts and files of TRL are read, explained and run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from braid.cli.main import main
from braid.errors import ConfigError
from braid_dialects.load import DIALECTS, Read, read_config

from .test_supervised import BUILD

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def read(name: str, *overrides: str, **chosen: Any) -> Read:
    return read_config(SCRIPTS / f"trl_{name}.py", overrides, **chosen)


def of_file(folder: Path, **arguments: Any) -> Read:
    path = folder / "trl.yaml"
    path.write_text(yaml.safe_dump({"model_name_or_path": "m", "dataset_name": "rows.jsonl", **arguments}))
    return read_config(path)


def script(folder: Path, change: tuple[str, str], name: str = "grpo") -> Path:
    text = (SCRIPTS / f"trl_{name}.py").read_text()
    assert change[0] in text
    path = folder / "run.py"
    path.write_text(text.replace(*change))
    return path


def test_a_script_of_grpo_keeps_the_meaning_of_its_sizes_and_defaults() -> None:
    """Eight completions of a process, twice accumulated, four times for a generation: 32 of four prompts."""
    made = read("grpo")
    config: Any = made.loaded.config
    algorithm = config.algorithm
    assert (made.language, made.title) == ("trl", "TRL 1")
    assert {entry.disposition for entry in made.ledger} <= {"applied", "unused", "implied", "no effect"}
    assert (config.rollout.prompts_per_round, config.rollout.group_size) == (4, 8)
    assert (config.train.steps_per_pass, config.train.passes_per_round) == (2, 2)
    assert (config.checkpoint.every_rounds, config.run.max_epochs, config.run.seed) == (2, 1, 7)
    assert (config.rollout.sampling.max_new_tokens, config.rollout.sampling.temperature) == (1024, 0.9)
    assert (algorithm.kl_coef, algorithm.kl_in, algorithm.kl_estimator, algorithm.kl_clamp) == (
        0.001,
        "loss",
        "k3",
        "off",
    )
    assert (algorithm.aggregation, algorithm.aggregation_constant) == ("token_sum_constant", 1024.0)
    assert (algorithm.policy_loss.clip_low, algorithm.policy_loss.clip_high) == (0.2, 0.28)
    assert (algorithm.advantage.normalize_by_std, algorithm.mask_truncated) == (False, True)
    assert [(part.kind, part.weight) for part in config.reward.parts] == [("math", 1.0), ("pattern", 0.5)]
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.targets) == (16, ("q_proj", "v_proj"))
    assert made.loaded.origins["train.optimizer.lr"] == "trl_grpo.py:16 learning_rate"


def test_a_script_of_dpo_has_pairs_of_all_processes_and_two_losses() -> None:
    config: Any = read("dpo", "num_processes=4").loaded.config
    assert config.prefer is not None
    assert (config.prefer.pairs_per_step, config.prefer.loss.kind, config.prefer.sft_coef) == (
        64,
        "sigmoid",
        0.1,
    )
    assert (config.prefer.optimizer.lr, config.prefer.optimizer.schedule.decay) == (5e-7, "linear")
    assert (config.prefer.data[0].split, config.prefer.eval_data[0].split) == ("train", "test")
    assert (config.train.backend.kind, dict(config.cluster.placement)) == (
        "fsdp2",
        {"policy,reference": "0-3"},
    )


def test_a_script_of_a_reward_model_scores_pairs(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(
        "model = AutoModelForSequenceClassification.from_pretrained('a/b', num_labels=1)\n"
        "trainer = RewardTrainer(model=model, args=RewardConfig('out', center_rewards_coefficient=0.01),\n"
        "    train_dataset=load_dataset('c/d', split='train'))\n"
    )
    config: Any = read_config(path).loaded.config
    assert (config.prefer.loss.kind, config.prefer.loss.center_coef) == ("bradley_terry", 0.01)
    assert (config.prefer.optimizer.lr, config.prefer.pairs_per_step, config.model.path) == (1e-4, 8, "a/b")


def test_a_script_of_sft_learns_conversations() -> None:
    config: Any = read("sft").loaded.config
    assert config.sft is not None
    assert (config.sft.rows_per_step, config.sft.max_tokens, config.sft.epochs) == (8, 2048, 1.0)
    assert config.sft.data[0].messages_key == "messages"
    completion = read("sft", "completion_only_loss=true").loaded.config.sft
    assert completion is not None
    assert (completion.data[0].prompt_key, completion.data[0].response_key) == ("prompt", "completion")


@pytest.mark.parametrize(
    ("arguments", "pipeline"),
    [
        ({"num_generations": 4, "reward_funcs": ["accuracy_reward"]}, "grpo"),
        ({"beta": 0.1}, "dpo"),
        ({"center_rewards_coefficient": 0.01}, "reward"),
        ({"packing": True}, "sft"),
        ({"trainer": "dpo"}, "dpo"),
    ],
)
def test_the_arguments_of_a_file_tell_its_trainer(
    tmp_path: Path, arguments: dict[str, Any], pipeline: str
) -> None:
    made = of_file(tmp_path, **arguments)
    config: Any = made.loaded.config
    assert made.version_from.startswith(f"{pipeline} ")
    kinds = {"grpo": config.data.train, "sft": config.sft, "dpo": config.prefer, "reward": config.prefer}
    assert kinds[pipeline]
    if config.prefer is not None:
        assert config.prefer.loss.kind == {"dpo": "sigmoid", "reward": "bradley_terry"}[pipeline]


def test_the_version_is_told_by_arguments_that_are_gone(tmp_path: Path) -> None:
    of_grpo = {"num_generations": 8, "reward_funcs": "accuracy_reward"}
    old, new = of_file(tmp_path, **of_grpo, max_prompt_length=128), of_file(tmp_path, **of_grpo)
    assert (old.title, new.title) == ("TRL 0", "TRL 1")
    assert [one.loaded.config.rollout.sampling.max_new_tokens for one in (old, new)] == [256, 512]
    assert (old.loaded.config.data.overlong, new.loaded.config.data.overlong) == ("truncate_left", "error")


@pytest.mark.parametrize(
    ("loss", "kind", "aggregation"),
    [
        ("dapo", "ppo_clip", "token_mean"),
        ("grpo", "ppo_clip", "sequence_mean_token_mean"),
        ("luspo", "ppo_clip", "sequence_mean_token_sum"),
        ("sapo", "sapo", "sequence_mean_token_mean"),
        ("vespo", "vespo", "token_mean"),
    ],
)
def test_losses_of_grpo(loss: str, kind: str, aggregation: str) -> None:
    algorithm: Any = read("grpo", f"loss_type={loss}").loaded.config.algorithm
    assert (algorithm.policy_loss.kind, algorithm.aggregation) == (kind, aggregation)


def test_cispo_bounds_the_ratio_itself() -> None:
    loss: Any = read("grpo", "loss_type=cispo", "epsilon_high=5.0").loaded.config.algorithm.policy_loss
    assert (loss.kind, loss.clip_low, loss.clip_high) == ("cispo", 1.0, 4.0)


def test_vllm_is_corrected_as_in_trl_and_others_are_not() -> None:
    config: Any = read("grpo", "use_vllm=true").loaded.config
    (correction,) = config.algorithm.corrections
    assert (correction.level, correction.mode, correction.high) == ("sequence", "mask", 3.0)
    assert (config.rollout.engine.kind, config.rollout.engine.memory_fraction) == ("vllm", 0.3)
    server: Any = read("grpo", "use_vllm=true", "vllm_mode=server", "vllm_server_port=9000").loaded.config
    assert server.rollout.engine.servers == ("http://0.0.0.0:9000",)
    assert read("grpo").loaded.config.algorithm.corrections == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("learning_rate=1e-5", "learning_rate=rate()"), r"learning_rate: rate\(\) is not a literal; set it on the command line: learning_rate=VALUE \[run\.py:16\]"),
        (("learning_rate=1e-5", "learning_rat=1e-5"), r"learning_rat: unknown key of TRL, did you mean .learning_rate.\?"),
        (("accuracy_reward, think", "main, think"), r"reward_funcs: .*run\.py:main takes lists of completions.*kind: function, path: FILE\.py:NAME"),
        (('split="train")', 'split="train").map(str)'), r"dataset_name: .* is computed by the script.*dataset_name=FILE"),
        (("GRPOTrainer(", "KTOTrainer("), r"config: braid has no KTOTrainer of TRL; it reads GRPOTrainer or DPOTrainer"),
        (("num_generations=NUM_GENERATIONS", "num_generations=5"), r"the 32 completions of a generation batch are not a multiple of 5"),
        (("beta=0.001", "sync_ref_model=True"), r"sync_ref_model: true is not supported"),
        (("args=training_args,", "args=training_args, callbacks=[1],"), r"callbacks: .* is not supported"),
        (("def main():", "def main(:"), r"config: cannot read the script"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(script(tmp_path, change))


def test_the_command_line_sets_what_the_script_computes(tmp_path: Path) -> None:
    path = script(tmp_path, ("learning_rate=1e-5", "learning_rate=rate()"))
    assert read_config(path, ["learning_rate=2e-5"]).loaded.config.train.optimizer.lr == 2e-5


def test_a_script_with_a_parser_takes_its_arguments_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))\n"
        "script_args, training_args, model_args = parser.parse_args_and_config()\n"
        "trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args,\n"
        "    reward_funcs=[accuracy_reward], train_dataset=load_dataset('a/b', split='train'))\n"
    )
    made = read_config(tmp_path / "run.py", ["model_name_or_path=m", "num_generations=4"])
    assert (made.loaded.config.model.path, made.loaded.config.rollout.group_size) == ("m", 4)


def test_nothing_in_a_script_is_executed(tmp_path: Path) -> None:
    text = f"open({str(tmp_path / 'made')!r}, 'w').close()\n" + (SCRIPTS / "trl_sft.py").read_text()
    (tmp_path / "run.py").write_text(text)
    read_config(tmp_path / "run.py")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("dialect", DIALECTS["trl"].others, ids=lambda one: one.version_from.split()[0])
def test_all_arguments_of_transformers_are_known(dialect: Any) -> None:
    known = {path.partition(".")[0] for path in (*dialect.rules, *dialect.aliases)}
    assert {field.name for field in dataclasses.fields(TrainingArguments)} - known == set()


ROWS: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"prompt": a, "solution": "1"} for a in "abcdefgh"],
    "dpo": [{"prompt": a, "chosen": "a", "rejected": "b"} for a in "abcdefgh"],
    "sft": [
        {"messages": [{"role": role, "content": a} for role in ("user", "assistant")]} for a in "abcdefgh"
    ],
}
OWN = {
    "grpo": ["num_generations=2", "max_steps=8", "max_completion_length=8", "per_device_train_batch_size=4"],
    "dpo": ["max_steps=2", "eval_strategy=no", "gradient_accumulation_steps=1"],
    "sft": ["max_steps=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_script_trains_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    template = "{% for one in messages %}{{ one.content }}{% if one.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    (tmp_path / "plain.jinja").write_text(
        template if name == "sft" else "{% for one in messages %}{{ one.content }}{% endfor %}"
    )
    native = {
        "model.path": "null",
        "model.build": json.dumps(BUILD),
        "report.console": "none",
        "model.chat_template": "plain.jinja",
    }
    overrides = [
        "dataset_name=rows.jsonl",
        "output_dir=out/run",
        *OWN[name],
        *(f"braid.{key}={value}" for key, value in native.items()),
    ]
    chosen = ["--backend", "single", "--engine", "native"]
    assert main(["train", str(SCRIPTS / f"trl_{name}.py"), *overrides, *chosen]) == 0, capsys.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    metric = {"grpo": "policy/loss", "dpo": "prefer/loss", "sft": "sft/loss"}[name]
    assert sum(metric in line for line in lines) == 2
