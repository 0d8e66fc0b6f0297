"""Instructions on the form of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from braid.errors import RewardError
from braid.rewards.ifeval import FUNCTIONS, follows, instructions_of
from braid.types import Trajectory

Answered = Callable[..., Trajectory]

CASES: dict[str, list[tuple[dict[str, Any], list[str], list[str]]]] = {
    "verify_keywords": [({"keyword_list": ["tea", "Pot"]}, ["A teapot", "TEA, pots"], ["tea", ""])],
    "verify_keyword_frequency": [({"word": "tea", "N": 2}, ["Tea and tea"], ["tea", "tea tea tea", "teas teas"])],
    "validate_forbidden_words": [({"forbidden_words": ["tea", "c++"]}, ["teas", "coffee"], ["Tea!", "no tea"])],
    "verify_letter_frequency": [({"letter": "a", "N": 2}, ["banAa"], ["banana", "A a"])],
    "validate_response_language": [
        (
            {"language": "de"},
            ["Der Tee ist heute besonders gut, und wir trinken ihn gern."],
            ["The tea is especially good today, and we like to drink it.", "", "12"],
        )
    ],
    "verify_paragraph_count": [({"N": 2}, ["a\n***\nb", "a\n* * *\nb\n***"], ["a", "a *** *** b", "a *** b *** c"])],
    "validate_word_constraint": [
        ({"N": 3, "quantifier": "at least"}, ["a b c", "a b c d"], ["a b"]),
        ({"N": 3, "quantifier": "at most"}, ["a b c", ""], ["a b c d"]),
        ({"N": 20, "quantifier": "around"}, ["a " * 18, "a " * 22], ["a " * 17, "a " * 23]),
        ({"N": 3, "quantifier": "around"}, ["a b", "a b c d"], ["a"]),
    ],
    "verify_sentence_constraint": [
        ({"N": 2, "quantifier": "at least"}, ["One. Two!", "A? B. C."], ["One."]),
        ({"N": 3, "quantifier": "around"}, ["One. Two.", "A. B. C. D."], ["One."]),
    ],
    "validate_paragraphs": [({"N": 2, "first_word": "So", "i": 2}, ["a\n\nSo b"], ["So\n\na", "a\n\nSo\n\nb"])],
    "verify_postscript": [({"postscript_marker": "P.S."}, ["Hi. P.S. Bye"], ["Hi.", "Hi. P.S. "])],
    "validate_placeholders": [({"N": 2}, ["[a] to [b]", "[a][b][c]"], ["[a] b", "[a"])],
    "verify_bullet_points": [({"N": 2}, ["* a\n - b\nc"], ["* a", "* a\n* b\n* c"])],
    "validate_title": [({}, ["<<Tea>>\nIt is"], ["<<>>", "<Tea>"])],
    "validate_choice": [({"options": ["My answer is yes.", "No."]}, [" No. ", "My answer is yes."], ["Maybe.", ""])],
    "validate_highlighted_sections": [({"N": 2}, ["*a* and *b c*"], ["*a* b", "**"])],
    "validate_sections": [({"N": 2, "section_splitter": "Section"}, ["Section 1 a Section 2 b"], ["Section 1", "a"])],
    "validate_json_format": [({}, ['{"a": 1}', "```json\n[1]\n```"], ["a", "{'a': 1}", "[" * 5000])],
    "validate_repeat_prompt": [({"original_prompt": "Say tea."}, ["Say tea. Tea."], ["Tea. Say tea."])],
    "validate_two_responses": [({}, ["a\n******\nb"], ["a", "a******a", "a******b******c"])],
    "validate_uppercase": [({}, ["TEA 1!"], ["Tea"])],
    "validate_lowercase": [({}, ["tea 1!"], ["Tea"])],
    "validate_frequency_capital_words": [
        ({"N": 1, "quantifier": "at least"}, ["TEA is", "I AM"], ["Tea"]),
        ({"N": 1, "quantifier": "around"}, ["TEA"], ["I AM"]),
    ],
    "validate_end": [({"end_phrase": "the end."}, ["So, the end.\n"], ["The end. No"])],
    "validate_quotation": [({}, ['"tea"', ' "" '], ["tea", '"', '"tea'])],
    "validate_no_commas": [({}, ["a b"], ["a, b"])],
}  # fmt: skip


def test_every_function_has_a_case() -> None:
    assert CASES.keys() == FUNCTIONS.keys()


@pytest.mark.parametrize("name", CASES)
def test_an_instruction_is_followed_or_not(answered: Answered, name: str) -> None:
    for arguments, followed, broken in CASES[name]:
        instruction = {"func_name": name, **arguments, "unread": None}
        for reference in (instruction, json.dumps(instruction), [json.dumps(instruction)]):
            assert [follows(answered(text, answer=reference)) for text in followed] == [1.0] * len(followed)
            assert [follows(answered(text, answer=reference)) for text in broken] == [0.0] * len(broken)


def test_all_instructions_of_a_row_must_be_followed(answered: Answered) -> None:
    both = [{"func_name": "validate_no_commas"}, {"func_name": "validate_lowercase"}]
    assert [follows(answered(text, answer=both)) for text in ("tea", "Tea", "t, a")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ({"func_name": "verify_keyword"}, r"is called 'verify_keyword', did you mean 'verify_keywords'\?"),
        (
            {"func_name": "validate_end"},
            "the instruction validate_end of the reference answer lacks end_phrase",
        ),
        ("no commas", "the reference answer 'no commas' is no instruction; it must be a mapping"),
        (None, "the reference answer None is no instruction"),
        ([], "is no instruction"),
        (["no commas"], "no function for instructions is called None"),
    ],
)
def test_a_row_without_an_instruction_is_refused_beforehand(
    answered: Answered, reference: object, message: str
) -> None:
    with pytest.raises(RewardError, match=message):
        instructions_of(answered("tea", answer=reference).prompt)


@pytest.mark.parametrize(
    "arguments",
    [
        {"N": "two", "quantifier": "at least"},
        {"N": 2, "quantifier": "less than"},
        {"N": [1], "quantifier": "around"},
    ],
)
def test_an_argument_that_cannot_be_used_is_no_wrong_answer(
    answered: Answered, arguments: dict[str, Any]
) -> None:
    with pytest.raises(RewardError, match=r"the instruction .* has an invalid value: "):
        follows(answered("tea", answer={"func_name": "validate_word_constraint", **arguments}))
