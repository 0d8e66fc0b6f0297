"""Unsupported options of Megatron-core are refused by key; options without effect cause warnings with the
reason."""

from __future__ import annotations

import pytest

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import resolve

RUN = [
    "model.build={}",
    "run.max_rounds=10",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
    "train.backend=megatron",
    "cluster.placement={policy: 0-1}",
]
OWN = "train.backend"


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("model.lora={}", "model.lora", "does not support adapters"),
        ("train.liger_kernels=true", "train.liger_kernels", "its own layers"),
        (f"{OWN}.virtual_pipeline=2", f"{OWN}.virtual_pipeline", "pipeline_parallel above 1"),
    ],
)
def test_unsupported_options_are_refused_with_an_alternative(override: str, key: str, words: str) -> None:
    config = load_config(None, [*RUN, override]).config
    with pytest.raises(ConfigError) as error:
        resolve(config)
    messages = {problem.key: problem.message for problem in error.value.problems}
    assert words in messages[key]


@pytest.mark.parametrize(
    ("override", "why"),
    [
        (f"{OWN}.recompute_num_layers=2", "recompute_granularity is off"),
        (f"{OWN}.sequence_parallel=true", "tensor_parallel is 1"),
        (f"{OWN}.ddp_bucket_size=5", "overlap_grad_reduce is false"),
        (f"{OWN}.dynamic_loss_scale_window=5", "fp16"),
    ],
)
def test_an_option_without_effect_is_reported_with_the_reason(override: str, why: str) -> None:
    warnings = {w.key: w.message for w in resolve(load_config(None, [*RUN, override]).config).warnings}
    assert why in warnings[override.partition("=")[0]]


def test_options_with_an_effect_cause_no_warnings() -> None:
    used = [
        f"{OWN}.tensor_parallel=2",
        f"{OWN}.sequence_parallel=true",
        f"{OWN}.recompute_granularity=full",
        f"{OWN}.recompute_num_layers=2",
        f"{OWN}.overlap_grad_reduce=true",
        f"{OWN}.ddp_bucket_size=1000",
    ]
    keys = {w.key for w in resolve(load_config(None, [*RUN, *used]).config).warnings}
    assert not {key for key in keys if key.startswith(OWN)}
