"""Consistency checks across the keys of a config.

Each check is a function from (config, plan) to (key, message) pairs. A problem stops the run before it
starts; a warning marks what is legal but rarely intended. Every accepted key either has an effect or is
reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

from braid.config.data import source_name
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig

from . import advantages, available
from .layout import RoleLayout
from .lengths import rotary_problems
from .machine import memory_bytes
from .parallel import TRAINING_ROLES, copy_devices, section_of
from .placement import format_numbers, parse_placement
from .plan import Plan
from .rewards import mix_problems, reward_problems
from .unused import ONLY_EVALUATES, set_keys, unused_keys

Finding = tuple[str, str]
"""The key that should be changed, and what is wrong."""
_Check = Callable[[RunConfig, Plan], Iterator[Finding]]


def find_problems(config: RunConfig, plan: Plan) -> list[Finding]:
    """Everything that makes the run impossible; if parts of it are unavailable, only those."""
    return list(available.missing_parts(config, plan)) or [
        finding for check in _PROBLEMS for finding in check(config, plan)
    ]


def find_warnings(config: RunConfig, plan: Plan) -> list[Finding]:
    """Everything that is legal but suspicious, and every key that has no effect."""
    return [finding for check in _WARNINGS for finding in check(config, plan)]


def _policy_and_env(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    yield from config.model.kind.problems(config)
    yield from config.env.problems(config, plan)


def _sac(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    if config.sac is not None:
        yield from config.sac.problems(config, plan)


def _demonstrations(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    sft, is_robot = config.sft, config.env.is_simulator
    if is_robot and plan.verb == "sft" and sft is None:
        yield "sft", "no demonstrations; set sft.demonstrations to a LeRobot folder"
    if sft is None or plan.verb == "eval":
        return
    if is_robot and config.model.kind.imitates != "demonstrations":
        return
    if is_robot and sft.data:
        yield "sft.data", "a robot policy imitates demonstrations; use sft.demonstrations"
    if is_robot and sft.demonstrations is None:
        yield "sft.demonstrations", "no demonstrations; set it to a LeRobot folder"
    if is_robot and sft.demonstrations is not None and sft.steps is None:
        yield "sft.steps", "demonstrations have no epochs; set the number of steps"
    if not is_robot and sft.demonstrations is not None:
        yield "sft.demonstrations", "demonstrations are for robots; use sft.data"


def _length(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    if plan.verb != "train":
        return
    if config.run.max_rounds is None and config.run.max_epochs is None:
        yield "run.max_rounds", "the run never ends; set run.max_rounds or run.max_epochs"
    rounds, warmup = plan.planned_rounds, config.critic.warmup_rounds
    if plan.learns_values and rounds is not None and warmup >= rounds:
        why = f"the run has {rounds} rounds, all of them critic warm-up ({warmup})"
        yield "critic.warmup_rounds", f"the policy is never updated: {why}"


def _values(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    if plan.learns_values and not plan.needs_critic and not config.env.is_simulator:
        why = "a language model's critic is a separate model; only robot policies can share theirs"
        yield "critic.network", f"{why}; set it to own"


def _data(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    if config.env.is_simulator:
        return
    has_tasks = config.makes_tasks
    if plan.verb == "train" and not config.data.train and not has_tasks:
        yield "data.train", "no training prompts; add at least one source"
    if plan.verb == "eval" and not config.data.eval and not has_tasks:
        yield "data.eval", "no evaluation prompts; add at least one source"
    is_scored = config.reward.parts or config.env.gives_rewards
    if (plan.verb == "train" or config.data.eval) and not is_scored:
        yield "reward.parts", f"no reward for env.kind={config.env.kind}; add at least one part"
    if plan.verb == "sft" and config.sft is None:
        yield (
            "sft",
            "no examples; add sources with response_key, response_function or messages_key to sft.data",
        )
    if config.sft is not None and plan.verb != "eval":
        if not config.sft.data:
            yield "sft.data", "no examples; add at least one source"
        for name in ("data", "eval_data"):
            for i, source in enumerate(getattr(config.sft, name)):
                keys = (source.response_key, source.response_function, source.messages_key)
                if sum(key is not None for key in keys) != 1:
                    why = "set exactly one of response_key, response_function and messages_key"
                    yield f"sft.{name}[{i}]", why
        yield from mix_problems("sft.mix", config.sft.mix, set(map(source_name, config.sft.data)))


def _preferences(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    if plan.verb != "prefer":
        return
    prefer, model = config.prefer, config.model
    if config.env.is_simulator or model.kind.is_robot:
        yield "env.kind", "only language models learn from preferences; remove env, model.mlp and model.vla"
        return
    if prefer is None or not prefer.data:
        yield "prefer.data", "no pairs; add sources with the columns prompt, chosen and rejected"
        return
    if not prefer.loss.trains_reward_model:
        return
    how = f"{prefer.loss.kind} trains a reward model"
    if config.data.eval:
        yield "data.eval", f"{how}, which samples no answers; remove it, and use prefer.eval_data"
    if config.sft is not None:
        why = "has no supervised warm-up; remove sft, and set model.path to the exported model of `braid sft`"
        yield "sft", f"{how}, which {why}"
    if model.lora is not None:
        yield "model.lora", f"{how}, all of its weights; remove it"
    if model.vision is not None:
        yield "model.vision", f"{how}, which reads only text; remove it"
    if config.data.chat_template_kwargs:
        why = "rewards render conversations without them; write them into the template (model.chat_template)"
        yield "data.chat_template_kwargs", f"{how}: {why}"
    if not config.train.backend.trains_reward_models:
        yield "train.backend", f"{how}, which {config.train.backend.kind} does not; set it to single or fsdp2"


def _evaluation(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    evaluation, target = config.eval, config.eval.target
    for i, k in enumerate(evaluation.pass_at):
        if k > evaluation.samples_per_prompt:
            needs = (
                f"pass@{k} needs {k} samples per prompt, but "
                f"eval.samples_per_prompt={evaluation.samples_per_prompt}"
            )
            yield f"eval.pass_at[{i}]", f"{needs}; raise it, or lower k"
    names = ("min_final", "max_final", "min_gain")
    keys = [f"eval.target.{name}" for name in names if getattr(target, name) is not None]
    if plan.verb != "eval":
        keys += ["eval.patience"] * (evaluation.patience is not None)
        keys += ["checkpoint.keep_best"] * config.checkpoint.keep_best
    if not keys:
        return
    held_out = config.held_out(plan.verb)
    if not (config.data.eval or held_out or config.env.is_simulator or config.makes_tasks):
        what = "a target" if target.is_set else "this"
        yield keys[0], f"{what} needs evaluation data; add sources to data.eval"
    if plan.verb != "eval" and target.is_set and not evaluation.at_end:
        yield keys[0], "the target is measured after the last round; set eval.at_end=true"
    if plan.verb != "eval" and target.min_gain is not None and not evaluation.before:
        why = "the gain is relative to the evaluation before training; set eval.before=true"
        yield "eval.target.min_gain", why
    known = (f"mean@{evaluation.samples_per_prompt}", *(f"pass@{k}" for k in evaluation.pass_at))
    if held_out:
        of_held_out = ("loss", "perplexity") if plan.verb == "sft" else ("accuracy", "margin", "loss")
        known = (*of_held_out, *(known if config.data.eval else ()))
    if evaluation.target_metric not in known:
        why = f"evaluations do not compute {evaluation.target_metric!r}; use {' or '.join(known)}"
        yield "eval.target.metric", f"{why}, or change eval.samples_per_prompt or eval.pass_at"


def _batches(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    prompts = config.rollout.prompts_per_round
    for key, train in available.train_sections(config, plan):
        steps = train.steps_per_pass
        if steps > prompts and key != "reference.train":
            why = f"{prompts} prompts per round cannot be split into {steps} mini-batches of whole prompts"
            yield (
                f"{key}.steps_per_pass",
                f"{why}; lower it to {prompts}, or raise rollout.prompts_per_round to {steps}",
            )


def _environment(config: RunConfig, _: Plan) -> Iterator[Finding]:
    for name in config.cluster.env:
        if not name or "=" in name or "\0" in name:
            why = f"{name!r} is not a valid environment variable name; it must not be empty or contain ="
            yield "cluster.env", why


def _algorithm(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    recipe, loss = plan.recipe, f"algorithm.policy_loss={plan.recipe.policy_loss.kind}"
    if plan.verb != "train":
        return
    if plan.old_logprobs in ("current", "interpolated"):
        which = f"log-probs before the update, which {plan.old_logprobs} does not compute"
        fix = f"{which}; set it to auto, recompute or behavior"
        if recipe.has_kl_before_update and not recipe.full_kl_in:
            yield "algorithm.old_logprobs", f"KL in the {recipe.kl_in} needs {fix}"
        if recipe.policy_loss.selects_tokens:
            yield "algorithm.old_logprobs", f"{loss} selects tokens by their {fix}"
    if recipe.logprob_level != "token" and not config.env.is_simulator:
        if recipe.policy_loss.has_segment_ratio:
            level = f"algorithm.logprob_level={recipe.logprob_level}"
            why = f"{level} already makes ratios turn-level; set it to token, or logprob_level to token"
            yield "algorithm.policy_loss.ratio_level", why
        if recipe.policy_loss.selects_tokens:
            yield "algorithm.logprob_level", f"{loss} selects single tokens; set it to token"
    levels = config.algorithm
    is_of_robots = plan.learns_values and config.env.is_simulator
    if is_of_robots and levels.reward_level == "action" and config.robot_logprob_level == "chunk":
        why = "returns of actions need log-probs of actions or their components, not of whole chunks"
        has_chunks_only = config.model.kind.decision_level == "chunk"
        fix = (
            "set it to chunk" if has_chunks_only else "set it to chunk, or algorithm.logprob_level to action"
        )
        yield "algorithm.reward_level", f"{why}; {fix}"
    if recipe.aggregation == "token_sum_constant" and plan.aggregation_constant is None:
        why = "episodes of a simulator have no maximum response length to derive it from; set it"
        yield "algorithm.aggregation_constant", why


def _full_kl(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    policy, reference = (plan.layout.role(role) for role in ("policy", "reference"))
    teachers = len(config.reference.teachers) if reference else 0
    if teachers and plan.verb != "train":
        why = f"braid {plan.verb} compares with one reference, not with {teachers} teachers"
        yield "reference.teachers", f"{why}; set reference.path"
    if teachers and plan.recipe.full_kl_in:
        why = f"{plan.recipe.kl_estimator} over the whole vocabulary compares with one reference, not with"
        fix = "set algorithm.kl_top_k, or kl_estimator to k1, k2 or k3, or reference.path"
        yield "reference.teachers", f"{why} {teachers} teachers; {fix}"
    if plan.verb != "train":
        return
    if plan.recipe.compares_distributions and plan.recipe.kl_top_k is not None:
        if plan.recipe.kl_in != "loss":
            why = f"the KL over the reference's likeliest tokens is a loss, but kl_in is {plan.recipe.kl_in}"
            yield "algorithm.kl_top_k", f"{why}; set algorithm.kl_in=loss, or kl_top_k=null"
        for key, train in (("train", config.train), ("reference.train", config.reference.train)):
            if train is not None and not train.backend.trains_causal_lm:
                why = f"{key}.backend={train.backend.kind} does not compute the likeliest tokens"
                yield "algorithm.kl_top_k", f"{why}; set it to single, fsdp, fsdp2 or deepspeed"
    if plan.recipe.full_kl_in and policy and reference and not reference.shares_processes(policy):
        here, there = (f"{side.kind} on {format_numbers(side.devices)}" for side in (policy, reference))
        yield (
            "algorithm.kl_estimator",
            f"{plan.recipe.kl_estimator} compares all logits of policy ({here}) and reference ({there}), "
            "which must run in the same processes: set train.backend and reference.train.backend to the same "
            "value (single, fsdp, fsdp2 or deepspeed), and place both on the same devices in "
            "cluster.placement; or use k1, k2 or k3",
        )


def _distillation(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Supervised fine-tuning with a teacher."""
    distillation = None if config.sft is None else config.sft.distillation
    if distillation is None or plan.verb == "eval":
        return
    if plan.verb != "sft":
        why = f"braid {plan.verb} starts with a warm-up on examples alone"
        yield (
            "sft.distillation",
            f"{why}; run braid sft first and set model.path to its export, or set it to null",
        )
        return
    if config.model.kind.is_robot:
        yield "sft.distillation", "only language models have a teacher; set it to null"
    if config.reference.path is None:
        yield "reference.path", "sft.distillation needs a teacher; set reference.path to its folder"
    policy, teacher = (plan.layout.role(role) for role in ("policy", "reference"))
    if distillation.top_k is None and policy and teacher and not teacher.shares_processes(policy):
        here, there = (f"{side.kind} on {format_numbers(side.devices)}" for side in (policy, teacher))
        yield (
            "sft.distillation.top_k",
            f"null compares all logits of policy ({here}) and teacher ({there}), which must run in the same "
            "processes: set train.backend and reference.train.backend to the same value, and place both on "
            "the same devices; or set top_k",
        )
    for key, train in (("train", config.train), ("reference.train", config.reference.train)):
        if train is not None and not train.backend.trains_causal_lm:
            why = f"{key}.backend={train.backend.kind} computes no divergence from a teacher"
            yield "sft.distillation", f"{why}; set it to single, fsdp, fsdp2 or deepspeed"


def _routers(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Router replay and load balancing of experts."""
    train, engine = config.train, config.rollout.engine
    for key, section in available.train_sections(config, plan):
        for name in ("router_replay", "router_aux_coef") if key != "train" else ():
            if any(set_keys(section, name)):
                yield f"{key}.{name}", f"routers are those of the policy; set train.{name} instead"
    replays = train.router_replay != "none" and plan.verb == "train"
    balances = train.router_aux_coef > 0 and plan.verb != "eval"
    asked = {"router_replay": replays, "router_aux_coef": balances}
    for key in (f"train.{name}" for name, is_asked in asked.items() if is_asked):
        default = "none" if key.endswith("replay") else "0"
        if config.env.is_simulator or (plan.model_size is not None and not plan.model_size.num_experts):
            yield key, f"the model has no routed experts, so it does nothing; set it to {default}"
        elif not train.backend.trains_causal_lm:
            instead = "single, fsdp, fsdp2 or deepspeed"
            why = f"train.backend={train.backend.kind} has routers of its own"
            yield key, f"{why}; set it to {default}, or train.backend to {instead}"
        elif train.liger_kernels:
            why = "Liger's kernels replace the modules that route"
            yield key, f"{why}; set it to {default}, or train.liger_kernels=false"
    if replays and train.router_replay == "rollout" and not engine.records_experts:
        why = f"rollout.engine={engine.kind} does not return the experts that it chose"
        yield "train.router_replay", f"{why}; set it to old or none, or use rollout.engine=native"
    if replays and train.router_replay == "old" and plan.old_logprobs != "recompute":
        why = "old replays the experts of the pass that computes log-probs before the update, of which there"
        fix = "set algorithm.old_logprobs=recompute, or train.router_replay to rollout or none"
        yield "train.router_replay", f"{why} is none with algorithm.old_logprobs={plan.old_logprobs}; {fix}"


def _opponents(config: RunConfig, _: Plan) -> Iterator[Finding]:
    if config.env.opponents_every_rounds is not None and config.rollout.engine.is_served:
        yield "env.opponents", "opponents need rollout.engine=native"


def _contexts(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Lengths that exceed the limits of the model or the engine, with the arithmetic."""
    if plan.verb in ("sft", "prefer") and not (config.data.eval or config.makes_tasks):
        return  # nothing is sampled
    prompt, bound, env = config.data.max_prompt_tokens, config.rollout.max_sequence_tokens, config.env
    limit = None if plan.model_size is None else plan.model_size.max_positions
    budget = config.rollout.engine.kv_budget(has_gpus=plan.layout.has_gpus)
    no_room = f"data.max_prompt_tokens={prompt} leaves no room for an answer in"
    if bound is not None and prompt >= bound and not config.env.is_simulator and not config.makes_tasks:
        yield "rollout.max_sequence_tokens", f"{no_room} {bound} tokens; raise it above {prompt}"
    samplings = [("rollout.sampling", config.rollout.sampling, plan.max_trajectory_tokens)]
    if (context := env.context_limit) is not None:
        if prompt >= context and not config.makes_tasks:
            why = f"{no_room} a context of {context} tokens; raise it above {prompt}"
            yield "env.max_context_tokens", why
    elif config.eval.sampling is not None:
        samplings.append(("eval.sampling", config.eval.sampling, plan.eval_max_trajectory_tokens))
    for key, sampling, total in samplings:
        if total is None:
            continue
        changed = f"{key}.max_new_tokens"
        if total == bound or env.context_limit is not None:
            changed = "rollout.max_sequence_tokens" if total == bound else "env.max_context_tokens"
            arithmetic = f"a trajectory has up to {total} tokens ({changed})"
        else:
            arithmetic = (
                f"data.max_prompt_tokens={prompt} + {changed}={sampling.max_new_tokens} = {total} tokens"
            )
        if limit is not None and total > limit:
            yield changed, f"{arithmetic}, but the model accepts {limit}; lower one of them"
        if budget is not None and total > budget:
            why = f"which never fits in a KV cache of {budget} tokens; raise it to at least {total}"
            yield "rollout.engine.kv_budget_tokens", f"{arithmetic}, {why}"


def _pipeline(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    if config.pipeline is None or plan.verb != "train":
        return
    layout, rollout = plan.layout, plan.layout.role("rollout")
    if layout.has_gpus and layout.mode != "in_process" and layout.sharing_devices("rollout") and rollout:
        shared = f"as some of rollout's GPUs {format_numbers(rollout.devices)} do"
        why = f"engines sample during training, so they cannot share GPUs with it, {shared}"
        yield "pipeline", f"{why}; separate the roles in cluster.placement, or set pipeline=null"
    for role in TRAINING_ROLES:
        if (role_layout := layout.role(role)) and role_layout.offload:
            why = (
                "moves models to host memory during sampling, but with a pipeline engines sample during "
                "training"
            )
            yield f"{section_of(config, role)}.offload", f"{why}; remove it, or set pipeline=null"


def _placement(_: RunConfig, plan: Plan) -> Iterator[Finding]:
    for refusal in plan.layout.refusals:
        yield refusal.key, refusal.message


_PROBLEMS: tuple[_Check, ...] = (
    _policy_and_env,
    _sac,
    _demonstrations,
    _length,
    _values,
    _data,
    _preferences,
    _evaluation,
    _batches,
    _environment,
    _algorithm,
    _full_kl,
    _distillation,
    _routers,
    advantages.advantage_problems,
    _opponents,
    _contexts,
    rotary_problems,
    _pipeline,
    _placement,
    reward_problems,
)


def _suspicious_sampling(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    sampling = config.rollout.sampling
    if plan.verb != "train" or config.env.is_simulator:
        return
    if sampling.greedy:
        why = "all answers of a group are identical, so their advantages are 0"
        yield "rollout.sampling.greedy", why
    for name in ("top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens"):
        if any(set_keys(sampling, name)):
            why = "tokens are sampled from a different distribution than the one that is trained"
            if plan.old_logprobs in ("behavior", "interpolated"):
                why += f", and with algorithm.old_logprobs={plan.old_logprobs} ratios compare the two"
            yield f"rollout.sampling.{name}", why
            return


def _suspicious_batches(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    prompts = config.rollout.prompts_per_round
    for key, train in available.train_sections(config, plan):
        few, more = divmod(prompts, train.steps_per_pass)
        if more and key != "reference.train":
            why = f"{prompts} prompts in {train.steps_per_pass} mini-batches: some have {few} prompts"
            yield f"{key}.steps_per_pass", f"{why} and some {few + 1}"
    if plan.round_bytes is not None:
        (least, most), memory = plan.round_bytes, memory_bytes()
        if least > memory / 4 or most > memory:
            yield (
                "rollout.prompts_per_round",
                f"a round of {plan.trajectories_per_round:,} trajectories takes {least / 2**30:.3g} to "
                f"{most / 2**30:.3g} GiB of memory, and this machine has {memory / 2**30:.3g} GiB; smaller "
                "rounds learn from newer answers",
            )
    if plan.old_logprobs == "current" and (steps := plan.steps_per_round) > 1:
        why = f"with current all ratios are 1, so there is no clipping over the {steps} steps of a round"
        yield "algorithm.old_logprobs", why
    if plan.num_prompts is not None and 0 < plan.num_prompts < prompts:
        why = f"there are only {plan.num_prompts}, so prompts repeat within a round"
        yield "rollout.prompts_per_round", f"a round takes {prompts} prompts, but {why}"


def _suspicious_schedule(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    key, sft = "optimizer.schedule.warmup_steps", config.sft
    warmup = config.train.optimizer.schedule.warmup_steps
    if (
        plan.verb == "train"
        and plan.planned_steps is not None
        and warmup >= (steps := plan.num_schedule_steps)
    ):
        yield f"train.{key}", f"the run ends after {steps} steps, before the warm-up of {warmup} steps"
    steps = plan.sft_steps
    if plan.verb != "eval" and sft and steps and sft.optimizer.schedule.warmup_steps >= steps:
        yield f"sft.{key}", f"supervised fine-tuning ends after {steps} steps, before its warm-up"
    for key, value in (("train.autocast", config.train.autocast), ("model.dtype", config.model.dtype)):
        if value == "fp16" and config.train.grad_scaler is None:
            yield key, f"small gradients underflow in fp16; set train.grad_scaler={{}}, or {key}=bf16"
    if config.run.max_restarts and plan.verb != "eval" and not config.checkpoint.every_rounds:
        why = "no checkpoints are saved, so a restart starts from scratch; set checkpoint.every_rounds"
        yield "run.max_restarts", why


def _suspicious_placement(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    layout = plan.layout
    if layout.mode == "in_process":
        return
    used = {device for role in layout.roles for device in role.devices}
    placed = parse_placement(config.cluster.placement, layout.num_nodes * layout.devices_per_node)
    for role, devices in placed.items():
        if layout.role(role) is None and devices is not None and not used.issuperset(devices.numbers):
            where = "; it runs with rollout" if role in ("reward", "env") else " in this run"
            unused = f"devices {format_numbers(devices.numbers)} are unused"
            yield "cluster.placement", f"{role} has no separate workers{where}, so {unused}"
    policy, rollout = layout.role("policy"), layout.role("rollout")
    for role_layout in (policy, layout.role("critic")):
        if role_layout is not None:
            yield from _suspicious_ranks(config, role_layout)
    shared = set(policy.devices) & set(rollout.devices) if policy and rollout else set()
    if layout.has_gpus and shared and policy and not policy.offload:
        yield (
            "train.offload",
            "policy and rollout share GPUs, but the policy's weights and optimizer stay there during "
            "rollout; if memory is short, set train.offload={weights: true, gradients: true, optimizer: "
            "true}",
        )


def _suspicious_ranks(config: RunConfig, role_layout: RoleLayout) -> Iterator[Finding]:
    role = cast("TrainingRole", role_layout.role)
    train = train_config(config, role)
    num_ranks = len(role_layout.workers) // copy_devices(train)
    rows = math.ceil(config.rollout.prompts_per_round / train.steps_per_pass) * config.rollout.group_size
    if rows < num_ranks:
        yield (
            f"{section_of(config, role)}.steps_per_pass",
            f"a step has {rows} rows for the {num_ranks} data-parallel ranks of the {role}, so some ranks "
            "are idle; lower it, or use fewer devices for the role",
        )
    for name in ("tensor", "sequence", "context"):
        if any(
            len({role_layout.workers[rank].node for rank in group}) > 1
            for group in role_layout.groups.get(name, ())
        ):
            why = (
                f"{name}-parallel ranks of the {role} communicate in every layer, but are on different "
                "machines"
            )
            yield "cluster.placement", why


def _without_effect(config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Keys with a non-default value that are unused in this run."""
    for key, why in unused_keys(config, plan).items():
        if why != ONLY_EVALUATES:  # obvious, so no warning
            for set_key in set_keys(config, key):
                yield set_key, f"has no effect: {why}"


_WARNINGS: tuple[_Check, ...] = (
    _suspicious_sampling,
    _suspicious_batches,
    _suspicious_schedule,
    _suspicious_placement,
    advantages.advantage_warnings,
    _without_effect,
)
