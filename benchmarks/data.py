"""Seconds and memory until data of 2,000,000 rows are read, checked and ready to be drawn from.

    python benchmarks/data.py [--rows 2000000] [--only KIND]

For each start a new process reads a run's config, tokenizer and data, checks them and draws, as `braid train`
and `braid sft` do before they build a model: at first, and later with the cache of the first start. The
seconds are those of the whole process, imports included; the memory is its peak. Goals: 15 s at first, 5 s
later, below 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet

START = """
import resource, sys
from braid.config.load import load_config
from braid.plan import resolve
from braid.trainer.inputs import prompt_sampler, read_inputs
from braid.trainer.preflight import check_inputs
verb, loaded = sys.argv[1], load_config(None, sys.argv[2:])
inputs = read_inputs(loaded, verb)
train, examples = inputs.train.prompts, inputs.examples.examples
plan = resolve(loaded.config, len(train) if verb == "train" else None, verb=verb, origin_of=loaded.origin)
check_inputs(loaded, plan, inputs)
if verb == "train":
    sampler = prompt_sampler(loaded.config, len(train), train)
    assert all(train[i].token_ids for i in sampler.take(64))
    inputs.eval.by_source()
    assert all(prompt.token_ids for prompt in inputs.prompts["eval"][:64])
else:
    assert all(example.response_ids for example in examples[:64])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
SEARCHING = (
    "{% for m in messages %}{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}<{{ m.role }}>{{ content | trim }}{% endfor %}<assistant>"
)
CHANGING = TEMPLATE.replace("m.content", "m.content | replace('\\t', ' ')")  # applied to each row
SETTINGS = (
    "model.build={characters: ' 0123456789+=?.ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>'}",
    "run.device=cpu",
    "run.max_rounds=1",
    "reward.parts=[{kind: exact}]",
)
GOALS = {"first": 15.0, "later": 5.0}
GOAL_GB = 1.0


def rows(num: int) -> Iterator[dict[str, str]]:
    """Sums of two numbers."""
    rng = random.Random(0)
    for _ in range(num):
        a, b = rng.randrange(1000), rng.randrange(1000)
        yield {"prompt": f"What is {a} + {b}? Answer with a number.", "answer": str(a + b)}


def write_lines(path: Path, rows: Iterator[dict[str, str]]) -> str:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def main() -> None:
    """Print a line for each start."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = write_lines(folder / "rows.jsonl", rows(args.rows))
        table, made = folder / "rows.parquet", rows(args.rows)
        pyarrow.parquet.write_table(
            pyarrow.concat_tables(
                pyarrow.Table.from_pylist(part) for part in iter(lambda: list(islice(made, 100_000)), [])
            ),
            table,
        )
        more = [write_lines(folder / f"part{i}.jsonl", islice(rows(args.rows), i, None, 4)) for i in range(4)]
        kinds = {
            "jsonl": ("train", f"data.train=[{{kind: file, path: {lines}}}]"),
            "parquet": ("train", f"data.train=[{{kind: file, path: {table}}}]"),
            "four sources": (
                "train",
                f"data.train=[{', '.join(f'{{kind: file, path: {path}}}' for path in more)}]",
            ),
            "chat template": (
                "train",
                f"data.train=[{{kind: file, path: {lines}, system: Be brief.}}]",
                f"model.chat_template={TEMPLATE!r}",
            ),
            "searching template": (
                "train",
                f"data.train=[{{kind: file, path: {lines}}}]",
                f"model.chat_template={SEARCHING!r}",
            ),
            "changing template": (
                "train",
                f"data.train=[{{kind: file, path: {lines}}}]",
                f"model.chat_template={CHANGING!r}",
            ),
            "evaluation": (
                "train",
                f"data.train=[{{kind: file, path: {more[0]}, name: train}}]",
                f"data.eval=[{{kind: file, path: {lines}, name: eval}}]",
            ),
            "shares": (
                "train",
                f"data.train=[{', '.join(f'{{kind: file, path: {path}}}' for path in more)}]",
                "data.mix=[{sources: [part0], share: 0.5}, {sources: ['*'], share: 0.5}]",
            ),
            "sft": ("sft", f"sft.data=[{{kind: file, path: {lines}, response_key: answer}}]"),
        }
        for kind, (verb, *settings) in kinds.items():
            if args.only in ("", kind):
                for start, goal in GOALS.items():
                    taken, memory = measure(verb, settings, folder / "caches" / kind)
                    is_met = taken <= goal and memory <= GOAL_GB
                    said = "" if is_met else f"   MISSED: {goal:g} s, {GOAL_GB:g} GB"
                    print(f"{kind:18} {start:6} {taken:6.1f} s {memory:6.2f} GB{said}", flush=True)


def measure(verb: str, settings: list[str], cache: Path) -> tuple[float, float]:
    """(seconds of a start, GB of memory), with the cache in a folder."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", START, verb, *SETTINGS, *settings]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return time.perf_counter() - began, float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
