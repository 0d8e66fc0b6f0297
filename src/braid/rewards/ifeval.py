"""Instructions on the form of an answer, checked by a program: the functions of allenai/RLVR-IFeval, with
those of IFEval (Zhou et al. 2023, arXiv 2311.07911) one at a time."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from braid.errors import RewardError, suggest
from braid.json_text import parse_json
from braid.types import Prompt, Trajectory


def follows(trajectory: Trajectory) -> float:
    """1 if the answer follows all instructions of its row, else 0. Raises RewardError as `instructions_of`,
    and for arguments of a wrong type."""
    return float(all(check(trajectory.answer_text) for check in instructions_of(trajectory.prompt)))


def instructions_of(prompt: Prompt) -> list[Callable[[str], bool]]:
    """The instructions of a row, as functions of the answer. Raises RewardError for a row without one, or
    with one that is unknown or lacks arguments."""
    reference = prompt.fields.get("answer")
    instructions = _parsed(reference)
    instructions = [instructions] if isinstance(instructions, Mapping) else instructions
    if not isinstance(instructions, list) or not instructions:
        raise RewardError(
            f"the reference answer {reference!r} is no instruction; it must be a mapping or JSON text with "
            "func_name and the function's arguments, or a list of them"
        )
    return [_check_of(instruction) for instruction in instructions]


def _parsed(value: Any) -> Any:
    """The value of JSON text, None if it is no JSON; any other value as it is."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return None


def _check_of(instruction: Any) -> Callable[[str], bool]:
    instruction = _parsed(instruction)
    name = instruction.get("func_name") if isinstance(instruction, Mapping) else None
    if not isinstance(name, str) or name not in FUNCTIONS:
        near = suggest(str(name), FUNCTIONS) or f"; known are {', '.join(FUNCTIONS)}"
        raise RewardError(f"no function for instructions is called {name!r}{near}")
    function = FUNCTIONS[name]
    _, *parameters = inspect.signature(function).parameters
    arguments = {key: instruction.get(key) for key in parameters}
    if missing := [key for key, value in arguments.items() if value is None]:
        raise RewardError(f"the instruction {name} of the reference answer lacks {', '.join(missing)}")

    def is_followed(text: str) -> bool:
        try:
            return function(text, **arguments)
        except (TypeError, ValueError, AttributeError) as error:
            raise RewardError(
                f"the instruction {json.dumps(instruction)} has an invalid value: {error}"
            ) from error

    return is_followed


def _compares(count: int, quantifier: str, number: int, tolerance: float) -> bool:
    match quantifier:
        case "at least":
            return count >= number
        case "at most":
            return count <= number
        case "around":
            return abs(count - number) <= tolerance
    raise ValueError(f"quantifier {quantifier!r} is none of at least, at most, around")


def verify_keywords(text: str, keyword_list: list[str]) -> bool:
    """All keywords occur, in any case, also within words."""
    return all(keyword.lower() in text.lower() for keyword in keyword_list)


def verify_keyword_frequency(text: str, word: str, N: int) -> bool:
    """The word occurs N times, in any case."""
    return re.findall(r"\b\w+\b", text.lower()).count(word.lower()) == int(N)


def validate_forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    """None of the words occurs, in any case."""
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def verify_letter_frequency(text: str, letter: str, N: int) -> bool:
    """The letter occurs N times, in this case."""
    if len(letter) != 1:
        raise ValueError(f"letter {letter!r} is not one letter")
    return text.count(letter) == int(N)


def validate_response_language(text: str, language: str) -> bool:
    """The answer is in the language, an ISO 639-1 code, according to langdetect."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as error:
        raise RewardError(
            "instructions on the language need the package langdetect: pip install langdetect"
        ) from error
    DetectorFactory.seed = 0  # else results are random
    try:
        return detect(text) == language
    except LangDetectException:  # no letters
        return False


def verify_paragraph_count(text: str, N: int) -> bool:
    """N paragraphs, divided by ***, none of them empty but the first and the last."""
    parts = [part.strip() for part in re.split(r"\s*\*\s?\*\s?\*\s*", text)]
    inner = parts[1:-1] if len(parts) > 1 else []
    return all(inner) and sum(map(bool, parts)) == int(N)


def validate_word_constraint(text: str, N: int, quantifier: str) -> bool:
    """A number of words; around: within a tenth."""
    number = int(N)
    return _compares(len(text.split()), quantifier, number, max(round(number * 0.1), 1))


def verify_sentence_constraint(text: str, N: int, quantifier: str) -> bool:
    """A number of sentences; around: one more or fewer."""
    sentences = [part for part in re.split(r"(?<![A-Z][a-z]\.)(?<=[.!?])\s+", text.strip()) if part]
    return _compares(len(sentences), quantifier, int(N), 1)


def validate_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """N paragraphs, divided by blank lines, of which the i-th (from 1) begins with a word."""
    parts = text.split("\n\n")
    return (
        len(parts) == int(N)
        and 1 <= int(i) <= len(parts)
        and parts[int(i) - 1].strip().startswith(first_word)
    )


def verify_postscript(text: str, postscript_marker: str) -> bool:
    """A postscript with some text after its marker."""
    _, marker, after = text.partition(postscript_marker)
    return bool(marker and after.strip())


def validate_placeholders(text: str, N: int) -> bool:
    """At least N placeholders in square brackets."""
    return len(re.findall(r"\[[^\[\]]*\]", text)) >= int(N)


def verify_bullet_points(text: str, N: int) -> bool:
    """N lines that begin with * or -."""
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == int(N)


def validate_title(text: str) -> bool:
    """A title in double angular brackets."""
    return re.search(r"<<.*\S.*>>", text) is not None


def validate_choice(text: str, options: list[str]) -> bool:
    """The answer is a part of one of the options."""
    return any(text.strip() in option for option in options) and bool(text.strip())


def validate_highlighted_sections(text: str, N: int) -> bool:
    """At least N sections highlighted by asterisks."""
    return len(re.findall(r"\*[^*\n]*[^*\s][^*\n]*\*", text)) >= int(N)


def validate_sections(text: str, N: int, section_splitter: str) -> bool:
    """N sections, each after its splitter, such as Section 1."""
    parts = re.split(rf"\s?{re.escape(section_splitter)}\s?\d*", text)
    return len(parts) - 1 == int(N)


def validate_json_format(text: str) -> bool:
    """The answer is JSON, perhaps in a code block."""
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def validate_repeat_prompt(text: str, original_prompt: str) -> bool:
    """The answer begins with the prompt."""
    return text.strip().startswith(original_prompt.strip())


def validate_two_responses(text: str) -> bool:
    """Two different responses, divided by six asterisks."""
    parts = [part.strip() for part in text.split("******")]
    return len(parts) == 2 and parts[0] != parts[1]


def validate_uppercase(text: str) -> bool:
    """No lowercase letter."""
    return text == text.upper()


def validate_lowercase(text: str) -> bool:
    """No capital letter."""
    return text == text.lower()


def validate_frequency_capital_words(text: str, N: int, quantifier: str) -> bool:
    """A number of words in capital letters; around: exactly."""
    return _compares(len(re.findall(r"\b[A-Z]+\b", text)), quantifier, int(N), 0)


def validate_end(text: str, end_phrase: str) -> bool:
    """The answer ends with the phrase."""
    return text.rstrip().endswith(end_phrase.rstrip())


def validate_quotation(text: str) -> bool:
    """The answer is in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def validate_no_commas(text: str) -> bool:
    """No comma."""
    return "," not in text


FUNCTIONS: Mapping[str, Callable[..., bool]] = {
    function.__name__: function
    for function in (
        verify_keywords, verify_keyword_frequency, validate_forbidden_words, verify_letter_frequency,
        validate_response_language, verify_paragraph_count, validate_word_constraint,
        verify_sentence_constraint,
        validate_paragraphs, verify_postscript, validate_placeholders, verify_bullet_points, validate_title,
        validate_choice, validate_highlighted_sections, validate_sections, validate_json_format,
        validate_repeat_prompt, validate_two_responses, validate_uppercase, validate_lowercase,
        validate_frequency_capital_words, validate_end, validate_quotation, validate_no_commas,
    )
}  # fmt: skip
"""The instructions, by the name of their function."""
