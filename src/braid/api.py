"""The Python API: the commands of the command line as functions.

    run = braid.train("config.yaml", reward=lambda text, answer: float(answer in text))
    run.metrics[-1]["reward/mean"]

Importing this module is cheap; torch and the rest are imported by the first call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import isdir  # False for names that no file can have
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from braid.config.load import Loaded, load_config
from braid.config.run_folder import file_of
from braid.config.schema import RunConfig
from braid.errors import ConfigError, ReportError, StopTraining
from braid.functions import path_of_passed
from braid.plan import resolve
from braid.users import described, is_the_users

if TYPE_CHECKING:
    from braid.report.samples import Sample

Config = str | Path | Mapping[str, Any]
"""A YAML file, the same as a dict, or the folder of a run."""
Callback = Callable[[int, Mapping[str, float]], object]
"""Called with the round and its metrics (docs/metrics.md) after each round. The run stops if it returns STOP
or raises StopTraining."""
STOP = object()
"""Returned by a callback, it ends the run after this round, with a checkpoint and the status `stopped`."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run on disk; docs/run_directory.md describes its files. `is_target_reached` is None unless this
    process ran it; it is true if the config has no eval.target."""

    path: Path
    is_target_reached: bool | None = None

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return load_config(self.path / "config.yaml").config

    @property
    def summary(self) -> dict[str, Any]:
        """Status and results so far."""
        return json.loads((self.path / "summary.json").read_text("utf-8"))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The metrics of each round, by name."""
        lines = (self.path / "metrics.jsonl").read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def samples(self, round_: int) -> Iterator[Sample]:
        """The trajectories of a round. Raises FileNotFoundError, with the rounds that are stored, for
        another."""
        from braid.report.samples import read_samples

        file = self.path / "samples" / f"round_{round_:06d}.jsonl"
        if not file.is_file():
            stored = sorted(
                int(path.stem.removeprefix("round_")) for path in file.parent.glob("round_*.jsonl")
            )
            raise FileNotFoundError(
                f"the trajectories of round {round_} are not stored in {file.parent}; stored rounds: "
                f"{', '.join(map(str, stored)) or 'none'} (report.samples_every_rounds)"
            )
        return read_samples(file)

    def export(self, output: str | Path | None = None, *, step: int | Literal["best"] | None = None) -> Path:
        """Write a checkpoint, by default the newest, as a folder that transformers loads; returns the
        folder."""
        from braid.trainer import commands

        return commands.export(self.path, output=None if output is None else Path(output), step=step)


def train(
    config: Config,
    overrides: Sequence[str] = (),
    *,
    reward: Callable[..., float] | None = None,
    policy_loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train as `braid train` does. Works in scripts with or without a `__main__` guard and in notebooks.

    `overrides` are `key=value` texts as on the command line. `reward` replaces the config's reward parts; its
    parameters are those of reward functions (docs/rewards.md). Workers on other machines receive it by value.
    `policy_loss` is a function of tokens, or a class of `braid.algorithms.PolicyLoss`, and `advantage` one of
    rewards and groups, or a class of `braid.algorithms.Advantage` (docs/algorithms.md, Adding an algorithm),
    in place of the config's. The run folder keeps only their names, so that resuming needs these functions
    again. A callback stops the run after a round by returning STOP or raising StopTraining; any other
    exception in it ends the run as failed.

    Raises ConfigError, DataError or ModelError for bad input, other BraidErrors if the run fails, and
    RunInterrupted after a signal.
    """
    loaded = _loaded(config, overrides, reward, policy_loss=policy_loss, advantage=advantage)
    plan = resolve(
        loaded.config, verb="eval" if loaded.config.run.eval_only else "train", origin_of=loaded.origin
    )
    from braid.trainer.cluster import launched

    with launched(loaded, plan) as cluster:
        from braid.trainer import commands  # heavy imports, which overlap with those of the workers

        outcome = commands.train(loaded, cluster, plan, sinks=[_CallbackSink(call) for call in callbacks])
    return Run(outcome.run_dir, outcome.is_target_reached)


def evaluate(
    config: Config, overrides: Sequence[str] = (), *, reward: Callable[..., float] | None = None
) -> Run:
    """Evaluate the config's model as `braid eval` does; arguments as in `train`. The path of a run folder
    evaluates its newest checkpoint."""
    run_dir = Path(config) if isinstance(config, str | Path) and isdir(config) else None
    loaded = _loaded(config, overrides, reward)
    plan = resolve(loaded.config, verb="eval", origin_of=loaded.origin)
    from braid.trainer.cluster import launched

    with launched(loaded, plan) as cluster:
        from braid.trainer import commands

        outcome = commands.evaluate(loaded, cluster, plan, run_dir=run_dir)
    return Run(outcome.run_dir, outcome.is_target_reached)


def load_run(path: str | Path) -> Run:
    """The run in a folder. Raises ConfigError if it holds none."""
    folder = Path(path)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(
            f"{folder} holds no run: it has no config.yaml; pass the folder that braid.train returned or "
            "printed"
        )
    return Run(folder)


def _loaded(
    config: Config,
    overrides: Sequence[str],
    reward: Callable[..., float] | None,
    **kinds: Callable[..., Any] | None,
) -> Loaded:
    file = None if isinstance(config, Mapping) else file_of(Path(config))
    settings = [_override(*item) for item in config.items()] if isinstance(config, Mapping) else []
    functions = dict[str, Callable[..., Any]]()
    for name, function in {"reward": reward, **kinds}.items():
        if function is not None:
            path = path_of_passed(function, name)
            path += f"_as_{name}" * (path in functions)
            functions[path] = function
            key, value = f"algorithm.{name}", path
            if name == "reward":
                key, value = "reward.parts", [{"kind": "function", "path": path}]
            settings.append(_override(key, value))
    return load_config(file, [*settings, *overrides], functions=functions)


def _override(key: str, value: Any) -> str:
    listed = yaml.safe_dump([value], default_flow_style=True, width=float("inf"))
    return f"{key}={listed.strip()[1:-1]}"


@dataclass(slots=True)
class _CallbackSink:
    """Sink that calls the user's callback with each round's metrics; StopTraining ends the run."""

    call: Callback
    name: str = "callback"

    def log(self, round_: int, step: int, flat: Mapping[str, float]) -> None:  # noqa: ARG002  # the protocol
        try:
            result = self.call(round_, flat)
        except StopTraining:
            raise
        except BaseException as error:
            if not is_the_users(error):
                raise
            raise ReportError(f"a callback raised {described(error)}") from error
        if result is STOP:
            raise StopTraining

    def close(self) -> None:
        pass
