"""Models and engine access for reward parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from braid.config.schema import RunConfig
from braid.errors import EngineError, ModelError, RewardError
from braid.images import plain_content, shown_content
from braid.models.chat import ChatFormat
from braid.models.sequence_classifier import load_classifier
from braid.models.vision import Vision
from braid.rewards.base import Services
from braid.rollout.engine import Request, RolloutEngine, Sampling
from braid.types import Message, Placed, images_in
from braid.users import encodable

from .inputs import TextInputs
from .judges import judge_tokenizer
from .keys import JUDGE_KEY


def reward_services(
    config: RunConfig,
    engine: RolloutEngine,
    inputs: TextInputs,
    device: torch.device,
    judges: Mapping[int, RolloutEngine],
) -> Services:
    """Load the reward models of the config, and provide the policy as a judge, and judges with the engines
    `judges` of their own, by the number of the part."""
    classifiers = {
        i: load_classifier(part, device=device, key=f"reward.parts[{i}]")
        for i, part in config.reward.models()
    }
    seed = config.run.seed
    policy = EngineJudge(engine, inputs.tokenizer, inputs.end_token_ids, seed=seed, vision=inputs.vision)
    parts = dict(config.reward.judges())
    of_judges = {
        i: EngineJudge(judge, *judge_tokenizer(parts[i], f"reward.parts[{i}]"), seed=seed)
        for i, judge in judges.items()
    }
    return Services(classifiers, policy, inputs.vision and inputs.vision.scaled_size, of_judges)


class EngineJudge:
    """A model on an engine as a judge, with the chat template if its tokenizer has one; see
    rewards.base.Generate."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: tuple[int, ...],
        *,
        seed: int,
        vision: Vision | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._ends, self._seed = engine, tokenizer, end_token_ids, seed
        self._vision = vision
        self._chat = ChatFormat(tokenizer, end_token_ids=end_token_ids)

    async def __call__(
        self,
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        key: tuple[int, ...],
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> str:
        sampling = Sampling(
            max_new_tokens=max_tokens,
            temperature=temperature or 1.0,
            greedy=temperature == 0,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=self._ends,
        )
        ids, images = self._prompt(messages)
        request = Request(ids, sampling, (self._seed, JUDGE_KEY, *key), images=images)
        try:
            completion = await self._engine.generate(request)
        except EngineError as error:
            raise RewardError(f"engine: {error}") from error
        if completion.stop_reason == "length":
            raise RewardError("the judge's reply was truncated; raise max_tokens of this reward part")
        return self._chat.parse(completion.token_ids, context_ids=request.prompt_ids).text

    def _prompt(self, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[Placed, ...]]:
        """Token ids of the messages, and where their images are. Without a chat template they are joined as
        plain text, separated by empty lines."""
        has_template = bool(self._tokenizer.chat_template)
        mark = "" if self._vision is None else self._vision.mark
        text = "\n\n".join(plain_content(message["content"], mark) for message in messages)
        if has_template:
            try:
                conversation: Any = [{**m, "content": shown_content(m["content"])} for m in messages]
                text = str(
                    self._tokenizer.apply_chat_template(
                        conversation, tokenize=False, add_generation_prompt=True
                    )
                )
            except (jinja2.TemplateError, TypeError, ValueError) as error:
                raise RewardError(
                    f"the chat template of the judge's model rejects its messages: {error}", is_final=True
                ) from error
        ids: Any = self._tokenizer(encodable(text), add_special_tokens=not has_template, verbose=False)[
            "input_ids"
        ]
        if self._vision is None:
            return tuple(ids), ()
        try:
            ids, images = self._vision.expand(ids, images_in(messages))
        except ModelError as error:
            raise RewardError(f"the judge's messages: {error}", is_final=True) from error
        return tuple(ids), images
