"""SwanLab sink (extra `swanlab`). The only file that imports swanlab."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Literal

from braid.errors import ConfigError, Problem

from .base import SampleRow, Tracker, run_id

MODES: dict[str, Literal["online", "local", "offline"]] = {
    "cloud": "online",
    "local": "local",
    "offline": "offline",
}
"""Mode in the config -> mode of the library."""


class SwanlabSink:
    """Logs to a SwanLab run with its files in `folder`/swanlab; `offline` only writes there, without network
    access (`swanlab sync` uploads it later). A resumed cloud run continues under the id in `id_file`.
    SwanLab's own messages are suppressed, since they would disturb the display.

    Raises ConfigError when swanlab rejects the run.
    """

    name = "swanlab"

    def __init__(self, tracker: Tracker, *, folder: Path, id_file: Path) -> None:
        import swanlab  # noqa: TID251  # an extra; plan.available reports a missing one

        self.num_samples, self._text = tracker.num_samples, swanlab.Text
        is_online = tracker.mode == "cloud"
        try:
            with redirect_stdout(io.StringIO()):
                self._run = swanlab.init(
                    project=tracker.project,
                    name=tracker.name,
                    id=run_id(id_file) if is_online else None,
                    resume="allow" if is_online else "never",
                    log_dir=str(folder / "swanlab"),
                    mode=MODES[tracker.mode],
                    config=tracker.config,
                    settings=swanlab.Settings(terminal=swanlab.Settings.Terminal(proxy_type="none")),
                )
        except Exception as error:
            message = (
                f"swanlab rejects the run: {error}; log in with `swanlab login`, or set "
                "report.swanlab.mode=offline"
            )
            raise ConfigError([Problem("report.swanlab", message, "report")]) from error

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:
        self._run.log({"step": step, **flat}, step=round_)

    def log_samples(self, use: str, round_: int, samples: Sequence[SampleRow]) -> None:
        texts = [
            self._text(f"{sample.prompt}\n\n{sample.answer}", caption=f"{sample.uid}: {sample.reward}")
            for sample in samples
        ]
        self._run.log({f"samples/{use}": texts}, step=round_)

    def close(self) -> None:
        with redirect_stdout(io.StringIO()):
            self._run.finish()
