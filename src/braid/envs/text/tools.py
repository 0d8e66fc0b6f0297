"""The tool environment: the policy calls tools by writing a tag.

    policy       <calc>12*7</calc>
    environment  <out>84</out>
    policy       A:84

A turn ends at the closing tag, and the tool's output is appended inline as environment tokens. A turn without a call
is the final answer and ends the conversation.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping

from braid.errors import EnvError
from braid.types import Prompt

from .base import Reply

Tool = Callable[[str], Awaitable[str]]
"""Maps the text between the tags to the tool's output. Mistakes of the policy are answered with text; an
exception is a failure of the environment."""


class ToolConversation:
    """Answers tool calls until a turn has none. See base.TextEnv.

    A call in turn `max_turns` is not answered: the trajectory is truncated. If a tool raises, or takes longer
    than `timeout_s`, `reply` raises EnvError.
    """

    def __init__(self, tools: Mapping[str, Tool], *, max_turns: int, timeout_s: float) -> None:
        """`tools` by tag."""
        self._tools, self._max_turns, self._timeout_s = tools, max_turns, timeout_s
        self._num_turns = 0
        tags = "|".join(re.escape(tag) for tag in tools)
        self._call = re.compile(rf"<({tags})>(.*?)</\1>", re.DOTALL)
        self.stop_strings = tuple(f"</{tag}>" for tag in tools)

    async def start(self, prompt: Prompt) -> None:
        """Do nothing."""

    async def reply(self, text: str) -> Reply:
        self._num_turns += 1
        call = self._call.search(text)
        if call is None:
            return Reply(is_done=True)
        if self._num_turns >= self._max_turns:
            return Reply(is_truncated=True)
        start_s = time.perf_counter()
        tag, argument = call.groups()
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._tools[tag](argument)
        except TimeoutError as error:
            raise EnvError(f"tool {tag!r} timed out after {self._timeout_s:g} s on {argument!r}") from error
        except Exception as error:
            raise EnvError(f"tool {tag!r} raised {type(error).__name__}: {error} on {argument!r}") from error
        return Reply(f"<out>{answer}</out>", tool_s=time.perf_counter() - start_s)
