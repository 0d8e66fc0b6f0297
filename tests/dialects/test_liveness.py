"""Every key that a ledger calls applied has an effect.

A key has an effect if another value changes what the run hands to its parts and to libraries (the plan; the
arguments of vLLM, SGLang, FSDP, DeepSpeed and Megatron-core), or makes the plan refuse the run; or if code of
the run reads the key (tests.live_keys). Changed arguments prove the options of engines and sharded backends
and the layout. Reads, recorded by full path in tiny runs, prove the rest. A key without an effect must be
unused according to the plan, with a reason.

    RUNS       tiny runs; each key is compared with what that very run reads
    LAYOUTS    configs for engines and devices that a test machine lacks; compared with what any of RUNS reads
    seeds      files of the dialects; likewise, for the keys that the ledger calls applied
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.live_keys import Effects, keys_of, observed, recorded
from tests.live_runs import LAYOUTS, LOSSES, RUNS, run_all, write_files

from braid.config.load import load_config, validate
from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of
from braid.config.source import Written, parse_path, place
from braid.config.train import OptimizerConfig
from braid.envs.kinds import (
    GymnasiumEnv,
    LiberoEnv,
    ManiskillEnv,
    McpServer,
    MetaworldEnv,
    MixedEnvConfig,
    RobosuiteEnv,
    SearchTool,
    ToolsEnv,
)
from braid.errors import ConfigError
from braid.rollout.engines.native.kind import Native
from braid.rollout.engines.sglang.kind import Sglang
from braid.rollout.engines.vllm.kind import Vllm
from braid.trainer import collectors, commands
from braid_dialects.load import DIALECTS, read_foreign
from braid_dialects.table import Rule
from braid_dialects.translate import translate

from .conftest import ALL_SEEDS, IN_ONE_PROCESS, Reader, Seed
from .samples import samples

pytestmark = pytest.mark.xdist_group("liveness")

LATE = (
    "run.max_restarts",
    "rollout.max_invalid_fraction",
    "train.max_skipped_steps",
    "critic.train.max_skipped_steps",
)
"""Keys that are read only after a failure; BROKEN runs read them."""
KINDS = (
    "env.kind",
    "algorithm.policy_loss.kind",
    "algorithm.advantage.kind",
    *(f"{key}[].kind" for key in ("data.train", "data.eval", "sft.data", "sft.eval_data", "reward.parts")),
)
"""Keys that determine which other keys their section has."""
ELSEWHERE = (*LATE, *KINDS, "run.base_dir")
"""Keys without an effect in RUNS and LAYOUTS. The loader reads the last one."""
TRIED: dict[str, tuple[str, ...]] = {
    "resumed": ("run.",),
    "pipelined": ("pipeline.", "rollout.engine."),
    "sources": ("data.", "sft.", "reward."),
    "pictures": ("model.", "data.", "sft."),
    "sac": ("sac.",),
    "supervised": ("sft.", "eval.", "train.", "run."),
    **dict.fromkeys(("rewards", "detection", "programs", "judge", "own judge"), ("reward.",)),
    **dict.fromkeys((*LOSSES, "distillation"), ("algorithm.",)),
    "distillation on examples": ("sft.distillation", "reference.path"),
    "teachers": ("reference.teachers",),
    **dict.fromkeys(LAYOUTS, ("train.", "inference.", "cluster.", "rollout.engine.", "rollout.weight_sync.")),
    **{name: ("rollout.",) for name in LAYOUTS if name.startswith(("vllm", "sglang"))},
    **{
        name: ("critic.train.", "reference.train.", "train.backend.")
        for name in LAYOUTS
        if name.startswith("roles")
    },
}
"""Run or layout -> the sections whose keys are tried in it; all sections in the other runs."""
VALUES: dict[str, tuple[Any, ...]] = {
    "algorithm.policy_loss.log_ratio_min": (-1.0,),
    "cluster.group_names": ({"policy": "mine"},),
    "cluster.placement": ({"policy": "0-15", "rollout": "0-15"}, {"policy": "0-7"}, {"policy": "0"}),
    "reward.parts[].letters": ("ABC",),
    "rollout.max_sequence_tokens": (63,),
}
"""Values to try where the type does not tell which are valid."""
MISSING = (
    "prefer.",
    "model.vla.",
    *sorted(
        {path for env in (ManiskillEnv, LiberoEnv, RobosuiteEnv) for path, _ in fields_of(env, "env.")}
        - {path for env in (ToolsEnv, GymnasiumEnv, MetaworldEnv) for path, _ in fields_of(env, "env.")}
    ),
)
"""Keys of another command, of policies and of simulators that RUNS have not:
tests/trainer/test_preference_runs.py, test_vla_runs.py, tests/envs/test_maniskill.py, test_libero.py, test_robosuite.py."""
_TRAINS = ("train", "critic.train", "reference.train")
NEVER = {
    # keys of prompts in sources of examples, and the reverse
    *(
        f"data.{use}[].{name}"
        for use in ("train", "eval")
        for name in ("response_function", "response_key", "messages_key", "tools_key")
    ),
    *(f"sft.{use}[].{name}_key" for use in ("data", "eval_data") for name in ("answer", "source")),
    *(
        f"{data}[].{name}"
        for data in ("data.train", "data.eval", "sft.data", "sft.eval_data")
        for name in ("chosen_key", "rejected_key", "pair_function", "margin_key", "target_key")
    ),
    # critics compute no log-probs and replay no experts, references are not trained
    *(
        f"critic.train.{name}"
        for name in ("compile", "logprob_chunk_bytes", "record_memory", "router_replay")
    ),
    "sft.optimizer.value_lr",
    "sac.optimizer.value_lr", "sac.critic_optimizer.value_lr",
    *(
        f"reference.train.{name}"
        for name in (
            "gradient_checkpointing", "grad_scaler.growth_interval", "grad_scaler.init_scale", "max_grad_norm",
            "max_skipped_steps", "micro_batch_rows", "offload.gradients", "offload.optimizer", "passes_per_round",
            "record_memory", "router_aux_coef", "router_replay", "shuffle", "steps_per_pass",
        )
    ),
    *(path for path, field in fields_of(OptimizerConfig, "reference.train.optimizer.") if not sections_of(field)),
    *(
        f"{train}.backend.transformer.apply_rope_fusion"
        for train in _TRAINS
        if find_spec("transformer_engine") is None
    ),
    # in mappings with names of the user's own, below which keys are not tried; tests/dialects/test_agentic.py
    *(path for path, _ in fields_of(MixedEnvConfig, "env.mix.")),
    # servers, indices and conversations: tests/envs/test_mcp_tools.py, test_search_tool.py,
    # tests/data/test_worked.py
    *(path for tool in (McpServer, SearchTool) for path, _ in fields_of(tool, "env.tools[].") if not path.endswith(".kind")),
    "env.tools[].kind",
    *(f"sft.{use}[].tools_key" for use in ("data", "eval_data")),
    # tests/trainer/test_vla_runs.py
    "sft.demonstrations",
    # engines of judges in processes of their own, which get what rollout.engine's get; tests/trainer/test_judges.py
    *(
        path
        for engine in (Vllm, Sglang)
        for path, _ in fields_of(engine, "reward.parts[].engine.")
        if path.rpartition(".")[2] not in Native.model_fields
    ),
    *(f"reward.parts[].engine.{name}" for name in ("kind", "prefix_caching", "recompute_cache")),
    # only one valid value
    "sac.optimizer.schedule.warmup_fraction", "sac.critic_optimizer.schedule.warmup_fraction",
    "rollout.engine.replicas",
    *(f"{train}.backend.stage" for train in _TRAINS),
}  # fmt: skip
"""Keys of the schema without an effect in all of RUNS and LAYOUTS: unused, or refused with another value."""

Reads = dict[str, set[str]]
"""Run -> the keys that it reads."""
Found = dict[str, dict[str, str]]
"""Run or layout -> key -> its effect (Effects.of)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of RUNS."""
    folder = tmp_path_factory.mktemp("runs")
    write_files(folder)
    return folder


@pytest.fixture(scope="module")
def reads(folder: Path) -> Reads:
    return run_all(folder)


@pytest.fixture(scope="module")
def in_runs(folder: Path, reads: Reads) -> Found:
    """Effects of the keys of RUNS."""
    return {
        name: _effects(_config(folder, overrides), TRIED.get(name, ("",)), reads[name], num_prompts=4)
        for name, overrides in RUNS.items()
    }


@pytest.fixture(scope="module")
def in_layouts(folder: Path, reads: Reads) -> Found:
    """Effects of the keys of LAYOUTS."""
    return {
        name: _effects(_config(folder, ["train.backend=fsdp2", *overrides]), TRIED[name], _union(reads))
        for name, overrides in LAYOUTS.items()
    }


def _config(folder: Path, overrides: Iterable[str]) -> RunConfig:
    filled = [text.replace("SERVER", "http://localhost:1") for text in overrides]
    return load_config(folder / "tiny.yaml", filled).config


def _union(reads: Reads) -> set[str]:
    return set().union(*reads.values())


def _effects(
    config: RunConfig, sections: tuple[str, ...], reads: set[str], num_prompts: int = 10**6
) -> dict[str, str]:
    effects = Effects(config, reads, num_prompts)
    return {key: effects.of(key, VALUES.get(key, ())) for key in keys_of(config) if key.startswith(sections)}


def _without_effect(effects: dict[str, str]) -> list[str]:
    return [key for key, effect in effects.items() if not effect and key not in ELSEWHERE]


@pytest.mark.parametrize("run", ["first", "second"])
def test_reads_of_a_run_are_recorded_and_those_of_the_plan_are_not(folder: Path, run: str) -> None:
    """Also in a second run of the process, whose modules have been imported in the first."""
    loaded = load_config(folder / "tiny.yaml", [f"run.name={run}"])
    with recorded() as keys:
        loaded = commands.with_absolute_paths(loaded)
        config, plan = loaded.config, commands.resolve(loaded.config, 4)
        assert keys == set()
        assert plan.to_json()["verb"] == "train"
        assert keys == set()
        assert config.model_copy(update={"run": config.run}).rollout.group_size > 1
        assert [part.kind for part in config.reward.parts]
        assert plan.recipe.kl_coef == 0
        assert collectors.sampling_of(config.rollout.sampling, (1,)).top_p == 1
        config.train.backend.model_dump()
    expected = {"rollout.group_size", "reward.parts[].kind", "algorithm.kl_coef", "rollout.sampling.top_p"}
    assert expected < keys
    assert "train.backend.kind" in keys
    assert not keys & {"rollout.sampling.min_p", "rollout.prompts_per_round", "algorithm.recipe", "run.name"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_each_key_of_a_run_has_an_effect_or_is_unused(in_runs: Found, name: str) -> None:
    assert _without_effect(in_runs[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_each_key_of_a_layout_has_an_effect_or_is_unused(in_layouts: Found, name: str) -> None:
    assert _without_effect(in_layouts[name]) == []


@pytest.mark.slow
def test_each_key_of_the_schema_has_an_effect_somewhere_or_is_known_to_have_none(
    in_runs: Found, in_layouts: Found, reads: Reads
) -> None:
    by_key: defaultdict[str, set[str]] = defaultdict(set)
    for effects in (*in_runs.values(), *in_layouts.values()):
        for key, effect in effects.items():
            by_key[key].add(effect.partition(":")[0])
    read = _union(reads)
    schema = {path for path, field in fields_of(RunConfig) if not sections_of(field)}
    schema = {key for key in schema if not key.startswith(MISSING) and key not in ELSEWHERE}
    is_refused = {key for key in read if "refused" in by_key[key]}
    without = {key for key in schema if not by_key[key] & {"changed", "read"} and key not in is_refused}
    assert sorted(without ^ NEVER) == []
    assert read.issuperset(LATE)


def test_the_loader_reads_the_base_folder() -> None:
    loaded = load_config(None, ["model.build={}", "run.base_dir=elsewhere"])
    assert loaded.base_dir == Path.cwd() / "elsewhere"


# The dialects


_CHOSEN: tuple[dict[str, str], ...] = (
    {},
    IN_ONE_PROCESS,
    {"backend": "fsdp", "engine": "vllm"},
    {"backend": "megatron", "engine": "vllm"},
    {"backend": "deepspeed", "engine": "native"},
)
_WHOLE = ("rlinf-math-003", "skyrl-004", "roll-rlvr-002-prose", "verl-gsm8k")
"""The fullest file of each language."""
VARIANTS = [(seed, chosen) for chosen in _CHOSEN for seed in ALL_SEEDS if not chosen or seed.name in _WHOLE]
"""Files, and what the command line chooses."""


class File:
    """A dialect's file, and what its run depends on if one key has another value."""

    def __init__(self, reader: Reader, seed: Seed, chosen: dict[str, str], reads: set[str]) -> None:
        self.dialect, self._reads, self._path = DIALECTS[seed.dialect], reads, reader.path(seed)
        self._chosen = chosen
        self._foreign = read_foreign(self._path, (), self.dialect)
        self.dialect = translate(self._foreign, self.dialect, **chosen).dialect
        self.baseline = self._outcome(self._foreign)

    def with_value(self, path: str, value: Any) -> str:
        """The outcome with another value at a key."""
        foreign = copy.deepcopy(self._foreign)
        assert place(foreign.tree, parse_path(path), value) is None
        return self._outcome(foreign)

    def _outcome(self, foreign: Written) -> str:
        """What the run depends on, or the problems and their keys."""
        written = translate(foreign, self.dialect, **self._chosen).written
        try:
            config = validate(written, self._path).config
        except ConfigError as error:
            return str(sorted((problem.key, problem.message) for problem in error.problems))
        return observed(config, self._reads)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_a_change_of_an_applied_key_changes_what_the_run_depends_on(
    reader: Reader, reads: Reads, name: str
) -> None:
    """A key that sets the same native keys in several variants is tried in the first of them."""
    tried: set[tuple[str, ...]] = set()
    without = []
    for seed, chosen in VARIANTS:
        if seed.dialect != name:
            continue
        file = File(reader, seed, chosen, _union(reads))
        for entry in reader.read(seed, **chosen).ledger:
            if entry.disposition != "applied" or (row := (entry.path, *entry.native)) in tried:
                continue
            tried.add(row)
            rule = file.dialect.rule_of(entry.path)
            assert rule is not None
            without += [
                f"{seed.name} {chosen} {entry.path}: {entry.value!r} -> {value!r}"
                for value in others(name, entry.path, rule, entry.value)
                if file.with_value(entry.path, value) == file.baseline
            ]
    assert without == [], "\n".join(without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "chosen"),
    VARIANTS,
    ids=lambda case: case.name if isinstance(case, Seed) else "-".join(case.values()) or "as it is",
)
def test_a_key_that_a_ledger_calls_applied_has_an_effect(
    reader: Reader, reads: Reads, seed: Seed, chosen: dict[str, str]
) -> None:
    read = reader.read(seed, **chosen)
    effects, keys = Effects(read.loaded.config, _union(reads)), keys_of(read.loaded.config)
    applied = [entry for entry in read.ledger if entry.disposition == "applied"]
    assert [
        entry.path
        for entry in applied
        if not any(_has_effect(key, effects) for key in keys if _is_set_by(key, entry.native))
    ] == []


def _is_set_by(key: str, native: Iterable[str]) -> bool:
    """Whether one of the native paths is the key, a section that contains it, or an item in it."""
    paths = (re.sub(r"\[\d+\]", "[]", path) for path in native)
    return any(
        f"{key}.".startswith((f"{p}.", f"{p}[]")) or p.startswith((f"{key}.", f"{key}[]")) for p in paths
    )


def _has_effect(key: str, effects: Effects) -> bool:
    # the stage has only one value; robot policies: tests/trainer/test_vla_runs.py,
    # tests/models/test_vla_policies.py auto_reset is only valid with another key:
    # tests/rollout_drivers/test_simulator_semantics.py
    if (
        key in (*ELSEWHERE, "env.auto_reset")
        or key.endswith(("train.backend.stage", "].tools_key"))  # of conversations: tests/data/test_worked.py
        or key.startswith(MISSING)
    ):
        return True
    return effects.of(key, VALUES.get(key, ())) in ("changed", "read", "refused")


EQUAL: dict[str, dict[str, tuple[tuple[Any, ...], ...]]] = {
    "rlinf": {
        "runner.task_type": (("math", "reasoning"),),
        "data.type": (("math", "reasoning"), ("vlm", "vision_language")),
        "data.val_rollout_batch_size": ((None, 8),),  # null: data.rollout_batch_size, which is 8 there
        "algorithm.adv_type": (("grpo", "grpo_dynamic"),),  # apart by algorithm.advantage_mode
        "algorithm.loss_type": (("ppo", "grpo", "actor"),),
        "algorithm.sampling_params.top_k": ((1_000_000, -1),),
        "algorithm.sampling_params.max_new_tokens": (
            (None, 1024),
        ),  # null: runner.seq_length - data.max_prompt_length
        "actor.fsdp_config.strategy": (("fsdp", "FSDP"), ("fsdp2", "FSDP2")),
        "actor.model.sequence_parallel": ((True, False),),  # without tensor parallelism
        "actor.model.trust_remote_code": ((True, False),),  # one of the two is enough
        "actor.tokenizer.trust_remote_code": ((True, False),),
    },
    "roll": {
        "actor_train.data_args.template": (("native", "qwen2_5", "qwen3"),),
        "actor_train.model_args.moe_aux_loss_coef": ((None, 0.0),),
        "actor_train.model_args.ulysses_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.context_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size": ((None, 1),),
        "actor_train.strategy_args.strategy_config.moe_grouped_gemm": ((None, False),),
        "actor_train.strategy_args.strategy_config.param_dtype": (("bf16", "bfloat16"),),
        "actor_train.strategy_args.strategy_config.reduce_dtype": (("fp32", "float32"),),
        "actor_train.strategy_args.strategy_config.reshard_after_forward": ((None, True),),
        # four devices are all that student and teacher have
        "student.strategy_args.strategy_config.fsdp_size": ((4, 1),),
        "teacher.strategy_args.strategy_config.fsdp_size": ((4, 1),),
        "student.device_mapping": (("list(range(0,4))", [0, 1, 2, 3]),),
        "student.data_args.template": (("native", "qwen2_5", "qwen3"),),
    },
    "verl": {"actor_rollout_ref.actor.ppo_mini_batch_size": ((None, 256),)},
    "trl": {
        "lr_scheduler_type": (("constant", "constant_with_warmup"),),  # there is no warmup
        "model_init_kwargs.dtype": (("float32", "auto", None),),
        "lora_target_modules": ((["q_proj", "v_proj"], None),),
        "report_to": (("none", None),),
    },
    "skyrl": {
        "generator.max_input_length": ((None, 512),),  # null: trainer.max_prompt_length, which is 512 there
        "generator.eval_sampling_params.max_generate_length": ((None, 1024),),  # null: that of training
    },
}
"""Values of a key that mean the same in these files."""


def others(dialect: str, path: str, rule: Rule, value: Any) -> Iterator[Any]:
    """Accepted values that mean something else than `value`."""
    equal = [value, *(v for same in EQUAL[dialect].get(path, ()) if _is_in(value, same) for v in same)]
    for sample in samples(rule):
        if not _is_in(sample, equal):
            yield sample


def _is_in(value: Any, values: Iterable[Any]) -> bool:
    return any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in values)


def enumerated() -> list[tuple[str, str, Rule]]:
    """(dialect, key, rule) of every key with a list of values."""
    return [
        (name, path, rule)
        for name, dialect in DIALECTS.items()
        for path, rule in dialect.rules.items()
        if rule.takes.choices
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_each_value_of_an_enumerated_key_is_taken_and_another_is_refused_with_the_list(name: str) -> None:
    for dialect, path, rule in enumerated():
        if dialect != name:
            continue
        key = path.replace("*", "mine")
        for value in rule.takes.choices:
            assert not _complaints(dialect, key, value, "is not one of"), f"{path}={value!r}"
        for choice in rule.takes.choices:
            assert _WORDS.get(str(choice), str(choice)) in rule.takes.words, f"{path}: {choice!r}"
        refused = _complaints(dialect, key, "no-such-value", "is not")
        assert any(rule.takes.words in text for text in refused), path


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _complaints(dialect: str, key: str, value: Any, text: str) -> list[str]:
    """Problems of a key in a file without other keys, but for the trainer of TRL that tells the table."""
    tree: dict[str, Any] = {"trainer": "grpo"} if dialect == "trl" else {}
    place(tree, parse_path(key), value)
    problems = translate(Written(tree), DIALECTS[dialect]).written.problems  # pyright: ignore[reportArgumentType]
    return [problem.message for problem in problems if problem.key == key and text in problem.message]
