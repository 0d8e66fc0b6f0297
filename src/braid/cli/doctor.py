"""`braid doctor`: whether this machine can run braid, one line for each thing that a run needs."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, Literal

import pynvml
import yaml
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

import braid
from braid.config.model import ModelConfig
from braid.cores import num_cores
from braid.errors import ConfigError, ModelError
from braid.plan.available import is_installed
from braid.plan.machine import count_gpus, cpu_info, memory_bytes
from braid.report.files import human_bytes, to_json
from braid.report.sinks.console import printable
from braid.rollout.engines import ENGINES
from braid.training.backends import BACKENDS

GIB = 2**30
MIN_SHARED, MIN_DISK, MIN_FILES = 2 * GIB, 10 * GIB, 4096
"""Below these a line warns: bytes of /dev/shm, bytes of disk, and open files."""
TRIAL_TIMEOUT_S = 600.0
_LETTERS = "abcd"
_TRIAL: dict[str, Any] = {
    "run": {"name": "trial", "max_rounds": 2},
    "model": {
        "build": {
            "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2,
            "head_dim": 32, "characters": _LETTERS,
        }
    },
    "data": {"train": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}]},
    "reward": {"parts": [{"kind": "exact"}]},
    "rollout": {
        "prompts_per_round": 4, "group_size": 4, "check_weights": True, "sampling": {"max_new_tokens": 4},
    },
    "train": {"optimizer": {"lr": 1e-3}},
    "checks": {"on_trip": "stop"},
    "checkpoint": {"every_rounds": 0},
    "report": {"console": "none", "tensorboard": False},
}  # fmt: skip
"""Two rounds of a model of 100,000 parameters."""


@dataclass(frozen=True, slots=True)
class Line:
    """What was looked at, what is there, and what to do if it is not well."""

    state: Literal["ok", "missing", "warning", "failed"]
    """missing: an optional package that is not installed."""
    name: str
    text: str
    fix: str = ""


def examine(*, model: str | None = None, trials: bool = True) -> Iterator[Line]:
    """Look at the machine, the packages and a model's folder; then train two rounds on each backend and
    engine that is installed, each in its own process, with every check of the loop."""
    for look in (
        _python,
        _processor,
        _memory,
        _shared_memory,
        _disk,
        _open_files,
        _gpus,
        _packages,
        _sandbox,
    ):
        yield from look()
    if model is not None:
        yield from _model(model)
    for kinds, key in ((BACKENDS, "train.backend"), (ENGINES, "rollout.engine")):
        for kind, section in kinds.items():
            if section.package and not is_installed(section.package):
                extra = getattr(section, "install", f"'braid-rl[{kind}]'")
                yield Line("missing", f"{key}={kind}", "not installed", f"pip install {extra}")
            elif section.needs_gpu and not count_gpus():
                yield Line("missing", f"{key}={kind}", "needs a GPU")
            elif trials:
                yield _trial(
                    key, kind, has_workers=bool(section.package) or getattr(section, "is_sharded", False)
                )
            else:
                yield Line("ok", f"{key}={kind}", "installed, not tried")


def print_report(lines: Iterator[Line], *, as_json: bool) -> bool:
    """Print each line as soon as it is known; JSON at the end. Returns whether nothing has failed."""
    console = Console(highlight=False)
    done: list[Line] = []
    marks = {"ok": ("ok     ", "green"), "missing": ("-      ", "dim"), "warning": ("warning", "yellow")}
    for line in lines:
        done.append(line)
        if as_json:
            continue
        text = Text.assemble(marks.get(line.state, ("FAILED ", "bold red")), f"  {line.name:<24} ")
        text.append(printable(line.text))
        console.print(text, soft_wrap=True)
        if line.fix:
            console.print(Text(f"{'':35}{printable(line.fix)}", "dim"), soft_wrap=True)
    failed = [line.name for line in done if line.state == "failed"]
    if as_json:
        sys.stdout.write(to_json([asdict(line) for line in done], indent=2) + "\n")
    else:
        console.print(f"\n{len(failed)} failed: {', '.join(failed)}" if failed else "\nNothing has failed.")
    return not failed


def _python() -> Iterator[Line]:
    text = f"{platform.python_version()}, {sys.prefix}"
    yield Line("ok", "braid", f"{braid.__version__}, {Path(braid.__file__).parent}")
    yield Line("ok", "Python", f"{text}, {platform.system()} {platform.release()}")


def _processor() -> Iterator[Line]:
    flags = cpu_info("flags").split()
    known = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bf16", "amx_bf16": "AMX"}
    has = [name for flag, name in known.items() if flag in flags]
    text = f"{cpu_info('model name') or platform.machine()}, {num_cores()} cores"
    yield Line("ok", "processor", f"{text}{', ' * bool(has)}{' '.join(has)}")
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(asked) > num_cores():
        why = f"OMP_NUM_THREADS={asked}, on {num_cores()} cores"
        yield Line("warning", "threads", why, "unset it, or threads wait for each other")


def _memory() -> Iterator[Line]:
    is_enough = memory_bytes() >= 4 * GIB
    fix = "" if is_enough else "braid and PyTorch take 1 GiB a process before any model"
    yield Line("ok" if is_enough else "warning", "memory", human_bytes(memory_bytes()), fix)


def _shared_memory() -> Iterator[Line]:
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        yield Line("failed", "shared memory", f"/dev/shm: {error.strerror}", "mount a tmpfs at /dev/shm")
        return
    fix = "" if size >= MIN_SHARED else "Ray and weight sync use it; docker run --shm-size=8g, or remount it"
    yield Line("warning" if fix else "ok", "shared memory", f"/dev/shm has {human_bytes(size)}", fix)


def _disk() -> Iterator[Line]:
    for name, folder in (("this folder", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        if not os.access(folder, os.W_OK):
            yield Line("failed", name, f"{folder} cannot be written", "choose another, or change its rights")
            continue
        free = shutil.disk_usage(folder).free
        fix = "" if free >= MIN_DISK else "checkpoints take up to 16 bytes a parameter; set run.output_dir"
        yield Line("warning" if fix else "ok", name, f"{folder}, {human_bytes(free)} free", fix)


def _open_files() -> Iterator[Line]:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    is_enough = allowed == resource.RLIM_INFINITY or allowed >= MIN_FILES
    count = "any number" if allowed == resource.RLIM_INFINITY else f"{allowed:,}"
    fix = "" if is_enough else f"Ray needs more with many workers: ulimit -n {MIN_FILES}"
    yield Line("ok" if is_enough else "warning", "open files", count, fix)


def _gpus() -> Iterator[Line]:
    code = "import torch; print(torch.__version__, torch.version.cuda or '', torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        fix = "pip install torch==2.13.0 (CPU build: --index-url https://download.pytorch.org/whl/cpu)"
        yield Line("failed", "torch", _last_line(done.stderr), fix)
        return
    name, *cuda, works = done.stdout.split()
    yield Line("ok", "torch", name + (f", CUDA {cuda[0]}" if cuda else ""))
    if not count_gpus():
        yield Line("ok", "GPUs", "none: runs use the CPU")
        return
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    names = [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    text = f"{len(names)} x {names[0]}, {human_bytes(min(sizes))} each, driver {driver}"
    if works == "True":
        yield Line("ok", "GPUs", text)
    else:
        why = "its CUDA does not work with this driver" if cuda else "it is a build for CPUs"
        fix = f"torch sees none of them: {why}; install one that does, or runs use the CPU"
        yield Line("warning", "GPUs", text, fix)


def _packages() -> Iterator[Line]:
    """The packages that braid requires, where a version is not one that it was tested with."""
    try:
        required = [Requirement(text) for text in distribution("braid-rl").requires or ()]
    except PackageNotFoundError:
        yield Line("warning", "packages", "braid is not installed, only importable", "pip install -e .")
        return
    needed = [package for package in required if not package.marker or package.marker.evaluate({"extra": ""})]
    wrong = 0
    for package in needed:
        try:
            there = version(package.name)
        except PackageNotFoundError:
            wrong += 1
            yield Line("failed", package.name, "not installed", f"pip install '{package}'")
            continue
        if not package.specifier.contains(there, prereleases=True):
            wrong += 1
            yield Line(
                "failed",
                package.name,
                f"{there}, but braid needs {package.specifier}",
                f"pip install '{package}'",
            )
    if not wrong:
        names = [f"{name} {version(name)}" for name in ("transformers", "ray", "numpy")]
        yield Line("ok", "packages", f"{len(needed)} as required, among them {', '.join(names)}")


def _sandbox() -> Iterator[Line]:
    from braid.isolation.sandbox import find_isolation

    try:
        yield Line("ok", "sandbox for programs", find_isolation("auto"))
    except ConfigError as error:
        why = error.problems[0].message
        yield Line(
            "warning", "sandbox for programs", why, "only reward kinds and tools that run programs need it"
        )


def _model(path: str) -> Iterator[Line]:
    """The tokenizer and the chat template of a model's folder."""
    from braid.models.folders import check_folder
    from braid.models.tokenizer import end_token_ids, load_tokenizer

    config = ModelConfig(path=path)
    try:
        check_folder(path, "model.path", needs_weights=True)
        tokenizer = load_tokenizer(config)
        ends = end_token_ids(config, tokenizer)
    except ModelError as error:
        yield Line("failed", "model", str(error))
        return
    words = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(list(ends))))
    yield Line("ok", "tokenizer", f"{len(tokenizer):,} tokens; answers end with {words}")
    if tokenizer.chat_template is None:
        fix = "prompts of messages need one: model.chat_template; prompts of text are fine"
        yield Line("warning", "chat template", "none", fix)
        return
    try:
        messages = [{"role": "user", "content": "Hello"}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template raises what it likes
        yield Line("failed", "chat template", f"{type(error).__name__}: {error}", "set model.chat_template")
        return
    yield Line("ok", "chat template", f"a prompt is {text!r}")


def _trial(key: str, kind: str, *, has_workers: bool) -> Line:
    """Train two rounds of a tiny model with a backend or an engine, in one process or on Ray workers."""
    settings = [f"{key}={kind}"]
    if has_workers:
        devices = "0" if key == "rollout.engine" or count_gpus() == 1 else "0-1"
        settings.append(f"cluster.placement={{policy: {devices}, rollout: {devices}}}")
    with tempfile.TemporaryDirectory(prefix="braid_doctor_", ignore_cleanup_errors=True) as folder:
        rows = [f'{{"prompt": "{letter}", "answer": "{letter}"}}\n' for letter in _LETTERS]
        Path(folder, "letters.jsonl").write_text("".join(rows), "utf-8")
        Path(folder, "trial.yaml").write_text(yaml.safe_dump(_TRIAL), "utf-8")
        command = [sys.executable, "-m", "braid", "train", "trial.yaml", *settings]
        code, output = _run(command, folder)
    name = f"{key}={kind}"
    if code == 0:
        return Line("ok", name, "two rounds of a tiny model, no check tripped")
    fix = f"braid train with {' '.join(settings)} would fail in the same way; see docs/troubleshooting.md"
    if code is None:
        return Line("failed", name, f"did not end within {TRIAL_TIMEOUT_S:g} s", fix)
    return Line("failed", name, _last_line(output), fix)


def _run(command: Sequence[str], folder: str) -> tuple[int | None, str]:
    """Exit code of a command, None if its time is over, and what it wrote to standard error."""
    process = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        errors = process.communicate(timeout=TRIAL_TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with process:
            try:
                return None, process.communicate(timeout=60)[1]
            except subprocess.TimeoutExpired:
                process.kill()
                return None, ""
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    return process.returncode, errors


def _last_line(text: str) -> str:
    """The last line of an output that says something."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.strip()]
    return lines[-1].removeprefix("braid: ") if lines else "no message"
