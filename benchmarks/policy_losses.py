"""Time of every policy loss, forward and backward, against plain PPO clip at 65,536 tokens.

From log-probs to the gradient of the mean loss: the ratio, the loss of the table that training uses, its
backward pass. The tokens are of 128 rows with two turns each, moved as far from the old policy as a few steps
move them. All cases are timed in turn within each repetition, so that what else the machine does meets them
alike; the figure is the median over repetitions of a case's time over plain PPO clip's time in the same
repetition. It is to be at most 1.5 for each loss. Below the losses stand PPO clip with the ratios of turns
and sequences, and the whole loss of training, metrics included, without and with corrections for the sampler;
they have no goal.

    python benchmarks/policy_losses.py [--tokens 65536] [--repeats 200] [--threads 1]

Exits with 1 when a loss misses the figure.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from braid.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from braid.algorithms.policy_losses.dppo import Dppo
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.recipes import RECIPES, Correction, Recipe
from braid.algorithms.segments import Segments, segments
from braid.algorithms.surrogate import Tokens, importance_ratio
from braid.models.batch import PackedBatch
from braid.training.losses import policy_loss

NUM_ROWS = 128
GOAL = 1.5
BASE = RECIPES["grpo"]


def batch_of(num_tokens: int) -> PackedBatch:
    """Rows of one length: a prompt of an eighth, then two turns with a reply of an eighth between."""
    generator = torch.Generator().manual_seed(0)
    length = num_tokens // NUM_ROWS
    position = torch.arange(num_tokens) % length * 8 // length
    mask = (position != 0) & (position != 4)
    old = -torch.empty(num_tokens).exponential_(generator=generator)
    fields = {
        "old_logprobs": old,
        "behavior_logprobs": old + 0.02 * torch.randn(num_tokens, generator=generator),
        "advantages": torch.randn(num_tokens, generator=generator),
        "is_chosen": (torch.rand(num_tokens, generator=generator) < 0.2).float(),
    }
    weights = torch.full((num_tokens,), 1.0 / float(mask.sum()))
    turns = torch.arange(num_tokens) // length * 2 + (position > 4)
    decision = torch.where(mask, turns, -1)
    return PackedBatch({}, mask, (length,) * NUM_ROWS, fields, weights, decision=decision)


def loss_alone(loss: PolicyLoss, batch: PackedBatch, over: Segments | None) -> Callable[[Tensor], Tensor]:
    """From log-probs [T] to the mean of the surrogate."""
    old, advantages, chosen = (batch.fields[n] for n in ("old_logprobs", "advantages", "is_chosen"))

    def compute(logprobs: Tensor) -> Tensor:
        tokens = Tokens(logprobs, old, advantages, importance_ratio(logprobs, old, over), chosen)
        return loss.per_token(tokens)[0].mean()

    return compute


def loss_of_training(recipe: Recipe, batch: PackedBatch) -> Callable[[Tensor], Tensor]:
    """From log-probs [T] to the loss that the backend is given."""
    loss, entropy = policy_loss(recipe), torch.zeros(batch.num_positions)
    return lambda logprobs: loss.compute({"logprobs": logprobs, "entropy": entropy}, batch)[0]


def cases(batch: PackedBatch) -> dict[str, Callable[[Tensor], Tensor]]:
    """What is timed, plain PPO clip first."""
    out: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, kind in POLICY_LOSSES.items():
        out[name] = loss_alone(kind(), batch, None)
    out["ppo_clip, dual clip"] = loss_alone(PpoClip(dual_clip=3.0), batch, None)
    out["dppo, kl"] = loss_alone(Dppo(divergence="kl"), batch, None)
    assert batch.decision is not None, "batch_of sets it"
    for level, segment in (("turn", batch.decision), ("sequence", batch.trajectory)):
        out[f"  ratio of a {level}"] = loss_alone(BASE.policy_loss, batch, segments(batch.mask, segment))
    out["  whole loss"] = loss_of_training(BASE, batch)
    out["  whole loss, ratio of a sequence"] = loss_of_training(
        replace(BASE, policy_loss=PpoClip(ratio_level="sequence")), batch
    )
    for level in ("token", "sequence"):
        correction = Correction(level=level, mode="truncate", low=0.0, high=2.0)
        name = f"  whole loss, correction of a {level}"
        out[name] = loss_of_training(replace(BASE, corrections=(correction,)), batch)
    return out


def seconds(compute: Callable[[Tensor], Tensor], logprobs: Tensor) -> float:
    """Of one forward and backward pass."""
    leaf = logprobs.clone().requires_grad_()
    start = time.perf_counter()
    compute(leaf).backward()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batch = batch_of(args.tokens)
    generator = torch.Generator().manual_seed(1)
    logprobs = batch.fields["old_logprobs"] + 0.1 * torch.randn(args.tokens, generator=generator)
    compared = cases(batch)
    times: dict[str, list[float]] = {name: [] for name in compared}
    for repeat in range(args.repeats + 5):
        for name, compute in compared.items():
            taken = seconds(compute, logprobs)
            if repeat >= 5:  # the first ones warm up
                times[name].append(taken)
    base = times["ppo_clip"]
    misses = 0
    print(f"{args.tokens} tokens, {args.threads} threads\n{'':<36}      ms   of ppo_clip")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
        misses += not name.startswith(" ") and ratio > GOAL
        print(f"{name:<36}  {1e3 * statistics.median(taken):>6.2f}   {ratio:>6.2f}")
    sys.exit(misses > 0)


if __name__ == "__main__":
    main()
