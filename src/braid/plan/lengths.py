"""Bounds on the length of trajectories and rows, and the length up to which rotary frequencies are fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from braid.config.rollout import SamplingConfig
from braid.config.schema import RunConfig
from braid.json_text import read_json

from .plan import Plan
from .sizes import ModelSize, policy_size


def token_bounds(config: RunConfig, sampling: SamplingConfig) -> tuple[int | None, int | None]:
    """Maximum tokens that the policy generates in a trajectory, and maximum tokens of a trajectory."""
    env, prompt, new = config.env, config.data.max_prompt_tokens, sampling.max_new_tokens
    if env.is_simulator:
        return None, None
    limit = config.rollout.max_sequence_tokens or math.inf
    total = int(min(env.context_limit or prompt + new, limit))
    return min((env.turn_limit or 1) * new, max(total - 1, 0)), total


def longest_row(config: RunConfig) -> int | None:
    """Maximum tokens of a row in training or evaluation; None if unbounded. Supervised examples and
    preference pairs are bounded by their max_tokens and the model's positions."""
    samplings = (config.rollout.sampling, config.eval_sampling)
    totals = [token_bounds(config, sampling)[1] for sampling in samplings]
    bounds = [total for total in totals if total is not None]
    size = policy_size(config)
    for section in (config.sft, config.prefer):
        if section is None:
            continue
        if (limit := row_limit(section.max_tokens, size)) is None:
            return None
        bounds.append(limit)
    return max(bounds, default=None)


def row_limit(max_tokens: int | None, size: ModelSize | None) -> int | None:
    """Maximum tokens of a supervised example or a preference pair's longer side, given the `max_tokens` of
    its section; None if unbounded."""
    limits = (max_tokens, None if size is None else size.max_positions)
    return min((limit for limit in limits if limit is not None), default=None)


def rotary_problem(model: Mapping[str, Any], longest: int | None) -> str | None:
    """Error message if rows of up to `longest` tokens (None: any length) exceed the length beyond which
    rotary frequencies depend on the longest row of a batch (dynamic NTK, LongRoPE); None if they do not, or
    if the config does not contain that length. `model` is the content of a config.json."""
    text = model.get("text_config") or model
    settings = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for rope in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        lengths, kind = {**rope, **text}, rope.get("rope_type", rope.get("type"))
        if kind not in ("dynamic", "longrope", "su"):
            continue
        key = "max_position_embeddings"
        if kind != "dynamic" and f"original_{key}" in lengths:
            key = f"original_{key}"
        limit = lengths.get(key)
        if limit is not None and (longest is None or longest > limit):
            reach = "have any length" if longest is None else f"may have {longest} tokens"
            return (
                f"{text.get('model_type', 'the model')} with {kind} rotary embeddings is computed "
                f"incorrectly for rows longer than its {key} of {limit} tokens, since frequencies then "
                f"depend on the longest row of a batch, and rows of this run {reach}; keep prompt and "
                f"answer together within {limit} tokens"
            )
    return None


def rotary_problems(config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """rotary_problem of every model that is computed here, if it is in a local folder."""
    if plan.verb == "eval" and config.rollout.engine.is_served:
        return
    is_train = plan.verb in ("train", "prefer")
    paths = {
        "model.path": config.model.source,
        "critic.path": config.critic.path if is_train and plan.needs_critic else None,
        **(config.reference.folders if plan.verb != "eval" and plan.needs_reference else {}),
    }
    for key, path in paths.items():
        try:
            model = read_json(Path(path or "").expanduser() / "config.json")
            message = rotary_problem(model, longest_row(config))
        except (OSError, ValueError, AttributeError, TypeError):
            continue  # no local folder, or not a model's: reported when it is loaded
        if message is not None:
            yield key, message
