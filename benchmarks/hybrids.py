"""Hybrids with linear attention or state-space layers, on CPU: an update on packed groups against a padded
batch, and the native engine against transformers `generate`.

Models have 4 layers of width 256, one of them with attention (Mamba 2: 5), random weights and fp32. Updates:
16 rows in 2 groups, answers of 40 to 64 tokens, forward and backward pass; the padded batch is transformers'
own model with a mask. The engine as in engine_vs_generate.py. CPU times of one thread, the sides taking turns;
ratios are medians over the turns.

    python benchmarks/hybrids.py [--models qwen3_5_text bamba] [--prompts 64 512] [--repeats 3]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from engine_vs_generate import compare, make_requests
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braid.cluster.memory import keep_freed_memory
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM

GROUP, GROUPS = 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
}
DELTA_NET = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA_NET,
    "bamba": {"attn_layer_indices": [3], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64},
}


def build(name: str) -> tuple[CausalLM, PreTrainedModel]:
    """The model in braid, and the same as transformers has it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **MODELS[name])
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    plain.generation_config.eos_token_id = None
    plain.generation_config.pad_token_id = 0
    return CausalLM(copy.deepcopy(plain)), plain


def rows_of(prompt: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(4096, (GROUPS, prompt), generator=generator)
    lengths = torch.randint(40, 65, (GROUPS * GROUP,), generator=generator).tolist()
    answers = [torch.randint(4096, (length,), generator=generator) for length in lengths]
    return [torch.cat((prompts[i // GROUP], answer)) for i, answer in enumerate(answers)]


def update_packed(lm: CausalLM, rows: list[Tensor], prompt: int) -> None:
    shared = [(i - i % GROUP, prompt if i % GROUP else 0) for i in range(len(rows))]
    shared = [pair if pair[1] else (0, 0) for pair in shared]
    stored = [row[num:] for row, (_, num) in zip(rows, shared, strict=True)]
    mask = [torch.arange(num, len(row)) >= prompt for row, (_, num) in zip(rows, shared, strict=True)]
    batch = PackedBatch(
        {"input_ids": torch.cat(stored)}, torch.cat(mask), tuple(map(len, rows)), shared=tuple(shared)
    )
    lm.forward(batch, frozenset({"logprobs"}))["logprobs"].sum().backward()


def update_padded(model: PreTrainedModel, rows: list[Tensor], prompt: int) -> None:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    is_row = torch.arange(ids.shape[1]) < lengths
    states = model.base_model(input_ids=ids, attention_mask=is_row.long(), use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(states[:, prompt - 1 : -1])  # pyright: ignore[reportOptionalCall]
    chosen = logits.log_softmax(-1).gather(2, ids[:, prompt:, None])[..., 0]
    (chosen * is_row[:, prompt:]).sum().backward()


def cpu_s(function: Callable[[], None]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--prompts", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--sequences", nargs="*", type=int, default=[16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for name in args.models:
        lm, plain = build(name)
        for prompt in args.prompts:
            rows = rows_of(prompt)
            sides = (lambda: update_packed(lm, rows, prompt), lambda: update_padded(plain, rows, prompt))  # noqa: B023
            turns = [[cpu_s(side) for side in sides] for _ in range(args.repeats + 1)][1:]
            packed, padded = (statistics.median(side) for side in zip(*turns, strict=True))
            ratio = statistics.median(a / b for a, b in turns)
            print(
                f"{name}, update with prompts of {prompt}: packed {packed:.2f} s, padded {padded:.2f} s, "
                f"ratio {ratio:.2f}",
                flush=True,
            )
        lm.model.requires_grad_(False)
        for num in args.sequences:
            for kind in ("ragged", "equal"):
                requests = make_requests(num, lm.vocab_size, is_ragged=kind == "ragged")
                ours, theirs, ratio = compare(lm, plain, requests, args.repeats)
                print(
                    f"{name}, {num} sequences, {kind}: engine {ours:,.0f} tokens/s, generate {theirs:,.0f}, "
                    f"ratio {ratio:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
