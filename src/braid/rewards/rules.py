"""Parts that compute a score inline from the text: comparison, patterns, choices, length, repetition."""

from __future__ import annotations

import regex

from braid.errors import ConfigError, Problem, RewardError
from braid.types import Trajectory

from .base import references_of


class Extraction:
    """Extracts the answer from a text: the first group of the pattern's last match, or the whole text without
    a pattern.

    Patterns use the `regex` package, which supports a time limit for matching.
    """

    def __init__(self, pattern: str | None, timeout_s: float, *, key: str, flags: int = 0) -> None:
        self._pattern = None if pattern is None else compile_pattern(pattern, key=key, flags=flags)
        self._timeout_s = timeout_s
        if self._pattern is not None and not self._pattern.groups:
            raise ConfigError(
                [Problem(key, f"{pattern!r} has no group; enclose the answer in one: (...)", "config")]
            )

    def __call__(self, text: str) -> str | None:
        """The answer without surrounding whitespace; None if the pattern does not match."""
        if self._pattern is None:
            return text.strip()
        answer = None
        try:
            for match in self._pattern.finditer(text, timeout=self._timeout_s):
                answer = match[1]
        except TimeoutError as error:
            raise _too_slow(self._timeout_s) from error
        return None if answer is None else answer.strip()


def compile_pattern(pattern: str, *, key: str, flags: int = 0) -> regex.Pattern[str]:
    """Compile the value of the config key `key`. Raises ConfigError if it is not a regular expression."""
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise ConfigError(
            [Problem(key, f"invalid regular expression {pattern!r}: {error}", "config")]
        ) from error


def _too_slow(timeout_s: float) -> RewardError:
    return RewardError(f"matching the pattern took longer than reward.timeout_s={timeout_s:g}; simplify it")


class ExactPart:
    """1 if the answer equals a reference, ignoring surrounding whitespace and the characters in `ignore`."""

    def __init__(self, extract: Extraction, *, ignore_case: bool, ignore: str) -> None:
        self._extract = extract
        self._ignore_case = ignore_case
        self._left_out = str.maketrans("", "", ignore)

    def __call__(self, trajectory: Trajectory) -> float:
        answer, references = self._extract(trajectory.answer_text), references_of(trajectory)
        return float(answer is not None and self._plain(answer) in map(self._plain, references))

    def _plain(self, text: str) -> str:
        text = text.translate(self._left_out).strip()
        return text.casefold() if self._ignore_case else text

    def close(self) -> None: ...


class PatternPart:
    """1 if the pattern matches anywhere in the text."""

    def __init__(self, pattern: str, timeout_s: float, *, key: str) -> None:
        self._pattern = compile_pattern(pattern, key=key, flags=regex.DOTALL)
        self._timeout_s = timeout_s

    def __call__(self, trajectory: Trajectory) -> float:
        try:
            return float(self._pattern.search(trajectory.answer_text, timeout=self._timeout_s) is not None)
        except TimeoutError as error:
            raise _too_slow(self._timeout_s) from error

    def close(self) -> None: ...


class ChoicePart:
    """One of four scores: whether the letter of the answer equals that of a reference, and is in a box.

    The letter is the one in the last box, else after the last "answer is" or "answer:", else the last that
    stands alone. A reference starts with its letter: "B", "(B)" or "B. Paris".
    """

    def __init__(self, letters: str, scores: tuple[float, float, float, float]) -> None:
        self._boxed_right, self._right, self._boxed_wrong, self._wrong = scores
        word, more = rf"(?P<letter>[{letters}])(?![\w'])", regex.IGNORECASE
        mark = r"[\s*_(\[{$:]*(?:\\text(?:bf)?\{)?\(?"
        self._forms = (
            regex.compile(rf"\\boxed\{{{mark}{word}", more),
            regex.compile(rf"answer(?:\s+is)?\b{mark}{word}", more),
            regex.compile(rf"(?<![\w'])[{letters}](?![\w'])"),
        )
        self._reference = regex.compile(rf"[\s(]*{word}", more)

    def __call__(self, trajectory: Trajectory) -> float:
        found = {self._letter_of(reference) for reference in references_of(trajectory)}
        for form in self._forms:
            if matches := form.findall(trajectory.answer_text):
                is_right, is_boxed = matches[-1].upper() in found, form is self._forms[0]
                if is_right:
                    return self._boxed_right if is_boxed else self._right
                return self._boxed_wrong if is_boxed else self._wrong
        return self._wrong

    def _letter_of(self, reference: str) -> str:
        match = self._reference.match(reference)
        if match is None:
            raise RewardError(
                f"the reference answer {reference!r} does not start with one of the choice letters"
            )
        return match["letter"].upper()

    def close(self) -> None: ...


class LengthPart:
    """0 up to length `start`, falling linearly to -1 at `end`, and -1 beyond."""

    def __init__(self, start: int, end: int, *, counts_tokens: bool) -> None:
        self._start, self._end, self._counts_tokens = start, end, counts_tokens

    def __call__(self, trajectory: Trajectory) -> float:
        length = trajectory.num_output_tokens if self._counts_tokens else len(trajectory.answer_text)
        return -min(max(length - self._start, 0) / (self._end - self._start), 1.0)

    def close(self) -> None: ...


class RepetitionPart:
    """Minus the fraction of n-grams of words that occurred before."""

    def __init__(self, ngram: int) -> None:
        self._ngram = ngram

    def __call__(self, trajectory: Trajectory) -> float:
        words = trajectory.answer_text.lower().split()
        ngrams = [tuple(words[i : i + self._ngram]) for i in range(len(words) - self._ngram + 1)]
        return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0

    def close(self) -> None: ...
