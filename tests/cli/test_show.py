"""`braid show`: origins, arithmetic, memory, warnings."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from braid.cli.figures import figures, human_bytes, human_count
from braid.cli.show import as_json, print_plan
from braid.config.load import load_config
from braid.plan import Verb, resolve

CONFIG = """\
run: {max_rounds: 10}
model: {build: {}}
data: {train: [{kind: procedural, generator: chain_sum, size: 64}]}
reward: {parts: [{kind: exact}]}
rollout:
  prompts_per_round: 16
  group_size: 4
"""


def show(
    tmp_path: Path, *overrides: str, show_defaults: bool = False, width: int = 120, verb: Verb = "train"
) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    loaded = load_config(path, overrides)
    plan = resolve(loaded.config, verb=verb, origin_of=loaded.origin)
    out = StringIO()
    print_plan(
        loaded, plan, show_defaults=show_defaults, console=Console(file=out, width=width, highlight=False)
    )
    return out.getvalue()


def line(text: str, start: str) -> str:
    """The line that starts with `start`, with single spaces."""
    lines = (" ".join(row.split()) for row in text.splitlines())
    return next(row for row in lines if row.startswith(start))


def test_values_come_with_their_origin_and_defaults_are_hidden(tmp_path: Path) -> None:
    text = show(tmp_path, "run.seed=5")
    assert line(text, "group_size") == "group_size 4 c.yaml:7"
    assert line(text, "seed") == "seed 5 override"
    assert "output_dir" not in text


def test_end_tokens_are_listed_with_their_origin(tmp_path: Path) -> None:
    assert line(show(tmp_path), "end token") == "end token <eos> (1) model.build"
    assert line(show(tmp_path, "model.eos_token_id=4"), "end token") == "end token 4 model.eos_token_id"
    folder = tmp_path / "model"
    folder.mkdir()
    added = [{"id": 1, "content": "<eos>"}, {"id": 107, "content": "<end_of_turn>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 107]}))
    text = show(tmp_path, "model.build=null", f"model.path={folder}", "rollout.sampling.stop_token_ids=[9]")
    end_tokens = [" ".join(row.split()) for row in text.splitlines() if row.strip().startswith("end token ")]
    assert end_tokens == [
        "end token <eos> (1) tokenizer_config.json and generation_config.json",
        "end token <end_of_turn> (107) generation_config.json",
        "end token 9 rollout.sampling.stop_token_ids",
    ]
    (folder / "generation_config.json").unlink()
    for config in ({"eos_token_id": 107}, {"text_config": {"eos_token_id": 107}}):
        (folder / "config.json").write_text(json.dumps(config))
        text = show(tmp_path, "model.build=null", f"model.path={folder}")
        assert line(text, "end token <end") == "end token <end_of_turn> (107) config.json"
    text = show(tmp_path, "model.build=null", "model.path=some/hub-name")
    assert line(text, "end tokens") == "end tokens unknown the model is not in a local folder"


def test_all_shows_defaults_too(tmp_path: Path) -> None:
    assert line(show(tmp_path, show_defaults=True), "output_dir") == "output_dir runs default"


def test_lists_of_plain_values_take_one_line(tmp_path: Path) -> None:
    assert line(show(tmp_path, "train.optimizer.betas=[0.5,0.9]"), "betas") == "betas [0.5, 0.9] override"


def test_derived_numbers_come_with_their_arithmetic(tmp_path: Path) -> None:
    text = show(
        tmp_path, "train.steps_per_pass=2", "train.passes_per_round=3", "rollout.sampling.max_new_tokens=100"
    )
    assert line(text, "trajectories per round") == "trajectories per round 64 16 prompts x 4 per group"
    assert line(text, "tokens per trajectory") == "tokens per trajectory at most 1,124 1024 prompt + 100 new"
    assert line(text, "tokens per round") == "tokens per round at most 71,936 64 trajectories x 1,124"
    assert line(text, "optimizer steps per round") == "optimizer steps per round 6 2 per pass x 3 passes"
    assert line(text, "rows per step") == "rows per step 32 16 prompts / 2 = 8 prompts x 4"
    assert line(text, "tokens per step").startswith("tokens per step at most 35,968 32 rows x 1,124")
    assert line(text, "rounds") == "rounds 10 run.max_rounds=10, 2.5 passes over the prompts"
    assert line(text, "optimizer steps 60") == "optimizer steps 60 10 rounds x 6"
    assert line(text, "total trajectories") == "total trajectories 640 10 rounds x 64"
    assert line(text, "old log-probs").startswith(
        "old log-probs recompute auto: the policy changes within a round of 6"
    )


def test_the_placement_shows_devices_and_groups_of_ranks(tmp_path: Path) -> None:
    assert line(show(tmp_path), "placement") == "placement in_process: all roles in the driver process"
    text = show(
        tmp_path,
        "run.device=cpu",
        "train.backend=fsdp2",
        "train.backend.size=2",
        "train.offload.optimizer=true",
        "cluster.placement={policy: 0-3, rollout: 4-5}",
        "cluster.devices_per_node=7",
    )
    assert line(text, "placement disagg") == "placement disaggregated: no two roles share a device"
    assert line(text, "role backend") == "role backend ranks machine devices parallel groups offloaded"
    groups = "data 0-3; shard 0-1 | 2-3; replica 0,2 | 1,3"
    assert line(text, "policy fsdp2") == f"policy fsdp2 0-3 0 0-3 {groups} optimizer"
    assert line(text, "rollout native") == "rollout native 0-1 0 4-5"
    assert line(text, "1 x 7 devices") == "1 x 7 devices; no role on 6"


def test_uneven_mini_batches_say_up_to(tmp_path: Path) -> None:
    text = show(tmp_path, "train.steps_per_pass=3")
    assert line(text, "rows per step") == "rows per step up to 24 16 prompts / 3 = up to 6 prompts x 4"


def test_rounds_that_depend_on_unread_data_are_unknown(tmp_path: Path) -> None:
    text = show(tmp_path, "run={max_epochs: 2}", "data.train=[{kind: file, path: x.jsonl}]")
    assert line(text, "rounds") == (
        "rounds unknown run.max_epochs=2 x training prompts / 16, known once the data is read"
    )


def test_critic_warm_up_is_subtracted_from_the_policys_steps(tmp_path: Path) -> None:
    text = show(tmp_path, "algorithm.recipe=ppo", "critic.warmup_rounds=4", width=160)
    assert line(text, "optimizer steps 6") == (
        "optimizer steps 6 6 rounds x 1 (4 rounds of critic warm-up; 10 critic steps)"
    )


def test_the_recipe_shows_what_the_config_changed_and_what_is_unused(tmp_path: Path) -> None:
    text = show(tmp_path, "algorithm.policy_loss.clip_high=0.3", "algorithm.kl_clamp=off")
    algorithm = text[text.index("algorithm  recipe grpo") :]
    assert line(algorithm, "clip_high") == "clip_high 0.3 override"
    assert line(algorithm, "clip_low") == "clip_low 0.2 recipe"
    assert line(algorithm, "kl_clamp") == "kl_clamp off override, unused"


def test_a_lower_precision_in_sampling_shows_where_its_correction_comes_from(tmp_path: Path) -> None:
    text = show(tmp_path, "rollout.engine.dtype=bf16", width=200)
    assert line(text, "engine's dtype") == "engine's dtype bf16 rollout.engine.dtype=bf16; training: fp32"
    assert line(text, "corrections").endswith("rollout.engine.dtype")
    assert line(text, "old log-probs").startswith(
        "old log-probs recompute auto: algorithm.corrections compare"
    )
    assert line(show(tmp_path, "pipeline={}", width=200), "corrections").endswith("pipeline")
    assert (
        line(show(tmp_path), "engine's dtype")
        == "engine's dtype fp32 rollout.engine.dtype=auto; training: fp32"
    )


def test_an_unused_key_of_a_list_is_marked(tmp_path: Path) -> None:
    text = show(tmp_path, "data.train=[{kind: file, path: x.jsonl, response_key: best}]")
    assert line(text, "response_key") == "response_key best override, unused"
    assert line(text, "path") == "path x.jsonl override"


def test_memory_adds_up(tmp_path: Path) -> None:
    text = show(tmp_path, "algorithm.kl_coef=0.1", "algorithm.kl_in=loss", "rollout.engine.compile=always")
    assert line(text, "policy 2") == "policy 2.98 M 11.4 MiB 11.4 MiB 22.7 MiB 45.4 MiB"
    assert line(text, "reference 2") == "reference 2.98 M 11.4 MiB 11.4 MiB"
    assert line(text, "engine's packed") == "engine's packed weights 2.98 M 11.4 MiB 11.4 MiB"
    assert line(text, "all") == "all 68.1 MiB"


def test_warnings_are_shown_with_key_and_origin(tmp_path: Path) -> None:
    text = show(tmp_path, "algorithm.kl_horizon=5", width=40)
    (warning,) = (line for line in text.splitlines() if "algorithm.kl_horizon: has no effect: " in line)
    assert warning.endswith("[override]"), "one line, however narrow the terminal"


def test_a_simulator_shows_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("run: {max_rounds: 2}\nmodel: {mlp: {}}\nenv: {kind: gymnasium, id: CartPole-v1}\n")
    loaded = load_config(path, ["algorithm.recipe=ppo"])
    names = [figure.name for figure in figures(loaded.config, resolve(loaded.config))]
    assert not [name for name in names if "token" in name or "cache" in name]
    out = StringIO()
    print_plan(loaded, resolve(loaded.config), show_defaults=False, console=Console(file=out, width=120))
    assert "level turn env" in " ".join(out.getvalue().split())  # of the advantage


@pytest.mark.parametrize("verb", ["sft", "eval"])
def test_other_commands_show_only_their_values(tmp_path: Path, verb: Verb) -> None:
    sources = ["sft.data=[{kind: file, path: x, response_key: y}]", "data.eval=[{kind: file, path: x}]"]
    text = show(tmp_path, *sources, verb=verb)
    assert f"derived  braid {verb}" in text
    assert "trajectories per round" not in text
    assert ("supervised steps" in text) == (verb == "sft")


@pytest.mark.parametrize("width", [80, 100])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, width: int) -> None:
    text = show(
        tmp_path, "algorithm.recipe=ppo", "algorithm.advantage.gamma=0.5", show_defaults=True, width=width
    )
    longer = [line.split(None, 1)[0] for line in text.splitlines() if len(line) > width]
    assert set(longer) <= {"characters"}, "but for values, which are whole"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_paths_and_lists_are_whole_at_any_width(tmp_path: Path, width: int) -> None:
    model, stops = (
        f"/data/{'a-deep-folder/' * 6}Qwen2.5-Math-7B",
        "[</answer>, a long stop string, and one more of them]",
    )
    text = show(
        tmp_path, "model={}", f"model.path={model}", f"rollout.sampling.stop_strings={stops}", width=width
    )
    for name, value in (("path", model), ("stop_strings", stops)):
        (shown,) = (line for line in text.splitlines() if line.split()[:1] == [name])
        assert shown.split(None, 1)[1].startswith(value), "it can be copied"
    assert line(text, "old log-probs").startswith("old log-probs current")


def test_the_sandbox_of_code_rewards_is_shown(tmp_path: Path) -> None:
    text = "model: {build: {}}\nrun: {max_rounds: 1}\ndata: {train: [{kind: procedural, generator: chain_sum, size: 64}]}\nreward: {parts: [{kind: code}], code: {isolation: process}}\n"
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml").config
    (shown,) = [f for f in figures(config, resolve(config)) if f.name == "sandbox of code rewards"]
    assert shown.value == "process"
    assert shown.how.startswith("resource limits only")


def test_json_has_config_origins_plan_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    loaded = load_config(path)
    document = json.loads(as_json(loaded, resolve(loaded.config)))
    assert document["config"]["rollout"]["group_size"] == 4
    assert document["origins"]["rollout.group_size"] == "c.yaml:7"
    assert document["plan"]["trajectories_per_round"] == 64
    assert {"name": "trajectories per round", "value": "64", "how": "16 prompts x 4 per group"} in document[
        "figures"
    ]


def test_sizes_are_rounded_for_reading() -> None:
    assert [human_bytes(n) for n in (12, 1536, 5 * 2**20, 3 * 2**30)] == [
        "12 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]
    assert [human_count(n) for n in (12, 1500, 2_960_128, 7 * 10**9)] == ["12", "1.5 k", "2.96 M", "7 B"]
