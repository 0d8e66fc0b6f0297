"""Every option of SGLang is in the command that starts SGLang."""

from __future__ import annotations

import pytest

from braid.rollout.engines.base import Model
from braid.rollout.engines.sglang.kind import Sglang
from braid.rollout.engines.sglang.options import server_arguments

OPTIONS: dict[str, tuple[object, str]] = {
    "tensor_parallel": (2, "--tp-size 2"),
    "pipeline_parallel": (2, "--pp-size 2"),
    "dtype": ("bf16", "--dtype bfloat16"),
    "memory_fraction": (0.5, "--mem-fraction-static 0.5"),
    "max_running": (7, "--max-running-requests 7"),
    "max_model_tokens": (99, "--context-length 99"),
    "cuda_graphs": (False, "--disable-cuda-graph"),
    "cuda_graph_max_batch": (4, "--cuda-graph-max-bs 4"),
    "prefix_caching": (False, "--disable-radix-cache"),
    "chunked_prefill": (False, "--chunked-prefill-size -1"),
    "prefill_tokens": (512, "--max-prefill-tokens 512 --chunked-prefill-size 512"),
    "attention": ("triton", "--attention-backend triton"),
    "load_weights": (True, "--load-format auto"),
    "decode_log_interval": (3, "--decode-log-interval 3"),
    "torch_compile": (True, "--enable-torch-compile"),
    "torch_compile_max_batch": (5, "--torch-compile-max-bs 5"),
}
"""Option -> its value, and what the command gets."""
ELSEWHERE = {
    "kind",
    "replicas", "servers",  # plan/test_layout.py
    "detokenize",  # idle: plan/test_available.py
    "deterministic",  # on unless it is said
}  # fmt: skip


def command(**options: object) -> str:
    beside = {"torch_compile": True} if "torch_compile_max_batch" in options else {}
    model = Model("m", tokenizer="t", dtype="fp32", longest=64, trust_remote_code=False, sleeps=False, seed=0)
    arguments = server_arguments(Sglang.model_validate({**beside, **options}), model)
    return f"{' '.join(arguments)} "


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_in_the_command(option: str) -> None:
    value, words = OPTIONS[option]
    assert f"{words} " in command(**{option: value})
    assert f"{words} " not in command()


def test_requests_have_separate_random_numbers_by_default() -> None:
    assert "--enable-deterministic-inference" in command()
    assert "--enable-deterministic-inference" not in command(deterministic=False)


def test_every_option_is_in_the_table() -> None:
    assert set(Sglang.model_fields) == OPTIONS.keys() | ELSEWHERE
