"""`braid explain` and `braid convert`, and the files that a run of a foreign config stores."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from braid.cli.explain import print_key, print_ledger
from braid.cli.main import main
from braid.config.load import load_config
from braid.config.model import BuildSpec, ModelConfig
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.plan import resolve
from braid_dialects.load import read_config

SEEDS = Path(__file__).parents[1] / "dialects/seeds"
SKYRL = SEEDS / "skyrl-004.yaml"
WHOLE = [
    "rlinf-math-000.yaml",
    "rlinf-math-003.yaml",
    "rlinf-embodied-003.yaml",
    "roll-rlvr-002.yaml",
    "skyrl-004.yaml",
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("REPO_PATH", "/opt/rlinf")
    monkeypatch.setenv("EMBODIED_PATH", str(SEEDS))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.yaml"
    path.write_text("trainer: {epochs: 2, seed: 7}\ngenerator: {n_samples_per_prompt: 4}\n")
    return path


def console(width: int) -> Console:
    return Console(file=io.StringIO(), width=width, highlight=False)


def text_of(terminal: Console) -> str:
    assert isinstance(terminal.file, io.StringIO)
    return terminal.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 160])
def test_every_key_is_shown_and_no_line_is_wider_than_the_terminal(width: int) -> None:
    ledger = read_config(SKYRL).ledger
    wide = console(width)
    print_ledger(ledger, title="skyrl-004.yaml (SkyRL)", console=wide)
    lines = text_of(wide).splitlines()
    assert max(map(len, lines)) <= width
    for entry in ledger:
        name = entry.path.rpartition(".")[2]
        assert any(line.startswith(f"  {name} ") for line in lines), entry.path
    counts = Counter(entry.disposition for entry in ledger)
    end = " ".join(" ".join(lines[-2:]).split())
    assert f"{len(ledger)} keys, {counts['applied']} applied, {counts['implied']} implied" in end


@pytest.mark.parametrize("width", [50, 80])
def test_a_native_path_is_whole_at_any_width(tmp_path: Path, width: int) -> None:
    path = tmp_path / "theirs.yaml"
    model = f"/data/{'a-deep-folder/' * 6}Qwen2.5-Math-7B"
    path.write_text(f"trainer: {{policy: {{model: {{path: {model}}}}}}}\n")
    narrow = console(width)
    print_ledger(read_config(path, dialect="skyrl").ledger, title="", console=narrow)
    assert f"model.path={model}" in text_of(narrow)


def test_json_has_a_row_for_every_key(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert main(["explain", str(file), "trainer.num_warmup_steps=3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {tuple(row) for row in rows} == {("path", "value", "disposition", "native", "note")}
    assert {row["path"]: row["native"] for row in rows} == {
        "trainer.epochs": {"run.max_epochs": 2},
        "trainer.seed": {"run.seed": 7},
        "trainer.num_warmup_steps": {"train.optimizer.schedule.warmup_steps": 3},
        "generator.n_samples_per_prompt": {"rollout.group_size": 4},
    }
    assert {row["disposition"] for row in rows} == {"applied"}


def test_keys_whose_native_keys_are_not_read_are_shown_as_unused(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    assert main(["explain", str(file), "generator.gpu_memory_utilization=0.5", "--engine", "vllm"]) == 0
    assert "rollout.engine.memory_fraction=0.5" in capsys.readouterr().out
    servers = "braid.rollout.engine.servers=[http://localhost:1]"
    arguments = [str(file), "generator.gpu_memory_utilization=0.5", servers, "--engine", "vllm"]
    assert main(["explain", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "unused: external servers have their own options (rollout.engine.servers)" in out
    assert "3 applied, 1 unused" in out


def test_explain_shows_what_would_stop_a_run(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert main(["explain", str(file), "trainer.logger=mlflow"]) == 2
    out, err = capsys.readouterr()
    assert "unsupported: use tensorboard, wandb or swanlab, or read" in out
    *_, counts, plan = out.splitlines()
    assert counts == "theirs.yaml (SkyRL 0.5): 4 keys, 3 applied, 1 unsupported"
    assert plan == "plan: refused because " + err.removeprefix("braid: ").partition(" [")[0]
    assert main(["explain", str(file), "trainer.logger=mlflow", "--allow-unsupported", "trainer.logger"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "plan: ok"


_REFUSED_BY_THE_PLAN = [
    ["trainer.strategy=megatron", "trainer.policy.model.lora.rank=8"],
    ["trainer.policy.sequence_parallel_size=3"],
    ["generator.sampling_params.top_p=0.5", "trainer.algorithm.off_policy_correction.tis_ratio_type=token"],
]


@pytest.mark.parametrize("overrides", _REFUSED_BY_THE_PLAN, ids=lambda texts: texts[0])
@pytest.mark.parametrize("json_option", [[], ["--json"]], ids=["text", "json"])
def test_explain_answers_as_show_does(
    capsys: pytest.CaptureFixture[str], file: Path, overrides: list[str], json_option: list[str]
) -> None:
    shown = main(["show", str(file), *overrides])
    why = capsys.readouterr().err
    assert main(["explain", str(file), *overrides, *json_option]) == shown
    out, err = capsys.readouterr()
    assert err.startswith(why) if shown else not why
    last = (err if json_option else out).splitlines()[-1]
    assert last.startswith("plan: refused because " if shown else "plan: ok")
    if json_option:
        assert json.loads(out)


def test_show_prints_the_corrections_that_a_file_sets(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert (
        main(["show", str(file), "trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=2.0"])
        == 0
    )
    algorithm = capsys.readouterr().out.partition("recipe grpo")[2]
    shown = " ".join(algorithm.split()).partition("corrections ")[2]
    correction = "{level: token, mode: truncate, low: 0.0, high: 2.0, measure: ratio, tokens: kept}"
    assert shown.startswith(f"[{correction}] override")


def test_training_keys_of_an_evaluation_are_unused(capsys: pytest.CaptureFixture[str]) -> None:
    seed = SEEDS / "rlinf-math-000.yaml"
    rows = {}
    for only_eval in ("true", "false"):
        main(["explain", str(seed), f"runner.only_eval={only_eval}", "--json"])
        rows[only_eval] = {row["path"]: row["disposition"] for row in json.loads(capsys.readouterr().out)}
    for key in ("runner.max_epochs", "actor.optim.lr", "algorithm.group_size", "data.rollout_batch_size"):
        assert (rows["false"][key], rows["true"][key]) == ("applied", "unused"), key
    assert rows["true"]["actor.model.precision"] == "applied"


def test_all_problems_are_reported_at_once_with_their_lines(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("trainer:\n  epochs: none\n  epoch: 3\ngenerator:\n  backend: vlm\n")
    assert main(["explain", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines()[-2:] == [
        "bad.yaml (SkyRL 0.4): 3 keys, 3 refused",
        "plan: refused because trainer.epochs: 'none' is not an integer >= 1 (and 2 more)",
    ]
    assert err == (
        "braid: 3 problems in the config:\n"
        "  - trainer.epochs: 'none' is not an integer >= 1 [bad.yaml:2]\n"
        "  - trainer.epoch: unknown key of SkyRL, did you mean 'trainer.epochs'? [bad.yaml:3]\n"
        "  - generator.backend: 'vlm' is not one of vllm, sglang [bad.yaml:5]\n"
    )


def test_a_refused_file_is_explained_completely_including_refused_keys(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    wrong = ["trainer.epoch=3", "trainer.train_batch_size=lots", "trainer.project_name=mine"]
    assert main(["explain", str(file), *wrong, "--json"]) == 2
    rows = {row["path"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["trainer.epochs"]["native"] == {"run.max_epochs": 2}
    assert rows["trainer.epoch"]["disposition"] == "refused"
    assert rows["trainer.epoch"]["note"] == "unknown key of SkyRL, did you mean 'trainer.epochs'?"
    assert rows["trainer.train_batch_size"]["disposition"] == "refused"
    assert len(rows) == 6


def test_keys_that_do_not_go_together_are_refused_in_the_ledger(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    assert main(["explain", str(file), "trainer.policy_mini_batch_size=100000", "--json"]) == 2
    out, err = capsys.readouterr()
    rows = json.loads(out)
    (row,) = [row for row in rows if row["disposition"] == "refused"]
    assert row["path"] == "trainer.policy_mini_batch_size"
    assert not row["native"]
    assert row["note"] in err
    assert len(rows) == 4


def test_a_native_value_that_the_config_refuses_is_refused_in_the_ledger(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    betas = "trainer.policy.optimizer_config.adam_betas"
    assert main(["explain", str(file), f"{betas}=[0.9,1.0]", "--json"]) == 2
    out, err = capsys.readouterr()
    (row,) = [row for row in json.loads(out) if row["disposition"] == "refused"]
    assert row["path"] == betas
    assert row["note"] in err


def test_a_native_config_has_nothing_to_explain(capsys: pytest.CaptureFixture[str]) -> None:
    quickstart = str(Path(__file__).parents[2] / "examples/quickstart.yaml")
    for verb, message in (
        ("explain", "use: braid show"),
        ("convert", "is already a native config"),
    ):
        assert main([verb, quickstart]) == 2
        assert message in capsys.readouterr().err
    assert main(["explain"]) == 2
    assert "pass a config to explain, or --key KEY" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["rollout.group_size", "group_size=3"])
def test_a_key_in_place_of_a_config_names_the_option(
    argument: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", argument]) == 2
    key = argument.partition("=")[0]
    assert f"{argument} is not a file; to explain a key: braid explain --key {key}" in capsys.readouterr().err
    (tmp_path / "group.yaml").touch()
    assert main(["explain", "group.yam"]) == 2
    assert "no such file: group.yam, did you mean 'group.yaml'?" in capsys.readouterr().err


def test_a_key_is_explained_in_each_dialect_that_has_it() -> None:
    wide = console(200)
    print_key("trainer.algorithm.kl_loss_coef", wide)
    assert text_of(wide) == (
        "SkyRL  trainer.algorithm.kl_loss_coef\n"
        "  takes     a number >= 0\n"
        "  default   0.001\n"
        "  becomes   algorithm.kl_coef\n"
        "  note      for KL in the loss and in the reward\n"
        "  does      Weight of the KL penalty against the reference model; with 0 no reference is loaded.\n\n"
    )
    wide = console(200)
    print_key("trainer.algorithm.policy_loss_type", wide)
    assert "-min(r*A, clamp(r, 1-eps_clip_low, 1+eps_clip_high)*A)" in text_of(wide)
    assert "  also      trainer.algorithm.ppo_loss_type\n" in text_of(wide)
    wide = console(200)
    print_key("algorithm.policy_loss.clip_low", wide)
    assert "  SkyRL     trainer.algorithm.eps_clip_low" in text_of(wide)


def test_rlinfs_kl_coefficient_comes_with_its_formula() -> None:
    wide = console(200)
    print_key("algorithm.kl_beta", wide)
    assert text_of(wide).startswith("RLinf  algorithm.kl_beta\n")
    assert "  note " in text_of(wide)


def test_an_unknown_key_is_reported_with_similar_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--key", "trainer.algorithm.kl_los_coef"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "braid: trainer.algorithm.kl_los_coef: unknown key in every config format, did you mean "
        "'trainer.algorithm.kl_loss_coef'?\n"
    )
    assert main(["explain", "--key", "group_size"]) == 2
    assert "; there is " in capsys.readouterr().err


@pytest.mark.parametrize("name", WHOLE)
def test_a_converted_file_gives_the_same_config_and_plan(name: str, tmp_path: Path) -> None:
    output = tmp_path / "native.yaml"
    assert main(["convert", str(SEEDS / name), "--output", str(output)]) == 0
    theirs, ours = read_config(SEEDS / name), read_config(output)
    assert ours.language == "native"
    expected = theirs.loaded.config.model_copy(update={"run": ours.loaded.config.run})
    assert ours.loaded.config == expected
    runs = [read.loaded.config.run.model_copy(update={"base_dir": None}) for read in (ours, theirs)]
    assert runs[0] == runs[1]
    assert ours.loaded.base_dir == theirs.loaded.base_dir


def test_a_converted_plan_for_one_process_is_the_same(tmp_path: Path) -> None:
    output = tmp_path / "native.yaml"
    options = ["--backend", "single", "--engine", "native"]
    assert main(["convert", str(SKYRL), *options, "--output", str(output)]) == 0
    theirs = read_config(SKYRL, backend="single", engine="native").loaded.config
    plans = [resolve(config, 1000) for config in (theirs, read_config(output).loaded.config)]
    assert plans[0].to_json() | {"warnings": []} == plans[1].to_json() | {"warnings": []}


def test_convert_writes_what_the_file_says_with_the_keys_it_came_from(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["convert", str(file)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == "# Converted from the SkyRL 0.5 config theirs.yaml; comments name the original keys."
    assert [line.split("#")[-1].strip() for line in lines if line.startswith("  max_epochs: 2")] == [
        "trainer.epochs"
    ]
    assert any(line.endswith("# SkyRL 0.5 default of trainer.algorithm.loss_reduction") for line in lines)
    written = yaml.safe_load(out)
    assert written["run"]["base_dir"] == str(file.parent)
    assert "sft" not in written
    assert "min_new_tokens" not in written["rollout"]["sampling"]


def test_a_converted_file_where_relative_paths_start_needs_no_base_dir(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    assert main(["convert", str(file), "--output", str(file.parent / "ours.yaml")]) == 0
    assert "base_dir" not in (file.parent / "ours.yaml").read_text()


def test_a_file_that_cannot_be_written_is_reported(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert main(["convert", str(file), "--output", str(file.parent / "no/such/folder.yaml")]) == 2
    assert "No such file or directory; choose another --output" in capsys.readouterr().err


def test_show_names_the_foreign_key_of_each_value(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    options = ["--backend", "single", "--engine", "native"]
    assert main(["show", str(file), "braid.run.max_rounds=3", *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    origins = shown["origins"]
    assert origins["run.max_epochs"] == "theirs.yaml:1 trainer.epochs"
    assert origins["rollout.group_size"] == "theirs.yaml:2 generator.n_samples_per_prompt"
    assert origins["algorithm.aggregation"] == "SkyRL 0.5 default of trainer.algorithm.loss_reduction"
    assert origins["run.max_rounds"] == "override"
    assert origins["train.backend.kind"] == "command line"


def test_the_dialect_can_be_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "few.yaml"
    path.write_text("data: {train_data: [a.parquet]}\n")
    assert main(["explain", str(path), "--dialect", "skyrl", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["native"]["data.train"][0]["path"] == ["a.parquet"]


def test_a_run_stores_its_source_file_and_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = ModelConfig(
        build=BuildSpec(
            hidden_size=16, intermediate_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16
        )
    )
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    save_pretrained(
        load_policy(tiny, temperature=1.0, seed=0, device=torch.device("cpu")), tokenizer, tmp_path / "m"
    )
    prompt = [{"role": "user", "content": "1+1"}]
    row = {"data_source": "a/b", "prompt": prompt, "reward_spec": {"method": "rule", "ground_truth": "2"}}
    Path("train.jsonl").write_text(json.dumps(row) + "\n")
    theirs = (
        "trainer:\n  policy: {model: {path: m}}\n  train_batch_size: 1\n  policy_mini_batch_size: 1\n"
        "  eval_interval: -1\n  logger: console\n  run_name: kept\ndata: {train_data: [train.jsonl]}\n"
        "generator: {n_samples_per_prompt: 4, sampling_params: {max_generate_length: 4}}\n"
    )
    Path("theirs.yaml").write_text(theirs)
    overrides = ["trainer.seed=3", "braid.run.max_rounds=1", "braid.report.console=none"]
    assert main(["train", "theirs.yaml", *overrides, "--backend", "single", "--engine", "native"]) == 0
    run = tmp_path / "runs/kept"
    assert (run / "source.yaml").read_text() == theirs
    rows = {row["path"]: row for row in json.loads((run / "ledger.json").read_text())}
    assert rows["trainer.seed"]["native"] == {"run.seed": 3}
    assert rows["trainer.train_batch_size"]["disposition"] == "applied"
    assert load_config(run / "config.yaml").config.run.seed == 3
