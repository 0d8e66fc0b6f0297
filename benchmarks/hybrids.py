"""A hybrid model (state-space layers and attention) on CPU: packed rows against a padded batch.

Forward and backward pass over 2 groups of 8 rows that share a prompt, with answers of 32 to 128 tokens. The
padded batch is right-padded and run by transformers' own layers; braid packs the rows and computes each prompt
once. Goal: at most 0.6 of the batch's time with prompts of 512 tokens.

CPU time of one thread; the sides take turns, and the ratio is the median over the turns, so that other work on
the machine changes both sides.

    python benchmarks/hybrids.py [--prompt 512] [--repeats 3]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braid.cluster.memory import keep_freed_memory
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64,
    "attn_layer_indices": [3], "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GROUPS, GROUP, ANSWER = 2, 8, (32, 128)


def make() -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model("bamba", **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def make_rows(prompt: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows: list[Tensor] = []
    for _ in range(GROUPS):
        words = torch.randint(512, (prompt,), generator=generator)
        sizes = torch.randint(*ANSWER, (GROUP,), generator=generator).tolist()
        rows += [torch.cat((words, torch.randint(512, (size,), generator=generator))) for size in sizes]
    return rows


def padded(model: PreTrainedModel, rows: list[Tensor], prompt: int) -> Callable[[], Tensor]:
    """Log-probs of the answers from one right-padded batch."""
    width = max(map(len, rows))
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    mask = torch.stack([torch.arange(width) < len(row) for row in rows])

    def run() -> Tensor:
        # only the logits that predict answers are computed, as in braid
        keep = torch.arange(prompt - 1, width - 1)
        out = model(input_ids=ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=keep)
        logprobs = out.logits.log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0]
        return (logprobs * mask[:, prompt:]).sum()

    return run


def packed(lm: CausalLM, rows: list[Tensor], prompt: int) -> Callable[[], Tensor]:
    shared = tuple((i - i % GROUP, prompt) if i % GROUP else (0, 0) for i in range(len(rows)))
    stored = [row[num:] for row, (_, num) in zip(rows, shared, strict=True)]
    mask = torch.cat(
        [torch.arange(num, num + len(p)) >= prompt for p, (_, num) in zip(stored, shared, strict=True)]
    )
    batch = PackedBatch({"input_ids": torch.cat(stored)}, mask, tuple(map(len, rows)), shared=shared)

    def run() -> Tensor:
        return lm.forward(batch, frozenset({"logprobs"}))["logprobs"].sum()

    return run


def update_s(model: torch.nn.Module, forward: Callable[[], Tensor]) -> float:
    start = time.process_time()
    forward().backward()
    model.zero_grad(set_to_none=True)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    plain = make()
    lm = CausalLM(copy.deepcopy(plain))
    rows = make_rows(args.prompt)
    ours, theirs = packed(lm, rows, args.prompt), padded(plain, rows, args.prompt)
    assert abs(ours().item() / theirs().item() - 1) < 1e-4, "both sides compute the same"
    turns = [(update_s(lm.module, ours), update_s(plain, theirs)) for _ in range(args.repeats + 1)][1:]
    packed_s, padded_s = (statistics.median(side) for side in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    print(f"packed {packed_s:.2f} s, padded {padded_s:.2f} s, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
