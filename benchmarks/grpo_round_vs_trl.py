"""A full GRPO round (rollout, log-probs, update) of braid against TRL's GRPOTrainer, on the CPU or a GPU.

Both sides get the same weights, prompts, group size, limits, reward, optimizer, clipping, dtype and threads,
keep freed memory mapped, and sample until an end token or the limit, so that lengths are ragged in the same
way. Each runs in a process of its own, in turn, so that a machine that slows down slows both. The figure is
trained tokens (completion tokens that the loss saw) per second of whole rounds, the first round left out.

    python benchmarks/grpo_round_vs_trl.py [--sizes 3m 30m] [--dtype bf16] [--device cuda] [--vocab 151936] [--rounds 6] [--repeats 3]
    python benchmarks/grpo_round_vs_trl.py --model smollm2 [--dtype bf16] ...      (after: make smollm2)

With a large `--vocab`, and with `--model`, TRL trains in micro-batches of 16 rows, since it stores all
logits; braid as always. bf16 is autocast on both sides, with weights in fp32. Of a pretrained `--model` the
learning rate is practically 0, so that the lengths of answers stay as they are, and prompts are in its chat
template. The memory is the most that a side's process took (VmHWM; on a GPU what PyTorch allocated there).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from sizes import SIZES

from braid.plan.sizes import size_of_folder

PROMPTS, GROUP, MAX_NEW = 16, 8, 128
LR = 1e-5
NO_LR = 1e-30
"""Learning rate that changes no weight of fp32; braid refuses 0."""
SMOLLM2 = Path(__file__).parents[1] / "examples" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclass(frozen=True)
class Setting:
    """What both sides compute. `micro` is TRL's rows per micro-batch; `is_chat`: prompts are in the model's
    template."""

    folder: str
    rounds: int
    micro: int
    dtype: str
    device: str
    lr: float = LR
    is_chat: bool = False


@dataclass(frozen=True)
class Side:
    """Trained tokens per second, and the most memory in bytes."""

    tokens_per_s: float
    peak_bytes: float


def make_prompts() -> list[str]:
    """Arithmetic questions of 20 to 40 characters."""
    return [f"What is {17 * i + 3} plus {29 * i + 11}? Think, then answer." for i in range(PROMPTS)]


def reward(token_ids: list[int]) -> float:
    """Some signal within every group: the share of even tokens."""
    return sum(t % 2 == 0 for t in token_ids) / max(len(token_ids), 1)


def side_trl(setting: Setting) -> list[tuple[int, float]]:
    """(trained tokens, seconds) of each round under TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from braid.cluster.memory import keep_freed_memory

    keep_freed_memory()  # as braid's runs do
    torch.set_num_threads(2)
    tokens: list[int] = []
    out: list[tuple[int, float]] = []

    def reward_func(completion_ids: list[list[int]], **_: object) -> list[float | None]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [reward(ids) for ids in completion_ids]

    class Clock(TrainerCallback):
        start = 0.0

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            out.append((tokens[-1], time.perf_counter() - self.start))

    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=setting.device == "cpu", bf16=setting.dtype == "bf16", gradient_checkpointing=False, use_vllm=False,
        beta=0.0, loss_type="dapo", num_generations=GROUP, per_device_train_batch_size=setting.micro,
        gradient_accumulation_steps=PROMPTS * GROUP // setting.micro, max_completion_length=MAX_NEW, temperature=1.0, top_p=1.0, top_k=0,
        learning_rate=setting.lr, lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, max_steps=setting.rounds,
        report_to="none", logging_steps=1, save_strategy="no", seed=0, disable_tqdm=True, shuffle_dataset=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(setting.folder),
        reward_funcs=cast("Any", reward_func),
        args=config,
        train_dataset=Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": p}] if setting.is_chat else p}
                for p in make_prompts() * setting.rounds
            ]
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    return out


def side_braid(setting: Setting) -> list[tuple[int, float]]:
    """(trained tokens, seconds) of each round under braid."""
    from braid.config.load import load_config
    from braid.trainer import commands

    work = Path(tempfile.mkdtemp())
    data = work / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in make_prompts()))
    config = {
        "run": {"name": "bench", "output_dir": str(work), "max_rounds": setting.rounds, "num_threads": 2, "device": setting.device},
        "model": {"path": setting.folder},
        "data": {"train": [{"kind": "file", "path": str(data), "answer_key": None}], "shuffle": False,
                 "use_chat_template": "always" if setting.is_chat else "never"},
        "reward": {"parts": [{"kind": "function", "path": f"{Path(__file__).resolve()}:trajectory_reward"}]},
        "rollout": {"prompts_per_round": PROMPTS, "group_size": GROUP, "sampling": {"max_new_tokens": MAX_NEW}},
        "algorithm": {"recipe": "grpo", "aggregation": "token_mean"},
        "train": {"optimizer": {"lr": setting.lr}, "max_grad_norm": 1.0, "micro_batch_tokens": 16384,
                  "autocast": {"fp32": "none", "bf16": "bf16"}[setting.dtype]},
        "eval": {"before": False, "at_end": False},
        "checkpoint": {"at_end": False},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
    }  # fmt: skip
    path = work / "bench.yaml"
    path.write_text(json.dumps(config))
    commands.train(load_config(path))
    lines = [json.loads(line) for line in (work / "bench" / "metrics.jsonl").read_text().splitlines()]
    return [(int(m["rollout/tokens"]), m["time/round_s"]) for m in lines if m["round"] > 0]


def trajectory_reward(trajectory: object) -> float:
    """The same reward, as braid hands it over."""
    return reward(trajectory.turns[-1].output_ids)  # type: ignore[attr-defined]


def make_model(folder: Path, size: dict[str, int], vocab: int | None = None) -> int:
    """Write a random Qwen3 folder with its tokenizer; returns its number of parameters. With `vocab` the
    model has more tokens than its tokenizer."""
    import torch

    from braid.config.model import ModelConfig
    from braid.models.loading import load_policy, load_tokenizer, save_pretrained

    config = ModelConfig.model_validate({"build": size})
    lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
    if vocab:
        lm.model.resize_token_embeddings(vocab, mean_resizing=False)
    save_pretrained(lm, load_tokenizer(config), folder)
    return sum(p.numel() for p in lm.module.parameters())


def peak_bytes(device: str) -> float:
    """The most memory that this process took."""
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024


def run_side(side: str, setting: Setting) -> Side:
    """One side, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--side", side, "--setting", json.dumps(asdict(setting))],
        capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr[-3000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    rows = result["rounds"][1:]
    return Side(sum(tokens for tokens, _ in rows) / sum(seconds for _, seconds in rows), result["peak_bytes"])


def compare(name: str, parameters: int, setting: Setting, repeats: int) -> None:
    """Run both sides in turn, and print their medians and that of the ratios."""
    pairs = [(run_side("braid", setting), run_side("trl", setting)) for _ in range(repeats)]
    ratio = statistics.median(braid.tokens_per_s / trl.tokens_per_s for braid, trl in pairs)
    braid, trl = (
        statistics.median(result.tokens_per_s for result in side) for side in zip(*pairs, strict=True)
    )
    peaks = [max(result.peak_bytes for result in side) / 2**30 for side in zip(*pairs, strict=True)]
    print(
        f"{name}: {parameters / 1e6:.1f}M parameters, {PROMPTS} prompts x {GROUP}, up to {MAX_NEW} new "
        f"tokens, {setting.dtype}, {setting.device}"
    )
    print(f"  braid {braid:,.0f} trained tokens/s, TRL {trl:,.0f}, ratio {ratio:.2f}")
    print(f"  peak memory: braid {peaks[0]:.1f} GiB, TRL {peaks[1]:.1f} GiB", flush=True)


def pretrained(file: Path) -> str:
    """The folder of the converted model in a GGUF file, which both sides read."""
    from braid.models.folders import local_path

    if not file.is_file():
        raise SystemExit(f"{file} is not there; run: make smollm2")
    return local_path(str(file), "--model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["3m", "30m"], choices=list(SIZES))
    parser.add_argument("--model", choices=["smollm2"], help="a pretrained model in place of --sizes")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--micro", type=int, default=PROMPTS * GROUP)
    parser.add_argument("--side", choices=["trl", "braid"])
    parser.add_argument("--setting", help="of a side")
    args = parser.parse_args()
    if args.side:
        setting = Setting(**json.loads(args.setting))
        rounds = {"trl": side_trl, "braid": side_braid}[args.side](setting)
        print(json.dumps({"rounds": rounds, "peak_bytes": peak_bytes(setting.device)}))
        return
    micro = min(16, args.micro) if args.model or (args.vocab or 0) > 2**15 else args.micro
    setting = Setting("", args.rounds, micro, args.dtype, args.device)
    if args.model:
        folder = pretrained(SMOLLM2)
        size = size_of_folder(folder)
        assert size is not None, "the folder has weights"
        compare(
            args.model, size.parameters, replace(setting, folder=folder, lr=NO_LR, is_chat=True), args.repeats
        )
        return
    for name in args.sizes:
        with tempfile.TemporaryDirectory() as folder:
            parameters = make_model(Path(folder), SIZES[name], args.vocab)
            compare(name, parameters, replace(setting, folder=folder), args.repeats)


if __name__ == "__main__":
    main()
