"""Code that must pass tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat

from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class CodeReward(RewardPart):
    """Runs the answer's Python code against the row's tests, in a process with limits on time, memory and
    files.

    Tests are one of: Python text with assertions; a list of such texts; a list of {input, output}, for
    programs that read stdin and print; {inputs, outputs} with two lists; or any of these as JSON text. With
    `fn_name`, `testtype: functional` or `type: function_call` (LiveCodeBench, DeepCoder, TACO) they are
    arguments and result of a function.
    """

    kind: Literal["code"]
    """Python code that must pass the tests."""
    tests_key: str = "tests"
    """Column that holds the tests."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every test passes, else 0. fraction: fraction of tests that pass."""
    pattern: str = r"```(?:python|py)?[ \t]*\n(.*?)```"
    """Regular expression; group 1 of its last match is the code (dot matches newlines). No match scores 0."""
    test_timeout_s: PositiveFloat = 5.0
    """Timeout of one test in seconds, after which it counts as failed. Replaces reward.timeout_s."""
    memory_bytes: int = Field(default=2**30, ge=2**26, le=2**32)
    """Address space limit of one test's process in bytes; a test that needs more fails."""

    runs_programs: ClassVar[bool] = True
    scores_in_processes: ClassVar[bool] = True

    def build(self, making: Making) -> Part:
        from braid.rewards.parts import code_part

        return code_part(self, making)

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.base import column_of

        return partial(column_of, name=self.tests_key, key=f"{key}.tests_key")

    def prompt_problems(self, key: str, prompt: Prompt) -> Iterator[tuple[str, str]]:
        from braid.rewards.programs import read_tests

        try:
            read_tests(prompt.fields[self.tests_key], prompt.fields.get("metadata"))
        except ValueError as error:
            yield f"{key}.tests_key", f"column {self.tests_key!r} of {prompt.uid}: {error}"
