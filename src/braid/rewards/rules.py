"""Parts that compute a score inline from the text: comparison, patterns, choices, length, repetition.

Patterns use the `regex` package, which supports a time limit for matching.
"""

from __future__ import annotations

from collections.abc import Callable

import regex

from braid.config.reward import ChoiceReward, ExactReward, LengthReward, PatternReward, RepetitionReward
from braid.errors import ConfigError, Problem, RewardError
from braid.types import Trajectory

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


def choice(config: ChoiceReward) -> Score:
    """One of four scores: whether the letter of the answer equals that of a reference, and is in a box.

    The letter is the one in the last box, else after the last "answer is" or "answer:", else the last that
    stands alone. A reference starts with its letter: "B", "(B)" or "B. Paris".
    """
    boxed_right, right, boxed_wrong, wrong = config.scores
    word, more = rf"(?P<letter>[{config.letters}])(?![\w'])", regex.IGNORECASE
    mark = r"[\s*_(\[{$:]*(?:\\text(?:bf)?\{)?\(?"
    boxed = regex.compile(rf"\\boxed\{{{mark}{word}", more)
    named = regex.compile(rf"answer(?:\s+is)?\b{mark}{word}", more)
    alone = regex.compile(rf"(?<![\w'])[{config.letters}](?![\w'])")
    start = regex.compile(rf"[\s(]*{word}", more)

    def letter_of(reference: str) -> str:
        match = start.match(reference)
        if match is None:
            raise RewardError(
                f"the reference answer {reference!r} does not start with one of the choice letters"
            )
        return match["letter"].upper()

    def score(trajectory: Trajectory) -> float:
        letters = {letter_of(reference) for reference in references_of(trajectory.prompt)}
        for form in (boxed, named, alone):
            if found := form.findall(trajectory.answer_text):
                is_right, is_boxed = found[-1].upper() in letters, form is boxed
                if is_right:
                    return boxed_right if is_boxed else right
                return boxed_wrong if is_boxed else wrong
        return wrong

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
