"""Judges with models of their own: their engines, in the rollout workers, or in workers of the role `reward`
if it has other devices.

The weights of a judge never change, so its engine takes part in no weight sync. It sleeps and wakes with the
engines whose devices training uses. Judges of the same model and engine share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from braid.cluster.workers import Place
from braid.config.model import ModelConfig
from braid.config.schema import RunConfig
from braid.envs.simulators.remote import Peer
from braid.errors import EngineError
from braid.models.folders import local_path, read_chat_template, read_tokenizer
from braid.models.loading import load_policy
from braid.models.tokenizer import end_token_ids, whole_text
from braid.plan import Plan
from braid.plan.sizes import size_of_folder
from braid.rewards.kinds import JudgeReward
from braid.rollout.engine import RolloutEngine
from braid.rollout.engines.base import InProcess, Model, ServedEngine
from braid.rollout.engines.hosted import EngineHost, HostedEngine
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native
from braid.rollout.engines.native.selfcheck import check_decoding
from braid.training.offload import HOST, move_weights, release_memory
from braid.training.worker import device_of

from .engines import start_engine
from .weight_sync import send_options


class _Native(NativeEngine):
    """A native engine that has its model to itself."""

    def sleep(self) -> None:
        """See Engine. The weights move to host memory."""
        super().sleep()
        if self._device.type == "cuda":
            move_weights(self._lm.model, HOST)
            release_memory()

    def wake(self) -> None:
        """Bring the weights back to the device."""
        move_weights(self._lm.model, self._device)
        super().wake()


def make_host(place: Place, *, config: RunConfig, plan: Plan, run_dir: Path) -> EngineHost:
    """Create a worker of the role `reward`."""
    sleeps = place.rank in plan.judges_in_turns
    logs = run_dir / "logs" / f"judges-{place.rank}"
    return EngineHost(load_engines(config, plan, sleeps=sleeps, logs=logs))


def hosted_engines(config: RunConfig, hosts: Sequence[Peer]) -> dict[int, RolloutEngine]:
    """The engine of each judge on workers of the role `reward`, by the number of its part."""
    return {number: HostedEngine(hosts, number) for number, _ in config.reward.judges()}


def load_engines(config: RunConfig, plan: Plan, *, sleeps: bool, logs: Path) -> dict[int, Any]:
    """The engine of each judge in this process, or in a child process of it with a log file in `logs`, by the
    number of its part. They are put to sleep while others use their devices if it `sleeps`. Raises ModelError
    and EngineError."""
    engines: dict[int, Any] = {}
    made: dict[str, Any] = {}
    try:
        for number, part in config.reward.judges():
            same = part.engine_key
            if same not in made:
                load = _served if part.engine.is_served else _native
                made[same] = load(part, number, config, plan, sleeps=sleeps, logs=logs)
            engines[number] = made[same]
    except BaseException:
        for engine in made.values():
            engine.close()
        raise
    return engines


def judge_tokenizer(part: JudgeReward, key: str) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]]:
    """The tokenizer of the judge at `key`, and the tokens that end its replies. Raises ModelError."""
    assert part.path is not None, "others have the tokenizer of the policy or of their server"
    name = "path" if part.tokenizer is None else "tokenizer"
    folder = local_path(part.tokenizer or part.path, f"{key}.{name}")
    tokenizer = read_tokenizer(folder, f"{key}.{name}", part.trust_remote_code)
    if part.template is not None:
        tokenizer.chat_template = read_chat_template(part.template, f"{key}.template")
    return tokenizer, end_token_ids(_model_of(part), tokenizer)


def _model_of(part: JudgeReward) -> ModelConfig:
    return ModelConfig(
        path=part.path,
        tokenizer=part.tokenizer,
        dtype=part.weights_dtype,
        trust_remote_code=part.trust_remote_code,
    )


def _native(
    part: JudgeReward, number: int, config: RunConfig, plan: Plan, *, sleeps: bool, logs: Path
) -> NativeEngine:
    """An engine in this process. Only compile=always compiles its steps: what they keep on a GPU would stay
    there while the weights are in host memory."""
    del plan, sleeps, logs
    kind, key = part.engine, f"reward.parts[{number}]"
    assert isinstance(kind, Native), "others have processes of their own"
    lm = load_policy(
        _model_of(part), temperature=1.0, seed=config.run.seed, device=device_of(config), key=key
    )
    lm.module.requires_grad_(False)
    check_decoding(lm, None, is_compiled=kind.compile == "always")
    tokenizer, _ = judge_tokenizer(part, key)
    settings = kind.model_copy(
        update={
            "dtype": "auto",
            "prefix_caching": False,
            "compile": "always" if kind.compile == "always" else "never",
        }
    )
    return _Native(lm, settings, InProcess(partial(whole_text, tokenizer)))


def _served(
    part: JudgeReward, number: int, config: RunConfig, plan: Plan, *, sleeps: bool, logs: Path
) -> RolloutEngine:
    """An engine in a child process."""
    kind, path = part.engine, local_path(part.path or "", f"reward.parts[{number}].path")
    assert isinstance(kind, ServedEngine), "others are in this process"
    size = size_of_folder(path)
    longest = kind.max_model_tokens or (None if size is None else size.max_positions)
    if longest is None:
        raise EngineError(
            f"the number of positions of {path} is unknown; set "
            f"reward.parts[{number}].engine.max_model_tokens"
        )
    model = Model(
        path,
        tokenizer=part.tokenizer or path,
        dtype=part.weights_dtype,
        longest=longest,
        trust_remote_code=part.trust_remote_code,
        sleeps=sleeps,
        seed=config.run.seed,
    )
    engine = start_engine(
        kind.model_copy(update={"load_weights": True}),
        number,
        config,
        model=lambda _: model,
        sending=send_options(config, plan.layout, "", device_of(config)),
        log=logs / f"judge_{number}.log",
    )
    engine.use_loaded_weights()
    return engine
