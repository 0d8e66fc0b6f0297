"""Bugs of public RL frameworks, each as one patch of braid, with the check that must notice it.

A bug's `scenario` are overrides of the tiny config (tests/trainer/conftest.py) in which it has an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import braid.algorithms.advantages.discounting as discounting
import braid.algorithms.advantages.groups as groups
import braid.algorithms.advantages.grpo as grpo
import braid.models.loading as loading
import braid.models.tokenizer as tokenizers
import braid.rollout.rows as rows
import braid.training.backends.single.backend as single
import braid.training.losses as losses
import braid_kernels.products as products
from braid.algorithms.advantages.grpo import Grpo
from braid.data.sampler import PromptSampler
from braid.models.attention import PackedAttention
from braid.models.chat import ChatFormat
from braid.models.logprobs import Head
from braid.rewards.scorer import Scorer
from braid.rollout.conversation import Conversation
from braid.rollout.drivers.agents import AgentDriver, _Guarded
from braid.rollout.engines.native.sampler import Sampler
from braid.trainer.models import Models
from braid.types import CheckName, Row

Patch = Callable[[pytest.MonkeyPatch], None]
Make = Callable[[Any], Any]
"""From a function to what replaces it."""


@dataclass(frozen=True)
class Bug:
    """`source` is a public issue with the bug, `check` the one that notices it. `resumed` are overrides of a
    second start, for bugs of resumes; `around` is a patch of the scenario, also without the bug."""

    source: str
    check: CheckName
    patch: Patch
    scenario: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    around: Patch = lambda monkeypatch: None


def patched(owner: Any, name: str, make: Make) -> Patch:
    """A patch that replaces `owner.name` by `make` of it."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, make(getattr(owner, name)))


def with_row(change: Callable[[Row], None]) -> Patch:
    """A patch of the row that a conversation becomes."""

    def make(text_row: Any) -> Any:
        def changed(turns: Any, agent: int) -> Row:
            row = text_row(turns, agent)
            change(row)
            return row

        return changed

    return patched(rows, "_text_row", make)


def shift_logprobs(row: Row) -> None:
    written = row.fields["behavior_logprobs"][row.mask]
    row.fields["behavior_logprobs"][row.mask] = np.roll(written, 1)


def train_context(row: Row) -> None:
    row.mask[int(row.mask.argmax()) - 1] = True
    row.decision = np.where(row.mask, np.maximum(row.decision, 0), -1).astype(np.int32)


def skip_end(row: Row) -> None:
    if row.num_tokens > 1:
        row.mask[-1], row.decision[-1] = False, -1


def raw_logprobs(sample: Any) -> Any:
    def patch(sampler: Sampler, logits: torch.Tensor, first: int) -> Any:
        raw = logits.float().log_softmax(-1).clone()
        tokens, _ = sample(sampler, logits, first)
        return tokens, [float(raw[i, token]) for i, token in enumerate(tokens)]

    return patch


def other_temperature(sample: Any) -> Any:
    def patch(sampler: Sampler, logits: torch.Tensor, first: int) -> Any:
        said = logits.float().log_softmax(-1).clone()
        tokens, _ = sample(sampler, logits * 5, first)
        return tokens, [float(said[i, token]) for i, token in enumerate(tokens)]

    return patch


def single_precision_variance(grouped: Any) -> Any:
    def patch(rewards: torch.Tensor, members: torch.Tensor) -> Any:
        statistics, x = grouped(rewards, members), rewards.float()
        _, numbers = members.unique(return_inverse=True)
        zeros = torch.zeros(len(members))
        means, squares = (zeros.index_add(0, numbers, v)[numbers] / statistics.count for v in (x, x * x))
        return replace(statistics, std=(squares.float() - means.float() ** 2).clamp(min=0).sqrt().double())

    return patch


def divided_by_passes(accumulate: Any) -> Any:
    def patch(backend: Any, batches: Any, num_passes: int, *rest: Any) -> None:
        backend._go_back = lambda loss: (loss / num_passes).backward()
        accumulate(backend, batches, num_passes, *rest)

    return patch


def tokenised_again(turn: Any) -> Any:
    async def patch(conversation: Conversation, *args: Any) -> Any:
        sampled = await turn(conversation, *args)
        if sampled is not None:
            conversation._history[-1] = 4
        return sampled

    return patch


def neighbours(score: Any) -> Any:
    async def patch(scorer: Scorer, trajectories: Any) -> Any:
        metrics = await score(scorer, trajectories)
        rewards = [t.reward for t in trajectories]
        for trajectory, reward in zip(trajectories, [*rewards[1:], *rewards[:1]], strict=True):
            trajectory.reward = reward
        return metrics

    return patch


def without_truncation(truncate: Any) -> Any:
    async def patch(env: Any, trajectory: Any, by: str) -> None:
        if by != "turn_tokens":
            await truncate(env, trajectory, by)

    return patch


def without_reference(follow: Any) -> Any:
    def patch(models: Models) -> None:
        reference, models.reference = models.reference, None
        follow(models)
        models.reference = reference

    return patch


def with_bos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers have a token BOS."""

    def make(build: Any) -> Any:
        def built(*args: Any) -> Any:
            tokenizer = build(*args)
            tokenizer.bos_token = "<unk>"
            return tokenizer

        return built

    patched(tokenizers, "character_tokenizer", make)(monkeypatch)


def swapped_kl(_: Any) -> Any:
    def patch(recipe: Any, outputs: Any, fields: Any) -> Any:
        if "ref_logprobs" not in fields:
            return None
        estimator, ref = recipe.kl_estimator, fields["ref_logprobs"]
        return losses.kl_estimate(ref, outputs["logprobs"], estimator=estimator, clamp=recipe.kl_clamp)

    return patch


def across_rows(init: Any) -> Any:
    def patch(attention: Any, lengths: Any, device: Any, shared: Any = (), kernel: Any = None) -> None:
        skipped = sum(num for _, num in shared)
        init(attention, (sum(lengths) - skipped,), device, (), kernel)

    return patch


def current_logprobs(policy_loss: Any) -> Any:
    def patch(recipe: Any, coef: Any, version: Any, is_checked: Any, outputs: Any, batch: Any) -> Any:
        fields = {name: value for name, value in batch.fields.items() if name != "old_logprobs"}
        return policy_loss(recipe, coef, version, is_checked, outputs, replace(batch, fields=fields))

    return patch


GUESS = (
    "data={use_chat_template: never}",
    "reward={}",
    "env={kind: agent, name: guess, max_turns: 3, cut_turns: continue, max_context_tokens: 256, tasks: 64}",
    "rollout.sampling.max_new_tokens=4",
    "model.build.characters=' 0123456789abcdefghijklmnopqrstuvwxyz'",
)
"""A game of several turns."""
SFT = "sft={data: [{kind: file, path: letters.jsonl, response_key: answer}], steps: 10, rows_per_step: 4}"
LONG = "rollout.sampling.max_new_tokens=4"

BUGS: Mapping[str, Bug] = {
    "log-probs of the position before": Bug(
        "prime-rl#1525", "sampler_logprobs", with_row(shift_logprobs), (LONG,)
    ),
    "the trainer ignores the temperature": Bug(
        "TRL#3029",
        "sampler_logprobs",
        patched(Head, "scaled", lambda scaled: lambda head, raw, temperature=1.0: scaled(head, raw)),
        ("rollout.sampling.temperature=0.6",),
    ),
    "the engine reports log-probs without the temperature": Bug(
        "TRL#4159",
        "sampler_logprobs",
        patched(Sampler, "sample", raw_logprobs),
        ("rollout.sampling.temperature=0.6",),
    ),
    "the engine samples at another temperature than it reports": Bug(
        "vime#64",
        "sampler_entropy",
        patched(Sampler, "sample", other_temperature),
        ("rollout.group_size=64", "rollout.sampling.max_new_tokens=8"),
    ),
    "the engine has a top-p of its own": Bug(
        "TRL#6789",
        "sampler_logprobs",
        patched(
            Sampler, "put", lambda put: lambda s, slot, x, *rest: put(s, slot, replace(x, top_p=0.8), *rest)
        ),
    ),
    "trajectories are compared with those of other prompts": Bug(
        "verl#2185",
        "group_advantages",
        patched(
            grpo,
            "group_advantages",
            lambda compute: lambda rewards, members, **kwargs: compute(rewards, members.roll(3), **kwargs),
        ),
    ),
    "one baseline for all groups": Bug(
        "slime#2230",
        "group_advantages",
        patched(groups, "grouped", lambda grouped: lambda rewards, members: grouped(rewards, members * 0)),
    ),
    "a variance lost to rounding": Bug(
        "NeMo-RL#4158",
        "group_advantages",
        patched(groups, "grouped", single_precision_variance),
        ("reward.shift=1000", "rollout.group_size=32"),
    ),
    "the sign of advantages is flipped": Bug(
        "a draft of braid",
        "group_advantages",
        patched(Grpo, "compute", lambda compute: lambda kind, round_: -compute(kind, round_)),
        ("rollout.group_size=32",),
    ),
    "the mean of each micro-batch": Bug(
        "open-instruct#1161",
        "loss_weights",
        patched(
            losses,
            "_reduced",
            lambda reduced: lambda x, batch: reduced(x, batch) / batch.weights.where(batch.mask, 0).sum(),
        ),
        ("train.micro_batch_tokens=16",),
    ),
    "divided by the number of passes": Bug(
        "ms-swift#10117",
        "loss_weights",
        patched(single.SingleBackend, "_accumulate", divided_by_passes),
        ("train.micro_batch_tokens=16",),
    ),
    "tokens of the environment are trained": Bug(
        "Search-R1#21", "trained_tokens", with_row(train_context), GUESS
    ),
    "the end token is not trained": Bug("RAGEN#59", "trained_tokens", with_row(skip_end), (LONG,)),
    "the history is tokenised again": Bug(
        "TRL#5224", "sampler_logprobs", patched(Conversation, "turn", tokenised_again), GUESS
    ),
    "cut answers count as finished": Bug(
        "Trinity-RFT#608", "stop_reasons", patched(_Guarded, "truncate", without_truncation)
    ),
    "a second BOS": Bug(
        "TRL#3856",
        "prompt_opening",
        patched(
            ChatFormat,
            "opening",
            lambda opening: lambda chat, *args: [chat.tokenizer.bos_token_id] * 2 + opening(chat, *args),
        ),
        GUESS,
        around=with_bos,
    ),
    "the weight sync is skipped": Bug(
        "TRL#5312",
        "policy_versions",
        patched(
            Models,
            "sync_weights",
            lambda sync: lambda models, version, when="drain": None if version else sync(models, 0, when),
        ),
    ),
    "the engine samples without the adapter": Bug(
        "miles#2075",
        "sampler_logprobs",
        patched(products, "merged_weight", lambda _: lambda layer: layer.weight),
        ("model.lora={rank: 2}", "rollout.engine.compile=always", "train.optimizer.lr=0.05"),
    ),
    "the reference is not copied": Bug(
        "ms-swift#9934",
        "reference_start",
        patched(Models, "follow_warm_up", without_reference),
        (SFT, "algorithm.kl_coef=0.01"),
    ),
    "the arguments of the KL are swapped": Bug(
        "RLinf#129", "kl_formula", patched(losses, "_kl", swapped_kl), ("algorithm.kl_coef=0.1",)
    ),
    "all answers of a group have the same random numbers": Bug(
        "Megatron-LM#5983",
        "repeated_answers",
        patched(
            AgentDriver,
            "_trajectory",
            lambda play: lambda driver, prompt, i, key, seed: play(driver, prompt, i, (*key[:-1], 0), seed),
        ),
        (LONG,),
    ),
    "the reward of the neighbour": Bug(
        "NeMo-RL#3794", "repeated_scores", patched(Scorer, "score", neighbours), ("rollout.group_size=32",)
    ),
    "GAE goes on into the next row": Bug(
        "ROLL#447",
        "gae_replay",
        patched(discounting, "is_last_of_row", lambda is_last: lambda row: is_last(row * 0)),
        ("algorithm.recipe=ppo",),
    ),
    "the value loss has no gradient": Bug(
        "ray#22171",
        "weight_updates",
        patched(
            losses,
            "value_loss",
            lambda loss: lambda values, *rest, **kw: loss(values.detach() + 0 * values, *rest, **kw),
        ),
        ("algorithm.recipe=ppo",),
    ),
    "the learning rate is 0": Bug(
        "verl#3674", "weight_updates", patched(single, "lr_factor", lambda _: lambda *args: 0.0)
    ),
    "no float32 master weights": Bug(
        "Automodel#3444",
        "weight_updates",
        patched(single, "master_weights", lambda _: lambda module: {}),
        ("model.dtype=bf16", "train.optimizer.lr=1e-6", "rollout.group_size=32"),
    ),
    "attention across the rows of a pack": Bug(
        "AReaL#1442",
        "packing",
        patched(PackedAttention, "__init__", across_rows),
        around=patched(loading, "check_against_plain", lambda _: lambda *args: None),  # refuses it at once
    ),
    "old log-probs are those of the current pass": Bug(
        "torchforge#571",
        "later_ratios",
        patched(losses, "_policy_loss", current_logprobs),
        ("train.steps_per_pass=2", "rollout.group_size=32"),
    ),
    "a resume repeats prompts": Bug(
        "EasyR1#57",
        "repeated_prompts",
        patched(PromptSampler, "load", lambda _: lambda sampler, state: None),
        ("rollout.prompts_per_round=2", "run.max_rounds=1"),
        resumed=("run.max_rounds=2",),
    ),
}
"""Of the bugs in issues that were collected, three are not here: gradients averaged over ranks, which
tests/checks/test_ranks.py has; a prefix cache kept across syncs, whose entries braid never reads again in a
loop without lag; and a failed reward scored as 0, which a reward of one's own may mean."""
