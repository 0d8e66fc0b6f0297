"""The exceptions that braid raises deliberately.

A message says what is wrong with which value, what is allowed, what to do, and where the value came from.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path


class BraidError(Exception):
    """Base class of the errors that the command line prints without a traceback."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a config: its key, a message, and the origin of the value (empty: unknown)."""

    key: str
    message: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f" [{self.origin}]" if self.origin else "")


_MAX_TOLD = 50
"""Most problems listed in the message of a ConfigError."""


class ConfigError(BraidError, ValueError):
    """One or more problems of a config, reported together."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems = (Problem("config", problems),) if isinstance(problems, str) else tuple(problems)
        lines = [str(problem) for problem in self.problems[:_MAX_TOLD]]
        if (left := len(self.problems) - len(lines)) > 0:
            lines.append(f"and {left:,} more")
        head = f"{len(self.problems)} problems in the config:\n  - " if len(lines) > 1 else ""
        super().__init__(head + "\n  - ".join(lines))

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class DataError(BraidError, ValueError):
    """Data is missing, malformed or empty."""


class ModelError(BraidError, ValueError):
    """A model or tokenizer cannot be built, or is incompatible with the run."""


class RewardError(BraidError, RuntimeError):
    """A reward part raised, timed out, or returned anything but a finite number. Retry after `wait_s` seconds
    at the earliest; not at all if `is_final`."""

    def __init__(self, message: str, *, wait_s: float = 0.0, is_final: bool = False) -> None:
        super().__init__(message)
        self.wait_s, self.is_final = wait_s, is_final


class EnvError(BraidError, RuntimeError):
    """An environment raised or violated its protocol."""


class ToolError(BraidError):
    """A tool could not do what the policy asked. The policy reads the message; any other exception of a tool
    is a failure of the environment."""


class EngineError(BraidError, RuntimeError):
    """The rollout engine failed or refused a request."""


class ServerError(EngineError):
    """A server did not answer a request, or refused it. `why` is the cause without server and request. A
    retry may succeed after `wait_s` seconds, unless the failure `is_final`."""

    def __init__(self, message: str, why: str = "", *, wait_s: float = 0.0, is_final: bool = False) -> None:
        super().__init__(message)
        self.why, self.wait_s, self.is_final = why, wait_s, is_final


class TrainingError(BraidError, RuntimeError):
    """Training cannot continue."""


class WorkerError(BraidError, RuntimeError):
    """A worker process died, timed out or raised. `raised` is its exception, None unless it raised; `phase`
    is the phase of the run, None until known."""

    def __init__(self, what: str, why: str = "", raised: BaseException | None = None) -> None:
        """`what` names the worker and ends with its operation; `why` is the rest of the message."""
        super().__init__(what, why)
        self.what, self.why, self.raised = what, why, raised
        self.phase: str | None = None

    def __str__(self) -> str:
        phase = f" of the {self.phase} phase" if self.phase else ""
        return f"{self.what}{phase}: {self.why}" if self.why else self.what


class MachineError(BraidError, RuntimeError):
    """A machine of the run has left its cluster and did not come back in time."""


class RolloutError(TrainingError):
    """More trajectories of a round failed than rollout.max_invalid_fraction allows."""


class CheckTripped(TrainingError):
    """A check of the loop has tripped, with checks.on_trip=stop."""


class CheckpointError(BraidError, RuntimeError):
    """A checkpoint could not be written or read."""


class ReportError(BraidError, RuntimeError):
    """A report file of the run could not be written."""


class StopTraining(BraidError):
    """Raised by a callback of the Python API: the run ends after this round, with a checkpoint and the status
    stopped."""


class TargetMissed(BraidError):
    """The run ended without reaching eval.target."""


class RunInterrupted(BraidError):
    """The run was interrupted (Ctrl-C or SIGTERM). `checkpoint` is the newest one, None if nothing was
    saved."""

    def __init__(self, run_dir: Path, checkpoint: Path | None) -> None:
        super().__init__(run_dir, checkpoint)
        self.run_dir, self.checkpoint = run_dir, checkpoint

    def __str__(self) -> str:
        newest = f"the newest checkpoint is {self.checkpoint}"
        saved = newest if self.checkpoint else "no checkpoint was saved"
        return f"interrupted; the run is in {self.run_dir}, {saved}"


_DISK_FIXES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free space within the disk quota",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f unlimited; the file system may have one too)",
    errno.EROFS: "choose a folder on a writable file system",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.EIO: "check the disk",
}


def disk_fix(error: OSError) -> str:
    """What to do after a failed write."""
    return _DISK_FIXES.get(error.errno or 0, "check the folder and its disk")


_LEAST_RATIO = 0.6


def suggest(name: str, known: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the known name closest to `name`, or an empty string."""
    matcher, bounds = SequenceMatcher(b=name), list[tuple[float, str]]()
    for other in known:
        matcher.set_seq1(other)
        if matcher.real_quick_ratio() >= _LEAST_RATIO:
            bounds.append((matcher.quick_ratio(), other))
    best, near = _LEAST_RATIO, ""
    # difflib.get_close_matches computes all ratios, which takes 20 ms.
    for bound, other in sorted(bounds, reverse=True):
        if bound < best:
            break
        matcher.set_seq1(other)
        best, near = max((best, near), (matcher.ratio(), other))
    return f", did you mean {near!r}?" if near else ""


def listed(faults: Mapping[str, Sequence[str]]) -> str:
    """The kinds of faults that occur, with the number and the first few names of each."""
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for kind, names in faults.items()
        if names
    )
