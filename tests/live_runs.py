"""Configs with which tests/dialects/test_liveness.py tries every key: tiny runs that run in this process, and
configs for engines and devices that a test machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from tests.live_keys import recorded
from tests.pictures import picture
from tests.rewards.server import completion, serving
from tests.rewards.test_runs import reward_model
from tests.trainer.conftest import BASE

import braid.cluster.machines
import braid.cluster.ray
from braid.cluster.workers import Call, InProcessGroup, Place, Started
from braid.config.load import load_config
from braid.config.model import BuildSpec
from braid.data.lerobot import Demonstration, write_demonstrations
from braid.errors import RolloutError
from braid.models.build import build_model
from braid.models.causal_lm import CausalLM
from braid.models.loading import save_pretrained
from braid.models.tokenizer import character_tokenizer
from braid.plan import default_verb
from braid.trainer import commands

RUNS: dict[str, list[str]] = {
    "plain": [],
    "resumed": ["run={name: plain, resume: latest, max_rounds: 4, device: cpu}"],
    "everything": [
        "run.max_rounds=2",
        "cluster.env={BRAID_TEST: '1'}",
        "data.mix=[{sources: [letters], share: 1}]",
        "reward.overlong={buffer_tokens: 1}",
        "rollout={prompts_per_round: 4, group_size: 4, sampling: {max_new_tokens: 2}, request_batch: 2, "
        "check_weights: true, filter: {min_std: 0.0, then: resample, max_batches: 2}}",
        "algorithm={recipe: ppo, kl_coef: 0.01, kl_target: 0.1, corrections: [{level: sequence, mode: "
        "mask}], aggregation: token_sum_constant, supervised_coef: 0.1, entropy_coef: 0.01, policy_loss: "
        "{dual_clip: 3.0}, advantage: {gae_lambda: 0.9}}",
        "train={steps_per_pass: 2, record_memory: true, optimizer: {schedule: {decay: cosine, "
        "warmup_steps: 1}}}",
        "critic.train={}",
        "reference={train: {}, update_every_epochs: 1}",
        "sft={data: [{kind: file, path: letters.jsonl, response_key: answer}], steps: 2, rows_per_step: 2, "
        "optimizer: {schedule: {decay: linear, warmup_steps: 1}}}",
        "eval={sampling: {max_new_tokens: 2}, every_rounds: 1, target: {min_final: 0}}",
        "checkpoint={every_rounds: 1, export_every_rounds: 1}",
        "report={console: none, samples_every_rounds: 1, batches_every_rounds: 1, wandb: {}, swanlab: {}}",
    ],
    "fp16 adapters": [
        "model.lora={rank: 2}",
        "algorithm.kl_coef=0.01",
        "train={autocast: fp16, grad_scaler: {}}",
        "rollout={prompts_per_round: 4, group_size: 4, sampling: {max_new_tokens: 2}, filter: "
        "{min_std: 0, then: replace}}",
        "reference.train={infer_batch_tokens: 64}",
    ],
    "folders": [
        "model={build: null, path: model, chat_template: '{{ messages[-1].content }}'}",
        "data.max_prompt_tokens=60",
        "rollout={prompts_per_round: 4, group_size: 4, sampling: {max_new_tokens: 4}, "
        "max_sequence_tokens: 62}",
        "algorithm={recipe: ppo, kl_coef: 0.1}",
        "reference={path: model, train: {grad_scaler: {}}}",
        "critic={path: model, train: {autocast: fp16, grad_scaler: {}, optimizer: {schedule: {decay: "
        "linear, warmup_steps: 1}}}}",
    ],
    "pictures": [
        "model={vision: {train: all}, build: {architecture: qwen3_vl, hidden_size: 32, intermediate_size: 48, num_layers: 2, "
        "num_heads: 2, num_kv_heads: 1, head_dim: 16, tower: {hidden_size: 16, intermediate_size: 24, num_heads: 2, depth: 2}}}",
        "data={max_prompt_tokens: 40, image: {min_pixels: 64, max_pixels: 1024}, train: [{kind: file, path: pictures.jsonl, "
        "images_key: seen}], eval: [{kind: file, path: pictures.jsonl, images_key: seen}]}",
        "sft={data: [{kind: file, path: pictures.jsonl, images_key: seen, response_key: answer}], steps: 2, rows_per_step: 2}",
    ],
    "supervised": [
        "data={}", "reward={}", "model.build.characters=' 0123456789+-=?.abcdefghijklmnopqrstuvwxyzISTW'",
        "eval={every_rounds: 1, target: {metric: loss, max_final: 100}}",
        "sft={data: [{kind: file, path: letters.jsonl, response_function: 'rewards.py:asked'}, {kind: hub, path: rows, "
        "response_key: answer}], eval_data: [{kind: file, path: letters.jsonl, name: held_out, response_key: answer}, "
        "{kind: hub, path: rows, response_key: answer}, "
        "{kind: procedural, generator: chain_sum, size: 4, seed: 30, response_key: answer}], "
        "mix: [{sources: [letters], share: 1}, {sources: [rows], share: 1}], max_tokens: 120, rows_per_step: 4}",
    ],
    "gymnasium": [
        "model={build: null, mlp: {}}", "data={}", "reward={}", "env={kind: gymnasium, id: CartPole-v1, eval_episodes: 2, max_steps_per_rollout: 20}",
        "algorithm.recipe=ppo", "critic.train={}",
    ],
    "metaworld": [
        "model={build: null, mlp: {num_action_chunks: 2}}", "data={}", "reward={}", "algorithm.recipe=ppo",
        "rollout={prompts_per_round: 2, group_size: 1}",
        "env={kind: metaworld, task: reach-v3, max_episode_steps: 3, num_envs: 2, eval_episodes: 2, "
        "video: {save: true}}",
    ],
    "sac": [
        "model={build: null, mlp: {}}", "data={}", "reward={}", "rollout={prompts_per_round: 2, group_size: 1}",
        "env={kind: gymnasium, id: Pendulum-v1, rescale_actions: true, max_episode_steps: 4, num_envs: 2, eval_episodes: 2}",
        "sac={batch_size: 4, min_transitions: 4, random_decisions: 4, num_critics: 2, "
        "optimizer: {schedule: {decay: linear, decay_steps: 9, warmup_steps: 1}}, "
        "critic_optimizer: {schedule: {decay: linear, decay_steps: 9, warmup_steps: 1}}, demonstrations: demonstrations}",
    ],
    "tools": [
        "env={kind: tools, max_turns: 2, max_context_tokens: 64}", "data.max_prompt_tokens=8", "rollout.sampling.max_new_tokens=4",
    ],
    "python": [
        "env={kind: tools, tools: [python], max_turns: 2, max_context_tokens: 64}", "data.max_prompt_tokens=8",
        "rollout.sampling.max_new_tokens=4",
    ],
    "program": [
        "env={kind: program, program: 'rewards.py:play', max_context_tokens: 64, max_turns: 2}", "data.max_prompt_tokens=8",
        "rollout.sampling.max_new_tokens=4", "data.use_chat_template=never", "reward={}",
    ],
    "agents": [
        "data={use_chat_template: never}", "reward={}",
        "env={kind: agent, name: guess, max_turns: 2, max_context_tokens: 256, tasks: 8, eval_episodes: 2, "
        "opponents: {every_rounds: 2}}",
    ],
    "mixture of data": [
        "data={use_chat_template: never, max_prompt_tokens: 8, train: [{kind: file, path: letters.jsonl}], "
        "eval: [{kind: file, path: letters.jsonl}]}",
        "reward={}",
            "env={kind: agent, mix: {a: {name: guess}, b: {name: guess, share: 2}, c: {name: "
            "guess}, d: {name: guess}}, mix_key: answer, max_turns: 1, max_context_tokens: 256}",
    ],
    "mixture": [
        "data={use_chat_template: never}", "reward={}", "rollout.prompts_per_round=2",
        "env={kind: agent, mix: {low: {name: guess, kwargs: {highest: 3}, max_turns: 1, eval_share: "
        "2}, high: {name: guess}}, max_turns: 2, max_context_tokens: 256, tasks: 8, eval_episodes: 3}",
    ],
    "sources": [
        "model.build.characters=' 0123456789+-=?.abcdefghijklmnopqrstuvwxyzISTW'",
        "data.train=[{kind: procedural, generator: chain_sum, size: 4}, {kind: hub, path: rows}]",
        "data.eval=[{kind: procedural, generator: chain_sum, size: 4, seed: 9}, {kind: hub, path: rows}]",
        "sft={data: [{kind: procedural, generator: chain_sum, size: 4, seed: 20, response_key: answer}, "
        "{kind: hub, path: rows, response_key: answer}], steps: 1, rows_per_step: 2}",
        "reward.parts=[{kind: reasoning_gym, sources: [chain_sum]}, {kind: exact, sources: [rows]}]",
    ],
    "rewards": [
        "reward.parts=[{kind: math}, {kind: exact}, {kind: pattern, pattern: a}, {kind: choice}, "
        "{kind: length, end: 4}, {kind: repetition}, {kind: function, path: 'rewards.py:one'}, "
        "{kind: model, path: classifier, max_tokens: 2, overlong: left}]",
    ],
    "detection": [
        "reward.parts=[{kind: detection}, {kind: pattern, pattern: a}]",
        "data={train: [{kind: file, path: boxes.jsonl}], eval: [{kind: file, path: boxes.jsonl}]}",
    ],
    "programs": ["reward={parts: [{kind: code, pattern: '(.*)'}], code: {isolation: process}}", "rollout.group_size=2"],
    "judge": [
        "reward.parts=[{kind: judge, url: SERVER, model: some, prompt: '{response}', api_key_env: HOME, "
        "backoff_s: 1e-3}]"
    ],
    "own judge": [
        "reward.parts=[{kind: judge, path: model, prompt: '{response}', pattern: '(.)', scores: {a: 1, b: 0}, "
        "temperature: 1, max_tokens: 60}]",
        "rollout.max_invalid_fraction=1",
    ],
    "pipelined": ["pipeline={on_new_weights: interrupt}", "run.max_rounds=2"],
    "fsdp2": ["train.backend=fsdp2", "cluster={runtime: ray}", "algorithm.recipe=ppo", "critic.train={backend: fsdp2}"],
    "fsdp": ["train.backend=fsdp", "cluster={runtime: ray}", "algorithm={recipe: ppo, kl_coef: 0.1}", "reference.train={backend: fsdp}"],
}  # fmt: skip
LOSSES = {
    "policy_gradient": "rloo", "importance_sampling": "remax", "masked_is": "raft", "cispo": "maxrl", "sapo": "reinforce",
    "topr": "grpo", "kimi": "gigpo", "clip_cov": "grpo", "kl_cov": "grpo", "dppo": "{kind: pass_at_k, k: 1}", "cross_entropy": "grpo",
    "gmpo": "opo", "vespo": "gpg", "sequence_mask": "gdpo",
}  # fmt: skip
"""Policy loss -> advantage; with ppo_clip and gae, of the run `everything`, they cover all of both."""
RUNS |= {
    loss: [
        f"algorithm={{policy_loss: {loss}, advantage: {advantage}, old_logprobs: recompute}}",
        "run.max_rounds=1",
        "eval={before: false, at_end: false}",
        "checkpoint.at_end=false",
    ]
    for loss, advantage in LOSSES.items()
}
RUNS["distillation"] = [
    "algorithm={recipe: grpo, kl_coef: 0.1, kl_estimator: full_jensen_shannon, kl_mixture: 0.3, kl_top_k: 2, "
    "kl_ratio_clip: 2.0, old_logprobs: recompute}",
    "run.max_rounds=1",
    "eval={before: false, at_end: false}",
    "checkpoint.at_end=false",
]
RUNS["distillation on examples"] = [
    "data={}", "reward={}", "reference.path=model", "eval={every_rounds: 1, target: {metric: loss, max_final: 100}}",
    "sft={data: [{kind: file, path: letters.jsonl, response_key: answer}], eval_data: [{kind: file, path: letters.jsonl, "
    "response_key: answer}], rows_per_step: 2, distillation: {divergence: jensen_shannon, mixture: 0.2, top_k: 2}}",
]  # fmt: skip
RUNS["teachers"] = [
    "reference.teachers=[{path: model, sources: [letters], kl_weight: 0.5}]",
    "algorithm={kl_coef: 0.1, kl_estimator: k1, kl_in: advantage}", "run.max_rounds=1", "eval={before: false, at_end: false}",
    "checkpoint.at_end=false",
]  # fmt: skip
BROKEN: dict[str, list[str]] = {
    "skipped steps": [
        "algorithm={recipe: ppo, policy_loss_coef: 1e300, value_loss_coef: 1e300}", "critic.train={}", "run.max_rounds=1",
    ],
    "failing": ["reward={parts: [{kind: function, path: 'rewards.py:picky'}], retries: 0}", "rollout.max_invalid_fraction=0"],
}  # fmt: skip
"""Runs in which something goes wrong."""
_APART = "cluster.placement={policy: 0-7, rollout: 8-15}"
_GPU = "run.device=cuda"
_MEGATRON = [
    "train.backend=megatron",
    "algorithm.old_logprobs=recompute",
    "cluster.placement={policy: 0-7, inference: 8-15, rollout: 16-23}",
]
LAYOUTS: dict[str, list[str]] = {
    "vllm": ["rollout.engine=vllm", _APART],
    "vllm on GPUs": [_GPU, "rollout={engine: {kind: vllm, tensor_parallel: 2}}", _APART],
    "vllm servers": ["rollout={engine: {kind: vllm, servers: ['http://localhost:1']}}", "cluster.placement={policy: 0-7}"],
    "sglang": ["rollout.engine=sglang", _APART],
    "sglang on GPUs": [_GPU, "rollout={engine: {kind: sglang, torch_compile: true}}", _APART],
    "sglang servers": ["rollout={engine: {kind: sglang, servers: ['http://localhost:1']}}", "cluster.placement={policy: 0-7}"],
    "one GPU": [_GPU, "train={backend: single, offload: {weights: true}}"],
    "fsdp2": [_APART],
    "fsdp2 on hosts": [_GPU, "train.backend.cpu_offload=true", _APART],
    "fsdp": ["train.backend=fsdp", _GPU, _APART],
    "deepspeed": ["train.backend=deepspeed", _APART],
    **{
        f"roles on {name}": [
            f"model={{build: null, path: other, dtype: {'fp16' if beside else 'fp32'}}}",
            *(f"{role}={{backend: {{kind: {name.partition(' ')[0]}{options}}}{beside}}}" for role in ("train", "critic.train", "reference.train")),
            "algorithm={recipe: ppo, kl_coef: 0.1}",
            "cluster.placement={policy: 0-7}",
            _GPU,
        ]
        for name, options, beside in (
            ("fsdp", "", ""),
            ("fsdp2", ", cpu_offload: true", ""),
            ("deepspeed", "", ""),
            ("megatron", ", tensor_parallel: 2, sequence_parallel: true, pipeline_parallel: 2", ", grad_scaler: {}"),
            ("megatron with recomputation", ", recompute_granularity: full, overlap_grad_reduce: true", ""),
        )
    },
    "dense megatron": _MEGATRON,
    "megatron": [*_MEGATRON, "model={build: null, path: other}", "inference.tensor_parallel=2"],
}  # fmt: skip
"""Overrides of tiny.yaml on top of train.backend=fsdp2."""


def write_files(folder: Path) -> None:
    """Write tiny.yaml, and the data, models and functions that RUNS name."""
    rows = "".join(f'{{"prompt": "{x}", "answer": "{x}", "tests": "assert 1"}}\n' for x in "abcd")
    (folder / "letters.jsonl").write_text(rows)
    boxes = "[{'bbox_2d': [0, 0, 1, 1], 'label': 'a'}]"
    (folder / "boxes.jsonl").write_text(
        "".join(f'{{"prompt": "{x}", "answer": "{boxes}"}}\n' for x in "abcd")
    )
    for i in range(4):
        (folder / f"{i}.png").write_bytes(picture(i).data)
    with_pictures = "".join(
        f'{{"prompt": "{x}", "answer": "{x}", "seen": "{i}.png"}}\n' for i, x in enumerate("abcd")
    )
    (folder / "pictures.jsonl").write_text(with_pictures)
    (folder / "rows").mkdir()
    (folder / "rows/train.jsonl").write_text(rows)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(BASE))
    states, numbers = np.zeros((3, 3), np.float32), np.zeros(3, np.float32)
    write_demonstrations(
        folder / "demonstrations", [Demonstration({"state": states}, numbers[:, None], "", numbers)]
    )
    (folder / "rewards.py").write_text(
        "def play(task, base_url, api_key):\n    import openai\n    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:\n"
        "        client.chat.completions.create(model='policy', messages=[{'role': 'user', 'content': 'a'}])\n    return 1.0\n\n"
        "def asked(row):\n    return [('a', True), ('b', False), (row['answer'], True)]\n\n"
        "def one():\n    return 1.0\n\ndef picky(text, answer):\n    return {answer: 1.0}[text]\n"
    )
    spec = BuildSpec.model_validate(BASE["model"]["build"])
    tokenizer = character_tokenizer(spec.characters)
    model = build_model(spec, tokenizer, dtype=torch.float32, seed=0)
    save_pretrained(CausalLM(model), tokenizer, folder / "model")
    reward_model(folder / "classifier")


def run_all(folder: Path, device: str = "cpu") -> dict[str, set[str]]:
    """Run RUNS and BROKEN in `folder`. Returns the keys that each of them reads."""
    reads = {}
    with _in_one_process(folder), serving(lambda number, _: completion("1" if number else "?")) as server:
        for name, overrides in (RUNS | BROKEN).items():
            run_overrides = [f"run.name={name.replace(' ', '-')}", *overrides]
            if device != "cpu":
                run_overrides = [
                    f"run.device={device}",
                    *(t.replace("device: cpu", f"device: {device}") for t in run_overrides),
                ]
            loaded = load_config("tiny.yaml", [text.replace("SERVER", server.url) for text in run_overrides])
            with recorded() as reads[name], suppress(*([RolloutError] if name == "failing" else [])):
                (commands.sft if default_verb(loaded.config) == "sft" else commands.train)(loaded)
            if dist.is_initialized():
                dist.destroy_process_group()
    return reads


@contextmanager
def _in_one_process(folder: Path) -> Iterator[None]:
    """Run workers as threads instead of Ray's processes, and no trackers."""
    build_sinks = commands.build_sinks

    def without_trackers(*args: Any, **options: Any) -> Any:
        return build_sinks(*args, **{**options, "wandb": None, "swanlab": None})

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(commands, "build_sinks", without_trackers)
        patch.setattr(braid.cluster.ray, "RayGroup", Threads)
        patch.setattr(braid.cluster.ray, "Machines", lambda *_, **__: SimpleNamespace(close=lambda: None))
        patch.setattr(braid.cluster.ray, "disconnect", lambda: None)
        patch.setattr(braid.cluster.machines, "_start", lambda *_: None)
        yield


class Threads(InProcessGroup[Any]):
    """Replaces RayGroup: one worker, in a thread of this process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.role, self._has_threads, self._workers = "main", False, {}
        self.is_made = False
        self._pool = ThreadPoolExecutor(1)

    def make(self, factory: Callable[[Place], Any], logs: Path) -> Threads:
        place = Place(0, 1, workers=self._workers)
        self._worker = self._workers[self.role] = self._pool.submit(factory, place).result()
        self.is_made = True
        return self

    def add(self, name: str, factory: Callable[[Place], Any], **_: Any) -> Threads:
        other = Threads()
        other.role, other._pool, other._workers = name, self._pool, self._workers
        return other.make(factory, Path())

    def _start(self, call: Call) -> Started[Any]:
        return Started(self._pool.submit(lambda: super(Threads, self)._start(call).wait()))

    def close(self) -> None:
        super().close()
        self._pool.shutdown()
