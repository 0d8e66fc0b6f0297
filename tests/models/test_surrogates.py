"""Half of a surrogate pair, as JSON may contain, cannot be encoded: it becomes U+FFFD, and ends no run."""

from __future__ import annotations

from typing import Any

import pytest

from braid.envs.agents.base import Opening, Step
from braid.models.chat import ChatFormat
from braid.models.tokenizer import character_tokenizer
from braid.users import encodable

HALF = "a\ud83d b"


def test_half_a_pair_becomes_the_replacement_character_and_a_whole_pair_stays() -> None:
    assert encodable(HALF) == "a\ufffd b"
    assert encodable("\U0001f600 é") == "\U0001f600 é"


@pytest.mark.parametrize("record", [Opening, Step])
def test_environments_may_write_it(record: Any) -> None:
    (message,) = record([{"role": "user", "content": HALF}]).messages
    assert message["content"] == "a\ufffd b"


def test_it_can_be_tokenized() -> None:
    tokenizer = character_tokenizer("ab \ufffd", (), ())
    chat = ChatFormat(tokenizer, end_token_ids=(1,))
    ids = chat.opening([{"role": "user", "content": HALF}])
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "a\ufffdb"
