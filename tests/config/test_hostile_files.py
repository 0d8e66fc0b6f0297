"""Any config file loads or raises a ConfigError, quickly: never another exception, never a hang."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pytest

from braid.config.load import load_config
from braid.config.source import plain_scalar
from braid.errors import BraidError, ConfigError
from braid.plan import resolve
from braid_dialects.load import read_config
from braid_dialects.roll_facts import largest_divisor

MAX_CPU_S = 5.0
"""Limit of CPU time per file, to detect hangs; reading takes less than a hundredth of it."""
NATIVE = """\
run: {max_rounds: 2, name: mine, seed: 7}
model: {build: {hidden_size: 32}}
data:
  train: [{kind: procedural, generator: chain_sum, size: 64, params: {a: [1, 2]}}]
reward:
  parts:
    - {kind: exact, pattern: "(.*)", weight: 0.5}
    - kind: judge
      url: "http://localhost:1/v1"
      model: m
      prompt: "{response}"
rollout: &r {prompts_per_round: 4, group_size: "${add:${rollout.prompts_per_round},4}"}
train: {optimizer: {lr: 1e-6, betas: [0.9, 0.99]}}
cluster: {env: {A: "${oc.env:HOME}"}, placement: {policy: 0-1}}
"""
FOREIGN = (
    "trainer: {epochs: 2, seed: 7, run_name: a}\ngenerator: {n_samples_per_prompt: 4}\nhydra: {searchpath: [x]}\ndefaults: [_self_]\n",
    "runner: {task_type: math, max_epochs: 2, seq_length: 64}\nalgorithm: {group_size: 2, adv_type: grpo}\nactor: {seed: 1}\nrollout: {}\n",
    "exp_name: a\nrollout_batch_size: 8\nprompt_length: 8\nresponse_length: 8\npretrain: m\nactor_train: {device_mapping: 'list(range(0,2))'}\n",
)
TOKENS = (
    "${", "${}", "${.}", "${..}", "${oc.env:HOME}", "${oc.decode:'[1'}", "${rollout}", "${mul:9e300,9e300}", "9" * 500, "0x" + "f" * 999, "0x" + "f" * 300, "0x" + "f" * 250, "999999999", "1_",
    "1e999", "-.inf", ".nan", "null", "~", "!!python/none", "!x", "&a", "*a", "*r", "<<: *r", "---\n", "...\n", "{", "}", "[", "]", ": ", "- ",
    "'", '"', "\t", "\x00", "\ud7ff", "日本", "%", "@", "`", "|", ">", "?", "# ", "..", "/", "../../x", "true", "[[[[[[", "{{{{{{", "a: b: c",
    "x" * 500, "env@env: x", "defaults: [x/y@z]", "braid: {run: {name: ..}}", "\\${", "0-7:0-3", "10_000_000_000_000_000_000_000",
)  # fmt: skip


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise AssertionError after that much CPU time, independent of the machine's load."""

    def stop(_: int, __: FrameType | None) -> None:
        raise AssertionError(f"took more than {seconds} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def mutated(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 3)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.choice((0, 0, 1, 3, 12)))
        lines = text.splitlines(keepends=True)
        match draw.randrange(4):
            case 0 | 1:
                text = text[:start] + draw.choice(TOKENS) + text[end:]
            case 2 if lines:
                text = text.replace(draw.choice(lines), draw.choice(lines) * draw.choice((0, 1, 2)), 1)
            case _:
                text = text[:start] + chr(draw.randrange(32, 0x300)) + text[end:]
    return text


def read(path: Path) -> None:
    with no_longer_than(MAX_CPU_S), suppress(BraidError):
        resolve(read_config(path).loaded.config, num_prompts=10)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_files", [600, pytest.param(10_000, marks=pytest.mark.nightly)])
def test_mutated_files_load_or_raise_a_config_error(num_files: int, tmp_path: Path) -> None:
    draw, path = random.Random(0), tmp_path / "file.yaml"
    for number in range(num_files):
        text = mutated(NATIVE if number % 2 else draw.choice(FOREIGN), draw)
        path.write_text(text, "utf-8")
        try:
            read(path)
        except Exception as error:
            raise AssertionError(f"file {number} raised {error!r}:\n{text}") from error


TENFOLD = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: *a{i - 1}, l{i}: *a{i - 1}}}\n" for i in range(1, 25)
)
HOSTILE = {
    "aliases of aliases": (TENFOLD, "more than 20,000 keys and values after expanding aliases"),
    "merges of merges": (MERGED, "more than 20,000 keys and values after expanding aliases"),
    "digits": (f"run: {{seed: {'9' * 6000}}}\n", "run.seed: an integer of 6,000 digits"),
    "digits of a float": (f"train: {{optimizer: {{lr: {'9' * 400}}}}}\n", "train.optimizer.lr: an integer of 400 digits"),
    "hexadecimal digits above floats": (f"run: {{seed: 0x{'f' * 256}}}\n", "an integer of 258 digits; at most 255"),
    "hexadecimal digits": (f"run: {{seed: 0x{'f' * 8000}}}\n", "an integer of 8,002 digits"),
    "a product": (f"run: {{seed: '${{mul:{'9' * 300},{'9' * 300}}}'}}\n", "the result exceeds 1e+308"),
    "a decoded number": (f"run: {{seed: '${{oc.decode:\"{'9' * 400}\"}}'}}\n", "is an integer above the maximum of 1e+308"),
    "unknown keys": ("run: {}\n" + "".join(f"key{i}: 1\n" for i in range(5000)), "and 4,95"),
    "a large file": ("# " + "x" * 2**20 + "\n", "bytes; at most 1,048,576"),
    "a name that leads out": ("run: {name: ..}\n", "run.name: '..' is not a folder below run.output_dir"),
    "no interpolation": ("run: {seed: '${.}', name: '${}'}\n", "is not a valid interpolation"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_a_clear_error_at_once(tmp_path: Path, name: str) -> None:
    text, words = HOSTILE[name]
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with no_longer_than(MAX_CPU_S), pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 20_000


def test_thousands_of_unknown_keys_are_reported_quickly(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("generator: {}\ntrainer:\n" + "".join(f"  epochs{i}: 1\n" for i in range(5000)))
    with no_longer_than(MAX_CPU_S), pytest.raises(ConfigError, match="5000 problems") as caught:
        read_config(path)
    assert "and 4,950 more" in str(caught.value)


@pytest.mark.parametrize("dialect", ["rlinf", "roll", "skyrl"])
def test_an_invalid_interpolation_is_reported_with_a_search_path_too(tmp_path: Path, dialect: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(
        "trainer: {epochs: '${}'}\nseed: '${.}'\nhydra: {searchpath: ['${.}', '${}', '${seed}']}\ndefaults: [env/none@env]\n"
    )
    with pytest.raises(ConfigError, match="is not a valid interpolation"):
        read_config(path, dialect=dialect)  # pyright: ignore[reportArgumentType]


def test_a_short_override_is_not_a_long_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an integer of 5,000 digits"):
        load_config(None, [f"run.seed={'9' * 5000}"])


ROLL = """\
exp_name: a
rollout_batch_size: {rounds}
num_return_sequences_in_group: 8
prompt_length: 8
response_length: 8
pretrain: m
actor_train: {{training_args: {{per_device_train_batch_size: 1, gradient_accumulation_steps: {steps}}}}}
"""
SIZES = {
    "many divisors": ("999999999", "7", "values that fit: 8, 24, 72, "),
    "a prime": ("999999937", "2", "values that fit: 8"),
    "64 bits": ("1152921504606846976", "3", "values that fit: 8, 16"),
    "more than 64 bits": ("9" * 300, "3", "is not an integer >= 1; integers have at most 64 bits"),
    "hexadecimal": (f"0x{'f' * 253}", "3", "is not an integer >= 1; integers have at most 64 bits"),
    "hexadecimal above floats": (f"0x{'f' * 300}", "3", "an integer of 302 digits; at most 255 are allowed"),
    "steps": ("8", f"0x{'f' * 253}", "is not an integer >= 1; integers have at most 64 bits"),
}


@pytest.mark.parametrize("name", SIZES)
def test_huge_sizes_of_a_roll_file_are_a_clear_error_at_once(tmp_path: Path, name: str) -> None:
    rounds, steps, words = SIZES[name]
    path = tmp_path / "file.yaml"
    path.write_text(ROLL.format(rounds=rounds, steps=steps))
    with no_longer_than(MAX_CPU_S), pytest.raises(ConfigError) as caught:
        read_config(path, dialect="roll")
    assert words in str(caught.value)
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("number", "most", "divisor"), [(12, 5, 4), (999999937, 10**8, 1), (10**12, 3 * 10**11, 25 * 10**10)]
)
def test_the_largest_divisor_is_found_without_trying_all(number: int, most: int, divisor: int) -> None:
    with no_longer_than(MAX_CPU_S):
        assert largest_divisor(number, most) == divisor


@pytest.mark.parametrize("text", ["1_", "1__0", "_1", "1_.5", "-1_"])
def test_misplaced_underscores_make_a_text(text: str) -> None:
    assert plain_scalar(text) == text


def test_a_name_that_no_file_can_have_is_a_file_that_is_missing(tmp_path: Path) -> None:
    """Where it is looked for, an OSError ended the command."""
    (tmp_path / "file.yaml").write_text(
        f"defaults: [{'x' * 300}, _self_]\nrollout_batch_size: 4\npretrain: a\n"
    )
    with pytest.raises(ConfigError, match=r"x{300}"):
        read_config(tmp_path / "file.yaml", [], dialect="roll")
