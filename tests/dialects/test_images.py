"""Files whose models read images: how they are recognised, what their keys become, and a run of each system's."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.pictures import picture

from braid.config.load import load_config
from braid.envs.kinds import AgentEnvConfig
from braid.errors import ConfigError
from braid.report.samples import read_samples
from braid.rewards.kinds import DetectionReward
from braid.trainer import commands
from braid_dialects.load import Read, read_config

from .conftest import ALL_SEEDS, IN_ONE_PROCESS, Reader, Seed
from .test_agentic import PRESET
from .test_agentic import roll as agentic

SEED_OF = {seed.name: seed for seed in ALL_SEEDS}
_DETECTION = "roll.pipeline.rlvr.rewards.detection_reward_worker.DetectionRewardWorker"
FREEZES = "actor_train.model_args.freeze_module_prefix"


def read(reader: Reader, name: str, *overrides: str, **chosen: Any) -> Read:
    seed: Seed = SEED_OF[name]
    return reader.read(seed, overrides, **chosen)


def trained(read_file: Read) -> str | None:
    """What is trained of the vision tower; None if the model reads only text."""
    vision = read_file.loaded.config.model.vision
    return None if vision is None else vision.train


def note_of(read_file: Read, key: str) -> tuple[str, str]:
    """Disposition and note of a key."""
    (entry,) = [entry for entry in read_file.ledger if entry.path == key]
    return entry.disposition, entry.note


# ROLL


@pytest.mark.parametrize(
    ("override", "tower"),
    [
        ("rollout_batch_size=64", None),
        ("+actor_train.data_args.image_max_pixels=4096", "all"),
        ("actor_train.data_args.template=qwen2-vl", "all"),
        ("+pretrain=Qwen/Qwen2.5-VL-7B-Instruct", "all"),
        ("+actor_train.model_args.model_name_or_path=/models/qwen3-vl-4b/", "all"),
        ("+pretrain=/models/vl/Qwen3-4B", None),
        ("+pretrain=Vlad/Marvl-7B", None),
        ("+braid.model.vision.train=projector", "projector"),
    ],
)
def test_roll_s_files_with_images_are_told_by_what_only_they_have(
    reader: Reader, override: str, tower: str | None
) -> None:
    assert trained(read(reader, "roll-rlvr-002", override)) == tower


def test_a_reward_for_detection_tells_a_file_with_images(reader: Reader) -> None:
    tree = SEED_OF["roll-rlvr-002"].tree()
    tree["rewards"] = {"boxes": {"worker_cls": _DETECTION}}
    path = reader.write("detection", tree)
    assert trained(read_config(path, (), dialect="roll")) == "all"


def detection(reader: Reader, *overrides: str) -> DetectionReward:
    (part,) = (
        part
        for part in read(reader, "roll-images", *overrides).loaded.config.reward.parts
        if isinstance(part, DetectionReward)
    )
    return part


def test_detection_has_the_weights_of_each_row_and_the_threshold_of_the_environment(reader: Reader) -> None:
    part = detection(reader)
    assert (part.name, part.sources, part.settings_key) == ("cv_detection", ("v3det",), "reward_model")
    assert part.iou_threshold == "average"
    assert detection(reader, "+system_envs.DET_IOU_THRESHOLD='0.75'").iou_threshold == 0.75
    of_worker = "+rewards.cv_detection.system_envs={DET_IOU_THRESHOLD: '0.5'}"
    assert detection(reader, "+system_envs.DET_IOU_THRESHOLD='0.75'", of_worker).iou_threshold == 0.5
    with pytest.raises(ConfigError, match=r"system_envs: DET_IOU_THRESHOLD=dynamic is not supported; use"):
        detection(reader, "+system_envs.DET_IOU_THRESHOLD=dynamic")


@pytest.mark.parametrize(
    ("model", "coordinates"),
    [("Qwen/Qwen2.5-VL-7B-Instruct", "pixels"), ("Qwen/Qwen3-VL-4B-Thinking", "reference")],
)
def test_qwen_2_5_finds_objects_in_pixels(reader: Reader, model: str, coordinates: str) -> None:
    assert detection(reader, f"pretrain={model}").coordinates == coordinates


def test_braid_s_own_key_leaves_the_tower_out(reader: Reader) -> None:
    text = read(reader, "roll-images", "braid.model.vision=null", "actor_train.data_args.messages=prompt")
    assert trained(text) is None
    assert note_of(text, "actor_train.data_args.image_max_pixels") == (
        "no effect",
        "the model reads only text",
    )
    assert note_of(text, FREEZES)[0] == "no effect"


@pytest.mark.parametrize(
    ("value", "tower"),
    [
        ("null", "all"),
        ("vision_model", "none"),
        ("model.visual", "none"),
        ("[vision_tower]", "none"),
        ("vision_model.blocks,vision_model.patch_embed", "projector"),
    ],
)
def test_freeze_module_prefix_says_what_is_trained_of_the_tower(
    reader: Reader, value: str, tower: str
) -> None:
    assert trained(read(reader, "roll-images", f"{FREEZES}={value}")) == tower


def test_adapters_freeze_the_tower(reader: Reader) -> None:
    adapted = ["+actor_train.model_args.lora_target=q_proj", f"{FREEZES}=null"]
    assert trained(read(reader, "roll-images", *adapted)) == "none"


@pytest.mark.parametrize(
    "value", ["vision_model,audio_model", "model.layers", "vision_model,vision_model.blocks"]
)
def test_other_modules_to_freeze_are_refused(reader: Reader, value: str) -> None:
    with pytest.raises(ConfigError, match=r"but braid freezes the vision tower \(vision_model.blocks"):
        read(reader, "roll-images", f'{FREEZES}="{value}"')


def test_a_text_file_that_freezes_the_tower_has_none(reader: Reader) -> None:
    """Qwen3.5's checkpoints have a tower, which files of text freeze."""
    text = read(reader, "roll-rlvr-002", f"+{FREEZES}=vision_model")
    assert trained(text) is None
    assert note_of(text, FREEZES)[0] == "no effect"
    with pytest.raises(ConfigError, match="use adapters: lora_target"):
        read(reader, "roll-rlvr-002", f"+{FREEZES}=model.layers")


def test_limits_of_images_have_roll_s_defaults_and_are_those_of_evaluation_too(reader: Reader) -> None:
    tree = SEED_OF["roll-images"].tree()
    for part in (tree["actor_train"], tree["validation"]):
        del part["data_args"]["image_max_pixels"]
    image = read_config(reader.write("limits", tree), (), dialect="roll").loaded.config.data.image
    assert (image.min_pixels, image.max_pixels) == (3136, 4096**2)
    with pytest.raises(ConfigError, match="set it to that of training, 1048576"):
        read(reader, "roll-images", "validation.data_args.image_max_pixels=4096")


def test_roll_s_older_pipeline_of_geometry_has_columns_and_limits_of_its_own(reader: Reader) -> None:
    overrides = ["actor_train.data_args.template=qwen2-vl", "actor_train.data_args.file_name=geoqa/"]
    config = read(reader, "roll-rlvr-002", *overrides, "actor_train.data_args.prompt=null").loaded.config
    (source,) = config.data.train
    assert source.kind == "file"
    assert source.path == "geoqa/*.*"
    assert (source.prompt_key, source.answer_key, source.images_key) == ("problem", "solution", "image")
    assert config.data.image.max_pixels == 768**2
    named = read(reader, "roll-rlvr-002", *overrides, "+actor_train.data_args.response=answer").loaded.config
    assert (named.data.train[0].prompt_key, named.data.train[0].answer_key) == ("instruction", "answer")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+actor_train.data_args.video_fps=2.0", "videos are not read"),
        ("+actor_train.data_args.audio_folder=a", "audio is not read"),
        ("+actor_train.data_args.custom_data_kwargs_func=roll.f", "videos and audio, which are not read"),
    ],
)
def test_videos_and_audio_are_refused_by_name(reader: Reader, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(reader, "roll-images", override)


SEES = {
    "env_manager_cls": "roll.pipeline.agentic.env_manager.vl_traj_env_manager.VLTrajEnvManager",
    "pre_step_template": "Turn {turn_idx}:\n",
    "next_step_template": "\n{actions_left} left",
}


def test_an_agent_that_sees_its_board_reads_images(tmp_path: Path) -> None:
    lake = PRESET["custom_env"]["FrozenLake"]
    drawn = lake | SEES | {"env_config": lake["env_config"] | {"render_mode": "rgb_array"}}
    config = agentic(tmp_path, {"custom_envs": {"FrozenLake": drawn}}).loaded.config
    assert config.model.vision is not None
    assert isinstance(config.env, AgentEnvConfig)
    kwargs = config.env.mix["FrozenLake"].kwargs
    assert kwargs["template"] == "{opening}Turn {turn_idx}:\n{suffix}\n{actions_left} left"
    assert kwargs["env_kwargs"]["render_mode"] == "rgb_array"
    assert "history_length" not in kwargs
    with pytest.raises(ConfigError, match=r"with env_config\.render_mode=rgb_array, the other managers"):
        agentic(tmp_path, {"custom_envs": {"FrozenLake": lake | SEES}})


# RLinf


def test_rlinf_s_kind_of_data_tells_that_images_are_read(reader: Reader) -> None:
    assert trained(read(reader, "rlinf-math-003")) is None
    assert trained(read(reader, "rlinf-images", "data.type=vlm")) == "all"
    assert trained(read(reader, "rlinf-images", "actor.model.is_lora=true")) == "none"
    with pytest.raises(ConfigError, match=r"rollout\.model\.model_type: 'qwen3_vl' is not supported"):
        read(reader, "rlinf-images", "data.type=math")
    with pytest.raises(ConfigError, match=r"use one of qwen2\.5_vl, qwen3_vl with"):
        read(reader, "rlinf-images", "rollout.model.model_type=qwen3_vl_moe")


def test_rlinf_s_folders_and_texts_become_files_and_a_template(reader: Reader) -> None:
    overrides = ["data.train_data_paths=[/d/train/, /d/more, a.parquet]", 'data.prepend_prompt="{a} "']
    (source,) = read(reader, "rlinf-images", *overrides).loaded.config.data.train
    assert source.kind == "file"
    assert source.path == ("/d/train/**/*.*", "/d/more/**/*.*", "a.parquet")
    assert source.template == "{{a}} {prompt}"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.image_keys=[main, wrist]", "put the images of a row into one column"),
        ("data.dataset_name=robo2vlm", "use base"),
        ("+data.choice_key=choices", "write the choices into the prompt"),
        ("+data.video_fps=2", "videos are not read"),
        ("reward.reward_type=vqa", r"use math, braid\.reward\.parts"),
    ],
)
def test_what_rlinf_s_files_with_images_ask_beyond_braid_is_refused(
    reader: Reader, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(reader, "rlinf-images", override)


# SkyRL

_FREEZE = "trainer.policy.megatron_config.transformer_config_kwargs.freeze"


@pytest.mark.parametrize(
    ("overrides", "tower"),
    [
        (["generator.vision_language_generator=false"], None),
        (["generator.vision_language_generator=true"], "all"),
        (["+trainer.policy.model.lora.rank=8"], "none"),
        (["trainer.strategy=megatron", f"+{_FREEZE}_vision_model=false"], "all"),
        (["trainer.strategy=megatron", f"+{_FREEZE}_vision_model=true"], "projector"),
        (
            [
                "trainer.strategy=megatron",
                f"+{_FREEZE}_vision_model=true",
                f"+{_FREEZE}_vision_projection=true",
            ],
            "none",
        ),
        ([f"+{_FREEZE}_vision_model=true"], "all"),  # on another strategy
    ],
)
def test_skyrl_s_generator_and_megatron_s_keys_say_what_is_trained(
    reader: Reader, overrides: list[str], tower: str | None
) -> None:
    assert trained(read(reader, "skyrl-images", *overrides)) == tower


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.strategy=megatron", f"+{_FREEZE}_vision_projection=true"], "freezes the projector alone"),
        (["trainer.strategy=megatron", f"+{_FREEZE}_language_model=true"], "set it to false"),
        (["trainer.policy.language_model_only=true"], "set it to false, or vision_language_generator"),
        (["+generator.inference_engine.engine_init_kwargs.quantization=fp8"], "does not pass; remove it"),
        (["environment.env_class=visgym"], "examples.train.visgym.env_instruct.VisGymEnv"),
    ],
)
def test_what_skyrl_s_files_with_images_ask_beyond_braid_is_refused(
    reader: Reader, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(reader, "skyrl-images", *overrides)


def test_a_context_of_the_engine_in_which_requests_fit_has_no_effect(reader: Reader) -> None:
    key = "generator.inference_engine.engine_init_kwargs"
    disposition, _ = note_of(
        read(reader, "skyrl-images", f"+{key}.max_model_len=60000"), f"{key}.max_model_len"
    )
    assert disposition == "no effect"


def test_prompts_of_text_are_cut_and_those_with_images_dropped(reader: Reader) -> None:
    assert read(reader, "skyrl-004").loaded.config.data.overlong == "truncate_left"
    assert read(reader, "skyrl-images").loaded.config.data.overlong == "drop"


# Runs

BUILD: dict[str, Any] = {
    "architecture": "qwen3_vl", "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 16, "characters": "abcdefgh ?\n",
    "tower": {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 2},
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that reads images and, in the three systems' forms, rows."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "sft.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    tree = {
        "run": {"name": "built", "device": "cpu", "output_dir": str(folder), "base_dir": str(folder)},
        "model": {"vision": {}, "build": BUILD},
        "sft": {"data": [{"kind": "file", "path": "sft.jsonl", "response_key": "answer"}], "steps": 1, "rows_per_step": 1},
        "report": {"console": "none", "tensorboard": False},
    }  # fmt: skip
    (folder / "built.yaml").write_text(yaml.safe_dump(tree))
    run_dir = commands.sft(load_config(folder / "built.yaml")).run_dir
    (commands.export(run_dir, output=folder / "model") / "chat_template.jinja").write_text(TEMPLATE)
    ratios = {"iou_max_label_first": 1.0, "iou_max_iou_first": 0.0, "iou_completeness": 0.3}
    boxes = "<answer>[{'bbox_2d': [0, 0, 1, 1], 'label': 'a'}]</answer>"
    _write_parquet(folder / "orsta.parquet", [
        {"prompt": "<image> a?", "images": [{"bytes": picture(i).data, "path": None}],
         "data_source": "v3det" if i == 3 else "mm_math",
         "reward_model": {"ground_truth": boxes if i == 3 else letter, "format_ratio": 0.1, "accuracy_ratio": 1.0,
                          "verifier_parm": {"det_verifier_normalized": True, "det_reward_ratio": ratios}}}
        for i, letter in enumerate("abcd")
    ])  # fmt: skip
    _write_parquet(folder / "geometry.parquet", [
        {"problem": "<image> a?", "images": [{"bytes": picture(i).data, "path": None}], "answer": letter}
        for i, letter in enumerate("abcd")
    ])  # fmt: skip
    _write_parquet(folder / "turns.parquet", [
        {"prompt": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(picture(i).data).decode()}"},
             "text": None},
            {"type": "text", "image_url": None, "text": "a?"},
         ]}], "env_class": "geometry3k", "reward_spec": {"method": "rule", "ground_truth": letter}}
        for i, letter in enumerate("abcd")
    ])  # fmt: skip
    return folder


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def rounds(reader: Reader, name: str, overrides: list[str], home: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Folder and metrics of two rounds of a seed in one process, sampled by the native engine."""
    native = ["run.device=cpu", "run.num_threads=1", "run.max_rounds=2", "report.console=none", "report.samples_every_rounds=1",
              "checkpoint.every_rounds=0", "eval.every_rounds=0", "eval.before=false", "eval.at_end=false",
              f"run.output_dir={home}/{name}", "rollout.sampling.max_new_tokens=3"]  # fmt: skip
    native_overrides = [f"braid.{text}" for text in native]
    run_dir = commands.train(
        read(reader, name, *overrides, *native_overrides, **IN_ONE_PROCESS).loaded
    ).run_dir
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return run_dir, [line for line in lines if "policy/grad_norm" in line]


def check(run_dir: Path, lines: list[dict[str, Any]]) -> None:
    assert [line["round"] for line in lines] == [1, 2]
    assert all(line["status/invalid"] == 0 for line in lines)
    assert lines[-1]["policy/grad_norm"] >= 0
    samples = list(read_samples(run_dir / "samples/round_000002.jsonl"))
    assert all(sample.trajectory.prompt.images for sample in samples)


@pytest.mark.slow
def test_a_file_of_roll_trains_with_images(reader: Reader, home: Path) -> None:
    overrides = [
        f"pretrain={home}/model", f"actor_train.data_args.file_name={home}/orsta.parquet",
        f"validation.data_args.file_name={home}/orsta.parquet",
        "actor_train.data_args.image_min_pixels=64",
        "rollout_batch_size=4", "num_return_sequences_in_group=2", "prompt_length=64", "response_length=4",
        "actor_train.device_mapping=[0]", "actor_train.training_args.gradient_accumulation_steps=8",
        "actor_train.training_args.warmup_steps=0", "actor_train.model_args.attn_implementation=sdpa",
    ]  # fmt: skip
    check(*rounds(reader, "roll-images", overrides, home))


@pytest.mark.slow
def test_a_file_of_rlinf_trains_with_images(reader: Reader, home: Path) -> None:
    overrides = [
        f"rollout.model.model_path={home}/model", f"actor.tokenizer.tokenizer_model={home}/model",
        f"data.train_data_paths=[{home}/geometry.parquet]", f"data.val_data_paths=[{home}/geometry.parquet]",
        "data.system_prompt=null", "data.prepend_prompt=b", "data.rollout_batch_size=4", "data.max_prompt_length=64",
        "runner.seq_length=68", "algorithm.group_size=2",
    ]  # fmt: skip
    check(*rounds(reader, "rlinf-images", overrides, home))


@pytest.mark.slow
def test_a_file_of_skyrl_trains_with_images_over_several_turns(reader: Reader, home: Path) -> None:
    overrides = [
        f"trainer.policy.model.path={home}/model", f"data.train_data=['{home}/turns.parquet']",
        f"data.val_data=['{home}/turns.parquet']", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4",
        "generator.n_samples_per_prompt=4", "trainer.epochs=2", "trainer.logger=console", f"trainer.ckpt_path={home}/checkpoints",
        "trainer.max_prompt_length=64", "generator.max_input_length=128",
        "generator.sampling_params.max_generate_length=4", "braid.env.kwargs.id=tests.dialects.sums.Sums",
    ]  # fmt: skip
    check(*rounds(reader, "skyrl-images", overrides, home))
