"""`resolve(config) -> Plan`: all numbers that a run derives from its config.

Neither the config nor the plan changes afterwards. checks.py checks that the keys are consistent.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from pydantic import BaseModel

from braid.algorithms.recipes import NO_RECIPE, RECIPES, Correction, Recipe
from braid.config.algorithm import CorrectionConfig
from braid.config.cluster import Role
from braid.config.data import ProceduralSource, Source
from braid.config.kinds import with_settings
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.config.source import DEFAULT
from braid.config.train import TrainConfig
from braid.errors import ConfigError, Problem
from braid.kinds import Kind
from braid.users import described

from .checks import find_problems, find_warnings
from .layout import Needs, lay_out
from .lengths import token_bounds
from .machine import count_gpus
from .plan import Memory, OldLogprobs, Plan, Verb
from .sizes import (
    BYTES,
    ModelSize,
    policy_size,
    round_bytes,
    samples_lower,
    size_of_folder,
)


def resolve(
    config: RunConfig,
    num_prompts: int | None = None,
    *,
    verb: Verb = "train",
    num_gpus: int | None = None,
    origin_of: Callable[[str], str] = lambda _: DEFAULT,
) -> Plan:
    """Resolve and check `config` for a command.

    `num_prompts` is the number of training prompts once they are read; before that, only those of procedural
    sources are known. `num_gpus` is the number of GPUs of this machine, detected if None. `origin_of` returns
    where a key was set (Loaded.origin). Raises ConfigError with all problems.
    """
    if num_prompts is None:
        num_prompts = _known_prompts(config)
    with _naming_own_kinds(config, origin_of):
        plan = derive(config, num_prompts, verb, count_gpus() if num_gpus is None else num_gpus)
        return _checked(plan, config, origin_of)


def with_prompts(plan: Plan, config: RunConfig, num_prompts: int, origin_of: Callable[[str], str]) -> Plan:
    """The `plan` of `config` once its training prompts are read. Raises ConfigError like `resolve`."""
    if plan.num_prompts == num_prompts:
        return plan
    with _naming_own_kinds(config, origin_of):
        return _checked(
            replace(plan, **_of_prompts(config, plan.recipe, num_prompts, plan.verb)), config, origin_of
        )


def with_examples(plan: Plan, config: RunConfig, num_examples: int, origin_of: Callable[[str], str]) -> Plan:
    """The `plan` of `config` once its supervised examples are read. Raises ConfigError like `resolve`."""
    steps = _sft_steps(config, num_examples)
    return plan if steps == plan.sft_steps else _checked(replace(plan, sft_steps=steps), config, origin_of)


def with_pairs(plan: Plan, config: RunConfig, num_pairs: int) -> Plan:
    """The `plan` of `config` once its preference pairs are read."""
    return replace(plan, prefer_steps=_prefer_steps(config, num_pairs))


@contextmanager
def _naming_own_kinds(config: RunConfig, origin_of: Callable[[str], str]) -> Iterator[None]:
    """What the code of a kind of the user's own raises becomes a ConfigError of its key, with the file and
    line."""
    try:
        yield
    except Exception as error:
        files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
        for key, kind in _own_kinds(config):
            if not isinstance(error, ConfigError) and inspect.getfile(type(kind)) in files:
                message = f"{kind.kind!r} raised {described(error)} while the run was planned"
                raise ConfigError([Problem(key, message, origin_of(key))]) from error
        raise


def _own_kinds(section: BaseModel, above: str = "") -> Iterator[tuple[str, Kind]]:
    """(key, kind) of each kind of the user's own in a config."""
    for name, value in section:
        if isinstance(value, Kind) and value.is_own:
            yield f"{above}{name}", value
        elif isinstance(value, BaseModel):
            yield from _own_kinds(value, f"{above}{name}.")


def _checked(plan: Plan, config: RunConfig, origin_of: Callable[[str], str]) -> Plan:
    """The plan with its warnings. Raises ConfigError with all problems."""
    if problems := find_problems(config, plan):
        raise ConfigError([Problem(key, message, origin_of(key)) for key, message in problems])
    warnings = [Problem(key, message, origin_of(key)) for key, message in find_warnings(config, plan)]
    return replace(plan, warnings=tuple(warnings))


def default_verb(config: RunConfig) -> Verb:
    """The command that a config is for: an evaluation, training, learning from
    preferences, or supervised fine-tuning alone."""
    if config.run.eval_only:
        return "eval"
    if config.has_rollouts:
        return "train"
    return "prefer" if config.prefer else "sft" if config.sft else "train"


def merge_recipe(config: RunConfig, *, has_gpus: bool) -> Recipe:
    """The named recipe with the config's overrides; `off` becomes None. Where tokens may be older than the
    round that trains on them, or are sampled in a lower precision, a recipe without a correction gets one."""
    names, algorithm = {field.name for field in fields(Recipe)}, config.algorithm
    settings = {name: value for name, value in algorithm if name in names and value is not None}
    recipe, corrections = RECIPES[algorithm.recipe], algorithm.corrections
    settings["advantage"] = with_settings(recipe.advantage, algorithm.advantage)
    weights = {part.metric_name: part.weight for part in config.reward.parts}
    settings["advantage"] = settings["advantage"].of_parts(weights)
    settings["policy_loss"] = with_settings(recipe.policy_loss, algorithm.policy_loss)
    if corrections is None and not recipe.corrections and algorithm.old_logprobs in ("auto", "recompute"):
        is_off = config.max_lag > 0 or samples_lower(config, has_gpus=has_gpus)
        corrections = (CorrectionConfig(),) if is_off else None
    if corrections is not None:
        settings["corrections"] = tuple(Correction(**_without_off(dict(c))) for c in corrections)
    recipe = replace(recipe, **_without_off(settings))
    if not config.env.is_simulator:
        return recipe
    # Log-probs and entropies of a simulator's rows are already at their levels; returns are those of
    # decisions or actions.
    advantage = recipe.advantage.of_simulator("action" if algorithm.reward_level == "action" else "turn")
    return replace(recipe, logprob_level="token", entropy_level="token", advantage=advantage)


def _without_off(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value == "off" else value for name, value in settings.items()}


def derive(config: RunConfig, num_prompts: int | None, verb: Verb, num_gpus: int = 0) -> Plan:
    """Derive the plan without checks; the config need not be able to run."""
    rollout, train = config.rollout, config.train
    has_gpus = num_gpus > 0 and config.run.device != "cpu"
    trains_sac = verb == "train" and config.sac is not None
    recipe = NO_RECIPE if trains_sac else merge_recipe(config, has_gpus=has_gpus)
    steps_per_round = train.steps_per_pass * train.passes_per_round
    rows_per_step = math.ceil(rollout.prompts_per_round / train.steps_per_pass) * rollout.group_size
    trajectories = rollout.prompts_per_round * rollout.group_size
    output, total = token_bounds(config, rollout.sampling)
    _, eval_total = token_bounds(config, config.eval_sampling)
    sizes = _sizes(config)
    size = sizes["policy"]
    num_parameters = None if size is None else size.parameters
    samples_in = rollout.engine.dtype_in(config, num_parameters, has_gpus=has_gpus)
    kv_per_token = None if size is None else size.kv_numbers_per_token * BYTES[samples_in]
    kv_budget = rollout.engine.kv_budget(has_gpus=has_gpus)
    constant = recipe.aggregation_constant
    if recipe.aggregation == "token_sum_constant" and constant is None and output is not None:
        constant = float(output)
    old_logprobs = "current" if trains_sac else _old_logprobs(config, recipe, steps_per_round)
    has_critic = _has_critic(config, recipe)
    needs_reference = recipe.kl_coef > 0
    if verb == "prefer":
        needs_reference = config.prefer is not None and config.prefer.loss.needs_reference
    elif verb == "sft":
        needs_reference = config.sft is not None and config.sft.distillation is not None
    is_used: dict[Role, bool] = {
        "policy": True,
        "critic": verb == "train" and has_critic,
        "reference": verb != "eval" and needs_reference,
        "inference": verb == "train" and old_logprobs == "recompute",
        "rollout": True,
        "env": config.env.is_simulator,
        "reward": any(config.reward.judges()),
    }
    needs = Needs(
        roles=tuple(role for role, is_one in is_used.items() if is_one),
        models={
            role: model_size for role, model_size in sizes.items() if is_used[role] and model_size is not None
        },
        has_workers=verb != "eval",
        num_gpus=0 if config.run.device == "cpu" else num_gpus,
    )
    return Plan(
        verb=verb,
        recipe=recipe,
        old_logprobs=old_logprobs,
        aggregation_constant=constant,
        learns_values=recipe.advantage.needs_values,
        needs_critic=has_critic,
        needs_reference=needs_reference,
        needs_greedy=recipe.advantage.needs_greedy,
        **_of_prompts(config, recipe, num_prompts, verb),
        trajectories_per_round=trajectories,
        steps_per_round=steps_per_round,
        rows_per_step=rows_per_step,
        sft_steps=_sft_steps(config, None if config.sft is None else _known_rows(config.sft.data)),
        prefer_steps=_prefer_steps(
            config, None if config.prefer is None else _known_rows(config.prefer.data)
        ),
        trains_reward_model=verb == "prefer"
        and config.prefer is not None
        and config.prefer.loss.trains_reward_model,
        max_output_tokens=output,
        max_trajectory_tokens=total,
        eval_max_trajectory_tokens=eval_total,
        max_tokens_per_round=None if total is None else trajectories * total,
        max_tokens_per_step=None if total is None else rows_per_step * total,
        round_bytes=round_bytes(config, trajectories, output, total, size) if verb == "train" else None,
        kv_bytes_per_token=kv_per_token,
        kv_budget_bytes=None if kv_per_token is None or kv_budget is None else kv_budget * kv_per_token,
        state_bytes_per_sequence=0 if size is None else size.state_numbers * BYTES["fp32"],
        max_concurrent=None
        if total is None
        else min(
            trajectories, rollout.engine.max_running, *([] if kv_budget is None else [kv_budget // total])
        ),
        model_size=size,
        memory=()
        if size is None
        else _memory(config, recipe, size, sizes, needs_reference=needs_reference, has_gpus=has_gpus),
        is_pipelined=verb == "train" and config.pipeline is not None,
        layout=lay_out(config, needs),
    )


def _of_prompts(config: RunConfig, recipe: Recipe, num_prompts: int | None, verb: Verb) -> dict[str, Any]:
    """The fields of a plan that depend on the number of training prompts."""
    rounds = _rounds(config, num_prompts) if verb == "train" else 0
    if rounds is None:
        planned = dict.fromkeys(("rounds", "steps", "critic_steps", "warmup_steps"))
    elif config.sac is not None:  # whose steps depend on the lengths of episodes
        planned = {"rounds": rounds, "steps": None, "critic_steps": 0, "warmup_steps": 0}
    else:
        critic = config.critic.train or config.train
        critic_steps = critic.steps_per_pass * critic.passes_per_round
        policy_rounds = _policy_rounds(config, recipe, rounds)
        planned = {
            "rounds": rounds,
            "steps": policy_rounds * config.train.steps_per_pass * config.train.passes_per_round,
            "critic_steps": rounds * critic_steps,
            "warmup_steps": 0 if _has_critic(config, recipe) else (rounds - policy_rounds) * critic_steps,
        }
    return {"num_prompts": num_prompts} | {f"planned_{name}": number for name, number in planned.items()}


def _sizes(config: RunConfig) -> dict[TrainingRole, ModelSize | None]:
    """Model size of each training role, where it is known."""
    policy, critic = policy_size(config), config.critic.path
    references = list(config.reference.folders.values())
    return {
        "policy": policy,
        "critic": policy if critic is None else size_of_folder(critic),
        "reference": size_of_folder(references[0]) if references else policy,
        "inference": policy,
    }


def _known_prompts(config: RunConfig) -> int | None:
    """Number of training prompts, if the config alone determines it."""
    if config.env.makes_tasks and not config.data.train:
        return config.env.num_own_tasks
    return _known_rows(config.data.train)


def _known_rows(sources: Sequence[Source]) -> int | None:
    """Number of rows of sources that are all generated; None if there are others, or no sources."""
    generated = [source for source in sources if isinstance(source, ProceduralSource)]
    if not generated or len(generated) < len(sources):
        return None
    return sum(min(source.size, source.limit or source.size) for source in generated)


def _rounds(config: RunConfig, num_prompts: int | None) -> int | None:
    limits = [] if config.run.max_rounds is None else [config.run.max_rounds]
    if config.run.max_epochs is not None:
        if num_prompts is None:
            return None
        limits.append(math.ceil(config.run.max_epochs * num_prompts / config.rollout.prompts_per_round))
    return min(limits, default=None)


def _sft_steps(config: RunConfig, num_examples: int | None) -> int | None:
    """Optimizer steps of supervised fine-tuning; None while they depend on the number of examples. Each whole
    pass ends with a step of the examples that are left."""
    sft = config.sft
    if sft is None:
        return 0
    if sft.steps is not None or num_examples is None:
        return sft.steps
    whole, part = divmod(sft.epochs, 1)
    size = sft.rows_per_step
    return int(whole) * math.ceil(num_examples / size) + math.ceil(part * num_examples / size)


def _prefer_steps(config: RunConfig, num_pairs: int | None) -> int | None:
    """Optimizer steps of `braid prefer`; None while they depend on the number of pairs."""
    prefer = config.prefer
    if prefer is None:
        return 0
    if prefer.steps is not None or num_pairs is None:
        return prefer.steps
    return math.ceil(prefer.epochs * num_pairs / prefer.pairs_per_step)


def _policy_rounds(config: RunConfig, recipe: Recipe, rounds: int) -> int:
    return max(0, rounds - config.critic.warmup_rounds) if recipe.advantage.needs_values else rounds


def _old_logprobs(config: RunConfig, recipe: Recipe, steps_per_round: int) -> OldLogprobs:
    """auto: `current` in a round of one step, unless something needs log-probs before the step: KL in the
    reward or advantage, a correction for the sampler, or a loss that selects tokens by them."""
    chosen = config.algorithm.old_logprobs
    if chosen != "auto":
        return chosen
    is_needed = (
        (recipe.has_kl_before_update and not recipe.full_kl_in)
        or bool(recipe.corrections)
        or recipe.policy_loss.selects_tokens
    )
    return "recompute" if is_needed or steps_per_round > 1 else "current"


def _has_critic(config: RunConfig, recipe: Recipe) -> bool:
    return recipe.advantage.needs_values and config.critic.network == "own"


def _memory(
    config: RunConfig,
    recipe: Recipe,
    policy: ModelSize,
    sizes: Mapping[TrainingRole, ModelSize | None],
    *,
    needs_reference: bool,
    has_gpus: bool,
) -> tuple[Memory, ...]:
    """Gradients, AdamW's two moments, and the master weights of half-precision models are fp32. With adapters
    only these are trained, and the reference is a copy of them."""
    width, lora = BYTES[config.model.dtype], config.model.lora
    adapters = None if lora is None else policy.adapter_parameters(lora)
    roles = [_trained("policy", policy.parameters, width, config.train, adapters)]
    if _has_critic(config, recipe) and (critic := sizes["critic"]) is not None:
        values = critic.parameters - critic.head_parameters + critic.hidden_size + 1
        roles.append(_trained("critic", values, width, config.critic.train or config.train))
    if needs_reference and (reference := sizes["reference"]) is not None:
        held = reference.parameters if adapters is None else adapters
        if folders := config.reference.folders.values():
            held = sum(size.parameters for size in map(size_of_folder, folders) if size is not None)
        roles.append(Memory("reference", held, held * width))
    held_by_engine = config.rollout.engine.held_bytes(config, policy.parameters, has_gpus=has_gpus)
    roles += [Memory(name, policy.parameters, held) for name, held in held_by_engine.items()]
    judges = {part.engine_key: part for _, part in config.reward.judges()}  # those of one engine once
    scoring = [(part, part.dtype) for _, part in config.reward.models()]
    for part, dtype in (*scoring, *((judge, judge.weights_dtype) for judge in judges.values())):
        if (size := size_of_folder(part.path)) is not None:
            held = size.parameters * BYTES[dtype]
            roles.append(Memory(f"reward:{part.metric_name}", size.parameters, held))
    return tuple(roles)


def _trained(
    role: str, parameters: int, width: int, train: TrainConfig, adapters: int | None = None
) -> Memory:
    """Memory of a model that is trained completely, or by adapters on top of `parameters` frozen weights."""
    trained = parameters if adapters is None else adapters
    held = parameters + (adapters or 0)
    exact = BYTES["fp32"]
    optimizer = 0 if train.optimizer.kind == "sgd" else 2 * exact * trained
    if width < exact:
        optimizer += train.backend.master_bytes(trained, held, width)
    return Memory(role, held, held * width, trained * exact, optimizer)
