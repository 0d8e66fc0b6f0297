"""What is known of a chat template without applying it to each row holds for all rows."""

from __future__ import annotations

from contextlib import suppress
from itertools import product
from typing import Any

import pytest

from braid.config.data import DataConfig, FileSource
from braid.data.chat_templates import searched_texts
from braid.data.prompts import Encoder
from braid.data.rows import JsonRows
from braid.data.sources import SourceRows
from braid.errors import DataError

from .conftest import character_tokenizer

UNDERSTOOD = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    "Llama 2": (
        "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
        "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}{% for message in rest %}"
        "{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>' + system + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}[INST] {{ content.strip() }} [/INST]{% endfor %}"
    ),
    "Llama 3": (
        "{% for message in messages %}{% set content = '<|' + message['role'] + '|>' + message['content'] | trim %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    ),
    "Qwen 3": (
        "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
        "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not("
        "message.content.startswith('<tool>') and message.content.endswith('</tool>')) %}"
        "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{%- set content = message.content %}{%- if '</think>' in content %}"
        "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
        "{{- '<|' + message.role + '|>' + content }}{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{%- endif %}"
        "{%- if loop.index0 > ns.last_query_index %}<think></think>{%- endif %}{%- endfor %}"
    ),
    "macro": "{% macro role(name) %}<{{ name }}>{% endmacro %}{% for m in messages %}{{ role(m.role) }}{{ m['content'] }}{% endfor %}",
    "neighbors": (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.content == 'a' %}yyyy{% endif %}{{ m.get('content') }}"
        "{% endfor %}"
    ),
    "truth": "{% for m in messages if m.content and m.content != '' %}{{ m.content if m.content else 'none' * 9 }}{% endfor %}",
}
FIRST = "messages[0].content"
NOT_UNDERSTOOD = [
    "{{ messages }}",
    "{{ messages[0] }}",
    "{{ messages | tojson }}",
    "{{ messages | map(attribute='content') | join }}",
    "{{ loop }}",
    "{{ '%s' % X }}",
    "{{ X * 3 }}",
    "{{ X | upper }}",
    "{{ X | tojson }}",
    "{{ X.replace('a', 'bbb') }}",
    "{{ X.split()[0] }}",
    "{{ X.split('a', 1)[0] }}",
    "{{ X.split('a')[1] }}",
    "{{ X[0] }}",
    "{{ X[:9] }}",
    "{{ messages[X | length].content }}",
    "{% if X | length > 3 %}y{% endif %}",
    "{% if X < 'abc' %}y{% endif %}",
    "{% if 'a' < X < 'abc' %}y{% endif %}",
    "{% if X in 'abc' %}y{% endif %}",
    "{% if '' in X %}y{% endif %}",
    "{% if X == unknown %}y{% endif %}",
    "{% if X is in ['a'] %}y{% endif %}",
    "{% if ('a' + X) == 'ab' %}y{% endif %}",
    "{% if 'ab' in 'a' ~ X %}y{% endif %}",
    "{% if X.strip('c') %}y{% endif %}",
    "{% if X.startswith(('a', 'b')) %}y{% endif %}",
    "{% for character in X %}y{% endfor %}",
    "{% for part in [X] %}y{% endfor %}",
    "{% for key, value in messages[0].items() %}{{ value }}{% endfor %}",
    "{% set text %}{{ X }}{% endset %}{{ text | length }}",
    "{% macro text() %}{{ X }}{% endmacro %}{{ text() | length }}",
    "{% macro text(of) %}{{ of }}{% endmacro %}{{ text(X) | length }}",
    "{% call f() %}{{ X }}{% endcall %}",
    "{% filter length %}{{ X }}{% endfilter %}",
    "{% set ns = namespace(x=X) %}{{ ns.x }}",
    "{% set ns = namespace() %}{% set ns.x = X %}{{ ns.x }}",
    "{% set a, b = X, 1 %}{{ a }}",
    "{% for m in messages %}{{ (loop | attr('previtem')).content }}{% endfor %}",
    "{% for m in messages %}{% set l = loop %}{{ l.previtem.content | length }}{% endfor %}",
    "{% for m in messages %}{% if loop.changed(m.content) %}y{% endif %}{% endfor %}",
    "{% include 'other' %}",
    "{% if %}",
]


@pytest.mark.parametrize("template", NOT_UNDERSTOOD)
def test_a_template_that_may_look_at_contents_in_other_ways_is_not_understood(template: str) -> None:
    assert searched_texts(template.replace("X", FIRST)) is None


def test_the_texts_that_templates_search_contents_for() -> None:
    assert searched_texts(UNDERSTOOD["Qwen 3"]) == {"<tool>", "</tool>", "</think>"}
    assert searched_texts(UNDERSTOOD["neighbors"]) == {"a"}
    for name in ("plain", "Llama 2", "Llama 3", "macro", "truth"):
        assert searched_texts(UNDERSTOOD[name]) == set()


FRAGMENTS = [
    *UNDERSTOOD.values(),
    *(
        text.replace("X", FIRST)
        for text in NOT_UNDERSTOOD
        if "include" not in text and "{% if %}" not in text
    ),
    *(
        "{% if TEST %}yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}".replace(
            "TEST", test
        )
        for test in (
            "messages[-1].content.endswith('b')",
            "'ab' in messages[0].content | trim",
            "messages[0].content.rstrip() == 'a'",
            "messages[0].content != ' '",
            "not messages[0].content.strip()",
            "messages[-1]['content'].split('b')[0] == 'a'",
            "messages | last is mapping and 'x' not in (messages | first).content",
        )
    ),
]
CONTENTS = ["a", "b", "ab", "xab ", "\n", "", "é" * 9, "</think>", "<tool>a</tool>", "x" * 40]


@pytest.mark.parametrize("template", FRAGMENTS)
@pytest.mark.parametrize("num_messages", [1, 2])
def test_no_prompt_has_more_tokens_than_the_bound_of_its_template(template: str, num_messages: int) -> None:
    """Also for templates that are not understood: these have no bound."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    rows: list[dict[str, Any]] = [
        {
            "prompt": [
                {"role": role, "content": content}
                for role, content in zip(["system", "user"][-num_messages:], texts, strict=True)
            ]
        }
        for texts in product(CONTENTS, repeat=num_messages)
    ]
    source = SourceRows("s", "data.train[0]", FileSource(path="s"), JsonRows.of(rows, "s"))
    encoder = Encoder(source, DataConfig(max_prompt_tokens=10_000), tokenizer)
    bounds = []
    for index, row in enumerate(rows):
        with suppress(DataError):  # of some templates for some contents
            if (most := encoder.most_tokens(index, row)) is not None:
                bounds.append(most)
                assert 1 <= len(encoder([index])[0].token_ids) <= most
    assert bool(bounds) is (searched_texts(template) is not None)
