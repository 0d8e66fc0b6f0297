"""One agent's conversation in an episode: tokens of messages and of the policy's turns, recorded as segments.

In a later turn the policy reads exactly the tokens that it read and wrote before, followed by the new
messages. Where the template drops the reasoning of earlier turns (`env.thinking=as_template`), a new segment
begins instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from braid.errors import EngineError
from braid.models.chat import Answer, ChatFormat, ToolSchema
from braid.types import Action, Key, Message, Placed, Prompt, Segment, Trajectory, Turn

from .engine import Request, RolloutEngine, Sampling


class Conversation:
    """Samples the turns of `agent` and records them in `trajectory`."""

    def __init__(
        self,
        engine: RolloutEngine,
        chat: ChatFormat,
        trajectory: Trajectory,
        *,
        key: Key,
        agent: str = "main",
        number: int = 0,
        is_trained: bool = True,
    ) -> None:
        """`key` seeds the random numbers of its turns, together with the agent, the `number` of its
        conversation, and that of the turn."""
        self._engine, self._chat, self._trajectory, self._key = engine, chat, trajectory, key
        self._agent, self._is_trained = agent, is_trained
        name = f"{agent}/{number}" if number else agent
        self._name = () if name == "main" else tuple(name.encode())
        self._num_turns = 0
        self.segments: list[Segment] = []
        self._segment: Segment | None = None
        self._history: list[int] = []
        self._images: tuple[Placed, ...] = ()
        self.unread: list[int] = []
        """Tokens that the next turn reads and no earlier one did."""
        self._unread_images: tuple[Placed, ...] = ()
        self._messages: list[Message] = []
        self._answers: list[Answer] = []
        self._tools: tuple[ToolSchema, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the next turn reads."""
        return len(self._history) + len(self.unread)

    def open(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], prompt: Prompt | None = None
    ) -> None:
        """Start with `messages`, whose tokens are those of `prompt`, if known."""
        self._messages, self._tools = list(messages), tuple(tools)
        if prompt is not None and prompt.token_ids:
            self.unread, self._unread_images = list(prompt.token_ids), prompt.images
        else:
            self._read(self._chat.opening(messages, tools), messages)

    def _read(self, ids: list[int], messages: Sequence[Message]) -> None:
        """Have the next turn read the tokens of messages."""
        self.unread, self._unread_images = self._chat.expand(ids, messages)

    def read(self, messages: Sequence[Message]) -> None:
        """Append messages after the policy's turn."""
        assert self._segment is not None, "the policy has not answered yet"
        last = self._segment.turns[-1].output_ids
        self._answers.append(Answer(last, tuple(messages)))
        if self._chat.thinking == "keep" or self._chat.replies_are_text:
            self._read(self._chat.delta(messages, self._tools, last), messages)
            if self._chat.replies_are_text and self._chat.is_end(last[-1]):
                del self._history[-1]
                images = (*self._images, *_moved(self._unread_images, len(self._history)))
                self._restart([*self._history, *self.unread], images)
            return
        said = [*self._messages, *(message for answer in self._answers for message in answer.replies)]
        ids = self._chat.conversation(self._messages, self._answers, self._tools)
        ids, images = self._chat.expand(ids, said)
        known = len(self._history)
        if ids[:known] == self._history:
            new = (one for one in images if one.start >= known)
            self.unread, self._unread_images = ids[known:], _moved(new, -known)
        else:
            self._restart(ids, images)

    def _restart(self, ids: list[int], images: tuple[Placed, ...]) -> None:
        """Begin a new segment with these tokens."""
        self._segment, self._history, self._images = None, [], ()
        self.unread, self._unread_images = ids, images

    def restart(self, messages: Sequence[Message]) -> None:
        """Begin a new segment, in which the policy reads only `messages`."""
        self._restart([], ())
        self._answers = []
        self.open(messages, self._tools)

    async def turn(self, sampling: Sampling, max_tokens: int) -> tuple[Turn, Action] | None:
        """Sample a turn; None if `max_tokens` of context and turn leave no room for one. Raises
        EngineError."""
        room = max_tokens - self.num_tokens
        if room < 1:
            return None
        number, self._num_turns = self._num_turns, self._num_turns + 1
        self._images += _moved(self._unread_images, len(self._history))
        self._history += self.unread
        key, name = (*self._key, number, *self._name), (*self._key, *self._name)
        request = Request(tuple(self._history), sampling.within(room), key, name, self._images)
        completion = await self._engine.generate(request)
        if completion.stop_reason == "cancelled":
            raise EngineError("the request was cancelled")
        if not (ids := completion.token_ids):
            raise EngineError("the completion has no tokens")
        turn = completion.turn(self.unread, self._unread_images)
        if self._segment is None:
            self._segment = Segment(agent=self._agent, is_trained=self._is_trained)
            self._trajectory.segments.append(self._segment)
            self.segments.append(self._segment)
        self._segment.turns.append(turn)
        self._history += ids
        self.unread, self._unread_images = [], ()
        calls = (f"call{number:03}{i:02}" for i in range(100))
        action = self._chat.parse(
            ids,
            self._tools,
            context_ids=request.prompt_ids,
            stop_reason=completion.stop_reason,
            new_id=lambda: next(calls),
        )
        self._trajectory.set_last_turn(action)
        return turn, action


def _moved(images: Iterable[Placed], by: int) -> tuple[Placed, ...]:
    """Images at other positions."""
    return tuple(one._replace(start=one.start + by) for one in images)
