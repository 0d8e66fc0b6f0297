"""The derived numbers of a plan, each with its calculation, as `braid show` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from braid.config.sac import SacConfig
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid.isolation.sandbox import find_isolation
from braid.plan import Plan
from braid.plan.end_tokens import end_tokens
from braid.plan.sizes import training_dtype
from braid.plan.threads import thread_counts
from braid.report.files import human_bytes

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Figure:
    """A value derived from the config. `how` is its calculation or reason."""

    name: str
    value: str
    how: str


def figures(config: RunConfig, plan: Plan) -> list[Figure]:
    """All derived values, in the order in which a run uses them."""
    parts = {
        "train": (_lengths, _end_tokens, _rollout, _training, _rewards, _ends, _threads),
        "sft": (_lengths, _end_tokens, _ends, _threads),
        "prefer": (_lengths, _end_tokens, _ends, _threads),
        "eval": (_lengths, _end_tokens, _rewards, _threads),
    }
    return [figure for part in parts[plan.verb] for figure in part(config, plan)]


def human_count(count: int) -> str:
    """2960128 as "2.96 M"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


def _lengths(config: RunConfig, plan: Plan) -> Iterator[Figure]:
    if plan.max_trajectory_tokens is None:
        return
    longest = f"at most {plan.max_trajectory_tokens:,}"
    if config.env.context_limit is not None:
        how = "env.max_context_tokens: prompt, turns and replies"
        yield Figure("tokens per trajectory", longest, how)
        return
    prompt, sampling = f"{config.data.max_prompt_tokens} prompt", config.rollout.sampling
    if plan.verb != "eval":
        yield Figure("tokens per trajectory", longest, f"{prompt} + {sampling.max_new_tokens} new")
    if plan.eval_max_trajectory_tokens is not None and (config.data.eval or plan.verb == "eval"):
        longest = f"at most {plan.eval_max_trajectory_tokens:,}"
        sampling = config.eval_sampling
        yield Figure("tokens per evaluation answer", longest, f"{prompt} + {sampling.max_new_tokens} new")


def _end_tokens(config: RunConfig, plan: Plan) -> Iterator[Figure]:
    evaluated = config.eval.sampling if plan.verb == "eval" else None
    origins = end_tokens(config.model, evaluated or config.rollout.sampling)
    if origins is None:
        yield Figure("end tokens", UNKNOWN, "the model is not in a local folder")
    for token, origin in (origins or {}).items():
        yield Figure("end token", token, origin)


def _rollout(config: RunConfig, plan: Plan) -> Iterator[Figure]:
    rollout, longest, has_gpus = config.rollout, plan.max_trajectory_tokens, plan.layout.has_gpus
    kv_budget = config.rollout.engine.kv_budget(has_gpus=has_gpus)
    count = f"{plan.trajectories_per_round:,}"
    how = f"{rollout.prompts_per_round} prompts x {rollout.group_size} per group"
    yield Figure("trajectories per round", count, how)
    if plan.max_tokens_per_round is not None:
        most = f"at most {plan.max_tokens_per_round:,}"
        yield Figure("tokens per round", most, f"{count} trajectories x {longest:,}")
    if plan.round_bytes is not None:
        least, most = map(human_bytes, plan.round_bytes)
        yield Figure(
            "memory of a round",
            f"{least} to {most}",
            f"{count} trajectories and their tokens, in host memory",
        )
    if not rollout.engine.is_served and not config.env.is_simulator:
        engine = rollout.engine.dtype_in(config, plan.num_parameters, has_gpus=has_gpus)
        train = training_dtype(config, has_gpus=has_gpus)
        yield Figure(
            "engine's dtype", engine, f"rollout.engine.dtype={rollout.engine.dtype}; training: {train}"
        )
    if plan.max_concurrent is not None:
        how = f"minimum of {count} trajectories, max_running {rollout.engine.max_running:,}"
        how += "" if kv_budget is None else f", {kv_budget:,} cached tokens / {longest:,}"
        yield Figure("concurrent trajectories", f"{plan.max_concurrent:,} at full length", how)
    if plan.kv_budget_bytes is not None:
        how = f"{kv_budget:,} tokens x {human_bytes(plan.kv_bytes_per_token or 0)}"
        yield Figure("KV cache", f"at most {human_bytes(plan.kv_budget_bytes)}", how)
    if plan.state_bytes_per_sequence and plan.max_concurrent is not None:
        how = f"{plan.max_concurrent:,} trajectories x {human_bytes(plan.state_bytes_per_sequence)}"
        total = human_bytes(plan.max_concurrent * plan.state_bytes_per_sequence)
        yield Figure("states of linear attention", f"at most {total}", how)


def _training(config: RunConfig, plan: Plan) -> Iterator[Figure]:
    if config.sac is not None:
        yield from _sac(config.sac)
        return
    train, group_size, prompts = config.train, config.rollout.group_size, config.rollout.prompts_per_round
    passes = f"{train.passes_per_round} pass" + ("es" if train.passes_per_round != 1 else "")
    how = f"{train.steps_per_pass} per pass x {passes}"
    yield Figure("optimizer steps per round", f"{plan.steps_per_round}", how)
    upto = "up to " if prompts % train.steps_per_pass else ""
    how = f"{prompts} prompts / {train.steps_per_pass} = {upto}{plan.rows_per_step // group_size} prompts"
    yield Figure("rows per step", f"{upto}{plan.rows_per_step:,}", f"{how} x {group_size}")
    if plan.max_tokens_per_step is not None:
        how = f"{plan.rows_per_step:,} rows x {plan.max_trajectory_tokens:,}"
        how += f", in micro-batches of {train.micro_batch_tokens:,}"
        yield Figure("tokens per step", f"at most {plan.max_tokens_per_step:,}", how)
    yield Figure("old log-probs", plan.old_logprobs, _why_old_logprobs(config, plan))
    if plan.aggregation_constant is not None:
        is_set = config.algorithm.aggregation_constant is not None
        how = "algorithm.aggregation_constant" if is_set else "longest possible response"
        yield Figure("aggregation constant", f"{plan.aggregation_constant:g}", how)
    critic = ("no", "the advantage does not use values")
    if plan.learns_values:
        critic = (
            ("yes", "GAE needs values") if plan.needs_critic else ("no", "the policy computes the values")
        )
    yield Figure("critic", *critic)
    kl = f"algorithm.kl_coef is {plan.recipe.kl_coef:g}"
    yield Figure("reference model", "yes" if plan.needs_reference else "no", kl)


def _sac(sac: SacConfig) -> Iterator[Figure]:
    number, how = f"{sac.updates_per_decision:g} per decision", "sac.updates_per_decision"
    if sac.updates_per_round is not None:
        number, how = f"{sac.updates_per_round:,} per round", "sac.updates_per_round"
    yield Figure("updates", number, f"{how}, after the first {sac.min_transitions:,} decisions")
    yield Figure("transitions per update", f"{sac.batch_size:,}", "sac.batch_size")
    targets = sac.num_target_critics or sac.num_critics
    yield Figure("critics", f"{sac.num_critics}", f"{targets} of them in a target (sac.num_target_critics)")


def _rewards(config: RunConfig, _: Plan) -> Iterator[Figure]:
    if not any(part.runs_programs for part in config.reward.parts):
        return
    asked = config.reward.code.isolation
    how = "auto: the first that works on this machine" if asked == "auto" else "reward.code.isolation"
    try:
        isolation: str = find_isolation(asked)
    except ConfigError:
        isolation, how = "none", "no sandbox works on this machine; the run would be refused"
    if isolation == "process":
        how = f"resource limits only: programs can read files and use the network; {how}"
    yield Figure("sandbox of code rewards", isolation, how)


def _why_old_logprobs(config: RunConfig, plan: Plan) -> str:
    if config.algorithm.old_logprobs != "auto":
        return "algorithm.old_logprobs"
    if plan.old_logprobs == "current":
        return "auto: one step per round, so the ratio is 1"
    if plan.recipe.corrections:
        return "auto: algorithm.corrections compare them with the engine's"
    if plan.steps_per_round == 1:
        return "auto: the KL penalty in the reward needs them before the update"
    return f"auto: the policy changes within a round of {plan.steps_per_round} steps"


def _ends(config: RunConfig, plan: Plan) -> Iterator[Figure]:
    if config.sft is not None:
        size, steps = config.sft.rows_per_step, plan.sft_steps
        how = f"sft.epochs={config.sft.epochs:g} x examples / {size}, each pass rounded up"
        if config.sft.steps is not None:
            how = f"sft.steps; {config.sft.steps * size:,} examples, {size} per step"
        elif steps is None:
            how += ", known once the data is read"
        yield Figure("supervised steps", UNKNOWN if steps is None else f"{steps:,}", how)
    if plan.verb == "prefer" and (prefer := config.prefer) is not None:
        how = "prefer.steps"
        if prefer.steps is None:
            how = f"prefer.epochs={prefer.epochs:g} x pairs / {prefer.pairs_per_step}, rounded up"
            how += ", known once the data is read" * (plan.prefer_steps is None)
        steps = UNKNOWN if plan.prefer_steps is None else f"{plan.prefer_steps:,}"
        yield Figure("optimizer steps", steps, how)
        needs = f"prefer.loss={prefer.loss.kind}"
        yield Figure("reference model", "yes" if plan.needs_reference else "no", needs)
    if plan.verb in ("sft", "prefer"):
        return
    if plan.num_prompts is not None:
        how = "size of data.train, before prompts that are too long are dropped"
        yield Figure("training prompts", f"{plan.num_prompts:,}", how)
    yield Figure("rounds", *_rounds(config, plan))
    rounds = plan.planned_rounds
    if config.sac is not None:
        return
    if rounds is None or plan.planned_steps is None:
        yield Figure("optimizer steps", UNKNOWN, f"rounds x {plan.steps_per_round}")
        return
    warmup = config.critic.warmup_rounds if plan.learns_values else 0
    how = f"{rounds - warmup:,} rounds x {plan.steps_per_round}"
    if warmup:
        how += f" ({warmup} rounds of critic warm-up; {plan.planned_critic_steps:,} critic steps)"
    elif plan.needs_critic and plan.planned_critic_steps != plan.planned_steps:
        how += f" ({plan.planned_critic_steps:,} critic steps)"
    yield Figure("optimizer steps", f"{plan.planned_steps:,}", how)
    count = plan.trajectories_per_round
    yield Figure("total trajectories", f"{rounds * count:,}", f"{rounds:,} rounds x {count:,}")


def _threads(config: RunConfig, plan: Plan) -> Iterator[Figure]:
    yield Figure("CPU threads", *thread_counts(config, plan))


def _rounds(config: RunConfig, plan: Plan) -> tuple[str, str]:
    run, per_round = config.run, config.rollout.prompts_per_round
    if plan.planned_rounds is None:
        how = f"run.max_epochs={run.max_epochs} x training prompts / {per_round}, known once the data is read"
        return UNKNOWN, how
    parts = [] if run.max_rounds is None else [f"run.max_rounds={run.max_rounds:,}"]
    if run.max_epochs is not None:
        parts.append(f"run.max_epochs={run.max_epochs} x {plan.num_prompts:,} prompts / {per_round}")
    elif plan.num_prompts:
        parts[-1] += f", {plan.planned_rounds * per_round / plan.num_prompts:.2g} passes over the prompts"
    return f"{plan.planned_rounds:,}", ("minimum of " if len(parts) > 1 else "") + " and ".join(parts)
