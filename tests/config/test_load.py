"""Loading: interpolation, validation, origins, and the text of every problem."""

from __future__ import annotations

import contextlib
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from braid.config.load import Loaded, load_config, plain_data, to_yaml
from braid.config.moved import MOVED
from braid.config.schema import RunConfig
from braid.config.shape import allowed, fields_of
from braid.config.source import leaves, path_text
from braid.envs.kinds import ToolsEnv
from braid.errors import ConfigError

BASE = """\
run: {max_rounds: 5}
model:
  build: {hidden_size: 64}
data:
  train:
    - {kind: procedural, generator: chain_sum}
    - kind: file
      path: data.jsonl
reward:
  parts:
    - {kind: exact}
env: {kind: tools}
"""


def load(tmp_path: Path, text: str = BASE, *overrides: str) -> Loaded:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def complaints(tmp_path: Path, text: str = BASE, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, *overrides)
    return [str(problem) for problem in error.value.problems]


def test_a_config_knows_where_each_value_came_from(tmp_path: Path) -> None:
    loaded = load(tmp_path, BASE, "run.seed=3", "data.train.1.limit=7")
    assert loaded.config.run.max_rounds == 5
    assert loaded.origins["run.max_rounds"] == "c.yaml:1"
    assert loaded.origins["run.seed"] == "override"
    assert loaded.origins["data.train[1].path"] == "c.yaml:8"
    assert loaded.origins["data.train[1].limit"] == "override"
    assert loaded.origins["model.build.num_layers"] == "default"
    assert loaded.base_dir == tmp_path.resolve()


def test_origins_cover_every_leaf_of_the_config(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert set(loaded.origins) == {path_text(path) for path, _ in leaves(plain_data(loaded.config))}


def test_a_section_has_the_origin_of_what_the_user_wrote_in_it(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert loaded.origin("data.train") == "c.yaml:6"
    assert loaded.origin("rollout") == "default"


def test_a_config_of_overrides_alone_needs_no_file() -> None:
    loaded = load_config(None, ["model.path=some/folder", "run.max_rounds=1"])
    assert loaded.config.model.path == "some/folder"
    assert loaded.path is None
    assert loaded.base_dir == Path.cwd()


def test_a_config_cannot_be_written_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path).config.run.seed = 4


def test_interpolations_name_other_keys_defaults_and_lists(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        BASE,
        "rollout.engine.max_running=${mul:${rollout.prompts_per_round},${rollout.group_size}}",
        "run.name=seed-${run.seed}",
        "eval.sampling=${rollout.sampling}",
        "eval.samples_per_prompt=${data.train[0].size}",
        "rollout.sampling.max_new_tokens=17",
    ).config
    assert config.rollout.engine.max_running == 32 * 8
    assert config.run.name == "seed-0"
    assert config.eval.sampling == config.rollout.sampling
    assert config.eval.samples_per_prompt == 10_000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${add:1,2,3}", 6),
        ("${sub:5,2}", 3),
        ("${subtract:5,2}", 3),
        ("${mul:2,3}", 6),
        ("${multiply:2,3}", 6),
        ("${div:6,4}", 1.5),
        ("${int_div:7,2}", 3),
        ("${min:4,2,3}", 2),
        ("${max:4,2,3}", 4),
        ("${add:${mul:2,3},1}", 7),
    ],
)
def test_resolvers_compute(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, BASE, f"eval.success_reward={text}").config.eval.success_reward == value


def test_not_negates_and_now_is_one_time_for_the_whole_process(tmp_path: Path) -> None:
    text = BASE + "eval: {before: true, at_end: '${not:${eval.before}}'}\n"
    config = load(tmp_path, text, "run.name=${now:%Y%m%d_%H%M%S_%f}").config
    assert config.eval.at_end is False
    assert re.fullmatch(r"20\d{6}_\d{6}_\d{6}", config.run.name or "")
    assert load(tmp_path, text, "run.name=${now:%Y%m%d_%H%M%S_%f}").config.run.name == config.run.name


def test_values_can_come_from_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAID_TEST_SEED", "12")
    assert load(tmp_path, BASE, "run.seed=${oc.env:BRAID_TEST_SEED}").config.run.seed == 12
    assert load(tmp_path, BASE, "run.seed=${oc.env:BRAID_TEST_UNSET,4}").config.run.seed == 4


def test_an_escaped_interpolation_is_text_and_other_text_is_untouched(tmp_path: Path) -> None:
    text = BASE + r"""rollout: {sampling: {stop_strings: ['\${x}', '\d{2}$', '\\']}}"""
    assert load(tmp_path, text).config.rollout.sampling.stop_strings == ("${x}", r"\d{2}$", "\\\\")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=${nope}", "run.seed: ${nope}: unknown key 'nope' [override]"),
        (
            "run.seed=${rollout.groop_size}",
            "run.seed: ${rollout.groop_size}: unknown key 'rollout.groop_size', did you mean "
            "'rollout.group_size'?",
        ),
        (
            "run.seed=${run.seed}",
            "run.seed: ${run.seed} is a circular reference; remove one of its links [override]",
        ),
        (
            "run.seed=${oc.env:BRAID_TEST_UNSET}",
            "run.seed: ${oc.env:BRAID_TEST_UNSET}: the environment variable BRAID_TEST_UNSET is not set; "
            "set it, or give a default: ${oc.env:BRAID_TEST_UNSET,default} [override]",
        ),
        (
            "run.seed=${ad:1,2}",
            "run.seed: ${ad:1,2}: unknown resolver 'ad', did you mean 'add'?; available: add, sub",
        ),
        ("run.seed=${div:1,0}", "run.seed: cannot evaluate ${div:1,0}: division by zero [override]"),
        ("run.seed=${add:a,1}", "run.seed: cannot evaluate ${add:a,1}: 'a' is not a number [override]"),
        (
            "run.seed=${add:1}",
            "run.seed: cannot evaluate ${add:1}: needs two or more numbers, got 1 [override]",
        ),
        ("run.seed=${", "run.seed: '${' is not a valid interpolation:"),
        ("run.seed=???", "run.seed: required; set it on the command line: run.seed=VALUE [override]"),
    ],
)
def test_an_interpolation_that_fails_says_why(tmp_path: Path, override: str, message: str) -> None:
    (complaint,) = complaints(tmp_path, BASE, override)
    assert complaint.startswith(message)


def test_circular_references_are_reported_for_each_key(tmp_path: Path) -> None:
    problems = complaints(tmp_path, BASE, "run.seed=${eval.every_rounds}", "eval.every_rounds=${run.seed}")
    assert problems == [
        "run.seed: ${eval.every_rounds} is a circular reference; remove one of its links [override]",
        "eval.every_rounds: ${run.seed} is a circular reference; remove one of its links [override]",
    ]


def test_a_mandatory_value_can_be_set(tmp_path: Path) -> None:
    text = BASE.replace("max_rounds: 5", 'max_rounds: "???"')
    assert complaints(tmp_path, text) == [
        "run.max_rounds: required; set it on the command line: run.max_rounds=VALUE [c.yaml:1]"
    ]
    assert load(tmp_path, text, "run.max_rounds=9").config.run.max_rounds == 9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.engine=VLM",
            "rollout.engine: kind: 'VLM' is not one of native, vllm, sglang, or file.py:name of your own, did "
            "you mean 'vllm'? [override]",
        ),
        (
            "rollout.engine={kind: ${run.name}}",
            "rollout.engine: cannot parse the value {kind: ${run.name}} (expected ',' or '}', but got '{'); "
            "quote ${...} inside { } and [ ] [override]",
        ),
        ("modle.path=x", "modle: unknown key, did you mean 'model'? [override]"),
        ("run.sed=1", "run.sed: unknown key, did you mean 'seed'? [override]"),
        (
            "train.optimizer.schedule.warmup=1",
            "train.optimizer.schedule.warmup: unknown key, did you mean 'warmup_steps'? [override]",
        ),
        (
            "model.build.hiden_size=1",
            "model.build.hiden_size: unknown key, did you mean 'hidden_size'? [override]",
        ),
        ("data.train.0.sizes=1", "data.train[0].sizes: unknown key, did you mean 'size'? [override]"),
        ("env.max_turn=1", "env.max_turn: unknown key, did you mean 'max_turns'? [override]"),
        (
            "reward.parts.0.ignorecase=1",
            "reward.parts[0].ignorecase: unknown key, did you mean 'ignore_case'?",
        ),
        ("report.wandb.projet=x", "report.wandb.projet: unknown key, did you mean 'project'? [override]"),
        (
            "data.train.0.path=x",
            "data.train[0].path: unknown key for kind procedural; available for kind file and hub [override]",
        ),
        (
            "group_size=4",
            "group_size: unknown key in this section, did you mean rollout.group_size? [override]",
        ),
        ("run.zzz=4", "run.zzz: unknown key; the keys of this section are name, output_dir, seed, device"),
    ],
)
def test_an_unknown_key_names_the_nearest_at_any_depth(tmp_path: Path, override: str, message: str) -> None:
    (complaint,) = complaints(tmp_path, BASE, override)
    assert complaint.startswith(message)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.seed=x", "run.seed: 'x' is not an integer >= 0 [override]"),
        ("run.seed=-1", "run.seed: -1 is not an integer >= 0 [override]"),
        ("run.seed=1.5", "run.seed: 1.5 is not an integer >= 0 [override]"),
        ("run.seed=true", "run.seed: true is not an integer >= 0 [override]"),
        ("run.seed=null", "run.seed: null is not an integer >= 0 [override]"),
        ("run.seed=[1]", "run.seed: [1] is not an integer >= 0 [override]"),
        ("run.max_rounds=0", "run.max_rounds: 0 is not an integer > 0, or null [override]"),
        ("run.name=5", "run.name: 5 is not a string matching ^[A-Za-z0-9_.-]+$; put it in quotes [override]"),
        ("run.name=a/b", "run.name: 'a/b' is not a string matching ^[A-Za-z0-9_.-]+$ [override]"),
        ("run.device=gpu", "run.device: 'gpu' is not one of auto, cpu, cuda [override]"),
        (
            "model.dtype=bf17",
            "model.dtype: 'bf17' is not one of fp32, bf16, fp16 [override]",
        ),
        ("data.shuffle=2", "data.shuffle: 2 is not true or false [override]"),
        (
            "rollout.sampling.top_p=1.5",
            "rollout.sampling.top_p: 1.5 is not a number > 0 and <= 1 [override]",
        ),
        (
            "rollout.sampling.temperature=.inf",
            "rollout.sampling.temperature: inf is not a number > 0 [override]",
        ),
        ("algorithm.entropy_coef=.nan", "algorithm.entropy_coef: nan is not a number, or null [override]"),
        (
            "algorithm.policy_loss.dual_clip=1",
            "algorithm.policy_loss.dual_clip: 1 is not a number > 1, or 'off' [override]",
        ),
        (
            "rollout.sampling.stop_token_ids=[1,x]",
            "rollout.sampling.stop_token_ids[1]: 'x' is not an integer [override]",
        ),
        (
            "rollout.sampling.stop_token_ids=[1,true]",
            "rollout.sampling.stop_token_ids[1]: true is not an integer [override]",
        ),
        (
            "rollout.sampling.stop_strings=x",
            "rollout.sampling.stop_strings: 'x' is not a list, each a string [override]",
        ),
        (
            "algorithm.corrections=[{high: -1}]",
            "algorithm.corrections[0].high: -1 is not a number > 0, or 'off' [override]",
        ),
        (
            "train.optimizer.betas=[0.9]",
            "train.optimizer.betas: [0.9] is not a list of 2, each a number >= 0 and < 1 [override]",
        ),
        (
            "data.train.0.params=3",
            "data.train[0].params: 3 is not a mapping [override]",
        ),
        (
            "data.train.1.path=3",
            "data.train[1].path: 3 is not a string, or a list, each a string; put it in quotes [override]",
        ),
        ("eval=3", "eval: 3 is not a mapping with keys before, every_rounds, at_end"),
        (
            "env.kind=tool",
            "env: kind: 'tool' is not one of single_turn, tools, agent, program, gymnasium, metaworld, "
            "maniskill, libero, robosuite",
        ),
        (
            "env={max_turns: 3}",
            "env: missing `kind`; set it to one of single_turn, tools, agent, program, gymnasium, "
            "metaworld, maniskill, libero, robosuite [override]",
        ),
        (
            "env=tools",
            "env: 'tools' is not a mapping whose `kind` is one of single_turn, tools, agent, program, "
            "gymnasium, metaworld, maniskill, libero, robosuite [override]",
        ),
        (
            "data.train=x",
            "data.train: 'x' is not a list, each a mapping whose `kind` is one of file, hub, procedural",
        ),
        (
            "data.train.2={kind: hub}",
            "data.train[2].path: missing required key: Name of the data set [override]",
        ),
        ("model.path=x", "model: set exactly one of path, build and mlp, not path and build [c.yaml:2]"),
        ("model.build=null", "model: set exactly one of path, build and mlp, not none [c.yaml:2]"),
        (
            "model.build.num_kv_heads=3",
            "model.build: num_heads=4 is not a multiple of num_kv_heads=3; set num_kv_heads to a divisor "
            "of num_heads",
        ),
        (
            "model.build.head_dim=7",
            "model.build: head_dim=7 is odd; rotary embeddings need an even number",
        ),
        (
            "rollout.sampling.min_new_tokens=999",
            "rollout.sampling: min_new_tokens=999 is above max_new_tokens=256; lower it [override]",
        ),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(tmp_path: Path, override: str, message: str) -> None:
    (complaint,) = complaints(tmp_path, BASE, override)
    assert complaint.startswith(message)


def test_a_config_without_a_model_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"^model: missing required key: The policy \[default\]$"):
        load_config(None)


def test_all_problems_are_reported_together_in_order(tmp_path: Path) -> None:
    text = "run: {seed: -1}\nmodle: {}\nmodel: {path: x}\nmodel: {path: y}\neval:\n  every_rounds: ${nope}\n"
    with pytest.raises(ConfigError) as error:
        load(tmp_path, text, "train.steps_per_pass=no", "oops")
    assert str(error.value) == (
        "6 problems in the config:\n"
        "  - config: 'oops' is not an override; write key=value, for example run.seed=1 [override]\n"
        "  - train.steps_per_pass: 'no' is not an integer > 0 [override]\n"
        "  - run.seed: -1 is not an integer >= 0 [c.yaml:1]\n"
        "  - modle: unknown key, did you mean 'model'? [c.yaml:2]\n"
        "  - model: duplicate key, first set at c.yaml:3; remove one [c.yaml:4]\n"
        "  - eval.every_rounds: ${nope}: unknown key 'nope' [c.yaml:6]"
    )


def test_numbers_may_be_quoted_and_integral_floats_are_integers(tmp_path: Path) -> None:
    run = load(tmp_path, BASE, "run.seed='7'", "run.max_rounds=3.0").config.run
    assert (run.seed, run.max_rounds) == (7, 3)


def test_true_and_false_are_free_in_parameters_of_functions(tmp_path: Path) -> None:
    loaded = load(tmp_path, BASE, "data.train.0.params={a: true, b: [false]}")
    assert plain_data(loaded.config.data.train[0])["params"] == {"a": True, "b": [False]}


def test_paths_start_from_the_config_or_from_base_dir(tmp_path: Path) -> None:
    assert load(tmp_path, BASE, "run.base_dir=sub").base_dir == tmp_path.resolve() / "sub"
    assert load(tmp_path, BASE, "run.base_dir=/abs").base_dir == Path("/abs")


def test_a_written_config_loads_as_the_same_config_from_anywhere(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        BASE,
        r"rollout.sampling.stop_strings=['\${x}', '\\\${y}', yes, '1e-3', '017', '', ' a ', '#', 'ö', '???x']",
        "report.wandb={}",
    )
    (tmp_path / "run").mkdir()
    copy = tmp_path / "run" / "config.yaml"
    copy.write_text(to_yaml(loaded), "utf-8")
    again = load_config(copy)
    assert again.base_dir == loaded.base_dir
    assert again.config.model_copy(update={"run": loaded.config.run}) == loaded.config


@pytest.mark.slow
@given(
    st.lists(st.text(max_size=8), max_size=4),
    st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
def test_any_text_survives_being_written_and_loaded(
    tmp_path: Path, texts: list[str], params: dict[str, str]
) -> None:
    path = tmp_path / "config.yaml"
    data = yaml.safe_load(BASE)
    data["rollout"] = {"sampling": {"stop_strings": ["x"]}}
    path.write_text(yaml.safe_dump(data))
    loaded = load_config(path)
    sampling = loaded.config.rollout.sampling.model_copy(update={"stop_strings": tuple(texts)})
    rollout = loaded.config.rollout.model_copy(update={"sampling": sampling})
    train = (loaded.config.data.train[0].model_copy(update={"params": params}),)
    config = loaded.config.model_copy(
        update={"rollout": rollout, "data": loaded.config.data.model_copy(update={"train": train})}
    )
    path.write_text(to_yaml(Loaded(config, loaded.origins, loaded.base_dir, path)), "utf-8")
    again = load_config(path).config
    assert again.rollout.sampling.stop_strings == tuple(texts)
    assert plain_data(again.data.train[0])["params"] == params


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def _has(at: Any, key: str | int) -> bool:
    """Whether `at` still has the entry, after changes further up."""
    if isinstance(at, list):
        return isinstance(key, int) and key < len(at)
    return isinstance(at, dict) and key in at


@pytest.mark.slow
@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
def test_a_wrong_type_anywhere_is_a_config_error_and_nothing_else(
    tmp_path: Path, data: st.DataObject
) -> None:
    tree = plain_data(load(tmp_path).config)
    paths = [path[:end] for path, _ in leaves(tree) for end in range(1, len(path) + 1)]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        at: Any = tree
        for key in path[:-1]:
            at = at[key] if _has(at, key) else None
        if _has(at, path[-1]):
            at[path[-1]] = data.draw(_VALUES)
    path = tmp_path / "wrong.yaml"
    path.write_text(yaml.safe_dump(tree))
    with contextlib.suppress(ConfigError):
        load_config(path)


def test_the_allowed_values_of_every_key_have_words() -> None:
    for path, field in fields_of(RunConfig):
        assert allowed(field), path


def test_an_item_may_be_a_name_or_a_section() -> None:
    words = "a string, or a mapping whose `kind` is one of mcp, search"
    assert allowed(ToolsEnv.model_fields["tools"], 0) == words
    assert allowed(ToolsEnv.model_fields["tools"]) == f"a list, each {words}"


@pytest.mark.parametrize(
    "path", ["eval.target", "checkpoint", "train.optimizer.schedule", "eval", "report", "rollout.sampling"]
)
def test_null_on_the_command_line_gives_a_section_its_default(tmp_path: Path, path: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {build: {}}\neval: {target: {min_final: 0.5}, every_rounds: 7}\ncheckpoint: {every_rounds: 3}\n"
        "train: {optimizer: {schedule: {warmup_steps: 4}}}\nreport: {tensorboard: false}\nrollout: {sampling: {top_k: 3}}\n"
    )
    section = attrgetter(path)
    changed, default = (
        section(load_config(file).config),
        section(load_config(None, ["model.build={}"]).config),
    )
    assert changed != default
    loaded = load_config(file, [f"{path}=null"])
    assert section(loaded.config) == default
    assert loaded.origin(path) == "default"


def test_null_of_a_section_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {build: {}}\ncheckpoint:\n")
    with pytest.raises(ConfigError, match=r"checkpoint: is empty; remove it"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"model: is empty"):
        load_config(None, ["model=null"])


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config: the file is empty.*\[c\.yaml\]"):
        load_config(file)


def test_an_escape_in_double_quotes_is_explained(tmp_path: Path) -> None:
    wrong, fixes = (
        r'{kind: exact, pattern: "\d+"}',
        (r'{kind: exact, pattern: "\\d+"}', r"{kind: exact, pattern: '\d+'}"),
    )
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {{build: {{}}}}\nreward: {{parts: [{wrong}]}}\n")
    for load in (
        lambda: load_config(file),
        lambda: load_config(None, ["model.build={}", f"reward.parts=[{wrong}]"]),
    ):
        with pytest.raises(ConfigError) as caught:
            load()
        assert r"""write it twice, "\\d", or use single quotes: '\d'""" in str(caught.value)
    for fix in fixes:
        (part,) = load_config(None, ["model.build={}", f"reward.parts=[{fix}]"]).config.reward.parts
        assert part.pattern == r"\d+"  # pyright: ignore[reportAttributeAccessIssue]


def test_the_nearest_key_is_in_the_same_section() -> None:
    with pytest.raises(
        ConfigError,
        match=r"critic\.optimizer: unknown key in this section, did you mean critic\.train\.optimizer\?",
    ):
        load_config(None, ["model.build={}", "critic.optimizer.lr=1e-3"])


@pytest.mark.parametrize("old", [*MOVED])
def test_the_error_for_a_moved_key_names_its_place(old: str) -> None:
    new = MOVED[old]
    with pytest.raises(ConfigError) as error:
        load_config(None, ["model.build={}", f"{old}=1"])
    assert str(error.value) == f"{old}: unknown key; it is now {new} [override]"
    assert new.partition(" ")[0] in dict(fields_of(RunConfig))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.policy_loss.tau=1"], "algorithm.policy_loss.tau: unknown key for kind ppo_clip; available for kind kimi"),
        (["algorithm={recipe: cispo, policy_loss: {dual_clip: 3}}"],
            "algorithm.policy_loss.dual_clip: unknown key for kind cispo; available for kind ppo_clip and "
            "gspo"),
        (["algorithm.advantage.gamma=0.9"],
            "algorithm.advantage.gamma: unknown key for kind grpo; available for kind gae and reinforce "
            "and gigpo"),
        (["algorithm.advantage={kind: gigpo, episode_weight: 0, turn_weight: 0}"], "algorithm.advantage: episode_weight and turn_weight are 0, so every advantage is 0"),
        (["algorithm.policy_loss=cispoo"], "algorithm.policy_loss: kind: 'cispoo' is not one of ppo_clip, gspo, "),
        (["rollout.engine.tensor_parallel=2"],
            "rollout.engine.tensor_parallel: unknown key for kind native; available for kind vllm and sglang"),
        (["train.backend={kind: fsdp2, forward_prefetch: true}"],
            "train.backend.forward_prefetch: unknown key for kind fsdp2; available for kind fsdp"),
        (["critic.train.backend=fsdp3"], "critic.train.backend: kind: 'fsdp3' is not one of single, fsdp, fsdp2, "),
    ],
)  # fmt: skip
def test_a_key_of_another_kind_is_unknown_and_names_the_kinds_that_have_it(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(None, ["model.build={}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        (["rollout.engine=vllm", "rollout.engine.tensor_parallel=2"], {"kind": "vllm", "tensor_parallel": 2}),
        (["rollout.engine.tensor_parallel=2", "rollout.engine=vllm"], {"kind": "vllm", "tensor_parallel": 2}),
        (["rollout.engine=native"], {"kind": "native", "max_running": 7}),
        (["rollout.engine.max_running=8"], {"max_running": 8}),
        (["rollout.engine=sglang"], {"kind": "sglang"}),
    ],
)
def test_a_kind_and_its_settings_are_overridden_in_any_order(
    tmp_path: Path, overrides: list[str], engine: dict[str, Any]
) -> None:
    """The name of the file's kind keeps the file's settings; that of another drops them."""
    section = "" if "tensor_parallel" in str(overrides) else "rollout: {engine: {max_running: 7}}\n"
    loaded = load(tmp_path, BASE + section, *overrides)
    dumped = loaded.config.rollout.engine.model_dump(exclude_unset=True)
    assert {**engine, "kind": loaded.config.rollout.engine.kind} == {
        **dumped,
        "kind": loaded.config.rollout.engine.kind,
    }
    assert load_config(_stored(tmp_path, loaded)).config.rollout == loaded.config.rollout


def _stored(folder: Path, loaded: Loaded) -> Path:
    path = folder / "stored.yaml"
    path.write_text(to_yaml(loaded))
    return path
