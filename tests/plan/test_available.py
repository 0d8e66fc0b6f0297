"""Features that this version lacks are named with alternatives; options of unused parts cause warnings."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.needs import WITH_VLLM

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import available, checks, resolve
from braid.plan.available import machine_problems, missing_packages
from braid.plan.resolve import derive as resolve_unchecked
from braid.rollout.engines.vllm import kind

TEXT = [
    "model.build={}",
    "run.max_rounds=10",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
]
PPO = ["algorithm.recipe=ppo", "train.passes_per_round=2"]


def complaints(*overrides: str) -> dict[str, str]:
    config = load_config(None, [*TEXT, *overrides]).config
    with pytest.raises(ConfigError) as error:
        resolve(config)
    return {problem.key: problem.message for problem in error.value.problems}


def warnings(*overrides: str) -> dict[str, str]:
    config = load_config(None, [*TEXT, *overrides]).config
    return {warning.key: warning.message for warning in resolve(config).warnings}


@pytest.mark.parametrize(
    ("override", "key", "part", "here"),
    [
        ("train.sequence_parallel=2", "train.sequence_parallel", "2 devices", "backend=fsdp2"),
    ],
)
def test_an_unavailable_feature_is_named_with_an_alternative(
    override: str, key: str, part: str, here: str
) -> None:
    messages = complaints(override)
    assert set(messages) == {key}
    assert part in messages[key]
    assert here in messages[key]


def test_all_missing_features_are_reported_together() -> None:
    messages = complaints(
        "model.attention=flash_attention_2", "train.autocast=none", "train.sequence_parallel=2"
    )
    assert set(messages) == {"model.attention", "train.sequence_parallel"}


def test_fsdp_takes_a_policy_on_several_devices() -> None:
    for backend in ("fsdp", "fsdp2"):
        placement = "cluster.placement={policy: 0-3, rollout: 4-5}"
        assert "train.backend" not in warnings(f"train.backend={backend}", placement)


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["cluster.runtime=in_process"], "cluster.runtime", "runs in separate processes"),
    ],
)
def test_unsupported_fsdp_options_are_reported(overrides: list[str], key: str, words: str) -> None:
    messages = complaints("train.backend=fsdp2", *overrides)
    assert set(messages) == {key}
    assert words in messages[key]


def test_adapters_train_with_fsdp_only_on_sharded_weights() -> None:
    for backend in ("fsdp", "fsdp2"):
        assert "train.backend" not in warnings("model.lora={}", f"train.backend={backend}")
    messages = complaints("model.lora={}", "train.backend=fsdp", "train.backend.sharding=none")
    assert "kind: fsdp2" in messages["train.backend.sharding"]


def test_options_of_externally_started_engines_are_unused() -> None:
    overrides = [
        "rollout.engine=vllm",
        "rollout.engine.servers=[http://localhost:1]",
        "rollout.engine.block_size=8",
    ]
    assert "their own options" in warnings(*overrides)["rollout.engine.block_size"]
    assert "rollout.engine.servers" not in warnings(*overrides)
    assert "fingerprints" in warnings(*overrides, "rollout.check_weights=true")["rollout.check_weights"]


def test_a_robot_policy_has_no_megatron_and_no_long_sequences() -> None:
    simulator = [
        "model.build=null",
        "model.mlp={}",
        "env={kind: gymnasium, id: CartPole-v1}",
        "data.train=[]",
        "reward.parts=[]",
    ]
    on_two = [*simulator, "cluster.placement={policy: 0-1, rollout: 0-1}"]
    assert "fsdp2" in complaints(*on_two, "train.backend=megatron")["train.backend"]
    split = complaints(*on_two, "train.backend=fsdp2", "train.sequence_parallel=2")
    assert "set it to 1" in split["train.sequence_parallel"]


def test_reward_models_run_where_rollout_does() -> None:
    reward = "reward.parts=[{kind: model, path: x}]"
    messages = complaints(reward, "cluster.placement={policy: 0, rollout: 1, reward: 2}")
    assert "devices of rollout (1)" in messages["cluster.placement"]
    apart = warnings("cluster.placement={policy: 0, rollout: 1, reward: 2}")
    assert "it runs with rollout, so devices 2 are unused" in apart["cluster.placement"]


def test_engines_of_judges_on_rollout_workers_have_as_many_devices() -> None:
    reward = "reward.parts=[{kind: judge, path: x, prompt: '{response}', engine: {kind: vllm, tensor_parallel: 2}}]"
    messages = complaints(reward)
    assert (
        "its engine has 2 devices, on the same workers as rollout's engine with 1"
        in messages["reward.parts[0].engine"]
    )
    apart = warnings(reward, "cluster.placement={policy: 0, rollout: 1, reward: 2-3}")
    assert not any(key.startswith("reward") for key in apart)


def test_a_package_that_is_not_installed_is_missed_by_a_run_and_not_by_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(None, [*TEXT, "train.backend=megatron", "model.build.num_heads=4"]).config
    plan = resolve(config)
    for name in ("megatron", "megatron.core"):
        monkeypatch.setitem(sys.modules, name, None)
    ((key, message),) = missing_packages(config, plan)
    assert key == "train.backend"
    assert "pip install 'braid-rl[megatron]'" in message
    single = load_config(None, TEXT).config
    assert list(missing_packages(single, resolve(single))) == []


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    config = load_config(None, [*TEXT, f"report.{name}={{}}"]).config
    ((key, message),) = missing_packages(config, resolve(config))
    assert key == f"report.{name}"
    assert f"pip install 'braid-rl[{name}]'" in message


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_is_not_installed_is_missed_where_no_server_takes_its_place(
    monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    config = load_config(None, [*TEXT, f"rollout.engine={engine}"]).config
    ((key, message),) = missing_packages(config, resolve(config))
    assert key == "rollout.engine"
    assert f"pip install 'braid-rl[{engine}]'" in message
    served = load_config(None, [*TEXT, f"rollout.engine={{kind: {engine}, servers: [http://x]}}"]).config
    assert list(missing_packages(served, resolve(served))) == []


NEED_GPUS = [
    (["run.device=cuda"], "run.device", "cuda needs a GPU"),
    (["train.backend=megatron", "model.build.num_heads=4"], "train.backend", "megatron needs a GPU.*fsdp2, fsdp or deepspeed"),
    (["train.liger_kernels=true"], "train.liger_kernels", "Liger needs a GPU"),
    (["model.attention=flash_attention_2", "model.dtype=bf16"], "model.attention", "flash_attention_2 needs a GPU"),
    (["rollout.engine=sglang"], "rollout.engine", "sglang needs a GPU"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "why"), NEED_GPUS)
def test_what_needs_a_gpu_is_refused_on_a_machine_without_one(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], key: str, why: str
) -> None:
    config = load_config(None, [*TEXT, *overrides]).config

    def refused(num_gpus: int) -> list[tuple[str, str]]:
        monkeypatch.setattr(available, "count_gpus", lambda: num_gpus)
        plan = resolve(config, num_gpus=num_gpus)
        absent = set(missing_packages(config, plan))
        return [problem for problem in machine_problems(config, plan) if problem not in absent]

    assert [name for name, message in refused(0) if re.search(why, message)] == [key]
    assert refused(1) == []


def test_the_machines_of_a_cluster_that_a_run_joins_may_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "count_gpus", lambda: 0)
    monkeypatch.setattr(available, "missing_packages", lambda *_: iter(()))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(None, [*TEXT, "run.device=cuda", "train.backend=fsdp2"]).config
    assert [key for key, _ in machine_problems(config, resolve(config, num_gpus=0))] == ["run.device"]
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert list(machine_problems(config, resolve(config, num_gpus=0))) == []
    joins = load_config(
        None, [*TEXT, "run.device=cuda", "train.backend=fsdp2", "cluster.address=local"]
    ).config
    assert [key for key, _ in machine_problems(joins, resolve(joins, num_gpus=0))] == ["run.device"]


def test_a_round_that_does_not_fit_into_memory_is_refused_and_a_large_one_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(available, "count_gpus", lambda: 0)
    huge = load_config(None, [*TEXT, "rollout={prompts_per_round: 100000, group_size: 64}"]).config
    usual = load_config(None, [*TEXT, "rollout={prompts_per_round: 512, group_size: 16}"]).config
    for gib, is_refused, warns in ((16, True, True), (128, False, True), (2048, False, False)):
        for module in (available, checks):
            monkeypatch.setattr(module, "memory_bytes", lambda gib=gib: gib * 2**30)
        plan = resolve(huge, num_gpus=0)
        assert plan.round_bytes is not None
        refusals = [f"{key}: {why}" for key, why in machine_problems(huge, plan)]
        assert len(refusals) == is_refused
        assert all(
            text.startswith(
                "rollout.prompts_per_round: a round of 6,400,000 trajectories takes at least 34 GiB, but "
                "this machine has 16 GiB of memory; lower it") for text in refusals
        )  # fmt: skip
        warned = [w.message for w in plan.warnings if "GiB of memory" in w.message]
        assert len(warned) == warns
        assert list(machine_problems(usual, resolve(usual, num_gpus=0))) == []
        assert not any("GiB" in w.message for w in resolve(usual, num_gpus=0).warnings)


def test_gpus_that_this_machine_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "count_gpus", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load_config(
        None, [*TEXT, "cluster.devices_per_node=4", "cluster.placement={policy: 0, rollout: 3}"]
    ).config
    ((key, message),) = machine_problems(config, resolve(config, num_gpus=2))
    assert key == "cluster.placement"
    assert "device 3 is used, but this machine has 2 GPUs (0 to 1)" in message


@pytest.mark.parametrize(("head_dim", "is_refused"), [(48, True), (64, False)])
def test_a_head_size_that_vllm_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, is_refused: bool
) -> None:
    monkeypatch.setattr(available, "missing_packages", lambda *_: iter(()))
    monkeypatch.setattr(kind, "missing_system_library", lambda: None)
    monkeypatch.setattr(available, "count_gpus", lambda: 0)
    config = load_config(None, [*TEXT, "rollout.engine=vllm", f"model.build.head_dim={head_dim}"]).config
    refusals = [f"{key}: {why}" for key, why in machine_problems(config, resolve(config, num_gpus=0))]
    assert [re.sub(r", and .*", "", text) for text in refusals] == (
        ["model.build.head_dim: the model's attention heads have size 48"] if is_refused else []
    )
    native = load_config(None, [*TEXT, f"model.build.head_dim={head_dim}"]).config
    assert list(machine_problems(native, resolve(native, num_gpus=0))) == []


def test_vllm_on_a_cpu_needs_a_system_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(kind, "CDLL", absent)
    monkeypatch.setattr(available, "missing_packages", lambda *_: iter(()))
    monkeypatch.setattr(available, "count_gpus", lambda: 0)
    config = load_config(None, [*TEXT, "rollout.engine=vllm"]).config
    ((key, message),) = machine_problems(config, resolve(config, num_gpus=0))
    assert key == "rollout.engine"
    assert message.endswith("install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora), or set it to native")


@WITH_VLLM
def test_the_head_sizes_are_those_of_the_installed_vllm() -> None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1/attention/backends/cpu_attn.py").read_text()
    listed = re.search(r"def get_supported_head_sizes.*?return \[([\d, ]+)\]", source, re.DOTALL)
    assert listed is not None
    assert tuple(map(int, listed[1].split(","))) == kind.CPU_HEAD_SIZES


def test_sglang_options_for_weights_and_text_are_unused() -> None:
    messages = warnings(
        "rollout.engine=sglang", "rollout.engine.detokenize=true", "rollout.weight_sync.transport=gloo"
    )
    assert "always detokenizes" in messages["rollout.engine.detokenize"]
    assert "from files" in messages["rollout.weight_sync.transport"]


def test_ranks_without_rows_and_groups_across_machines_are_suspicious() -> None:
    few = warnings(
        "train.backend=fsdp2",
        "cluster.placement={policy: 0-7, rollout: 0}",
        "rollout={prompts_per_round: 2, group_size: 2}",
    )
    assert "4 rows for the 8 data-parallel ranks" in few["train.steps_per_pass"]


def test_a_critics_backend_is_checked_only_with_a_critic() -> None:
    uneven = "critic.train={backend: megatron, sequence_parallel: 2}"
    assert set(complaints(*PPO, uneven)) == {"critic.train.sequence_parallel"}
    assert "critic.train.sequence_parallel" not in warnings(uneven)
    assert "critic.train.backend" not in warnings(*PPO, "critic.train={backend: megatron}")


def test_one_device_for_all_roles_is_supported() -> None:
    assert warnings("cluster.placement={policy: '0', rollout: '0'}", "cluster.devices_per_node=1") == {}


def test_flash_attention_needs_half_precision() -> None:
    assert "bf16" in complaints("model.attention=flash_attention_2", "train.autocast=none")["model.attention"]
    assert warnings("model.attention=flash_attention_2", "train.autocast=bf16") == {}


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (
            ["train.backend={kind: fsdp2, pin_memory: true}"],
            "train.backend.pin_memory",
            "train.backend.cpu_offload is false",
        ),
        (
            ["train.backend={kind: fsdp2, sharding: grad_op, reshard_after_forward: false}"],
            "train.backend.reshard_after_forward",
            "train.backend.sharding is grad_op",
        ),
        (
            ["critic.train.backend={kind: fsdp, sharding: none, size: 1}", "algorithm.recipe=ppo"],
            "critic.train.backend.size",
            "critic.train.backend.sharding is none",
        ),
        (
            ["rollout.engine={kind: sglang, torch_compile_max_batch: 2}"],
            "rollout.engine.torch_compile_max_batch",
            "rollout.engine.torch_compile is false",
        ),
        (["rollout.weight_sync.transport=nccl"], "rollout.weight_sync.transport", "in place"),
        (["cluster.call_timeout_s=5"], "cluster.call_timeout_s", "one process"),
        (["train.balance_ranks=false"], "train.balance_ranks", "one process"),
        (["train.offload.gradients=true"], "train.offload.gradients", "always frees"),
        (
            ["train.offload.optimizer=true", "run.device=cpu"],
            "train.offload.optimizer",
            "everything is in host memory",
        ),
        (["train.offload.weights=true"], "train.offload.weights", "samples with the trainer's own weights"),
        (["train.infer_batch_rows=4"], "train.infer_batch_rows", "no inference passes"),
        (["train.grad_scaler={}"], "train.grad_scaler", "fp16"),
        (
            ["train.optimizer={kind: sgd, betas: [0.5, 0.9]}"],
            "train.optimizer.betas",
            "train.optimizer.kind is sgd",
        ),
        (["train.optimizer.value_lr=0.1"], "train.optimizer.value_lr", "value head"),
        (
            ["train.optimizer.schedule.min_ratio=0.1"],
            "train.optimizer.schedule.min_ratio",
            "schedule.decay is constant",
        ),
        (
            ["train.optimizer.schedule={decay: inverse_sqrt, decay_steps: 5}"],
            "train.optimizer.schedule.decay_steps",
            "inverse_sqrt",
        ),
        (
            ["train.optimizer.schedule.start_ratio=0.1"],
            "train.optimizer.schedule.start_ratio",
            "no warm-up",
        ),
        (["critic.normalize_values=true"], "critic.normalize_values", "no critic"),
        (
            ["rollout.engine={dtype: bf16, compile: always}"],
            "rollout.engine.compile",
            "only decoding in fp32",
        ),
        (["critic.head_name=v"], "critic.head_name", "no critic"),
        (["model.lora={path: adapter, rank: 4}"], "model.lora.rank", "determine it"),
        (["model.low_memory_load=false"], "model.low_memory_load", "no files"),
        (["cluster.devices_per_node=8"], "cluster.devices_per_node", "the first device"),
        (
            ["run.device=cpu", "rollout.engine.cuda_graphs=false"],
            "rollout.engine.cuda_graphs",
            "no CUDA graphs",
        ),
    ],
)
def test_an_option_of_a_part_that_is_not_used_has_no_effect_with_a_reason(
    overrides: list[str], key: str, why: str
) -> None:
    messages = warnings(*overrides)
    assert set(messages) == {key}
    assert messages[key].startswith("has no effect: ")
    assert why in messages[key]


@pytest.mark.parametrize(
    ("policy", "overrides", "unused"),
    [
        ("vla={kind: openvla}", ["eval.sampling.temperature=2"], []),
        ("vla={kind: openvla}", ["eval.sampling={temperature: 2, greedy: true}"], ["sampling.temperature"]),
        ("vla={kind: openvla}", ["eval.sampling.greedy=true", "model.vla.greedy=false"], ["sampling.greedy"]),
        ("vla={kind: openvla}", ["model.vla.eval_batch_rows=4"], ["vla.eval_batch_rows"]),
        ("vla={kind: openvla}", ["model.vla={greedy: true, eval_batch_rows: 4}"], []),
        ("vla={kind: pi0}", ["model.vla.eval_batch_rows=4"], []),
        (
            "vla={kind: pi0}",
            ["eval.sampling={temperature: 2, greedy: true}"],
            ["sampling.greedy", "sampling.temperature"],
        ),
        ("mlp={}", ["eval.sampling={temperature: 2, greedy: true}"], ["sampling.temperature"]),
    ],
)
def test_what_decides_how_robot_policies_are_evaluated(
    policy: str, overrides: list[str], unused: list[str]
) -> None:
    folder = "null" if policy.startswith("mlp") else "some_folder"
    base = [f"model.path={folder}", f"model.{policy}", "env={kind: gymnasium, id: Pendulum-v1}"]
    config = load_config(None, [*base, "run.max_rounds=1", "algorithm.kl_coef=0", *overrides]).config
    keys = {warning.key for warning in resolve(config).warnings}
    assert sorted(key.partition(".")[2] for key in keys) == unused


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.grad_scaler={}", "train.autocast=fp16"],
        ["train.offload.weights=true", "rollout.engine.dtype=bf16"],
        ["train.offload.optimizer=true"],
        ["train.optimizer.value_lr=0.1", *PPO],
        ["critic.normalize_values=true", "critic.head_name=v", *PPO],
        ["train.infer_batch_rows=4", "train.passes_per_round=2"],
        ["train.optimizer.schedule={decay: wsd, decay_steps: 5, min_ratio: 0.1}"],
        ["train.optimizer.schedule={warmup_steps: 2, start_ratio: 0.1}"],
        ["model.lora={rank: 4}", "train.compile=true", "train.count_flops=true", "train.record_memory=true"],
    ],
)
def test_options_that_are_read_do_not_warn(overrides: list[str]) -> None:
    assert warnings(*overrides) == {}


def test_fp16_products_without_loss_scaling_are_suspicious() -> None:
    assert "train.grad_scaler={}" in warnings("train.autocast=fp16")["train.autocast"]


def _mixture(folder: Path, num_experts: int = 8) -> str:
    """A folder that has the sizes of a model, and no weights but one."""
    sizes = {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 3}
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | sizes | experts))
    save_file({"lm_head.weight": torch.zeros(4, 8)}, folder / "model.safetensors")
    return f"model={{path: {folder}}}"


ROUTERS: dict[str, tuple[list[str], str, str]] = {
    "dense": (
        ["train.router_replay=rollout"],
        "train.router_replay",
        "no routed experts, so it does nothing",
    ),
    "dense balance": (["train.router_aux_coef=0.1"], "train.router_aux_coef", "no routed experts"),
    "no pass": (
        ["{mixture}", "train.router_replay=old"],
        "train.router_replay",
        "none with algorithm.old_logprobs=current; set algorithm.old_logprobs=recompute",
    ),
    "engine": (
        ["{mixture}", "train.router_replay=rollout", "rollout.engine=vllm"],
        "train.router_replay",
        "rollout.engine=vllm does not return the experts that it chose; set it to old or none",
    ),
    "backend": (
        ["{mixture}", "train.router_aux_coef=0.1", "train.backend=megatron"],
        "train.router_aux_coef",
        "train.backend=megatron has routers of its own",
    ),
    "kernels": (
        ["{mixture}", "train.router_replay=rollout", "train.liger_kernels=true"],
        "train.router_replay",
        "Liger",
    ),
    "critic": (
        ["{mixture}", *PPO, "critic.train={router_aux_coef: 0.1}"],
        "critic.train.router_aux_coef",
        "routers are those of the policy; set train.router_aux_coef instead",
    ),
}


@pytest.mark.parametrize(("overrides", "key", "why"), ROUTERS.values(), ids=list(ROUTERS))
def test_routers_are_replayed_and_balanced_where_they_can_be(
    overrides: list[str], key: str, why: str, tmp_path: Path
) -> None:
    folder = _mixture(tmp_path)
    text = [line.replace("{mixture}", folder) for line in overrides]
    config = load_config(None, [*(TEXT if "{mixture}" not in overrides else TEXT[1:]), *text]).config
    plan = resolve_unchecked(config, None, "train")
    assert why in dict(checks.find_problems(config, plan))[key]


def test_experts_to_replay_are_in_the_memory_of_a_round(tmp_path: Path) -> None:
    """Of all tokens, in a row and in the trajectory."""
    folder = [_mixture(tmp_path), "data.max_prompt_tokens=100", "rollout.sampling.max_new_tokens=50"]
    replays = [*TEXT[1:], *folder, "train.router_replay=rollout"]
    plain, replayed = (
        resolve_unchecked(load_config(None, o).config, None, "train") for o in ([*TEXT[1:], *folder], replays)
    )
    assert plain.round_bytes is not None
    assert replayed.round_bytes is not None
    num_bytes = replayed.trajectories_per_round * 150 * 3 * 2
    assert replayed.round_bytes[1] - plain.round_bytes[1] == 2 * num_bytes
