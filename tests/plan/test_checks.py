"""Inconsistent keys, with the text of each problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import Verb, resolve

TEXT = [
    "model.build={}",
    "run.max_rounds=10",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "data.eval=[{kind: procedural, generator: chain_sum, size: 10}]",
    "reward.parts=[{kind: exact}]",
]
SIMULATOR = [
    "model.mlp={}",
    "env={kind: gymnasium, id: CartPole-v1}",
    "algorithm.recipe=ppo",
    "run.max_rounds=10",
]


FULL_KL = ["algorithm.kl_estimator=full", "algorithm.kl_coef=0.1"]
SAME = (
    "which must run in the same processes: set train.backend and reference.train.backend to the same "
    "value (single, fsdp, fsdp2 or deepspeed), and place both on the same devices in cluster.placement; "
    "or use k1, k2 or k3"
)


def complaints(base: list[str], *overrides: str, verb: Verb = "train") -> list[str]:
    config = load_config(None, [*base, *overrides]).config
    with pytest.raises(ConfigError) as error:
        resolve(config, verb=verb)
    return [f"{problem.key}: {problem.message}" for problem in error.value.problems]


def warnings(base: list[str], *overrides: str, verb: Verb = "train") -> list[str]:
    config = load_config(None, [*base, *overrides]).config
    return [f"{warning.key}: {warning.message}" for warning in resolve(config, verb=verb).warnings]


@pytest.mark.parametrize("base", [TEXT, SIMULATOR])
def test_a_valid_config_has_no_problems(base: list[str]) -> None:
    assert warnings(base) == []


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["train.steps_per_pass=64"],
            "train.steps_per_pass: 32 prompts per round cannot be split into 64 mini-batches of whole "
            "prompts; lower it to 32, or raise rollout.prompts_per_round to 64",
        ),
        (
            ["algorithm.recipe=ppo", "critic.train.steps_per_pass=64"],
            "critic.train.steps_per_pass: 32 prompts per round cannot be split into 64 mini-batches of "
            "whole prompts; lower it to 32, or raise rollout.prompts_per_round to 64",
        ),
        (
            ["rollout.max_sequence_tokens=1024"],
            "rollout.max_sequence_tokens: data.max_prompt_tokens=1024 leaves no room for an answer in "
            "1024 tokens; raise it above 1024",
        ),
        (
            ["rollout.max_sequence_tokens=1100", "rollout.engine.kv_budget_tokens=1000"],
            "rollout.engine.kv_budget_tokens: a trajectory has up to 1100 tokens "
            "(rollout.max_sequence_tokens), which never fits in a KV cache of 1000 tokens; raise it to "
            "at least 1100",
        ),
        (
            ["cluster.env={'A=B': x}"],
            "cluster.env: 'A=B' is not a valid environment variable name; it must not be empty or contain =",
        ),
        (
            ["eval.pass_at=[1,4]", "eval.samples_per_prompt=2"],
            "eval.pass_at[1]: pass@4 needs 4 samples per prompt, but eval.samples_per_prompt=2; raise "
            "it, or lower k",
        ),
        (
            ["run.max_rounds=null"],
            "run.max_rounds: the run never ends; set run.max_rounds or run.max_epochs",
        ),
        (
            ["rollout.group_size=1"],
            "rollout.group_size: grpo compares the answers of a group, so with group_size=1 every "
            "advantage is 0; raise it to 2 or more, or set algorithm.recipe=ppo",
        ),
        (
            ["algorithm.old_logprobs=current", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            "algorithm.old_logprobs: KL in the reward needs log-probs before the update, which current "
            "does not compute; set it to auto, recompute or behavior",
        ),
        (
            ["algorithm.old_logprobs=current", "algorithm.kl_coef=0.1", "algorithm.kl_in=advantage"],
            "algorithm.old_logprobs: KL in the advantage needs log-probs before the update, which current "
            "does not compute; set it to auto, recompute or behavior",
        ),
        (
            [*FULL_KL, "cluster.placement={policy: 0, reference: 1}"],
            "algorithm.kl_estimator: full compares all logits of policy (single on 0) and reference "
            f"(single on 1), {SAME}",
        ),
        (
            [*FULL_KL, "train.backend=fsdp2", "reference.train={backend: single}"],
            "algorithm.kl_estimator: full compares all logits of policy (fsdp2 on 0) and reference (single "
            f"on 0), {SAME}",
        ),
        (
            [*FULL_KL, "train.backend=megatron", "algorithm.kl_in=reward"],
            "algorithm.kl_estimator: full compares all logits of policy (megatron on 0) and reference "
            f"(megatron on 0), {SAME}",
        ),
        (
            ["algorithm.old_logprobs=current", "algorithm.recipe=kl_cov"],
            "algorithm.old_logprobs: algorithm.policy_loss=kl_cov selects tokens by their log-probs "
            "before the update, which current does not compute; set it to auto, recompute or behavior",
        ),
        (
            ["model={mlp: {}}"],
            "model.mlp: a robot policy cannot act in env.kind=single_turn, a text environment; set "
            "env.kind=gymnasium or metaworld, or use model.path or model.build alone",
        ),
        (["data.train=[]"], "data.train: no training prompts; add at least one source"),
        (
            ["reward.parts=[]"],
            "reward.parts: no reward for env.kind=single_turn; add at least one part",
        ),
        (
            ["model.build.max_positions=1200"],
            "rollout.sampling.max_new_tokens: data.max_prompt_tokens=1024 + "
            "rollout.sampling.max_new_tokens=256 = 1280 tokens, but the model accepts 1200; lower one of "
            "them",
        ),
        (
            ["model.build.max_positions=1300", "eval.sampling.max_new_tokens=300"],
            "eval.sampling.max_new_tokens: data.max_prompt_tokens=1024 + eval.sampling.max_new_tokens=300 = "
            "1324 tokens, but the model accepts 1300; lower one of them",
        ),
        (
            ["rollout.engine.kv_budget_tokens=1000"],
            "rollout.engine.kv_budget_tokens: data.max_prompt_tokens=1024 + "
            "rollout.sampling.max_new_tokens=256 = 1280 tokens, which never fits in a KV cache of 1000 "
            "tokens; raise it to at least 1280",
        ),
        (
            ["env={kind: tools, max_context_tokens: 1024}"],
            "env.max_context_tokens: data.max_prompt_tokens=1024 leaves no room for an answer in a "
            "context of 1024 tokens; raise it above 1024",
        ),
        (
            ["env={kind: tools, max_context_tokens: 4096}"],
            "env.max_context_tokens: a trajectory has up to 4096 tokens (env.max_context_tokens), but the "
            "model accepts 2048; lower one of them",
        ),
        (
            ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.old_logprobs=interpolated"],
            "algorithm.old_logprobs: KL in the reward needs log-probs before the update, which "
            "interpolated does not compute; set it to auto, recompute or behavior",
        ),
        (
            ["algorithm.recipe=gspo", "algorithm.logprob_level=chunk"],
            (
                "algorithm.policy_loss.ratio_level: algorithm.logprob_level=chunk already makes ratios "
                "turn-level; set it to token, or logprob_level to token"
            ),
        ),
        (
            ["algorithm.recipe=kl_cov", "algorithm.logprob_level=action"],
            "algorithm.logprob_level: algorithm.policy_loss=kl_cov selects single tokens; set it to token",
        ),
        (
            ["eval.target.min_final=0.5", "data.eval=[]"],
            "eval.target.min_final: a target needs evaluation data; add sources to data.eval",
        ),
        (
            ["eval.target.min_final=0.5", "eval.at_end=false"],
            "eval.target.min_final: the target is measured after the last round; set eval.at_end=true",
        ),
        (
            ["eval.target.min_gain=0.5", "eval.before=false"],
            "eval.target.min_gain: the gain is relative to the evaluation before training; set "
            "eval.before=true",
        ),
        (
            ["eval={samples_per_prompt: 4, pass_at: [1, 2], target: {metric: pass@4, min_final: 0.5}}"],
            "eval.target.metric: evaluations do not compute 'pass@4'; use mean@4 or pass@1 or pass@2, or "
            "change eval.samples_per_prompt or eval.pass_at",
        ),
        (
            ["sft.data=[]"],
            "sft.data: no examples; add at least one source",
        ),
        (
            ["sft.data=[{kind: file, path: x.jsonl}]"],
            "sft.data[0]: set exactly one of response_key, response_function and messages_key",
        ),
        (
            ["algorithm.recipe=ppo", "critic.warmup_rounds=10"],
            "critic.warmup_rounds: the policy is never updated: the run has 10 rounds, all of them critic "
            "warm-up (10)",
        ),
    ],
)
def test_an_impossible_config_is_refused_with_the_arithmetic(overrides: list[str], complaint: str) -> None:
    assert complaints(TEXT, *overrides) == [complaint]


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["model={build: {}}"],
            "env.kind: a language model cannot act in a simulator; use model.mlp instead of model.build, "
            "or set model.vla if it is a vision-language-action policy",
        ),
        (
            ["data.train=[{kind: file, path: x}]"],
            "data.train: a simulator has its own reset states; remove the data",
        ),
        (
            ["reward.parts=[{kind: exact}]"],
            "reward.parts: reward parts score text, but a simulator computes its own rewards; remove them",
        ),
        (
            ["sft.data=[{kind: file, path: x, response_key: y}]"],
            "sft: supervised fine-tuning for a simulator needs a vision-language-action policy "
            "(model.vla); remove it",
        ),
        (
            ["algorithm.kl_coef=0.1"],
            "algorithm.kl_coef: robot policies have no reference model; set algorithm.kl_coef=0",
        ),
        (
            ["run.max_epochs=3"],
            "run.max_epochs: a simulator has no prompts and so no epochs; set run.max_rounds",
        ),
        (
            ["algorithm.aggregation=token_sum_constant"],
            "algorithm.aggregation_constant: episodes of a simulator have no maximum response length to "
            "derive it from; set it",
        ),
    ],
)
def test_keys_that_a_simulator_does_not_support_are_refused(overrides: list[str], complaint: str) -> None:
    assert complaints(SIMULATOR, *overrides) == [complaint]


def test_problems_of_several_keys_are_reported_together() -> None:
    problems = complaints(TEXT, "data.train=[]", "run.max_rounds=null", "train.steps_per_pass=64")
    assert [complaint.split(":")[0] for complaint in problems] == [
        "run.max_rounds",
        "data.train",
        "train.steps_per_pass",
    ]


def test_each_verb_needs_its_own_parts() -> None:
    bare = ["model.build={}"]
    assert complaints(bare, verb="eval") == [
        "data.eval: no evaluation prompts; add at least one source",
    ]
    assert complaints(bare, verb="sft") == [
        "sft: no examples; add sources with response_key, response_function or messages_key to sft.data"
    ]
    examples = [*bare, "sft.data=[{kind: file, path: x, response_key: y}]"]
    assert warnings(examples, verb="sft") == []
    assert warnings([*examples, "algorithm.recipe=ppo"], verb="sft") == [], (
        "a critic without rounds is no problem"
    )
    assert warnings([*bare, *TEXT[3:]], verb="eval") == []


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (
            ["train.steps_per_pass=5"],
            "train.steps_per_pass: 32 prompts in 5 mini-batches: some have 6 prompts and some 7",
        ),
        (
            ["algorithm.old_logprobs=current", "train.passes_per_round=2"],
            "algorithm.old_logprobs: with current all ratios are 1, so there is no clipping over the 2 "
            "steps of a round",
        ),
        (
            ["rollout.prompts_per_round=200"],
            "rollout.prompts_per_round: a round takes 200 prompts, but there are only 100, so prompts "
            "repeat within a round",
        ),
        (
            ["rollout.sampling.top_p=0.9"],
            "rollout.sampling.top_p: tokens are sampled from a different distribution than the one that is "
            "trained",
        ),
        (
            ["rollout.sampling.min_p=0.1", "algorithm.old_logprobs=behavior"],
            "rollout.sampling.min_p: tokens are sampled from a different distribution than the one that "
            "is trained, and with algorithm.old_logprobs=behavior ratios compare the two",
        ),
        (
            ["rollout.sampling.greedy=true"],
            "rollout.sampling.greedy: all answers of a group are identical, so their advantages are 0",
        ),
        (
            ["train.optimizer.schedule.warmup_steps=10"],
            "train.optimizer.schedule.warmup_steps: the run ends after 10 steps, before the warm-up of 10 "
            "steps",
        ),
        (
            ["model.dtype=fp16"],
            "model.dtype: small gradients underflow in fp16; set train.grad_scaler={}, or model.dtype=bf16",
        ),
        (["critic.warmup_rounds=1"], "critic.warmup_rounds: has no effect: the advantage uses no critic"),
        (["algorithm.kl_in=reward"], "algorithm.kl_in: has no effect: algorithm.kl_coef is 0"),
        (["reference.path=x"], "reference.path: has no effect: algorithm.kl_coef is 0"),
        (
            ["eval.target.metric=pass@1"],
            "eval.target.metric: has no effect: no target is set, and evaluations are not compared",
        ),
        (
            ["algorithm.old_logprobs=behavior", "algorithm.corrections=[{high: 3}]"],
            "algorithm.corrections: has no effect: with algorithm.old_logprobs=behavior there is nothing "
            "to correct",
        ),
        (
            ["algorithm.early_stop_ratio=2"],
            "algorithm.early_stop_ratio: has no effect: with algorithm.old_logprobs=current all ratios are 1",
        ),
        (
            ["algorithm.aggregation_constant=3"],
            "algorithm.aggregation_constant: has no effect: algorithm.aggregation is not token_sum_constant",
        ),
        (
            ["algorithm.kl_coef=0.1", "reference.train.passes_per_round=2"],
            "reference.train.passes_per_round: has no effect: the reference model is not trained",
        ),
        (
            ["reference.update_every_epochs=1"],
            "reference.update_every_epochs: has no effect: algorithm.kl_coef is 0",
        ),
        (
            ["algorithm.recipe=ppo", "critic.train.steps_per_pass=3"],
            "critic.train.steps_per_pass: 32 prompts in 3 mini-batches: some have 10 prompts and some 11",
        ),
        (
            ["rollout.max_sequence_tokens=1280"],
            "rollout.max_sequence_tokens: has no effect: the limits of prompt and answer do not add up to "
            "more than that",
        ),
        (
            ["rollout.request_batch=32"],
            "rollout.request_batch: has no effect: a round does not have more prompts than that",
        ),
        (
            ["algorithm.old_logprobs=interpolated", "algorithm.corrections=[{}]"],
            "algorithm.corrections: has no effect: rounds are sampled with the weights that they start "
            "from, so interpolated log-probs are the engine's",
        ),
        (
            ["algorithm.entropy_level=chunk"],
            "algorithm.entropy_level: has no effect: algorithm.entropy_coef is 0",
        ),
        (
            ["algorithm.logprob_level=chunk", "algorithm.turn_weighting=turns"],
            "algorithm.turn_weighting: has no effect: algorithm.logprob_level is not token",
        ),
        (
            ["rollout.check_weights_dir=x"],
            "rollout.check_weights_dir: has no effect: rollout.check_weights is false",
        ),
        (
            ["checkpoint.export_dir=x"],
            "checkpoint.export_dir: has no effect: checkpoint.export_every_rounds is 0",
        ),
        (
            ["report.tensorboard=false", "report.dir=x"],
            "report.dir: has no effect: TensorBoard and trackers are off",
        ),
        (
            ["report.tensorboard=false", "report.tensorboard_queue=3"],
            "report.tensorboard_queue: has no effect: report.tensorboard is false",
        ),
        (["data.shuffle=false", "data.seed=3"], "data.seed: has no effect: data.shuffle is false"),
        (
            ["cluster.group_names={policy: actor}"],
            "cluster.group_names: has no effect: everything runs in one process",
        ),
        (
            ["run.max_restarts=3"],
            "run.max_restarts: no checkpoints are saved, so a restart starts from scratch; set "
            "checkpoint.every_rounds",
        ),
        (
            ["data.eval=[]", "eval.every_rounds=5"],
            "eval.every_rounds: has no effect: there are no data.eval sources",
        ),
        (
            ["data.train=[{kind: file, path: x.jsonl, response_key: best}]"],
            "data.train[0].response_key: has no effect: only sft.data and sft.eval_data have target responses",
        ),
        (
            ["data.use_chat_template=never", "model.chat_template=x"],
            "model.chat_template: has no effect: data.use_chat_template is never",
        ),
    ],
)
def test_suspicious_settings_cause_warnings(overrides: list[str], warning: str) -> None:
    assert warnings(TEXT, *overrides) == [warning]


def test_levels_of_robot_policies() -> None:
    assert not warnings(SIMULATOR, "algorithm.recipe=grpo", "algorithm.logprob_level=chunk")
    chunks = "model.mlp.num_action_chunks=4"
    assert not warnings(SIMULATOR, chunks, "algorithm.entropy_level=chunk", "algorithm.entropy_coef=0.01")
    per_action = "algorithm.reward_level=action"
    assert not warnings(SIMULATOR, chunks, per_action)
    assert not warnings(SIMULATOR, chunks, per_action, "algorithm.logprob_level=token")
    (why,) = complaints(SIMULATOR, chunks, per_action, "algorithm.logprob_level=chunk")
    assert "returns of actions need log-probs of actions or their components, not of whole chunks" in why
    vla = ["model.mlp=null", "model.path=pi0", "model.vla={kind: pi0}"]
    (why,) = complaints(SIMULATOR, *vla, per_action)
    assert "set it to chunk" in why
    assert "logprob_level" not in why, "pi0 has no others"


def test_a_simulator_warns_of_keys_for_text() -> None:
    assert warnings(SIMULATOR, "rollout.sampling.top_p=0.9", "env.num_envs=1000") == [
        "rollout.sampling.top_p: has no effect: a simulator has no text",
        "env.num_envs: has no effect: a round has fewer trajectories than that",
    ]


def test_deadlines_of_environments_need_processes_of_which_each_has_an_environment() -> None:
    assert warnings(SIMULATOR, "rollout.env_timeout_s=9", "env.num_envs=2", "env.processes=3") == [
        "env.processes: has no effect: there are fewer environments than that (env.num_envs)"
    ]
    assert warnings(SIMULATOR, "rollout.env_timeout_s=9", "env.processes=0") == [
        "rollout.env_timeout_s: has no effect: only simulators in processes of their own have it"
    ]


_LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("kind", "key", "model"),
    [
        ("dynamic", "max_", {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("dynamic", "max_", {"max_position_embeddings": 64, "rope_parameters": {"full": {"rope_type": "dynamic"}}}),
        ("longrope", "original_max_", {
            "original_max_position_embeddings": 64, "max_position_embeddings": 256, "rope_scaling": _LONGROPE}),
        ("longrope", "original_max_", {
            "max_position_embeddings": 256,
            "rope_parameters": _LONGROPE | {"original_max_position_embeddings": 64}}),
    ],
)  # fmt: skip
def test_rows_beyond_the_length_of_a_models_rotary_frequencies_are_refused_before_it_is_loaded(
    tmp_path: Path, kind: str, key: str, model: dict[str, Any]
) -> None:
    llama = {"model_type": "llama"} | model
    for nested in (llama, {"model_type": "outer", "text_config": llama}):
        (tmp_path / "config.json").write_text(json.dumps(nested))
        base = [*TEXT, "model.build=null", f"model.path={tmp_path}", "data.max_prompt_tokens=60"]
        assert complaints(base, "rollout.sampling.max_new_tokens=5") == [
            f"model.path: llama with {kind} rotary embeddings is computed incorrectly for rows longer than "
            f"its {key}position_embeddings of 64 tokens, since frequencies then depend on the longest row "
            "of a batch, and rows of this run may have 65 tokens; keep prompt and answer together within "
            "64 tokens"
        ]
        assert warnings(base, "rollout.sampling.max_new_tokens=4") == []
    served = ["rollout.engine=vllm", "rollout.engine.servers=[http://localhost:1]"]
    resolve(load_config(None, [*base, "rollout.sampling.max_new_tokens=5", *served]).config, verb="eval")
    reference = [f"reference.path={tmp_path}", "algorithm.kl_coef=0.1", "data.max_prompt_tokens=64"]
    (complaint,) = complaints([*TEXT, *reference])
    assert complaint.startswith("reference.path: llama with")


@pytest.mark.parametrize("backend", ["single", "fsdp", "fsdp2"])
@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_full_kl_needs_no_other_log_probs_of_policy_or_reference(backend: str, place: str) -> None:
    config = load_config(
        None, [*TEXT, *FULL_KL, f"train.backend={backend}", f"algorithm.kl_in={place}"]
    ).config
    assert resolve(config).old_logprobs == "current"


def test_a_rollout_holds_a_chunk_and_compared_episodes_begin_in_the_same_state() -> None:
    chunks = ["model.mlp.num_action_chunks=4", "env.max_steps_per_rollout=3"]
    assert complaints(SIMULATOR, *chunks) == [
        "env.max_steps_per_rollout: a rollout of 3 env steps ends before the first chunk of 4 actions; "
        "raise it to 4 or more"
    ]
    (warned,) = warnings(SIMULATOR, "algorithm.recipe=grpo", "env.fixed_reset_states=false")
    assert "compared although they begin in different states; set it to true" in warned
    assert not warnings(SIMULATOR, "env.fixed_reset_states=false")
    assert warnings(SIMULATOR, "rollout.group_size=1", "env.fixed_reset_states=false") == [
        "env.fixed_reset_states: has no effect: a group is a single episode (rollout.group_size)"
    ]


def test_stages_need_processes_and_environments() -> None:
    assert complaints(SIMULATOR, "env.pipeline_stages=2", "env.processes=0") == [
        "env.pipeline_stages: environments in the run's own process are not stepped while the policy acts; "
        "set env.processes to 1 or more, or this to 1"
    ]
    assert complaints(SIMULATOR, "env.pipeline_stages=9") == [
        "env.pipeline_stages: there are only 8 environments (env.num_envs); lower it"
    ]


def test_only_a_simulator_has_a_state_after_the_end() -> None:
    (why,) = complaints(TEXT, "algorithm.recipe=ppo", "algorithm.advantage.bootstrap=always")
    assert "algorithm.advantage.bootstrap: a text has no state after its end" in why


def test_limits_of_sampling_have_no_effect_on_greedy_evaluations() -> None:
    (warned,) = warnings(TEXT, "eval.sampling={greedy: true, top_k: 5}")
    assert warned == "eval.sampling.top_k: has no effect: eval.sampling.greedy is true"
    assert not warnings(TEXT, "eval.sampling={top_k: 5}")


@pytest.mark.parametrize("model", ["model.mlp={}", "model={path: policy, vla: {form: rlinf}}"])
def test_a_robot_that_acts_with_its_trainer_s_weights_keeps_them(model: str) -> None:
    base = [model, *SIMULATOR[1:], "algorithm.recipe=grpo", "train.offload.weights=true"]
    why = "train.offload.weights: has no effect: the engine samples with the trainer's own weights"
    assert why in warnings(base)
    assert why not in warnings(base, "cluster.runtime=ray"), "rollout workers have copies"


SAC = """
run: {max_rounds: 2}
model: {mlp: {}}
env: {kind: gymnasium, id: Pendulum-v1, rescale_actions: true, num_envs: 1}
rollout: {prompts_per_round: 1, group_size: 1}
sac: {}
"""


@pytest.mark.parametrize(
    ("override", "key", "reason"),
    [
        ("env.rescale_actions=false", "env.rescale_actions", "between -1 and 1"),
        ("pipeline={}", "pipeline", "in turns"),
        ("cluster.placement={policy: 0, rollout: 1}", "sac", "one process"),
        ("model.mlp.num_bins=5", "model.mlp.num_bins", "squashed Gaussian"),
    ],
)
def test_what_soft_actor_critic_cannot_run_with_is_refused(
    tmp_path: Path, override: str, key: str, reason: str
) -> None:
    (tmp_path / "sac.yaml").write_text(SAC)
    config = load_config(tmp_path / "sac.yaml", [override]).config
    with pytest.raises(ConfigError) as caught:
        resolve(config, num_gpus=0)
    assert any(problem.key == key and reason in problem.message for problem in caught.value.problems)


def test_soft_actor_critic_says_which_settings_of_others_it_does_not_read(tmp_path: Path) -> None:
    (tmp_path / "sac.yaml").write_text(SAC)
    overrides = [
        "algorithm.recipe=ppo",
        "train.optimizer.lr=1.0",
        "critic.warmup_rounds=1",
        "sac.optimizer.value_lr=1.0",
    ]
    plan = resolve(load_config(tmp_path / "sac.yaml", overrides).config, num_gpus=0)
    assert not plan.needs_critic
    assert {warning.key for warning in plan.warnings} == {
        override.partition("=")[0] for override in overrides
    }


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("sac.num_target_critics=3", "num_critics=2"),
        ("sac.capacity=10", "batch_size=256"),
        ("sac.critic_optimizer={schedule: {decay: linear}}", "decay_steps"),
        ("sac.optimizer={schedule: {warmup_fraction: 0.1}}", "warmup_steps"),
    ],
)
def test_impossible_settings_of_soft_actor_critic_are_refused(
    tmp_path: Path, override: str, reason: str
) -> None:
    (tmp_path / "sac.yaml").write_text(SAC)
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / "sac.yaml", [override])
