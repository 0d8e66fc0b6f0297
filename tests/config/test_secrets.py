"""Values of environment variables are kept as references in everything that a run or `braid show` writes."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from braid.cli.main import main
from braid.config.load import load_config, to_yaml
from braid.config.secrets import Reference
from braid.errors import ConfigError
from braid_dialects.load import read_config

SECRET = "sk-1234-not-for-the-record"
CONFIG = """\
run: {name: tiny, max_rounds: 1, device: cpu}
model: {build: {hidden_size: 16, intermediate_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, characters: ab}}
data: {train: [{kind: file, path: "rows.jsonl", system: "${oc.env:MY_SECRET}"}], use_chat_template: auto}
reward:
  parts:
    - kind: judge
      url: "http://127.0.0.1:9/v1?api-key=${oc.env:MY_SECRET}"
      model: m
      prompt: "{response}"
      body: {api_key: "${oc.env:MY_SECRET}", user: "${reward.parts[0].body.api_key}"}
cluster: {env: {PLAIN_TOKEN: sk-5678-nor-this, NUMBER: 1, LATER: "x-${oc.env:MY_SECRET,none}"}}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SECRET", SECRET)
    monkeypatch.setenv("NUMBER", "0")  # put back after tests whose run sets it
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "a"}\n')
    return path


def test_a_config_is_written_with_references_and_reads_back_as_the_same(file: Path) -> None:
    loaded = load_config(file)
    text = to_yaml(loaded)
    assert SECRET not in text
    assert "sk-5678" not in text
    assert "api-key=${oc.env:MY_SECRET}" in text
    assert "LATER: x-${oc.env:MY_SECRET,none}" in text
    assert 'NUMBER: "1"' in text
    copy = file.parent / "copy.yaml"
    copy.write_text(text)
    again = load_config(copy)
    assert again.config.reward == loaded.config.reward
    assert again.config.data == loaded.config.data
    assert again.config.cluster.env == {"PLAIN_TOKEN": None, "NUMBER": "1", "LATER": f"x-{SECRET}"}
    assert to_yaml(again) == text


def test_show_has_references(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--all"], ["--json"]):
        assert main(["show", str(file), *options]) == 0
        out, err = capsys.readouterr()
        assert SECRET not in "".join((out + err).split())
        assert "sk-5678" not in out + err
        assert "oc.env:MY_SECRET" in "".join(out.split())


def test_an_error_shows_the_reference_instead_of_the_value(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(file), "run.seed=${oc.env:MY_SECRET}"]) == 2
    err = capsys.readouterr().err
    assert err == "braid: run.seed: '${oc.env:MY_SECRET}' is not an integer >= 0 [override]\n"


@pytest.mark.parametrize(
    "part",
    [
        "{kind: judge, url: 'http://x/v1?api-key=abc', model: m, prompt: '{response}'}",
        "{kind: judge, url: 'http://x/v1', model: m, prompt: '{response}', body: {access_token: abc}}",
    ],
)
def test_a_judges_secret_in_the_config_is_refused(file: Path, part: str) -> None:
    with pytest.raises(ConfigError, match=r"looks like a secret.*write \$\{oc\.env:NAME\} instead"):
        load_config(file, [f"reward.parts=[{part}]"])


def test_the_files_of_a_run_contain_no_secret_and_are_private(file: Path) -> None:
    overrides = ["reward.parts=[{kind: exact}]", "report.console=none", "data.train.0.system=null"]
    overrides += ["rollout.sampling.stop_strings=['${oc.env:MY_SECRET}']", "rollout.prompts_per_round=1"]
    overrides += ["rollout.group_size=2", "rollout.sampling.max_new_tokens=2", "checkpoint.every_rounds=1"]
    assert main(["train", str(file), *overrides]) == 0
    run = Path("runs/tiny")
    files = [path for path in run.rglob("*") if path.is_file()]
    for secret in (SECRET, "sk-5678"):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    for name in ("config.yaml", "plan.json", "summary.json"):
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600
    assert main(["eval", str(run), "data.eval=[{kind: file, path: rows.jsonl}]"]) == 0


FOREIGN: dict[str, Any] = {
    "skyrl.yaml": 'trainer: {epochs: 1, run_name: "run-${oc.env:MY_SECRET}", project_name: "${trainer.run_name}"}\n'
    'generator: {n_samples_per_prompt: 4}\nbraid: {cluster: {env: {A: "${oc.env:MY_SECRET}"}}}\n',
    "roll.yaml": 'exp_name: "${oc.env:MY_SECRET}"\nsystem_envs: {A_TOKEN: sk-5678-nor-this}\nrollout_batch_size: 8\n'
    "actor_train: {model_args: {}}\nactor_infer: {}\npretrain: m\nprompt_length: 16\nresponse_length: 16\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_files_ledger_and_config_have_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MY_SECRET", SECRET)
    path = tmp_path / name
    path.write_text(FOREIGN[name])
    read = read_config(path, backend="single", engine="native")
    for text in (read.loaded.kept["ledger.json"], to_yaml(read.loaded), json.dumps(read.loaded.to_show())):
        assert SECRET not in text
        assert "sk-5678" not in text
        assert "oc.env:" in text
    assert read.loaded.config.run.name.endswith(SECRET)


_PLAIN = {
    "NCCL_DEBUG": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
    "MONKEY": "banana",
    "HTTPS_PROXY": "http://proxy:80",
}
_SECRETS = {
    "WANDB_API_KEY": "abcd1234",
    "HF_TOKEN": "hf_abcd",
    "DB": "http://me:pw77@host",
    "MY_PASSWORD": "pw77",
}


def test_variables_that_a_file_sets_are_written_as_they_are_unless_they_are_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*_PLAIN, *_SECRETS):
        monkeypatch.delenv(name, raising=False)
    path, output = tmp_path / "roll.yaml", tmp_path / "native.yaml"
    path.write_text(
        FOREIGN["roll.yaml"]
        .replace("${oc.env:MY_SECRET}", "x")
        .replace("A_TOKEN: sk-5678-nor-this", json.dumps(_PLAIN | _SECRETS)[1:-1])
    )
    options = ["--backend", "single", "--engine", "native"]
    assert main(["convert", str(path), *options, "--output", str(output)]) == 0
    assert load_config(output).config.cluster.variables == _PLAIN
    for source in (path, output):
        env = read_config(source, backend="single", engine="native").loaded.to_show()["cluster"]["env"]
        assert {name: env[name] for name in _PLAIN} == _PLAIN
        assert not {"abcd1234", "hf_abcd", "pw77"} & set(env.values())


def test_values_not_from_variables_are_written_unchanged(file: Path) -> None:
    loaded = load_config(file, ["run.output_dir=\\${oc.env:HOME}"])
    assert loaded.config.run.output_dir == "${oc.env:HOME}"
    assert "output_dir: \\${oc.env:HOME}" in to_yaml(loaded)
    assert not isinstance(loaded.config.run.output_dir, Reference)
