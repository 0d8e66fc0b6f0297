"""The inputs of a text run, read before anything is built: tokenizer and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from braid.config.data import covers
from braid.config.load import Loaded
from braid.config.schema import RunConfig
from braid.data.pairs import NO_PAIRS, PairFormat, PairSet, load_pairs
from braid.data.prompts import NOTHING, Prompts, PromptSet, load_prompts
from braid.data.sampler import MixedSampler, PromptSampler
from braid.data.worked import NO_EXAMPLES, ExampleRules, ExampleSet, load_examples
from braid.envs.simulators.base import reset_prompts
from braid.errors import ConfigError, Problem, suggest
from braid.models.tokenizer import end_token_ids, load_tokenizer, whole_text
from braid.models.vision import Vision, load_vision
from braid.plan import Plan, Verb, policy_size, row_limit, with_examples, with_pairs, with_prompts
from braid.plan.rewards import mix_problems, source_problems, weight_problems
from braid.rollout.collector import Use
from braid.types import Prompt

from .conversations import chat_format


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The tokenizer and all data."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    eval: PromptSet
    examples: ExampleSet
    end_token_ids: tuple[int, ...]
    """Ids of all tokens that end an answer."""
    vision: Vision | None = None
    """How the model reads images; None if it reads only text."""
    pairs: PairSet = NO_PAIRS
    """Preference pairs to train on."""
    held_out: PairSet = NO_PAIRS
    """Preference pairs of evaluations."""
    held_out_examples: ExampleSet = NO_EXAMPLES
    """Supervised examples of evaluations."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text, with special tokens."""
        return whole_text(self.tokenizer, ids)

    @property
    def prompts(self) -> dict[Use, Sequence[Prompt]]:
        """Prompts by use, in the order of their indices."""
        places = np.concatenate([NOTHING, *self.eval.prompts.places_by_source().values()])
        return {"train": self.train.prompts, "eval": self.eval.prompts.chosen(places)}


def read_inputs(loaded: Loaded, verb: Verb) -> TextInputs | None:
    """Read the tokenizer and data of a text run; None for simulators. Raises ModelError and DataError."""
    config, base_dir = loaded.config, loaded.base_dir
    if config.env.is_simulator:
        return None
    tokenizer, data = load_tokenizer(config.model), config.data
    ends, vision = end_token_ids(config.model, tokenizer), load_vision(config.model, data.image, tokenizer)
    train = data.train if verb == "train" else ()
    size = policy_size(config)
    prompts: dict[Use, PromptSet] = {
        "train": load_prompts(train, data, tokenizer, base_dir=base_dir, role="train", vision=vision),
        "eval": load_prompts(data.eval, data, tokenizer, base_dir=base_dir, role="eval", vision=vision),
    }
    if config.makes_tasks:
        for use in prompts:
            tasks = config.text_env.own_tasks(use)
            prompts[use] = PromptSet(Prompts([reset_prompts(kind, num) for kind, num in tasks.items()]), {})
    conversation = chat_format(config, tokenizer, ends, vision).examples
    examples, held_out_examples, pairs, held_out = NO_EXAMPLES, NO_EXAMPLES, NO_PAIRS, NO_PAIRS
    if verb != "eval" and (sft := config.sft) is not None:
        rules = ExampleRules(
            max_tokens=row_limit(sft.max_tokens, size), overlong=sft.overlong, train_on=sft.train_on
        )
        load = partial(
            load_examples,
            config=data,
            tokenizer=tokenizer,
            base_dir=base_dir,
            conversation=conversation,
            end_token_ids=ends,
            vision=vision,
        )
        examples = load(sft.data, rules=rules)
        held_out_examples = load(
            sft.eval_data if verb == "sft" else (), rules=replace(rules, key="sft.eval_data")
        )
    if verb == "prefer" and (prefer := config.prefer) is not None:
        pair_format = PairFormat(
            data,
            tokenizer,
            base_dir,
            ends,
            conversation,
            vision,
            max_tokens=row_limit(prefer.max_tokens, size),
            is_scored=prefer.loss.trains_reward_model,
        )
        pairs = load_pairs(prefer.data, pair_format, key="prefer.data")
        held_out = load_pairs(prefer.eval_data, pair_format, key="prefer.eval_data")
    return TextInputs(
        tokenizer,
        prompts["train"],
        prompts["eval"],
        examples,
        ends,
        vision,
        pairs,
        held_out,
        held_out_examples,
    )


def planned(loaded: Loaded, plan: Plan, inputs: TextInputs | None) -> Plan:
    """The `plan` with the numbers that follow from the data of a text run. Raises ConfigError."""
    config = loaded.config
    if inputs is None:
        return plan
    if plan.verb == "train":
        plan = with_prompts(plan, config, len(inputs.train.prompts), loaded.origin)
    if plan.verb == "prefer":
        plan = with_pairs(plan, config, len(inputs.pairs.pairs))
    if config.sft is not None and plan.verb != "eval":
        num_examples = example_sampler(config, inputs.examples).num_prompts
        plan = with_examples(plan, config, num_examples, loaded.origin)
    return plan


def check_sources(loaded: Loaded, inputs: TextInputs) -> None:
    """Raise ConfigError if reward parts or data.mix name sources that the data does not have. Needs all data
    to have been read."""
    trained, evaluated = (set(split.prompts.sources) for split in (inputs.train, inputs.eval))
    data = loaded.config.data
    by_row = any(source.source_key is not None for source in (*data.train, *data.eval))
    problems = [
        *source_problems(loaded.config.reward.parts, trained, evaluated, data.mix, by_row=by_row),
        *mix_problems("data.mix", data.mix, trained),
        *weight_problems(loaded.config, trained | evaluated),
        *teacher_problems(loaded.config, trained),
    ]
    env = loaded.config.env
    if env.mixture:
        prompts = (inputs.train.prompts + inputs.eval.prompts).untokenized(messages=False)
        kinds = {env.kind_of_task(prompt) for prompt in prompts}
        if unknown := sorted(kinds - set(env.mixture)):
            why = f"the data has prompts for the environment {unknown[0]!r}, which is not in env.mix"
            problems.append(("env.mix", f"{why} ({', '.join(env.mixture)})"))
    if problems:
        raise ConfigError([loaded.placed(Problem(key, message)) for key, message in problems])


def teacher_problems(config: RunConfig, trained: set[str]) -> Iterator[tuple[str, str]]:
    """Sources to train on without a teacher, and teachers of sources that the data does not have."""
    teachers = config.reference.teachers if config.algorithm.kl_coef != 0 else ()
    taught = [source for teacher in teachers for source in teacher.sources]
    if teachers and (alone := sorted(trained - set(taught))):
        why = f"no teacher for rows of the source {alone[0]!r}"
        yield "reference.teachers", f"{why}; add it to the sources of one of them"
    for i, teacher in enumerate(teachers):
        for source in teacher.sources:
            if source not in trained:
                known = f"; the sources to train on are {', '.join(sorted(trained))}"
                why = f"data.train has no source {source!r}{suggest(source, sorted(trained))}"
                yield f"reference.teachers[{i}].sources", why + known


def example_sampler(config: RunConfig, examples: ExampleSet) -> PromptSampler:
    """The order in which supervised examples are trained, by the shares of sft.mix if set."""
    sft, seed = config.sft, config.run.seed
    assert sft is not None, "there are examples"
    sizes = {name: len(of_source) for name, of_source in examples.by_source.items()}
    if not sft.mix:
        return PromptSampler(sum(sizes.values()), seed=seed, shuffle=sft.shuffle)
    ends = np.cumsum([0, *sizes.values()])
    places = {name: np.arange(*ends[i : i + 2]) for i, name in enumerate(sizes)}
    mixed = {name for entry in sft.mix for name in entry.sources}
    groups = [
        (
            np.concatenate([places[name] for name in sizes if covers(entry.sources, mixed, name)]),
            entry.share,
        )
        for entry in sft.mix
        if entry.share
    ]
    return MixedSampler(groups, seed=seed, shuffle=sft.shuffle)


def prompt_sampler(config: RunConfig, num_prompts: int, prompts: Prompts | None = None) -> PromptSampler:
    """The sampling order of `num_prompts` prompts, by the shares of data.mix if set."""
    seed = config.run.seed if config.data.seed is None else config.data.seed
    mix = [(entry.sources, entry.share) for entry in config.data.mix]
    if config.makes_tasks:
        mix = [((kind,), mixed.share) for kind, mixed in config.env.mixture.items()]
    if not mix or not prompts:
        return PromptSampler(num_prompts, seed=seed, shuffle=config.data.shuffle)
    named = {name for sources, _ in mix for name in sources}
    groups = [(np.flatnonzero(prompts.are_covered(sources, named)), share) for sources, share in mix]
    return MixedSampler(groups, seed=seed, shuffle=config.data.shuffle)
