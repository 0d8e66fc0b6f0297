"""Every exception that braid raises on purpose.

    BraidError
    ├── ConfigError (ValueError)       what the user wrote cannot be run; carries all problems at once
    ├── DataError (ValueError)         a data file, row or column is not what the config says
    ├── ModelError (ValueError)        a model folder, tokenizer or architecture cannot be used
    ├── RewardError (RuntimeError)     a reward part failed; recorded on the trajectory, never scored
    ├── EnvError (RuntimeError)        an environment failed; recorded on the trajectory, never scored
    ├── EngineError (RuntimeError)     the rollout engine failed
    ├── TrainingError (RuntimeError)   optimization cannot go on (non-finite steps in a row, no valid rows)
    │   └── RolloutError               too many trajectories of a round failed
    ├── WorkerError (RuntimeError)     a worker process died, hung or failed; names it and what it was doing
    ├── CheckpointError (RuntimeError) a checkpoint cannot be written, or none can be read
    ├── TargetMissed                   the run ended without reaching eval.target
    └── RunInterrupted                 Ctrl-C or SIGTERM; says where the run stands

A message says what is wrong with which value, what is allowed, what to do, and where the value came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path


class BraidError(Exception):
    """Base of all errors that the command line prints without a traceback."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a config: the key, what is wrong, and where the value was written (empty: not known)."""

    key: str
    message: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f" [{self.origin}]" if self.origin else "")


_MAX_TOLD = 50
"""Problems that the message of a ConfigError has."""


class ConfigError(BraidError, ValueError):
    """One or more problems of a config, reported together."""

    def __init__(self, problems: Sequence[Problem] | str) -> None:
        self.problems = (Problem("config", problems),) if isinstance(problems, str) else tuple(problems)
        lines = [str(p) for p in self.problems]
        head = f"{len(lines)} problems in the config:\n  - " if len(lines) > 1 else ""
        left = len(lines) - _MAX_TOLD
        rest = [f"and {left:,} more"] if left > 0 else []
        super().__init__(head + "\n  - ".join([*lines[:_MAX_TOLD], *rest]))

    def __reduce__(self) -> tuple[type, tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class DataError(BraidError, ValueError):
    """Data is missing, malformed or empty."""


class ModelError(BraidError, ValueError):
    """A model or tokenizer cannot be built or does not fit the run."""


class RewardError(BraidError, RuntimeError):
    """A reward part raised, timed out, or returned something that is no finite number. A further try makes sense after
    `wait_s`, or with `is_final` not at all."""

    def __init__(self, message: str, *, wait_s: float = 0.0, is_final: bool = False) -> None:
        super().__init__(message)
        self.wait_s, self.is_final = wait_s, is_final


class EnvError(BraidError, RuntimeError):
    """An environment raised or broke its protocol."""


class EngineError(BraidError, RuntimeError):
    """The rollout engine failed or refused a request."""


class TrainingError(BraidError, RuntimeError):
    """Training cannot go on."""


class WorkerError(BraidError, RuntimeError):
    """A worker process died, did not answer in time, or raised. `raised` is what it raised, None for the others; `phase` the phase of
    the run, once that is known."""

    def __init__(self, what: str, why: str = "", raised: BaseException | None = None) -> None:
        """`what` ends with what the worker was doing; `why` is the rest of the message."""
        super().__init__(what, why)
        self.what, self.why, self.raised = what, why, raised
        self.phase: str | None = None

    def __str__(self) -> str:
        phase = f" of the {self.phase} phase" if self.phase else ""
        return f"{self.what}{phase}: {self.why}" if self.why else self.what


class RolloutError(TrainingError):
    """More trajectories of a round failed than rollout.max_invalid_fraction allows."""


class CheckpointError(BraidError, RuntimeError):
    """A checkpoint could not be written or read."""


class ReportError(BraidError, RuntimeError):
    """The run's own record could not be written."""


class TargetMissed(BraidError):
    """The run ended without reaching eval.target."""


class RunInterrupted(BraidError):
    """A run was told to stop (Ctrl-C or SIGTERM). `checkpoint` is the newest one, None when nothing was saved."""

    def __init__(self, run_dir: Path, checkpoint: Path | None) -> None:
        super().__init__(run_dir, checkpoint)
        self.run_dir, self.checkpoint = run_dir, checkpoint

    def __str__(self) -> str:
        saved = (
            "nothing was saved yet"
            if self.checkpoint is None
            else f"the newest checkpoint is {self.checkpoint}"
        )
        return f"interrupted; the run is in {self.run_dir}, {saved}"


def suggest(name: str, known: Iterable[str]) -> str:
    """`", did you mean 'x'?"` for the known name nearest to `name`, or an empty string."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f", did you mean {near[0]!r}?" if near else ""
