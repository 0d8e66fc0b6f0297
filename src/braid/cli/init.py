"""`braid init`: a config for a model and a file of data, from what its rows contain."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import yaml

from braid.config.data import FileSource
from braid.data.columns import find
from braid.data.rows import DataRow
from braid.data.sources import read_sources
from braid.errors import ConfigError, DataError, ModelError, Problem, suggest
from braid.plan.sizes import ModelSize, size_of_folder
from braid.rewards.kinds import REWARDS
from braid.types import text_of

PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input", "task")
ANSWERS = (
    "answer", "final_answer", "expected_answer", "ground_truth", "reward_model.ground_truth", "solution",
    "target", "label",
)  # fmt: skip
RESPONSES = ("response", "completion", "output")
CONVERSATIONS = ("messages", "conversations", "conversation")
"""Names of columns, the likeliest first."""

_ROWS_READ = 1000
"""Rows from which columns, rewards and lengths are guessed."""
_HELD_OUT, _LEAST_TO_HOLD_OUT = 200, 20
"""Rows held out for evaluation, at most a tenth; a smaller file is trained on as a whole."""
_TEMPLATE_TOKENS, _TOKEN_CHARACTERS, _STEP = 64, 3, 64
"""Room for the chat template, characters per token without a tokenizer, and the multiple to which lengths are
rounded up."""
_MOST_NEW_TOKENS = 512

Verb = Literal["train", "sft", "prefer"]


@dataclass(frozen=True)
class Draft:
    """What a config is written from: the command it is for, the keys of a source of data, the reason for
    each choice, and the reward part."""

    verb: Verb
    columns: Mapping[str, str | None]
    reasons: Sequence[str]
    reward: Mapping[str, str]


def config_for(paths: Sequence[str], model: str, reward: str | None, output: Path) -> tuple[str, Draft, int]:
    """The YAML of a config for `model` and the data in `paths`, to be written to `output`; what it was
    written from; and the number of rows. `reward` is the kind of a reward part, or FILE.py:FUNCTION, if the
    user has chosen. Raises DataError and ConfigError."""
    num_rows, rows = _read_rows(paths)
    draft = _draft(rows, reward)
    key = draft.columns.get("prompt_key")
    length = _prompt_tokens(rows, key, model) if draft.verb == "train" and key else None
    folder = output.absolute().parent
    paths = [os.path.relpath(Path(path).expanduser().absolute(), folder) for path in paths]
    text = _config_text(draft, name=output.stem, paths=paths, num_rows=num_rows, model=model, length=length)
    return text, draft, num_rows


def _read_rows(paths: Sequence[str]) -> tuple[int, list[DataRow]]:
    """The number of rows in the files, and the first of them. Raises DataError."""
    files = tuple(os.path.abspath(Path(path).expanduser()) for path in paths)
    try:
        (source,) = read_sources([FileSource(path=files)], base_dir=Path.cwd(), key="DATA")
    except DataError as error:
        raise DataError(str(error).replace("DATA[0].path: ", "")) from error
    return len(source.rows), list(islice(source.rows, _ROWS_READ))


def _draft(rows: Sequence[DataRow], reward: str | None) -> Draft:
    """Decide what the rows are for. Raises DataError if they lack what a run needs, and ConfigError for an
    unknown reward."""
    if {"chosen", "rejected"} <= rows[0].keys():
        if reward is not None:
            message = f"pairs of chosen and rejected responses need no reward; leave out {reward}"
            raise ConfigError([Problem("--reward", message)])
        prompt = _column(rows, PROMPTS)
        reasons = ["columns chosen and rejected: preference pairs"]
        return Draft("prefer", {} if prompt is None else {"prompt_key": prompt}, reasons, {})
    conversation = _column(rows, CONVERSATIONS)
    prompt = _column(rows, PROMPTS) or conversation
    if prompt is None:
        have = ", ".join(map(str, rows[0]))
        raise DataError(
            f"no column for prompts among {have}; rename one to prompt, or write the config by hand"
        )
    answer, response = _column(rows, ANSWERS), _column(rows, RESPONSES)
    if reward is not None or answer is not None:
        chosen, why = _reward(rows, answer, reward)
        columns = {"prompt_key": prompt, "answer_key": answer}
        reasons = [
            f"column {prompt}: the prompt",
            *([f"column {answer}: the reference answer"] * bool(answer)),
            why,
        ]
        return Draft("train", columns, reasons, chosen)
    if prompt == conversation:
        return Draft("sft", {"messages_key": prompt}, [f"column {prompt}: conversations to imitate"], {})
    if response is not None:
        columns = {"prompt_key": prompt, "response_key": response}
        reasons = [f"column {prompt}: the prompt", f"column {response}: the response to imitate"]
        if prompt == "instruction" and "input" in rows[0]:
            columns["template"] = "{prompt}\n\n{input}"
            reasons[0] += ", with column input below it"
        return Draft("sft", columns, reasons, {})
    raise DataError(
        f"column {prompt} has prompts, but no column has answers ({', '.join(ANSWERS)}) or responses "
        f"({', '.join(RESPONSES)}); pass a reward that needs neither: --reward FILE.py:FUNCTION"
    )


def _column(rows: Sequence[DataRow], names: Sequence[str]) -> str | None:
    """The first of the columns, perhaps nested, that has a value in all rows."""
    return next((name for name in names if all(_cell(row, name) not in (None, "", []) for row in rows)), None)


def _cell(row: DataRow, path: str) -> Any:
    try:
        return find(row, path)
    except LookupError:
        return None


def _reward(rows: Sequence[DataRow], answer: str | None, asked: str | None) -> tuple[dict[str, str], str]:
    """The reward part, and the reason for it."""
    if asked is not None and re.fullmatch(r".+\.py:\w+", asked):
        return {"kind": "function", "path": asked}, f"reward: {asked}, as asked"
    if asked is not None:
        if asked not in REWARDS:
            kinds = f"the kinds are {', '.join(REWARDS)}; FILE.py:FUNCTION is one of your own"
            message = f"no kind of reward is called {asked!r}{suggest(asked, REWARDS)}; {kinds}"
            raise ConfigError([Problem("--reward", message)])
        return {"kind": asked}, f"reward: {asked}, as asked"
    assert answer is not None
    values = [_cell(row, answer) for row in rows]
    texts = [str(value[0] if isinstance(value, list) else value).strip() for value in values]
    for kind, is_one, what in _KINDS:
        if sum(map(is_one, texts)) >= 0.95 * len(texts):
            return {"kind": kind}, f"reward: {kind}, since the answers are {what}"
    return {
        "kind": "exact"
    }, "reward: exact, since the answers are texts; a function of your own may suit better"


def _is_mathematical(text: str) -> bool:
    tail = text.rpartition("####")[2].strip().strip("$%. ")
    return bool(re.fullmatch(r"[-+]?[\d,]*\.?\d+(/\d+)?", tail)) or "\\" in tail


_KINDS: tuple[tuple[str, Callable[[str], bool], str], ...] = (
    ("choice", lambda text: bool(re.fullmatch(r"\(?[A-J]\)?\.?", text)), "single letters"),
    ("math", _is_mathematical, "numbers or formulas"),
)


def _prompt_tokens(rows: Sequence[DataRow], key: str, model: str) -> tuple[int, str]:
    """Tokens of the longest prompt, with room for a chat template, and how they were found."""
    texts = [_text(_cell(row, key)) for row in rows]
    num = "all" if len(rows) < _ROWS_READ else f"the first {_ROWS_READ:,}"
    try:
        from braid.config.model import ModelConfig
        from braid.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(ModelConfig(path=model))
        longest = max(len(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
        how = f"the longest of {num} prompts has {longest}, the rest is for the chat template"
    except (ModelError, OSError, ValueError):
        longest = max(map(len, texts)) // _TOKEN_CHARACTERS
        how = f"estimated from the characters of {num} prompts; the tokenizer could not be loaded"
    return -(-(longest + _TEMPLATE_TOKENS) // _STEP) * _STEP, how


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(
            text_of(message.get("content", "")) for message in value if isinstance(message, dict)
        )
    return str(value)


def _config_text(
    draft: Draft,
    *,
    name: str,
    paths: Sequence[str],
    num_rows: int,
    model: str,
    length: tuple[int, str] | None,
) -> str:
    """The YAML of the config. `length` is max_prompt_tokens of a run with rollouts, and its reason."""
    held_out = min(_HELD_OUT, num_rows // 10) if num_rows >= _LEAST_TO_HOLD_OUT else 0
    path = _scalar(paths[0]) if len(paths) == 1 else f"[{', '.join(map(_scalar, paths))}]"
    keys = "".join(
        f", {key}: {_scalar(value)}"
        for key, value in draft.columns.items()
        if (key, value) != ("answer_key", "answer")
    )
    source = f"kind: file, path: {path}{keys}"
    skip = f", skip: {held_out}" if held_out else ""
    held = (
        f"    - {{{source}, limit: {held_out}}}       # the first rows; shuffle the file if they are sorted\n"
    )
    lines = [
        "# Written by `braid init`; docs/config.md has every key.\n",
        *(f"#   {reason}\n" for reason in draft.reasons),
        f"\nrun:\n  name: {_scalar(name)}\n{_LENGTH if draft.verb == 'train' else ''}",
        f"\nmodel:\n  path: {_scalar(model)}\n",
    ]
    size = size_of_folder(model)
    room = _MOST_NEW_TOKENS
    if length is not None and size is not None and size.max_positions is not None:
        room = max(1, min(room, size.max_positions - length[0]))
    metrics = _METRICS[draft.verb].format(room=room)
    evaluation = f"\neval:\n  every_rounds: {_EVERY[draft.verb]}\n{metrics}"
    if draft.verb == "train":
        assert length is not None
        lines += [f"\ndata:\n  train:\n    - {{{source}{skip}}}\n", f"  eval:\n{held}" if held_out else ""]
        lines += [f"  max_prompt_tokens: {length[0]}      # {length[1]}\n"]
        part = ", ".join(f"{key}: {_scalar(value)}" for key, value in draft.reward.items())
        lines += [f"\nreward:\n  parts:\n    - {{{part}}}\n"]
        lines += [_TRAIN.format(room=room, rate=_learning_rate(size))]
    else:
        lines += [
            f"\n{draft.verb}:\n  data:\n    - {{{source}{skip}}}\n",
            f"  eval_data:\n{held}" if held_out else "",
        ]
        lines += [_IMITATION if draft.verb == "sft" else _PREFERENCE]
    lines += [evaluation + "\ncheckpoint:\n  keep_best: true\n"] if held_out else []
    return "".join(lines)


def _learning_rate(size: ModelSize | None) -> str:
    """That of reinforcement learning of all weights of a model; of one of unknown size, the lowest."""
    rates = ((1e7, "1.0e-4"), (1e9, "1.0e-5"))
    return next((rate for limit, rate in rates if size is not None and size.parameters < limit), "1.0e-6")


def _scalar(value: str | None) -> str:
    """A value in YAML, in quotes where it needs them."""
    is_plain = (
        value is not None and re.fullmatch(r"[A-Za-z./][\w./-]*", value) and yaml.safe_load(value) == value
    )
    return str(value) if is_plain else json.dumps(value, ensure_ascii=False)


_LENGTH = "  max_rounds: 200\n"
_EVERY = {"train": 10, "sft": 50, "prefer": 50}
_METRICS = {
    "train": "  sampling: {{greedy: true, max_new_tokens: {room}}}\n",
    "sft": "  target: {{metric: loss}}       # by which the best checkpoint is chosen\n",
    "prefer": "  target: {{metric: accuracy}}   # by which the best checkpoint is chosen\n",
}
_TRAIN = """
rollout:
  prompts_per_round: 32
  group_size: 8                # answers to each prompt, compared with one another
  sampling: {{max_new_tokens: {room}}}

algorithm:
  recipe: grpo

train:
  optimizer: {{lr: {rate}}}      # 1e-6 from 1B parameters, 1e-5 below, 1e-4 with adapters (model.lora)
"""
_IMITATION = """\
  epochs: 1
  rows_per_step: 32
  optimizer: {lr: 1.0e-5, schedule: {warmup_steps: 10, decay: cosine}}
"""
_PREFERENCE = """\
  loss: {kind: sigmoid, beta: 0.1}
  epochs: 1
  pairs_per_step: 32
  optimizer: {lr: 1.0e-6, schedule: {warmup_steps: 10}}
"""
