"""Effects of single config keys, in whole runs of a tiny model."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.native_engines import make_engine
from transformers import AutoModelForCausalLM, AutoTokenizer

from braid.algorithms.recipes import FULL_DIVERGENCES
from braid.checkpoint.store import CheckpointStore
from braid.errors import CheckpointError, ConfigError, ModelError, TrainingError
from braid.models.loading import load_policy
from braid.report.batches import read_batch
from braid.report.names import describe
from braid.report.samples import read_samples
from braid.trainer import commands
from braid.weights.fingerprint import check_synced

from .conftest import LoadTiny
from .test_runs import lines, weights

pytestmark = pytest.mark.slow


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics of each round, without those that depend on the clock or the machine."""
    return [{k: v for k, v in line.items() if describe(k).is_reproducible} for line in lines(run)]


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def equal(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


# evaluation


def test_batches_and_order_of_an_evaluation_change_no_result(load_tiny: LoadTiny) -> None:
    common = ("eval.samples_per_prompt=3", "eval.pass_at=[1,2]", "run.max_rounds=1")
    plain = commands.train(load_tiny("run.name=plain", *common)).run_dir
    mixed = commands.train(
        load_tiny("run.name=mixed", "eval.batch_prompts=3", "eval.shuffle=true", *common)
    ).run_dir
    assert numbers(plain) == numbers(mixed)
    plain_uids, mixed_uids = (
        [s.trajectory.prompt.uid for s in read_samples(run / "samples" / "eval_000001.jsonl")]
        for run in (plain, mixed)
    )
    assert plain_uids != mixed_uids
    assert sorted(plain_uids) == sorted(mixed_uids)


def test_samples_of_evaluations_can_be_disabled(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny("report.eval_samples=false")).run_dir
    assert list((run / "samples").iterdir()) == []
    assert summary(run)["eval"]["last"]


def test_a_run_that_only_evaluates_scores_the_checkpoint_that_it_is_given(load_tiny: LoadTiny) -> None:
    many = "eval.samples_per_prompt=16"
    run = commands.train(load_tiny(many)).run_dir
    before = (run / "metrics.jsonl").read_bytes()
    fresh = commands.train(load_tiny("run.eval_only=true", many)).run_dir
    newest = commands.train(load_tiny("run.eval_only=true", "run.resume=latest", many)).run_dir
    named = commands.train(
        load_tiny("run.eval_only=true", f"run.resume={run / 'checkpoints' / 'step_3'}", many)
    ).run_dir
    assert [r.name for r in (fresh, newest, named)] == ["tiny-eval", "tiny-eval-2", "tiny-eval-3"]
    evals = summary(run)["eval"]
    assert [summary(r)["eval"]["last"] for r in (fresh, newest, named)] == [
        evals["first"],
        *[evals["last"]] * 2,
    ]
    assert evals["first"] != evals["last"]
    assert (run / "metrics.jsonl").read_bytes() == before


# checkpoints, exports, reports


def test_checkpoints_can_be_in_another_folder(load_tiny: LoadTiny, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    common = ("checkpoint.every_rounds=1", f"checkpoint.dir={folder}")
    run = commands.train(load_tiny("run.max_rounds=2", *common)).run_dir
    assert not (run / "checkpoints").exists()
    commands.train(load_tiny("run.resume=latest", *common))
    assert CheckpointStore(folder).steps() == [2, 3]
    model = AutoModelForCausalLM.from_pretrained(commands.export(run))
    *_, state = CheckpointStore(folder).locate()
    assert torch.equal(
        model.state_dict()["lm_head.weight"], state["policy"]["weights"]["model.embed_tokens.weight"]
    )
    with pytest.raises(ConfigError, match=r"checkpoint\.dir: .*contains checkpoints of another run"):
        commands.train(load_tiny("run.name=other", *common))


def test_all_checkpoints_are_kept_without_a_limit(load_tiny: LoadTiny) -> None:
    run = commands.train(load_tiny("checkpoint.every_rounds=1", "checkpoint.keep=null")).run_dir
    assert CheckpointStore(run / "checkpoints").steps() == [0, 1, 2, 3]


def test_models_exported_while_training_are_those_of_their_rounds(
    load_tiny: LoadTiny, tmp_path: Path
) -> None:
    common = (
        "checkpoint.every_rounds=1",
        "checkpoint.keep=null",
        "checkpoint.export_every_rounds=2",
        "run.max_rounds=4",
    )
    run = commands.train(load_tiny(*common)).run_dir
    assert sorted(p.name for p in (run / "exports").iterdir()) == ["step_2", "step_4"]
    for step in (2, 4):
        exported = AutoModelForCausalLM.from_pretrained(run / "exports" / f"step_{step}").state_dict()
        *_, state = CheckpointStore(run / "checkpoints").locate(run / "checkpoints" / f"step_{step}")
        assert all(torch.equal(exported[name], tensor) for name, tensor in state["policy"]["weights"].items())
    assert AutoTokenizer.from_pretrained(run / "exports" / "step_2").eos_token == "<eos>"
    elsewhere = commands.train(
        load_tiny("run.name=other", f"checkpoint.export_dir={tmp_path / 'models'}", *common)
    ).run_dir
    assert not (elsewhere / "exports").exists()
    assert (tmp_path / "models" / "step_4" / "model.safetensors").exists()


def test_an_export_into_a_folder_leaves_other_files_alone(load_tiny: LoadTiny, tmp_path: Path) -> None:
    run = commands.train(load_tiny()).run_dir
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    commands.export(run, output=folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert AutoModelForCausalLM.from_pretrained(folder) is not None
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_export_that_cannot_be_written_says_where(load_tiny: LoadTiny, tmp_path: Path) -> None:
    run = commands.train(load_tiny()).run_dir
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write the model folder .*file/export"):
        commands.export(run, output=tmp_path / "file" / "export")


def test_end_and_padding_tokens_of_the_config_reach_sampling_and_exports(load_tiny: LoadTiny) -> None:
    folder = commands.export(commands.train(load_tiny()).run_dir)
    overrides = ("model.build=null", f"model.path={folder}", "model.eos_token_id=5", "model.pad_token_id=4")
    run = commands.train(load_tiny("run.name=second", "report.samples_every_rounds=1", *overrides)).run_dir
    turns = [s.trajectory.turns[0] for s in read_samples(run / "samples" / "round_000001.jsonl")]
    assert any(turn.output_ids[-1] == 5 for turn in turns)
    assert all((turn.output_ids[-1] == 5) == (turn.stop_reason == "stop") for turn in turns)
    exported = commands.export(run)
    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForCausalLM.from_pretrained(exported)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (5, 4)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (5, 4)


def test_the_rows_of_a_round_can_be_read_back(load_tiny: LoadTiny) -> None:
    common = ("report.batches_every_rounds=2", "report.samples_every_rounds=2", "algorithm.kl_coef=0.01")
    run = commands.train(load_tiny("run.max_rounds=5", *common)).run_dir
    assert sorted(p.name for p in (run / "batches").iterdir()) == [
        f"round_00000{i}.{kind}" for i in (2, 4) for kind in ("json", "safetensors")
    ]
    samples = list(read_samples(run / "samples" / "round_000002.jsonl"))
    for row, origin in read_batch(run / "batches" / "round_000002"):
        sample = samples[row.trajectory]
        assert (origin.uid, origin.sample) == (sample.trajectory.prompt.uid, sample.trajectory.sample)
        assert row.fields["advantages"][row.mask].tolist() == sample.training["advantages"]
        ids = [i for turn in sample.trajectory.turns for i in (*turn.context_ids, *turn.output_ids)]
        assert row.inputs["input_ids"].tolist() == ids
        assert {"behavior_logprobs", "ref_logprobs", "rewards", "advantages"} <= row.fields.keys()


def test_a_resumed_run_removes_rows_of_later_rounds(load_tiny: LoadTiny) -> None:
    common = ("report.batches_every_rounds=1", "checkpoint.every_rounds=1", "checkpoint.keep=null")
    run = commands.train(load_tiny(*common)).run_dir
    commands.train(load_tiny(f"run.resume={run / 'checkpoints' / 'step_1'}", "run.max_rounds=2", *common))
    assert sorted(p.stem for p in (run / "batches").glob("*.json")) == ["round_000001", "round_000002"]


def test_files_of_sinks_can_be_in_another_folder(load_tiny: LoadTiny, tmp_path: Path) -> None:
    run = commands.train(load_tiny("report.tensorboard=true", f"report.dir={tmp_path / 'curves'}")).run_dir
    assert list((tmp_path / "curves" / "tensorboard").iterdir())
    assert not (run / "tensorboard").exists()
    assert (run / "metrics.jsonl").exists()


# the critic and the reference

PPO = ("algorithm.recipe=ppo", "algorithm.kl_coef=0.01", "train.steps_per_pass=2", "train.passes_per_round=2")


def test_explicit_critic_settings_equal_to_the_policys_change_nothing(load_tiny: LoadTiny) -> None:
    critic_train = "critic.train={steps_per_pass: 2, passes_per_round: 2, optimizer: {lr: 3.0e-3}}"
    shared = commands.train(load_tiny("run.name=shared", *PPO)).run_dir
    apart = commands.train(load_tiny("run.name=apart", critic_train, *PPO)).run_dir
    assert numbers(shared) == numbers(apart)
    assert equal(weights(shared), weights(apart))


def test_mini_batches_of_the_critic_do_not_affect_the_policy(load_tiny: LoadTiny) -> None:
    critic_train = (
        "critic.train={steps_per_pass: 4, passes_per_round: 3, shuffle: false, optimizer: {lr: 3.0e-3}}"
    )
    run = commands.train(load_tiny(critic_train, "checkpoint.every_rounds=1", *PPO)).run_dir
    *_, state = CheckpointStore(run / "checkpoints").locate()
    assert (state["critic"]["num_steps"], state["policy"]["num_steps"]) == (3 * 4 * 3, 3 * 2 * 2)
    assert json.loads((run / "plan.json").read_text())["planned_critic_steps"] == 36
    commands.train(
        load_tiny("run.name=parts", "run.max_rounds=1", critic_train, "checkpoint.every_rounds=1", *PPO)
    )
    parts = commands.train(load_tiny("run.name=parts", "run.resume=latest", critic_train, *PPO)).run_dir
    assert equal(weights(parts), weights(run))


@pytest.mark.parametrize("source", ["", "reference.path=model"])
def test_the_reference_takes_over_the_policy_after_each_pass_over_the_prompts(
    load_tiny: LoadTiny, source: str
) -> None:
    """Rounds of 2 of the 4 prompts: a pass ends with each second round."""
    commands.export(commands.train(load_tiny("run.name=first")).run_dir, output=Path("model"))
    common = [
        "algorithm.kl_coef=0.01",
        "rollout.prompts_per_round=2",
        "reference.update_every_epochs=1",
        "checkpoint.every_rounds=1",
        "checkpoint.keep=null",
        *filter(None, [source]),
    ]
    run = commands.train(load_tiny("run.name=whole", "run.max_rounds=5", *common)).run_dir
    store = CheckpointStore(run / "checkpoints")
    states = [store.locate(store.path(step))[2] for step in range(6)]
    policy, reference = ([state[role]["weights"] for state in states] for role in ("policy", "reference"))
    assert equal(reference[2], policy[2])
    assert equal(reference[3], policy[2])
    assert equal(reference[4], policy[4])
    assert equal(reference[5], policy[4])
    assert equal(reference[1], reference[0])
    assert not equal(policy[3], policy[2])
    commands.train(load_tiny("run.name=parts", "run.max_rounds=3", *common))
    parts = commands.train(
        load_tiny("run.name=parts", "run.resume=latest", "run.max_rounds=5", *common)
    ).run_dir
    assert equal(weights(parts), policy[5])


def test_batch_settings_of_the_reference_do_not_change_results(load_tiny: LoadTiny) -> None:
    reference_train = "reference.train={micro_batch_tokens: 5, logprob_chunk_bytes: 64}"
    plain = commands.train(load_tiny("run.name=plain", "algorithm.kl_coef=0.01")).run_dir
    small = commands.train(load_tiny("run.name=small", reference_train, "algorithm.kl_coef=0.01")).run_dir
    assert [line["policy/kl"] for line in lines(plain)[1:]] == pytest.approx(
        [line["policy/kl"] for line in lines(small)[1:]],
        abs=1e-7,  # matrix products of other shapes round differently
    )


FULL_KL = ("algorithm.kl_coef=0.1", "algorithm.kl_estimator=full")


@pytest.mark.parametrize("estimator", FULL_DIVERGENCES)
def test_a_full_kl_in_the_loss_is_that_of_each_step(load_tiny: LoadTiny, estimator: str) -> None:
    keys = (*FULL_KL, f"algorithm.kl_estimator={estimator}")
    rounds = lines(commands.train(load_tiny(*keys)).run_dir)[1:]
    assert rounds[0]["policy/kl"] == pytest.approx(0.0, abs=2e-7)  # rounding of the mixture's logarithm
    assert 0.0 < rounds[1]["policy/kl"] < rounds[2]["policy/kl"]
    assert "reward/kl" not in rounds[0]


@pytest.mark.parametrize("place", ["reward", "advantage"])
def test_the_full_kl_outside_the_loss_is_that_before_the_update(load_tiny: LoadTiny, place: str) -> None:
    keys = (*FULL_KL, f"algorithm.kl_in={place}", "algorithm.recipe=ppo", "train.steps_per_pass=2")
    rounds = lines(commands.train(load_tiny(*keys)).run_dir)[1:]
    assert rounds[0]["reward/kl"] == 0.0
    assert 0.0 < rounds[1]["reward/kl"] < rounds[2]["reward/kl"]
    assert "policy/kl" not in rounds[0]


def test_a_reference_with_another_vocabulary_is_refused_for_the_full_kl(load_tiny: LoadTiny) -> None:
    other = "model.build.characters=abcdefghijklmnopqrstuvwxyz"
    folder = commands.export(commands.train(load_tiny("run.name=other", other)).run_dir)
    with pytest.raises(
        ModelError, match=r"vocabulary has 16 tokens and the reference's 32; set reference\.path"
    ):
        commands.train(load_tiny(*FULL_KL, f"reference.path={folder}"))


# rollout


def test_request_batches_do_not_change_answers(load_tiny: LoadTiny) -> None:
    whole = commands.train(load_tiny("run.name=whole")).run_dir
    parts = commands.train(load_tiny("run.name=parts", "rollout.request_batch=3")).run_dir
    assert numbers(whole) == numbers(parts)


def test_answers_are_logged_with_their_prompts_and_rewards(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "braid"):
        commands.train(
            load_tiny("rollout.print_outputs=true", "run.max_rounds=1", "report.samples_every_rounds=1")
        )
    said = [r.getMessage() for r in caplog.records if r.name == "braid.report.outputs"]
    samples = list(read_samples(Path("runs/tiny/samples/round_000001.jsonl")))
    assert len(said) == len(samples) == 32
    for text, sample in zip(said, samples, strict=True):
        t = sample.trajectory
        assert text == (
            f"round 1, {t.prompt.uid}, answer {t.sample + 1} of 8: {t.status}, reward {t.reward:g}\n"
            f"    {t.prompt.messages[-1]['content']}\n    --> {t.text}"
        )


def test_prompt_and_answer_share_a_limit(load_tiny: LoadTiny, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "a" * length, "answer": "b"}) for length in (1, 2, 3, 4)]
    (tmp_path / "letters.jsonl").unlink(missing_ok=True)
    loaded = load_tiny(
        "rollout.max_sequence_tokens=6",
        "data.max_prompt_tokens=5",
        "rollout.sampling.max_new_tokens=4",
        "rollout.sampling.min_new_tokens=4",
        "report.samples_every_rounds=1",
        "run.max_rounds=1",
    )
    (tmp_path / "letters.jsonl").write_text("\n".join(rows))
    run = commands.train(loaded).run_dir
    for name in ("round_000001", "eval_000001"):
        trajectories = [s.trajectory for s in read_samples(run / "samples" / f"{name}.jsonl")]
        lengths = {(len(t.prompt.token_ids), t.num_output_tokens) for t in trajectories}
        assert lengths == {(1, 4), (2, 4), (3, 3), (4, 2)}
    assert json.loads((run / "plan.json").read_text())["max_trajectory_tokens"] == 6


@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_sampling_uses_the_synced_weights(load_tiny: LoadTiny, dtype: str) -> None:
    common = (f"rollout.engine.dtype={dtype}", "algorithm.old_logprobs=recompute")
    plain = commands.train(load_tiny("run.name=plain", *common)).run_dir
    checked = commands.train(load_tiny("run.name=checked", "rollout.check_weights=true", *common)).run_dir
    assert numbers(plain) == numbers(checked)
    assert not (checked / "check_weights").exists()


def test_sampling_in_bf16_is_said_and_corrected(
    load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    run = commands.train(load_tiny("rollout.engine.dtype=bf16")).run_dir
    assert "the engine samples in bf16, training computes in fp32" in caplog.text
    for line in lines(run)[1:]:
        assert line["policy/correction_mean"] == pytest.approx(1, abs=0.05)
        assert line["policy/logprob_mismatch_kl"] > 0
        assert line["policy/ratio_mean"] == pytest.approx(1, abs=0.05)


def test_an_engine_with_wrong_weights_is_detected_and_both_sets_are_stored(tmp_path: Path) -> None:
    trainer = {"a": torch.linspace(-1, 1, 8), "b": torch.ones(2, 3)}
    engine = {name: tensor.to(torch.bfloat16) for name, tensor in trainer.items()}
    check_synced(trainer.items(), engine.items(), version=4, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    engine["b"][1, 2] = 1.0078125  # the next number in bf16
    with pytest.raises(TrainingError, match=r"version 4 .* 1 of 2 tensors \(b\)"):
        check_synced(trainer.items(), engine.items(), version=4, folder=tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "version_4_engine.safetensors",
        "version_4_trainer.safetensors",
    ]
    with pytest.raises(TrainingError, match=r"1 of 2 tensors \(a\)"):
        check_synced(trainer.items(), {"b": trainer["b"]}.items(), version=5, folder=tmp_path)


def test_weights_damaged_after_a_sync_are_detected(load_tiny: LoadTiny, tmp_path: Path) -> None:
    config = load_tiny().config.model
    lm = load_policy(config, temperature=1.0, seed=0, device=torch.device("cpu"))
    engine = make_engine(lm, dtype="bf16")
    asyncio.run(engine.set_weights(1))
    check_synced(lm.model.named_parameters(), engine.named_parameters(), version=1, folder=tmp_path / "sets")
    with torch.no_grad():
        dict(engine.named_parameters())["model.norm.weight"][3] += 0.5
    with pytest.raises(TrainingError, match=r"\(model\.norm\.weight\)"):
        check_synced(
            lm.model.named_parameters(), engine.named_parameters(), version=1, folder=tmp_path / "sets"
        )
    stored = load_file(tmp_path / "sets" / "version_1_engine.safetensors")
    assert stored.keys() == dict(lm.model.named_parameters()).keys()


# the process


def test_environment_variables_apply_to_rewards_only_during_the_run(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BRAID_TEST_VALUE", raising=False)
    rewards = "import os\ndef value():\n    return float(os.environ['BRAID_TEST_VALUE'])\n"
    part = "reward.parts=[{kind: function, path: 'rewards.py:value'}]"
    run = commands.train(load_tiny("cluster.env={BRAID_TEST_VALUE: '2.5'}", part, rewards=rewards)).run_dir
    assert [line["reward/mean"] for line in lines(run)[1:]] == [2.5] * 3
    assert "BRAID_TEST_VALUE" not in os.environ


def test_the_order_of_prompts_has_its_own_seed(load_tiny: LoadTiny) -> None:
    def order(*overrides: str) -> list[str]:
        common = ("report.samples_every_rounds=1", "run.if_exists=new", "run.max_rounds=1")
        run = commands.train(load_tiny(*common, *overrides)).run_dir
        uids = [s.trajectory.prompt.uid for s in read_samples(run / "samples" / "round_000001.jsonl")]
        return list(dict.fromkeys(uids))

    assert order("data.seed=0") == order()
    assert order("data.seed=3") == order("run.seed=3") != order()
    assert order("data.seed=3", "run.seed=1") == order("data.seed=3")


def test_metrics_and_rewards_go_by_the_source_of_each_row(load_tiny: LoadTiny, tmp_path: Path) -> None:
    loaded = load_tiny(
        "data.train=[{kind: file, path: mixed.jsonl, source_key: info.domain}]",
        "data.eval=[{kind: file, path: mixed.jsonl, source_key: info.domain}]",
    )
    rows = [
        {"prompt": p, "answer": [p, "b"], "info": {"domain": d}}
        for p, d in zip("abcd", ["x", "x", "y/z", "x"], strict=True)
    ]
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = commands.train(loaded).run_dir
    line = lines(run)[-1]
    assert {
        "reward/source/x",
        "reward/source/y/z",
        "eval/x/num",
        "eval/y/z/num",
        "eval/all/num",
    } <= line.keys()
    assert (line["eval/x/num"], line["eval/y/z/num"]) == (3, 1)
    (part,) = (name for name in line if name.startswith("eval/part/"))
    assert line[part] == pytest.approx(line["eval/all/mean@1"])
    assert line["eval/all/reward_min"] <= line[part] <= line["eval/all/reward_max"]
    results = json.loads((run / "summary.json").read_text())["eval"]["last"]
    assert set(results) == {"x", "y/z", "all"}


def test_turns_of_conversations_are_counted(load_tiny: LoadTiny) -> None:
    line = lines(commands.train(load_tiny("run.max_rounds=1")).run_dir)[-1]
    assert line["rollout/turns_mean"] == 1.0


def test_groups_of_one_are_not_said_to_have_equal_rewards(load_tiny: LoadTiny) -> None:
    loaded = load_tiny("run.max_rounds=1", "rollout.group_size=1", "algorithm.recipe=reinforce")
    assert "reward/same_in_group_fraction" not in lines(commands.train(loaded).run_dir)[-1]


# restarts

FAILS_ONCE = """
from pathlib import Path

def flaky(answer, text):
    left = Path("failures")
    if left.exists():
        left.write_text(str(int(left.read_text()) - 1))
        if int(left.read_text()) < 0:
            left.unlink()
        raise ConnectionError("the service is away")
    return float(text == answer)
"""
FLAKY = (
    "reward.parts=[{kind: function, path: 'rewards.py:flaky'}]",
    "reward.retries=0",
    "reward.concurrency=1",
)


def test_a_run_restarts_from_its_newest_checkpoint_bit_exactly(load_tiny: LoadTiny) -> None:
    """The service fails in the second round, for one call of each trajectory: the round is lost, the run is
    not."""
    common = (
        *FLAKY,
        "checkpoint.every_rounds=1",
        "run.max_restarts=1",
        "eval.every_rounds=1",
        "run.max_rounds=4",
    )
    calm = commands.train(load_tiny("run.name=calm", *common, rewards=FAILS_ONCE)).run_dir
    loaded = load_tiny("run.name=stormy", "eval.before=false", *common, rewards=FAILS_ONCE)
    Path("failures").write_text("31")
    stormy = commands.train(loaded).run_dir
    assert not Path("failures").exists()
    assert (summary(calm)["restarts"], summary(stormy)["restarts"]) == (0, 1)
    assert summary(stormy)["status"] == "finished"
    assert numbers(stormy)[1:] == numbers(calm)[1:]
    assert equal(weights(stormy), weights(calm))


def test_a_run_that_keeps_failing_ends_with_its_error(load_tiny: LoadTiny) -> None:
    rewards = "def broken():\n    raise ConnectionError('the service is away')\n"
    part = "reward.parts=[{kind: function, path: 'rewards.py:broken'}]"
    with pytest.raises(TrainingError, match=r"the service is away"):
        commands.train(load_tiny(part, "run.max_restarts=1", "eval.before=false", rewards=rewards))
    assert summary(Path("runs/tiny"))["status"] == "failed"
    assert summary(Path("runs/tiny"))["restarts"] == 1


def test_permanent_failures_are_not_retried(load_tiny: LoadTiny, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TrainingError, match=r"max_skipped_steps"):
        commands.train(load_tiny("run.max_restarts=3", "train.optimizer.lr=1e30", "run.max_rounds=30"))
    assert summary(Path("runs/tiny"))["restarts"] == 0
