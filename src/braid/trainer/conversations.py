"""The format of the policy's conversations with a text environment."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from braid.config.schema import RunConfig
from braid.models.chat import ChatFormat
from braid.models.vision import Vision


def chat_format(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int],
    vision: Vision | None = None,
) -> ChatFormat:
    """The format of the policy's conversations. Raises ModelError if its chat template cannot be
    continued."""
    env, data = config.text_env, config.data
    chat = ChatFormat(
        tokenizer,
        end_token_ids=end_token_ids,
        use_template=data.use_chat_template != "never",
        template_kwargs=data.chat_template_kwargs,
        vision=vision,
        **env.chat_options(),
    )
    env.check_chat(chat)
    return chat
