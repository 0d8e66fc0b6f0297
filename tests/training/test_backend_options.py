"""Options of DeepSpeed, Megatron-core and vLLM in the library's own settings. (Those of FSDP:
test_fsdp_settings; that no option is without effect: dialects/test_liveness.)

A table for each library: option -> what is in the settings then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from braid.config.load import load_config
from braid.config.train import TrainConfig
from braid.plan import derive
from braid.rollout.engines.base import Model
from braid.rollout.engines.vllm.kind import Vllm
from braid.rollout.engines.vllm.options import engine_arguments, environment
from braid.training.backends.deepspeed.backend import _settings
from braid.training.backends.deepspeed.kind import DeepSpeed
from braid.training.backends.megatron.kind import Megatron

Settings = dict[str, Any]

VLLM: dict[str, tuple[Any, Settings]] = {
    "tensor_parallel": (2, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    "pipeline_parallel": (2, {"pipeline_parallel_size": 2}),
    "executor": ("ray", {"distributed_executor_backend": "ray"}),
    "dtype": ("bf16", {"dtype": "bfloat16"}),
    "memory_fraction": (0.3, {"gpu_memory_utilization": 0.3}),
    "max_running": (7, {"max_num_seqs": 7}),
    "max_model_tokens": (99, {"max_model_len": 99}),
    "cuda_graphs": (False, {"enforce_eager": True}),
    "cuda_graph_max_batch": (16, {"max_cudagraph_capture_size": 16}),
    "prefix_caching": (False, {"enable_prefix_caching": False}),
    "chunked_prefill": (False, {"enable_chunked_prefill": False}),
    "prefill_tokens": (300, {"max_num_batched_tokens": 300}),
    "attention": ("TRITON_ATTN", {"attention_backend": "TRITON_ATTN"}),
    "load_weights": (True, {"load_format": "auto"}),
    "block_size": (32, {"block_size": 32}),
    "log_stats": (False, {"disable_log_stats": True}),
    "in_process": (False, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}),
}
DEEPSPEED: dict[str, tuple[Any, Settings]] = {
    "stage": (3, {"stage": 3}),
    "hpz_partition_size": (2, {"zero_hpz_partition_size": 2}),
    "cpu_offload": (True, {"offload_param": {"device": "cpu", "pin_memory": False}}),
}

MEGATRON: dict[str, tuple[Any, Settings]] = {
    "virtual_pipeline": (2, {"overlap_p2p_comm": True}),
    "sequence_parallel": (True, {"sequence_parallel": True}),
    "recompute_granularity": ("full", {"recompute_granularity": "full", "recompute_method": "uniform"}),
    "recompute_method": ("block", {"recompute_method": "block"}),
    "recompute_num_layers": (2, {"recompute_num_layers": 2}),
    "moe_layer_recompute": (True, {"recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "moe_token_dispatcher": ("flex", {"moe_token_dispatcher_type": "flex"}),
    "transformer.bias_dropout_fusion": (True, {"bias_dropout_fusion": True}),
    "transformer.bias_activation_fusion": (True, {"bias_activation_fusion": True}),
    "transformer.gradient_accumulation_fusion": (True, {"gradient_accumulation_fusion": True}),
    "transformer.batch_p2p_comm": (True, {"batch_p2p_comm": True, "overlap_p2p_comm": False}),
}
"""Option -> its value, and what TransformerConfig gets."""
BESIDE: dict[str, Settings] = {
    "sequence_parallel": {"tensor_parallel": 2},
    "recompute_method": {"recompute_granularity": "full"},
    "recompute_num_layers": {"recompute_granularity": "full"},
    "transformer.batch_p2p_comm": {"virtual_pipeline": 2, "pipeline_parallel": 2},
}
"""Other settings that an option needs to have an effect."""


def vllm_settings(**options: Any) -> Settings:
    config = Vllm(**options)
    model = Model("m", tokenizer="t", dtype="fp32", longest=64, trust_remote_code=False, sleeps=False, seed=0)
    return environment(config) | engine_arguments(config, model, on_gpu=True)


@pytest.mark.parametrize("option", VLLM)
def test_an_option_of_vllm_is_in_its_arguments(option: str) -> None:
    value, expected = VLLM[option]
    beside = {"tensor_parallel": 2} if option == "executor" else {}
    before, after = vllm_settings(**beside), vllm_settings(**beside, **{option: value})
    assert {name: after[name] for name in expected} == expected
    assert any(before.get(name) != after[name] for name in expected)


@pytest.mark.parametrize("option", DEEPSPEED)
def test_an_option_of_deepspeed_is_in_its_settings(option: str) -> None:
    value, expected = DEEPSPEED[option]
    settings = _settings(nn.Linear(2, 2), DeepSpeed(**{option: value}), torch.device("cpu"))
    assert {name: settings["zero_optimization"][name] for name in expected} == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:megatron")
@pytest.mark.parametrize("option", MEGATRON)
def test_an_option_of_megatron_is_in_what_its_layers_are_made_of(option: str) -> None:
    pytest.importorskip("megatron.core")
    from braid.training.backends.megatron.model import layer_options

    mixture = AutoConfig.for_model("qwen3_moe", num_experts=4)

    def made(settings: Settings) -> Settings:
        tree: Settings = {}
        for path, value in settings.items():
            section, _, name = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = value
        train = TrainConfig(backend=Megatron.model_validate(tree))
        return layer_options(mixture, train, torch.float32)

    value, expected = MEGATRON[option]
    beside = BESIDE.get(option, {})
    before, after = made(beside), made({**beside, option: value})
    assert {name: after[name] for name in expected} == expected
    assert any(before.get(name) != after[name] for name in expected)


@pytest.mark.parametrize("option", ["tensor_parallel", "pipeline_parallel", "sequence_parallel"])
def test_inference_on_separate_devices_has_its_own_layout(option: str) -> None:
    from braid.config.roles import train_config

    value = True if option == "sequence_parallel" else 2
    overrides = [
        "model.build={}", "train.backend=megatron", "algorithm.old_logprobs=recompute", f"inference.{option}={value}",
        "cluster.placement={policy: 0-1, inference: 2-3, rollout: 4}",
    ]  # fmt: skip
    config = load_config(None, overrides).config
    assert getattr(train_config(config, "inference").backend, option) == value
    assert getattr(train_config(config, "policy").backend, option) != value
    inference = derive(config, None, "train").layout.role("inference")
    assert inference is not None
    name = {"tensor_parallel": "tensor", "pipeline_parallel": "pipeline"}.get(option)
    assert name is None or inference.groups[name] == ((0, 1),)
