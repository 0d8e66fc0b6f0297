"""Weights & Biases sink (extra `wandb`). The only file that imports wandb."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from braid.errors import ConfigError, Problem

from .base import SampleRow, Tracker, run_id


class WandbSink:
    """Logs to a wandb run with its files in `folder`/wandb; `offline` only writes there, without network
    access (`wandb sync` uploads it later). A resumed run continues under the id in `id_file`.

    Raises ConfigError when wandb rejects the run.
    """

    name = "wandb"

    def __init__(self, tracker: Tracker, *, folder: Path, id_file: Path) -> None:
        import wandb  # noqa: TID251  # an extra; plan.available reports a missing one

        self.num_samples, self._table = tracker.num_samples, wandb.Table
        is_offline = tracker.mode == "offline"
        if is_offline:  # else its service sends error reports over the network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            self._run = wandb.init(
                project=tracker.project,
                name=tracker.name,
                id=run_id(id_file),
                dir=str(folder),
                mode="offline" if is_offline else "online",
                config=tracker.config,
                resume=None if is_offline else "allow",
                settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
            )
        except (wandb.Error, OSError) as error:
            message = (
                f"wandb rejects the run: {error}; log in with `wandb login`, or set report.wandb.mode=offline"
            )
            raise ConfigError([Problem("report.wandb", message, "report")]) from error
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        self._run.log({"round": round_, "step": step, **flat})

    def log_samples(self, use: str, round_: int, samples: Sequence[SampleRow]) -> None:
        table = self._table(columns=list(SampleRow._fields), data=[list(sample) for sample in samples])
        self._run.log({"round": round_, f"samples/{use}": table})

    def close(self) -> None:
        self._run.finish()
