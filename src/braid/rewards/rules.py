"""Parts that compute a score inline from the text: comparison, patterns, choices, length, repetition.

Patterns use the `regex` package, which supports a time limit for matching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import regex

from braid.errors import ConfigError, Problem, RewardError
from braid.reasoning import without_reasoning
from braid.rewards.kinds import ChoiceReward, ExactReward, LengthReward, PatternReward, RepetitionReward
from braid.types import Trajectory

from .answers import last_boxes, tagged_answer
from .base import Score, references_of

Extract = Callable[[str], str | None]


def extraction(pattern: str | None, timeout_s: float, *, key: str, flags: int = 0) -> Extract:
    """Return a function that extracts the answer from a text, without surrounding whitespace: the first group
    of the pattern's last match (None if there is none), or the whole text without a pattern."""
    if pattern is None:
        return str.strip
    compiled = compile_pattern(pattern, key=key, flags=flags)
    if not compiled.groups:
        raise ConfigError(
            [Problem(key, f"{pattern!r} has no group; enclose the answer in one: (...)", "config")]
        )

    def extract(text: str) -> str | None:
        answer = None
        try:
            for match in compiled.finditer(text, timeout=timeout_s):
                answer = match[1]
        except TimeoutError as error:
            raise _too_slow(timeout_s) from error
        return None if answer is None else answer.strip()

    return extract


def compile_pattern(pattern: str, *, key: str, flags: int = 0) -> regex.Pattern[str]:
    """Compile the value of the config key `key`. Raises ConfigError if it is not a regular expression."""
    try:
        return regex.compile(pattern, flags)
    except (regex.error, RecursionError, OverflowError, MemoryError) as error:
        raise ConfigError(
            [Problem(key, f"invalid regular expression {pattern!r}: {error}", "config")]
        ) from error


def _too_slow(timeout_s: float) -> RewardError:
    return RewardError(f"matching the pattern took longer than reward.timeout_s={timeout_s:g}; simplify it")


def exact(config: ExactReward, extract: Extract) -> Score:
    """1 if the answer equals a reference, ignoring surrounding whitespace and the characters in `ignore`."""
    left_out = str.maketrans("", "", config.ignore)

    def plain(text: str) -> str:
        text = text.translate(left_out).strip()
        return text.casefold() if config.ignore_case else text

    def score(trajectory: Trajectory) -> float:
        answer, references = extract(trajectory.answer_text), references_of(trajectory.prompt)
        return float(answer is not None and plain(answer) in map(plain, references))

    return score


def matches(config: PatternReward, timeout_s: float, *, key: str) -> Score:
    """1 if the pattern matches anywhere in what it reads."""
    compiled = compile_pattern(config.pattern, key=key, flags=regex.DOTALL)

    def score(trajectory: Trajectory) -> float:
        is_text = config.reads == "text"
        read = trajectory.prefill + trajectory.sampled_text if is_text else trajectory.answer_text
        try:
            return float(compiled.search(read, timeout=timeout_s) is not None)
        except TimeoutError as error:
            raise _too_slow(timeout_s) from error

    return score


_AFTER_A = (
    r"(?:is|was|are|and|or|but|because|since|as|by|in|on|at|of|to|for|from|with|given|when|where|while|if|only|so|due|"
    r"has|had|can|could|will|would|should|must|may|might|does|do|did|seems|fits|works|makes|gives|says|matches|follows|"
    r"states|describes|not|cannot|best|correct|correctly|here)\b"
)
_AFTER_I = r"(?:is|and|or|because|since|as|by|in|given|when|where|if|only|best|correct|correctly|here)\b"
_NO_WORD = (
    rf"(?![Aa]\s+(?!{_AFTER_A})(?-i:[a-z])|[Ii]\s+(?!{_AFTER_I})(?-i:[a-z]))"  # the article, the pronoun
)


def choice(config: ChoiceReward) -> Score:
    """One of four scores: whether the letter of the answer equals that of a reference, and is in a box.

    The letter is sought after the reasoning, in the last `<answer>` tag if there is one: in the last box,
    else after the last "answer is" or "answer:", else the last that stands alone. Letters connected by a
    comma, "and" or "or" are a wrong answer. A reference starts with its letter: "B", "(B)" or "B. Paris".
    """
    boxed_right, right, boxed_wrong, wrong = config.scores
    letters, more = config.letters, regex.IGNORECASE
    word, end = rf"[{letters}](?![\w'\u2019])", r"[\s*_)\]}$.:]*+"
    mark = r"[\s*_(\[{$:]*+(?:\\text(?:bf)?\{)?\(?"
    others = (
        rf"(?P<others>{end}(?:[,;]?\s*\b(?:and|or)\b{mark}{_NO_WORD}{word}"
        rf"|[,;/&+]{mark}{_NO_WORD}{word}(?!\s+(?!and\b|or\b)(?-i:[a-z]))))?"
    )
    letter = rf"{_NO_WORD}(?P<letter>{word}){others}"
    at_start = regex.compile(rf"{mark}(?:{letter}|(?-i:(?P<letters>[{letters}]{{2,}})(?!\w)))", more)
    named = regex.compile(rf"answers?(?:\s+(?:is|are))?\b{mark}{letter}", more)
    alone = regex.compile(rf"(?<![\w'\u2019])(?-i:(?=[{letters}])){letter}", more)
    start = regex.compile(rf"[\s(]*(?P<letter>{word})", more)

    def letter_of(reference: str) -> str:
        match = start.match(reference)
        if match is None:
            raise RewardError(
                f"the reference answer {reference!r} does not start with one of the choice letters"
            )
        return match["letter"].upper()

    def answer(text: str) -> tuple[str, bool]:
        """The letter, empty if there is not exactly one, and whether it is in a box."""
        tagged = tagged_answer(text)
        text = text if tagged is None else tagged
        boxes, match = last_boxes(text), None
        if boxes and (match := at_start.match(boxes[-1].content)):
            return ("" if len(boxes) > 1 else single(match)), True
        if tagged is not None:
            match = at_start.match(text)
        for form in (named, alone):
            match = match or next(iter(deque(form.finditer(text), maxlen=1)), None)
        return (single(match) if match else ""), False

    def single(match: regex.Match[str]) -> str:
        is_single = match["letter"] and not match["others"]
        return match["letter"].upper() if is_single else ""

    def score(trajectory: Trajectory) -> float:
        rights = {letter_of(reference) for reference in references_of(trajectory.prompt)}
        text = without_reasoning(trajectory.answer_text, is_parsed=bool(trajectory.reasoning_text))
        letter, is_boxed = answer(text)
        if letter in rights:
            return boxed_right if is_boxed else right
        return boxed_wrong if is_boxed else wrong

    return score


def length(config: LengthReward, trajectory: Trajectory) -> float:
    """0 up to length `start`, falling linearly to -1 at `end`, and -1 beyond."""
    size = trajectory.num_output_tokens if config.unit == "tokens" else len(trajectory.sampled_text)
    return -min(max(size - config.start, 0) / (config.end - config.start), 1.0)


def repetition(config: RepetitionReward, trajectory: Trajectory) -> float:
    """Minus the fraction of n-grams of words that occurred before."""
    words = trajectory.sampled_text.lower().split()
    ngrams = [tuple(words[i : i + config.ngram]) for i in range(len(words) - config.ngram + 1)]
    return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0
