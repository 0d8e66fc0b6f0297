"""What a run with text reads before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from braid.config.load import Loaded
from braid.config.rollout import GymnasiumEnv
from braid.config.schema import RunConfig
from braid.data.prompts import PromptSet, load_prompts
from braid.data.sampler import PromptSampler
from braid.data.worked import Example, load_examples
from braid.errors import ConfigError, Problem
from braid.models.tokenizer import load_tokenizer
from braid.plan import Verb
from braid.plan.rewards import source_problems
from braid.rollout.collector import Use
from braid.types import Prompt


@dataclass(frozen=True, slots=True)
class TextInputs:
    """The tokenizer and all data."""

    tokenizer: PreTrainedTokenizerBase
    train: PromptSet
    eval: PromptSet
    examples: list[Example]

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids to text, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def prompts(self) -> dict[Use, list[Prompt]]:
        """Those of each use, in the order in which they are numbered."""
        in_order = [prompt for of in self.eval.by_source().values() for prompt in of]
        return {"train": self.train.prompts, "eval": in_order}


def read_inputs(loaded: Loaded, verb: Verb) -> TextInputs | None:
    """Tokenizer and data of a run with text; None for simulators. Raises ModelError and DataError."""
    config, base_dir = loaded.config, loaded.base_dir
    if isinstance(config.env, GymnasiumEnv):
        return None
    tokenizer, data = load_tokenizer(config.model), config.data
    train = data.train if verb == "train" else ()
    examples = config.sft.data if config.sft is not None and verb != "eval" else ()
    return TextInputs(
        tokenizer,
        load_prompts(train, data, tokenizer, base_dir=base_dir, role="train"),
        load_prompts(data.eval, data, tokenizer, base_dir=base_dir, role="eval"),
        load_examples(examples, data, tokenizer, base_dir=base_dir),
    )


def check_sources(loaded: Loaded, inputs: TextInputs) -> None:
    """Raise ConfigError when the sources that reward parts name are not those of the data, now that all of it is read."""
    known = {prompt.source for prompt in (*inputs.train.prompts, *inputs.eval.prompts)}
    if found := list(source_problems(loaded.config.reward.parts, known)):
        raise ConfigError([loaded.placed(Problem(key, message)) for key, message in found])


def prompt_sampler(config: RunConfig, num_prompts: int) -> PromptSampler:
    """The order in which so many prompts are taken."""
    seed = config.run.seed if config.data.seed is None else config.data.seed
    return PromptSampler(num_prompts, seed=seed, shuffle=config.data.shuffle)
