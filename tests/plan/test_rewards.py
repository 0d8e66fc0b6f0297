"""Reward parts against the data's sources and the model's sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import Plan, resolve

BASE = [
    "model.build={max_positions: 512}",
    "run.max_rounds=10",
    "data.train=[{kind: procedural, generator: chain_sum}, {kind: file, path: some/gsm8k.jsonl}]",
    "data.eval=[{kind: hub, path: org/aime}]",
    "data.max_prompt_tokens=128",
]


def plan_of(parts: str, *overrides: str) -> Plan:
    return resolve(load_config(None, [*BASE, f"reward.parts={parts}", *overrides]).config)


def complaints(parts: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        plan_of(parts, *overrides)
    return [f"{problem.key}: {problem.message}" for problem in error.value.problems]


def test_sources_that_parts_name_are_those_of_the_data() -> None:
    plan_of("[{kind: exact, sources: [chain_sum]}, {kind: math, sources: [gsm8k, aime]}]")
    assert complaints("[{kind: exact}, {kind: math, sources: [gsm8k, gsm8]}]") == [
        "reward.parts[1].sources[1]: unknown data source 'gsm8', did you mean 'gsm8k'?; the sources are "
        "aime, chain_sum, gsm8k"
    ]


def test_every_source_is_scored_by_a_part() -> None:
    assert complaints("[{kind: exact, sources: [chain_sum]}, {kind: math, sources: [gsm8k]}]") == [
        "reward.parts: no part scores the source 'aime'; add it to the sources of a part, or add a part "
        "without sources"
    ]


def test_rewards_that_are_always_0_are_refused() -> None:
    assert complaints("[{kind: exact, weight: 0}, {kind: math, weight: 0}]") == [
        "reward.parts: every weight is 0, so every reward would be 0; set the weight of a part"
    ]
    (why,) = complaints(
        "[{kind: exact, sources: [chain_sum]}, {kind: math, sources: [gsm8k, aime], weight: 0}]"
    )[:1]
    assert why.startswith(
        "reward.parts: only parts of weight 0 score the source 'aime', so its rewards would all be 0"
    )
    plan_of("[{kind: exact}, {kind: math, weight: 0}]")  # measured only


def test_an_environment_that_gives_rewards_may_have_parts_that_are_only_measured() -> None:
    plan_of("[{kind: exact, weight: 0}]", "env={kind: agent, name: 'envs.py:Env', max_context_tokens: 256}")


@pytest.mark.parametrize(
    ("parts", "index", "name"),
    [
        ("[{kind: exact}, {kind: math}, {kind: exact}]", 2, "exact"),
        ("[{kind: exact, name: math}, {kind: math}]", 1, "math"),
        ("[{kind: function, path: 'a.py:score'}, {kind: function, path: 'b.py:score'}]", 1, "score"),
    ],
)
def test_parts_have_names_of_their_own(parts: str, index: int, name: str) -> None:
    (why,) = complaints(parts)
    assert why.startswith(f"reward.parts[{index}].name: reward.parts[0] is also named {name!r}")


def test_shares_are_of_sources_that_the_data_has_and_leave_none_out() -> None:
    two = "data.mix=[{sources: [chain_sum], share: 0.7}, {sources: [gsm8k], share: 0.3}]"
    plan_of("[{kind: exact}]", two)
    mixes = {
        "[{sources: [chain_sum], share: 1}]": "data.mix: the source 'gsm8k' has no share; add it to an "
        "entry, or to one with share: 0 to exclude it",
        "[{sources: [chain_sum, gsm8k], share: 1}, {sources: [law], share: 1}]": "data.mix[1].sources: "
        "no training source is "
        "named law; the sources "
        "are chain_sum, gsm8k",
        "[{sources: [chain_sum, gsm8k], share: 1}, {sources: [gsm8k], share: 1}]": "data.mix: the source "
        "'gsm8k' has two "
        "shares; remove one",
        "[{sources: [chain_sum, gsm8k], share: 0}]": "data.mix: all shares are 0, so nothing would be drawn; raise one",
    }
    for mix, complaint in mixes.items():
        assert complaints("[{kind: exact}]", f"data.mix={mix}") == [complaint]


def test_a_star_stands_for_the_sources_that_are_not_named() -> None:
    plan_of("[{kind: exact, sources: [chain_sum]}, {kind: math, sources: ['*']}]")
    plan_of("[{kind: exact}]", "data.mix=[{sources: [gsm8k], share: 1}, {sources: ['*'], share: 0}]")


def test_a_training_source_without_a_share_needs_no_reward() -> None:
    parts = "[{kind: math, sources: [gsm8k, aime]}]"
    plan_of(parts, "data.mix=[{sources: [gsm8k], share: 1}, {sources: ['*'], share: 0}]")
    plan_of(parts, "data.mix=[{sources: [gsm8k], share: 1}, {sources: [chain_sum], share: 0}]")
    assert (
        "reward.parts: no part scores the source 'aime'"
        in complaints(
            "[{kind: math, sources: [gsm8k]}]",
            "data.mix=[{sources: [gsm8k], share: 1}, {sources: ['*'], share: 0}]",
        )[0]
    )


def test_sources_that_rows_name_are_known_when_they_are_read() -> None:
    by_row = "data.train=[{kind: file, path: mixed.jsonl, source_key: domain}]"
    plan_of("[{kind: exact, sources: [law]}, {kind: math, sources: [aime]}]", by_row)


def test_a_policy_that_judges_itself_needs_room_for_the_question() -> None:
    part = "[{{kind: judge, url: policy, prompt: '{{response}}', max_tokens: {}}}]"
    plan_of(part.format(511))
    assert complaints(part.format(512)) == [
        "reward.parts[0].max_tokens: 512 tokens for the reply leave no room for the question: the policy "
        "accepts 512 tokens in total; lower it below 512"
    ]


def test_the_memory_of_reward_models_is_planned(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=4, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "rm")
    count = sum(weight.numel() for weight in model.parameters())
    plan = plan_of(f"[{{kind: model, name: helpful, path: {tmp_path / 'rm'}, dtype: bf16}}]")
    (role,) = [role for role in plan.memory if role.role.startswith("reward:")]
    assert (role.role, role.parameters, role.total_bytes) == ("reward:helpful", count, 2 * count)
