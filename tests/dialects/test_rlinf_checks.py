"""Constraints between RLinf's keys, each with its message."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.errors import ConfigError
from braid.plan import resolve
from braid_dialects.load import read_config

SEED = Path(__file__).parent / "seeds" / "rlinf-math-003.yaml"
EIGHT = "cluster.num_gpus_per_node=8"
APART = "cluster.component_placement={actor: 0-3, rollout: 4-7, inference: 0-3}"


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_config(SEED, overrides)
    return [str(problem) for problem in error.value.problems]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["runner.enable_dynamic_batch_size=true", "runner.max_tokens_per_mbs=1000"],
            "runner.max_tokens_per_mbs: 1000 is below runner.seq_length=2048, the length of the longest "
            "row; raise it to at least 2048",
        ),
        (
            ["algorithm.n_minibatches=5"],
            "algorithm.n_minibatches: 128 rows per round cannot be split into 5 equal mini-batches; set it "
            "to a divisor of 128",
        ),
        (
            ["algorithm.training_batch_size_per_gpu=5"],
            (
                "algorithm.n_minibatches: the 32 rows of an optimizer step are not a multiple of 5 rows per "
                "micro-batch * 1 data-parallel ranks = 5"
            ),
        ),
        (
            [EIGHT, "algorithm.training_batch_size_per_gpu=8"],
            (
                "algorithm.n_minibatches: the 32 rows of an optimizer step are not a multiple of 8 rows per "
                "micro-batch * 8 data-parallel ranks = 64"
            ),
        ),
        (
            ["rollout.recompute_logprobs=false", "rollout.return_logprobs=false"],
            "rollout.return_logprobs: false, like rollout.recompute_logprobs, so there are no log-probs; "
            "set one of them to true",
        ),
        (
            ["algorithm.importance_sampling_fix=true", "rollout.recompute_logprobs=false"],
            "algorithm.importance_sampling_fix: needs recomputed log-probs; set rollout.recompute_logprobs "
            "to true",
        ),
        (
            ["runner.val_check_interval=20"],
            "runner.save_interval: 50 is not a multiple of runner.val_check_interval=20",
        ),
        (
            [EIGHT, "cluster.component_placement={actor: 0-3, rollout: 2-5}"],
            (
                "cluster.component_placement: actor and rollout share only the devices 2, 3; place them on "
                "the same devices, or on disjoint ones"
            ),
        ),
        (
            [EIGHT, "rollout.tensor_parallel_size=2"],
            (
                "rollout.tensor_parallel_size: 2 does not divide actor.model.tensor_model_parallel_size=1, "
                "as required on shared devices"
            ),
        ),
        (
            [EIGHT, APART, "runner.enable_dynamic_batch_size=true"],
            (
                "runner.enable_dynamic_batch_size: needs all rows of a round at once, but with actor and "
                "rollout on different devices rows arrive one by one; set it to false"
            ),
        ),
        (
            [EIGHT, APART, "actor.enable_dp_load_balance=true"],
            (
                "actor.enable_dp_load_balance: needs all rows of a round at once, but with actor and rollout "
                "on different devices rows arrive one by one; set it to false"
            ),
        ),
        (
            [
                EIGHT,
                "cluster.component_placement={actor: 0-3, rollout: 0-3, inference: 4-7}",
                "rollout.recompute_logprobs=false",
            ],
            (
                "cluster.component_placement: inference has devices but nothing to compute; set "
                "rollout.recompute_logprobs=true, or remove inference"
            ),
        ),
        (
            ["actor.model.precision=fp32", "actor.optim.fp16=false"],
            "actor.model.precision: Megatron needs 16 bits; set it to fp16 or bf16, or set "
            "actor.training_backend=fsdp",
        ),
        (
            ["actor.model.precision=bf16"],
            "actor.optim.fp16: true contradicts actor.model.precision=bf16; make them agree",
        ),
    ],
)
def test_keys_that_do_not_fit_each_other_are_refused(overrides: list[str], expected: str) -> None:
    (problem,) = problems(*overrides)
    assert problem.partition(" [")[0] == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["runner.seq_length=1024", "algorithm.sampling_params.max_new_tokens=8"],
            "leaves no room for an answer in 1024 tokens; raise it above 1024 [override runner.seq_length]",
        ),
        (["algorithm.group_size=1"], "[override algorithm.group_size]"),
        (
            ["algorithm.adv_type=reinpp", "algorithm.use_reinpp_baseline=true", "algorithm.group_size=1"],
            "[override algorithm.group_size]",
        ),
        (
            [EIGHT, "rollout.tensor_parallel_size=3", "actor.model.tensor_model_parallel_size=3"],
            "[override rollout.tensor_parallel_size]",
        ),
        (
            [EIGHT, "actor.model.tensor_model_parallel_size=3"],
            "[override actor.model.tensor_model_parallel_size]",
        ),
    ],
)
def test_a_size_that_cannot_work_is_refused_by_the_plan_with_its_key(
    overrides: list[str], expected: str
) -> None:
    loaded = read_config(SEED, overrides).loaded
    with pytest.raises(ConfigError) as error:
        resolve(loaded.config)
    assert any(str(loaded.placed(problem)).endswith(expected) for problem in error.value.problems)


@pytest.mark.parametrize(
    "overrides",
    [
        [EIGHT, "algorithm.training_batch_size_per_gpu=4"],
        [EIGHT, "actor.model.tensor_model_parallel_size=2", "rollout.tensor_parallel_size=2"],
        [EIGHT, APART, "data.rollout_batch_size=64"],
        [EIGHT, "data.rollout_batch_size=60", "algorithm.n_minibatches=1", "algorithm.group_size=4"],
        ["runner.val_check_interval=-1", "runner.save_interval=7"],
        ["algorithm.adv_type=reinpp", "algorithm.group_size=1"],
        ["rollout.recompute_logprobs=false"],
        ["runner.enable_dynamic_batch_size=true"],
    ],
)
def test_what_fits_is_not_refused(overrides: list[str]) -> None:
    assert read_config(SEED, overrides).language == "rlinf"


def test_a_problem_has_the_place_where_its_key_was_written() -> None:
    (problem,) = problems("runner.val_check_interval=20")
    line = SEED.read_text().splitlines().index("  save_interval: 50") + 1
    assert problem.endswith(f"[rlinf-math-003.yaml:{line}]")


def test_huge_counts_are_refused_quickly() -> None:
    reported = problems("cluster.num_gpus_per_node=1000000000000000000")
    assert any("more than" in problem for problem in reported)
    reported = problems("cluster.num_gpus_per_node=1000000000000000000000000000000")
    assert any("64 bits" in problem for problem in reported)
