"""Chat formats: from messages to tokens by a chat template, and from sampled tokens to actions.

Tokens that the policy sampled are never tokenised again. New messages are appended to them as a *delta*: the
template renders a conversation whose last answer is a sentinel, and the delta is what follows the sentinel.
Text in messages cannot forge control tokens: occurrences of the tokenizer's added tokens in them are encoded
as ordinary text.
"""

from __future__ import annotations

import logging
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from braid.errors import ModelError
from braid.images import plain_content
from braid.reasoning import OF_MODELS
from braid.types import Action, Message, Placed, StopReason, ToolCall, images_in
from braid.users import encodable

from .tokenizer import leading_tokens, whole_text
from .tool_calls import ToolFormat, ToolSchema, detect_format, parse_calls
from .vision import Vision

logger = logging.getLogger(__name__)

Thinking = Literal["keep", "as_template"]
_SENTINEL, _REASON = "@@answer {}@@", "@@reason {}@@"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Keys of messages under which templates read reasoning; gpt-oss's reads the last."""
_PREFILL_TOKENS = 64
"""The prefilled part of a turn is found within as many tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A past turn of the policy: its sampled tokens, and which messages followed it."""

    output_ids: Sequence[int]
    replies: Sequence[Message]


class ChatFormat:
    """The format of one model's conversations."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        end_token_ids: Sequence[int],
        use_template: bool = True,
        tool_format: ToolFormat | None = None,
        thinking: Thinking = "keep",
        replies: Literal["messages", "text"] = "messages",
        template_kwargs: Mapping[str, Any] | None = None,
        vision: Vision | None = None,
    ) -> None:
        """Without `use_template`, or a template of the tokenizer, messages are texts without roles, and
        results of tools are in a tag. `tool_format` None: that of the template. `thinking`: keep that of
        earlier turns, or do as the template does. `replies` to the policy: messages, or text within its
        answer. `vision` places images; None if the model reads only text."""
        template: Any = tokenizer.chat_template if use_template else None
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        self.tokenizer, self._ends = tokenizer, tuple(end_token_ids)
        self._template: str = template or ""
        self._vision = vision
        self.is_plain = not template
        self._tool_format: ToolFormat | None = tool_format or detect_format(template)
        self.thinking: Thinking = thinking
        self.replies_are_text = replies == "text"
        self._kwargs = dict(template_kwargs or {})
        added = sorted(
            (str(token) for token in tokenizer.added_tokens_decoder.values()), key=len, reverse=True
        )
        self._added = "|".join(re.escape(token) for token in added if len(token) > 1) or r"(?!)"
        self._forged = re.compile(rf"(?=(?:{self._added}))(.)", re.DOTALL)
        markers = (pair for pair in OF_MODELS if pair[0] in self._template)
        self._reasoning = start, end = next(markers, OF_MODELS[-1])
        keys = (key for key in _REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", self._template))
        self._reasoning_key = next(keys, _REASONING_KEYS[0])
        self._has_channels = "<|channel|>" in self._template or self._tool_format == "harmony"
        # the user's own prompt may end with "<think></think>", as an example
        closed = "" if self.is_plain else rf"(?:{re.escape(end)}\s*)?"
        self._prefilled = re.compile(rf"(?:{re.escape(start)}\s*{closed}|<\|channel\|>\w+<\|message\|>)\Z")

        @lru_cache(maxsize=256)  # the trajectories of a group open alike, and games have few replies
        def encoded(text: str) -> list[int]:
            parts = (part for part in encodable(text).split(_MARK) if part)
            ids = [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]
            if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the tokenizer lacks characters of a message (for a model built from scratch, add them "
                    "to model.build.characters or words): %.200r",
                    text.replace(_MARK, ""),
                )
            return ids

        self._encoded, self._has_warned = encoded, False

    def expand(
        self, ids: list[int], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[list[int], tuple[Placed, ...]]:
        """The tokens `ids` of `messages`, with those that stand for their images in place of one
        placeholder each; and where these are. Raises ModelError if the model reads only text, or the template
        does not show an image."""
        images = images_in(messages)
        if self._vision is not None:
            return self._vision.expand(ids, images)
        if images:
            raise ModelError("a message has an image, but the model reads only text; set model.vision")
        return ids, ()

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Tokens of a conversation, up to the start of the policy's answer. Each image is a placeholder, as
        in all tokens of messages here; see `expand`."""
        start = leading_tokens(self.tokenizer) if self.is_plain else []
        return start + self._encode(self._render(messages, tools))

    def delta(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], last_ids: Sequence[int]
    ) -> list[int]:
        """Tokens from the end of the policy's turn `last_ids` to the start of its next one, with `messages`
        between them. Begins with the template's end of a turn, unless the turn ends with an end token."""
        if self.replies_are_text:
            return self._encode(
                "".join(self._plain(self._marked(message["content"])) for message in messages)
            )
        closing, tail = self._tail(messages, tools)
        text = closing + tail
        if last_ids[-1] not in self._ends:
            return self._encode(text)
        last = self._text([last_ids[-1]])
        if text.startswith(last):
            return self._encode(text.removeprefix(last))
        if self._closes_turns and (end := re.match(rf"\s*(?:{self._added})", text)):
            return self._encode(text[end.end() :])  # the policy's end token is in its place
        return self._encode(text)

    def is_end(self, token_id: int) -> bool:
        """Whether the token ends a turn."""
        return token_id in self._ends

    def conversation(
        self, messages: Sequence[Message], answers: Sequence[Answer], tools: Sequence[ToolSchema]
    ) -> list[int]:
        """Tokens of a whole conversation as the template renders it, which may drop the reasoning of earlier
        turns. Of the policy's turns, the sampled tokens are kept."""
        chat: list[dict[str, Any]] = [dict(message) for message in messages]
        sampled: dict[str, Sequence[int]] = {}
        for i, answer in enumerate(answers):
            reasoning, content = self._split_reasoning(answer.output_ids)
            turn: dict[str, Any] = {"role": "assistant", "content": _SENTINEL.format(i)}
            sampled[_SENTINEL.format(i)] = content
            if reasoning:
                turn["reasoning_content"] = _REASON.format(i)
                sampled[_REASON.format(i)] = reasoning
            chat += [turn, *(dict(message) for message in answer.replies)]
        text = self._render(chat, tools)
        for i in range(len(answers)):
            if _REASON.format(i) in text:  # kept: the turn is as it was sampled
                before, after = text.split(_REASON.format(i))
                start = before.rindex(self._thinking_start)
                text = before[:start] + _SENTINEL.format(i) + after.split(_SENTINEL.format(i), 1)[1]
                sampled[_SENTINEL.format(i)] = [
                    *sampled[_REASON.format(i)],
                    *sampled[_SENTINEL.format(i)],
                ]
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, sampled)) + ")", text):
            ids += sampled[part] if part in sampled else self._encode(part)
        return ids

    def examples(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema] = ()
    ) -> list[tuple[list[int], list[int], list[bool], tuple[Placed, ...]]]:
        """A conversation to imitate, with answers of the role `assistant`: tokens of the prompt, those after
        it, which of these the policy writes (not those of answers whose `weight` is 0), and the images in
        all of these tokens. Another example begins where a new segment would in an episode, when the template
        drops the reasoning of earlier turns. Raises ModelError if the template does not show an answer where
        the policy would write it."""
        imitated = [message.get("weight") != 0 for message in messages]
        messages = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        first: Any = messages[: answers[0]]
        prompt, images = self.expand(self.opening(first, tools), first)
        ids, mask, past = list[int](), list[bool](), list[Answer]()
        examples = list[tuple[list[int], list[int], list[bool], tuple[Placed, ...]]]()
        for i, following in zip(answers, [*answers[1:], len(messages)], strict=True):
            replies: Any = messages[i + 1 : following]
            written = self._written(messages[: i + 1], replies, tools)
            ids += written
            mask += [imitated[i]] * len(written)
            if following == len(messages):
                break
            past.append(Answer(written, replies))
            if self.thinking == "keep" or self.replies_are_text:
                read, new = self.expand(self.delta(replies, tools, written), replies)
                start = len(prompt) + len(ids)
                images += tuple(one._replace(start=one.start + start) for one in new)
            else:
                shown = [*first, *(message for answer in past for message in answer.replies)]
                whole, of_whole = self.expand(self.conversation(first, past, tools), shown)
                history = [*prompt, *ids]
                if whole[: len(history)] != history:
                    examples.append((prompt, ids, mask, images))
                    prompt, ids, mask, images = whole, [], [], of_whole
                    continue
                read, images = whole[len(history) :], of_whole
            ids += read
            mask += [False] * len(read)
        return [example for example in (*examples, (prompt, ids, mask, images)) if any(example[2])]

    def _written(
        self, messages: Sequence[Mapping[str, Any]], replies: Sequence[Any], tools: Sequence[ToolSchema]
    ) -> list[int]:
        """Tokens of the last message as the policy would write it, with its end."""
        before = self._render(messages[:-1], tools, imitates=True)
        text = self._render(messages, tools, asks=False, imitates=True)
        if not text.startswith(before):
            raise ModelError(
                "the chat template does not continue its start of an answer with this one; if it starts "
                "answers with <think>, give the answer a reasoning_content"
            )
        text = text[len(before) :]
        if self.is_plain and replies and text.endswith(self.stop_strings(tools) or ("\0",)):
            return self._encode(text)
        ends = [end for token in self._ends if (end := self._text([token]))] or ["\0"]
        last = list(re.finditer(rf"(?:(?:{'|'.join(map(re.escape, ends))})\s*)+", text))[-1:]
        # The first of those in a row: some templates write the end of the text after that of the turn.
        if last:
            first = next(end for end in sorted(ends, key=len, reverse=True) if last[0][0].startswith(end))
            return self._encode(text[: last[0].start() + len(first)])
        tail = self._tail(replies, tools)[1] if replies else ""
        marker = next(
            (token for token in self._ends if tail.startswith(self._text([token]) or "\0")), self._ends[0]
        )
        return [*self._encode(text), marker]

    def stop_strings(self, tools: Sequence[ToolSchema]) -> tuple[str, ...]:
        """Strings that end a turn where no token does: the ends of the tags that call a tool."""
        names = (tool["function"]["name"] for tool in tools if self._tool_format == "tag")
        return tuple(f"</{name}>" for name in names)

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[ToolSchema] = (),
        *,
        context_ids: Sequence[int] | None = None,
        stop_reason: StopReason = "stop",
        new_id: Callable[[], str] = lambda: "call",
    ) -> Action:
        """The policy's turn as environments and rewards see it. `context_ids` were read before it (None: they
        end as the template starts an answer). `new_id` makes the ids of tool calls."""
        num = len(ids)
        while num and ids[num - 1] in self._ends:
            num -= 1
        prefill = self._usual_prefill if context_ids is None else self.prefill(context_ids)
        return self._parsed(self._text(ids[:num]), prefill, tools, stop_reason, new_id)

    def _parsed(
        self,
        raw: str,
        prefill: str,
        tools: Sequence[ToolSchema],
        stop_reason: StopReason,
        new_id: Callable[[], str],
    ) -> Action:
        answer, reasoning, to_tools = self._split(prefill + raw)
        calls: tuple[ToolCall, ...] = ()
        if self._tool_format == "harmony":
            parsed = (parse_calls(message, tools, self._tool_format, new_id)[1] for message in to_tools)
            calls = tuple(call for calls in parsed for call in calls)
        elif self._tool_format is not None:
            answer, calls = parse_calls(answer, tools, self._tool_format, new_id)
        return Action(self._around_answer.sub("", answer), reasoning, calls, stop_reason, raw, prefill)

    def example_turn(self, answer: str, context_ids: Sequence[int]) -> Action:
        """A turn with this answer, after some reasoning if the model's format has it."""
        (start, end), prefill = self._reasoning, self.prefill(context_ids)
        if self._has_channels:
            final = f"<|channel|>final<|message|>{answer}"
            text = final if prefill else f"<|channel|>analysis<|message|>...<|end|><|start|>assistant{final}"
            text = answer if "final" in prefill else text
        elif prefill and end not in prefill:
            text = f"...\n{end}\n\n{answer}"
        elif not prefill and start in self._template:
            text = f"{start}\n...\n{end}\n\n{answer}"
        else:
            text = answer
        return self._parsed(text, prefill, (), "stop", lambda: "call")

    def check(self, *, uses_tools: bool) -> None:
        """Check that conversations with this template can be continued token by token. Raises ModelError with
        the reason if not, or if it cannot show tools that the run has."""
        problem = None
        tool: Message = {"role": "tool", "content": "reply", "tool_call_id": "call00000", "name": "tool"}
        replies: list[Message] = [tool] if uses_tools else [{"role": "user", "content": "reply"}]
        try:
            text = self._render([{"role": "user", "content": "ask"}], [_TOOL] if uses_tools else [])
            if uses_tools and not self.is_plain and '"tool"' not in text and "tool" not in text:
                problem = "it does not show tools to the model; use a template for tools, or remove env.tools"
            elif uses_tools and self._tool_format is None:
                problem = "its format of tool calls is unknown; set env.tool_format"
            elif "reply" not in self._tail(replies, [_TOOL] if uses_tools else [])[1]:
                problem = "the environment's reply does not follow the policy's turn"
        except ModelError as error:
            problem = str(error)
        if problem is not None:
            raise ModelError(f"the chat template cannot be used for episodes of several turns: {problem}")

    def _tail(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[str, str]:
        """What follows an answer: the template's end of the turn; then `messages` and the start of the next
        answer. Results of tools follow an answer that calls them, as some templates demand."""
        first: Message = {"role": "user", "content": "ask"}
        plain = {"role": "assistant", "content": _SENTINEL}
        bases: list[dict[str, Any]] = [plain]
        called = [m for m in messages if m["role"] == "tool"]
        if called and "tool_calls" in self._template:
            bases = [_calling(called, {"value": _SENTINEL}), _calling(called, _AS_TEXT), plain]
        problem: ModelError | None = None
        for base in bases:
            try:
                before = self._render([first, base], tools, asks=False)
                text = self._render([first, base, *messages], tools)
            except ModelError as error:
                problem = problem or error
                continue
            (head, _, closing), (new_head, _, tail) = before.rpartition(_SENTINEL), text.rpartition(_SENTINEL)
            if _EMPTY_THINKING.sub("", head) != _EMPTY_THINKING.sub("", new_head):
                problem = ModelError("it renders earlier turns differently once a message follows")
                continue
            if base is not plain:
                ends = [tail.find(end) for end in self._turn_ends if end in tail]
                if not ends:
                    continue
                closing, tail = "", tail[min(ends) :]
            shared = os.path.commonprefix([closing, tail])  # noqa: RUF071  # of strings, not of paths
            return shared, tail.removeprefix(shared)
        raise problem or ModelError("it has no token that ends a turn with a tool call")

    @cached_property
    def _turn_ends(self) -> list[str]:
        """Texts of the tokens that end a turn."""
        user: Message = {"role": "user", "content": "ask"}
        text = self._render([user, {"role": "assistant", "content": _SENTINEL}, user], [])
        tail = text[text.rfind(_SENTINEL) + len(_SENTINEL) :]
        first = re.match(self._added, tail)
        return [*([first[0]] if first else []), *(self._text([token]) for token in self._ends)]

    def prefill(self, context_ids: Sequence[int]) -> str:
        """How the context begins the policy's turn: with the start of its reasoning, or with an empty one."""
        match = self._prefilled.search(self._text(context_ids[-_PREFILL_TOKENS:]))
        return "" if match is None else match[0]

    @cached_property
    def _usual_prefill(self) -> str:
        return self.prefill(self.opening([{"role": "user", "content": "ask"}]))

    @cached_property
    def _closes_turns(self) -> bool:
        """Whether the template writes an end token after each answer; GLM's next role ends the turn
        instead."""
        user: Message = {"role": "user", "content": "ask"}
        text = self._render([user, {"role": "assistant", "content": _SENTINEL}], [], asks=False)
        return re.match(rf"\s*(?:{self._added})", text.rpartition(_SENTINEL)[2]) is not None

    @property
    def _thinking_start(self) -> str:
        """Empty if the template opens the policy's reasoning for it."""
        start, end = self._reasoning
        return "" if self._usual_prefill and end not in self._usual_prefill else start

    def _split(self, turn: str) -> tuple[str, str, list[str]]:
        """Answer, reasoning, and messages to tools of a turn, which may be cut. Reasoning without an end is
        no answer."""
        if self._has_channels and re.search(r"<\|(?:channel|message)\|>", turn):
            answer, reasoning, to_tools = "", list[str](), list[str]()
            for message in turn.split("<|start|>"):
                header, _, body = message.partition("<|message|>")
                channel = header.rpartition("<|channel|>")[2].split() or [""]
                body = re.split(r"<\|(?:end|return|call)\|>", body, maxsplit=1)[0]
                if "to=" in header:
                    to_tools.append(message)
                elif channel[0] == "final":
                    answer = body
                elif channel[0] == "analysis":
                    reasoning.append(body)
            return answer, "\n".join(reasoning), to_tools
        start, end = self._reasoning
        reasoning, closed, answer = turn.rpartition(end)
        answer, opened, unfinished = answer.partition(start)
        thoughts = (reasoning.lstrip("\n").removeprefix(start).strip("\n"), unfinished.strip("\n"))
        return answer.lstrip("\n") if closed or opened else answer, "\n".join(filter(None, thoughts)), [turn]

    @cached_property
    def _around_answer(self) -> re.Pattern[str]:
        """Control tokens around an answer that are not of it: the one with which the template begins each,
        and special tokens at its end, but for closing tags such as `</answer>`."""
        try:
            messages: list[Message] = [{"role": "user", "content": "ask"}]
            text = self._render([*messages, {"role": "assistant", "content": _SENTINEL}], [], asks=False)
        except ModelError:
            text = ""
        first = re.search(rf"(?:{self._added})\Z", text.rpartition(_SENTINEL)[0])
        special = [str(t) for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        last = [token for token in special if "/" not in token or token == self.tokenizer.eos_token]
        starts, ends = re.escape(first[0]) if first else "(?!)", "|".join(map(re.escape, last)) or "(?!)"
        return re.compile(rf"\A(?:{starts})+|(?:(?:{ends})\s*)+\Z")

    def _split_reasoning(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of a turn's reasoning, with its markers and the line ends after it, and the others
        without the end token."""
        kept, marker = list(ids[:-1] if ids and ids[-1] in self._ends else ids), self._reasoning[1]
        if marker not in self._text(kept):
            return [], kept
        end = bisect_left(range(len(kept)), True, key=lambda i: marker in self._text(kept[:i]))
        while end < len(kept) and not self._text(kept[end : end + 1]).strip("\n"):
            end += 1
        return kept[:end], kept[end:]

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema],
        *,
        asks: bool = True,
        imitates: bool = False,
    ) -> str:
        """The template's text, with a mark inside each forged token. Answers to imitate may contain such
        tokens, for example around their reasoning. Raises ModelError if the template refuses."""
        import jinja2

        chat: Any = [
            dict(m) if imitates and m["role"] == "assistant" else {**self._marked(m), "role": m["role"]}
            for m in messages
        ]
        for message in chat:
            if (
                message["role"] == "assistant"
                and self._reasoning_key not in message
                and "reasoning_content" in message
            ):
                message[self._reasoning_key] = message.pop("reasoning_content")
        if self.is_plain:
            texts = [(self._plain(message["content"]), message["role"]) for message in chat]
            return "".join(f"<out>{text}</out>" if role == "tool" else text for text, role in texts)
        shown: Any = self._marked(list(tools)) or None
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    chat,
                    tools=shown,
                    chat_template=self._template,
                    tokenize=False,
                    add_generation_prompt=asks,
                    **self._kwargs,
                )
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(m["role"]) for m in messages)
            raise ModelError(f"the chat template rejects messages with the roles {roles}: {error}") from error

    def _plain(self, content: Any) -> str:
        """Text, with a placeholder for each image."""
        return plain_content(content, "" if self._vision is None else self._vision.mark)

    def _marked(self, value: Any) -> Any:
        """`value` with a mark after the first character of each added token in its texts, and images as
        transformers' templates take them."""
        if isinstance(value, Mapping):
            if value.get("type") == "image":
                return {"type": "image"}
            return {key: self._marked(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(one) for one in value]
        if not isinstance(value, str):
            return value
        return self._forged.sub(rf"\1{_MARK}", value.replace(_MARK, ""))

    def _encode(self, text: str) -> list[int]:
        """Tokens of rendered text; marks are borders between tokens."""
        return list(self._encoded(text))

    def _text(self, ids: Sequence[int]) -> str:
        return whole_text(self.tokenizer, ids)


_MARK = "\ue0f7"
"""A private-use character, which is removed from messages."""
_EMPTY_THINKING = re.compile(r"<think>\s*</think>\s*")
_AS_TEXT = '{"value": "' + _SENTINEL + '"}'
_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def _calling(results: Sequence[Message], arguments: object) -> dict[str, Any]:
    """A message of the policy with the calls that `results` answer."""
    calls = [
        {
            "id": result.get("tool_call_id", "call00000"),
            "type": "function",
            "function": {"name": result.get("name", "tool"), "arguments": arguments},
        }
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
