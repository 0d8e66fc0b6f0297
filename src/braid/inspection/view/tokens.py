"""The turns of a stored trajectory with their numbers by token, and the text of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KEPT = ("context_text", "stop_reason", "reward", "start_s", "end_s", "env_s", "tool_s", "images")


def turns_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each turn of a stored trajectory: its texts and times, the `agent` that wrote it, the texts of its
    `tokens` (None where the file does not have them), and `numbers`: name -> one number per token: `logprob`
    of the sampler, the weights' `version`, and the training values, where the turn was trained on."""
    turns = record["turns"]
    segments = record.get("segments") or [{"agent": None, "num_turns": len(turns), "is_trained": True}]
    about = [segment for segment in segments for _ in range(segment["num_turns"])]
    lengths = [len(turn["output_ids"]) for turn in turns]
    num_trained = sum(n for n, one in zip(lengths, about, strict=True) if one.get("is_trained", True))
    training = {name: values for name, values in record["training"].items() if len(values) == num_trained}
    shown, start = [], 0
    for turn, segment, length in zip(turns, about, lengths, strict=True):
        numbers = {"logprob": turn["logprobs"], "version": _versions(turn["policy_version"], length)}
        if segment.get("is_trained", True):
            numbers |= {name: values[start : start + length] for name, values in training.items()}
            start += length
        texts = turn.get("token_texts")
        shown.append(
            {name: turn.get(name) for name in _KEPT}
            | {
                "agent": segment["agent"],
                "output": turn["output_text"],
                "tokens": None if texts is None else spans(turn["output_text"], texts),
                "ids": turn["output_ids"],
                "numbers": {name: values for name, values in numbers.items() if len(values) == length},
            }
        )
    return shown


def spans(text: str, tokens: Sequence[str]) -> list[str]:
    """Divide a text among its tokens: strings whose concatenation is the text, one per token. `tokens` are
    the texts of tokens decoded one by one, in which characters may be incomplete (U+FFFD) and a leading space
    missing; what cannot be told apart goes to the first of the tokens concerned."""
    parts = [""] * len(tokens)
    end, waiting = 0, None
    for i, token in enumerate(tokens):
        if not token or "�" in token:
            waiting = i if waiting is None else waiting
            continue
        reach = end + len(token) + 1 + (0 if waiting is None else 4 * (i - waiting))
        at = text.find(token, end, reach)
        if at < 0:
            waiting = i if waiting is None else waiting
            continue
        if waiting is None:
            parts[i] = text[end:at] + token
        else:
            parts[waiting], parts[i] = text[end:at], token
        end, waiting = at + len(token), None
    if tokens and end < len(text):
        parts[len(tokens) - 1 if waiting is None else waiting] += text[end:]
    return parts


def _versions(version: int | list[list[int]], length: int) -> list[int]:
    if isinstance(version, int):
        return [version] * length
    return [number for number, num in version for _ in range(num)]
