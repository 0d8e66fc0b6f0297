"""Vision-language-action policies: acting, and the same log-probs in training."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.vla_checkpoints import STATISTICS, tiny_openvla, tiny_pi0, tiny_tokenizer
from tests.rounding import assert_near, rounding

from braid.config.backends import LoraConfig
from braid.config.model import ModelConfig, VlaConfig
from braid.errors import ModelError
from braid.models.base import copy_weights
from braid.models.lora import add_adapters, merged_weights
from braid.models.vla.actions import range_of
from braid.models.vla.build import load_module, make_processor
from braid.models.vla.openvla import load_openvla
from braid.models.vla.pi0 import Pi0Policy, demonstrated, load_pi0, transition
from braid.models.vla.policy import OpenVlaPolicy, Processor, VlaPolicy
from braid.rollout.rows import group_rows
from braid.training.packing import pack
from braid.types import ActionSpace, EnvSteps, Group, Prompt, Row, Spaces, Status, Trajectory

CPU = torch.device("cpu")
SPACES = Spaces(2, ActionSpace("continuous", 3), {"image": (24, 24, 3), "wrist": (20, 20, 3)})
LEVELS = ("token", "action", "chunk")
KINDS: list[dict[str, Any]] = [
    {"kind": "openvla", "num_action_chunks": 1},
    {"kind": "openvla_oft", "form": "rlinf", "num_action_chunks": 2, "num_images": 2},
    {"kind": "openvla_oft", "form": "official", "num_action_chunks": 2, "use_proprio": True},
    {"kind": "pi0", "num_action_chunks": 2, "noise": "flow_sde"},
    {"kind": "pi0", "num_action_chunks": 2, "noise": "flow_noise"},
]
RLINF_TARGETS: list[str] = [
    "proj", "qkv", "fc1", "fc2", "q", "kv", "fc3", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj", "lm_head",
]  # fmt: skip
"""Layers of its adapters for OpenVLA; `proj` is the convolution of the patches too."""
PI0_TARGETS: list[str] = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "out_proj", "fc1", "fc2",
    "linear", "patch_embedding", "action_in_proj", "state_proj", "action_time_mlp_in", "action_time_mlp_out",
    "action_out_proj",
]  # fmt: skip
CASES = [(kind, level) for kind in KINDS for level in (LEVELS if kind["kind"] != "pi0" else LEVELS[2:])]


def make(
    folder: Path,
    kind: dict[str, Any],
    level: Any = "token",
    temperature: float = 1.0,
    lora: LoraConfig | None = None,
) -> VlaPolicy:
    config = VlaConfig(action_dim=3, unnorm_key="toy", max_prompt_tokens=20, **kind)
    actions = range_of(STATISTICS, config, size=3)
    if config.kind == "pi0":
        state = range_of(STATISTICS, config, "proprio")
        model = tiny_pi0(folder)
        if lora is not None:
            add_adapters(model, lora, seed=0)
        return Pi0Policy(
            model, Processor(config, SPACES, tiny_tokenizer(), actions, state), level=level, seed=0
        )
    tiny_openvla(folder, proprio_size=2 if config.use_proprio else None)
    state = range_of(STATISTICS, config, "proprio") if config.use_proprio else None
    module = load_openvla(str(folder), dtype=torch.float32, device=CPU, use_proprio=config.use_proprio)
    if lora is not None:
        add_adapters(cast("Any", module), lora, seed=0)
    processor = Processor(config, SPACES, tiny_tokenizer(), actions, state)
    return OpenVlaPolicy(module, processor, level=level, temperature=temperature)


def observations(policy: VlaPolicy, num: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    tasks = ["push red cube", "push cube"]
    raw = [
        {name: rng.integers(0, 256, shape, np.uint8) for name, shape in SPACES.images.items()}
        | {"state": rng.normal(size=2).astype(np.float32)}
        for _ in range(num)
    ]
    observed = policy.observe(stacked(raw), [tasks[n % 2] for n in range(num)])
    return [{name: values[n] for name, values in observed.items()} for n in range(num)]


def stacked(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def play(policy: VlaPolicy, num: int = 3, seed: int = 0) -> tuple[Row, np.ndarray]:
    """The row of an episode of `num` decisions, the last of which executes one action only."""
    observed = observations(policy, num + 1, seed)
    uniforms = np.random.default_rng(seed).random((num, policy.num_uniforms))
    acted = policy.act(stacked(observed[:num]), uniforms)
    chunk = policy.config.num_action_chunks
    assert acted.actions.shape == (num, chunk, 3)
    assert acted.logprobs.shape == (num, policy.width)
    executed = np.full(num, chunk, np.int32)
    executed[-1] = 1
    steps = EnvSteps(
        stacked(observed),
        acted.inputs,
        acted.logprobs,
        np.zeros((num, chunk), np.float32),
        executed,
        policy_version=0,
    )
    trajectory = Trajectory(Prompt("a", "a", (), ()), 0, Status.FINISHED, reward=0.0, env_steps=steps)
    (row,) = group_rows(Group(trajectory.prompt, [trajectory]), 0, 0)
    return row, acted.actions


@pytest.mark.parametrize(("kind", "level"), CASES)
def test_training_computes_the_log_probs_of_acting(tmp_path: Path, kind: dict[str, Any], level: Any) -> None:
    policy = make(tmp_path, kind, level, temperature=1.6)
    rows = [play(policy, seed=seed)[0] for seed in range(2)]
    assert [row.num_tokens for row in rows] == [
        policy.width * 2 + max(policy.width // kind["num_action_chunks"], 1)
    ] * 2
    batch = pack(rows, CPU)
    out = policy.forward(batch, frozenset({"logprobs", "entropy"}))
    assert (out["logprobs"] - batch.fields["behavior_logprobs"]).abs().max() < 1e-5
    assert not out["logprobs"][~batch.mask].any()
    assert not out["entropy"][~batch.mask].any()
    assert (out["logprobs"][batch.mask] != 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_all_layers_act_and_train_as_merged_weights(tmp_path: Path, kind: dict[str, Any]) -> None:
    """peft merges them, and saves the weight of an adapted head too, here another than the policy's. A
    rollout worker's copy gets them by name."""
    kind = kind | {"train_expert_only": False}
    targets = PI0_TARGETS if kind["kind"] == "pi0" else RLINF_TARGETS
    merged = make(tmp_path / "model", kind, "chunk", temperature=1.6)
    own_head = {}
    if kind["kind"] != "pi0":
        head = merged.module.get_parameter("language_model.lm_head.weight")
        head.data.mul_(1.5)
        own_head["base_model.model.language_model.lm_head.base_layer.weight"] = head.detach()
    settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets)
    wrapped: Any = peft.get_peft_model(cast("Any", merged.module), settings)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            parameter.data.normal_(0, 0.1, generator=generator)
    wrapped.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | own_head, file)
    merged.module = wrapped.merge_and_unload()
    lora = LoraConfig(path=str(tmp_path / "adapter"))
    policy = make(tmp_path / "model", kind, "chunk", temperature=1.6, lora=lora)
    names = [name.removesuffix(".lora_A.weight").rpartition(".")[2] for name, _ in policy.named_weights()]
    assert {*targets}.difference(names) <= {"out_proj"}, "OpenVLA has no such layer"

    row, actions = play(policy)
    batch = pack([row], CPU)
    outputs, expected = (
        model.forward(batch, frozenset({"logprobs", "entropy"})) for model in (policy, merged)
    )
    assert (outputs["logprobs"] - batch.fields["behavior_logprobs"]).abs().max() < 1e-5
    for name in ("logprobs", "entropy"):
        assert_near(outputs[name], expected[name], rounding(30 * 64), name)
    outputs["logprobs"].sum().backward()
    trained = [
        name for name, weight in policy.named_weights() if weight.grad is not None and weight.grad.any()
    ]
    assert {part for name in trained for part in name.split(".")} >= {*targets} - {"out_proj", "q", "kv"}

    plain = merged.module.state_dict()
    for name, tensor in merged_weights(policy.module):
        torch.testing.assert_close(tensor, plain[name], rtol=1e-5, atol=1e-6)
    copy = make(tmp_path / "model", kind, "chunk", temperature=1.6, lora=lora)
    for _, tensor in copy.named_weights():
        tensor.data.zero_()
    assert not np.array_equal(play(copy)[1], actions)
    copy_weights(dict(policy.named_weights()), copy.named_weights())
    np.testing.assert_array_equal(play(copy)[1], actions)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_no_gradient(tmp_path: Path, kind: dict[str, Any]) -> None:
    policy = make(tmp_path, kind | {"eval_batch_rows": 2}, "chunk")
    batch = pack([play(policy)[0]], CPU)
    gradients = []
    for recomputes in (False, True):
        policy.set_gradient_checkpointing(recomputes)
        policy.module.zero_grad()
        policy.forward(batch, frozenset({"logprobs"}))["logprobs"].sum().backward()
        gradients.append(
            {n: p.grad.clone() for n, p in policy.module.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        difference = torch.linalg.vector_norm(gradients[1][name] - gradient)
        assert difference <= rounding(30 * 64) * max(float(torch.linalg.vector_norm(gradient)), 1.0), name
    trained = {n for n, p in policy.module.named_parameters() if p.requires_grad}
    if kind["kind"] == "pi0":
        assert not [name for name in trained if ".vlm." in name]
    else:
        assert not trained - gradients[0].keys() - {"language_model.lm_head.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_actions_do_not_depend_on_the_rest_of_the_call(tmp_path: Path, kind: dict[str, Any]) -> None:
    policy = make(tmp_path, kind, "chunk")
    observed = observations(policy, 3)
    uniforms = np.random.default_rng(1).random((3, policy.num_uniforms))
    together = policy.act(stacked(observed), uniforms)
    for n in range(3):
        alone = policy.act(stacked(observed[n : n + 1]), uniforms[n : n + 1])
        np.testing.assert_allclose(alone.actions[0], together.actions[n], atol=1e-4)
    greedy = [policy.act(stacked(observed), None).actions for _ in range(2)]
    np.testing.assert_array_equal(greedy[0], greedy[1])


@pytest.mark.parametrize("kind", KINDS[:2])
def test_sampled_tokens_follow_the_distribution(tmp_path: Path, kind: dict[str, Any]) -> None:
    """At a high temperature bins are nearly uniform; at a low one sampling is greedy. Evaluation may have its
    own, with the same actions and log-probs as if it were that of training."""
    cold, hot = (make(tmp_path, kind, "token", temperature=t) for t in (1e-4, 1e4))
    observed = stacked(observations(cold, 2))
    uniforms = np.random.default_rng(1).random((2, cold.num_uniforms))
    np.testing.assert_array_equal(
        cold.act(observed, uniforms).inputs["bins"], cold.act(observed, None).inputs["bins"]
    )
    expected = (uniforms * 256).astype(int)
    assert np.abs(hot.act(observed, uniforms).inputs["bins"][..., 0] - expected).max() <= 1
    np.testing.assert_allclose(hot.act(observed, uniforms).logprobs, -math.log(256), atol=0.01)
    for policy, another, temperature in ((cold, hot, 1e-4), (hot, cold, 1e4)):
        one, other = policy.act(observed, uniforms), another.act(observed, uniforms, temperature)
        np.testing.assert_array_equal(one.inputs["bins"], other.inputs["bins"])
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_flow_sde_has_one_stochastic_step(tmp_path: Path) -> None:
    """The step and its noise come from the uniform numbers; the log-prob is that of the documented normal
    distribution."""
    policy = make(tmp_path, KINDS[3] | {"denoise_steps": 4, "noise_level": 0.7}, "chunk")
    assert isinstance(policy, Pi0Policy)
    observed = {name: torch.from_numpy(x) for name, x in stacked(observations(policy, 1)).items()}
    chunk, size = 4, 5
    for step in range(4):
        uniforms = torch.full((1, policy.num_uniforms), 0.5, dtype=torch.float64)
        uniforms[0, chunk * size : 2 * chunk * size] = 0.8
        uniforms[0, -1] = (step + 0.5) / 4
        before = after = density = torch.empty(0)
        with torch.no_grad():
            actions, inputs, logprob = policy.draw(observed, uniforms)
            prefix, x, t, d = policy._prefix(observed), torch.zeros(1, chunk, size), 1.0, 0.25
            for n in range(4):
                velocity, *_ = policy._velocity(prefix, observed, x, torch.tensor([n]))
                x0, x1 = x - velocity * t, x + velocity * (1 - t)
                if n == step:
                    sigma = 0.7 * math.sqrt(t / (1 - t if n else d))
                    mean = x0 * (1 - (t - d)) + x1 * (t - d - sigma**2 * d / (2 * t))
                    deviation, before = sigma * math.sqrt(d), x
                    x = mean + deviation * torch.special.ndtri(torch.tensor(0.8, dtype=torch.float64)).float()
                    density = torch.distributions.Normal(mean, deviation).log_prob(x)[:, :2, :3].sum()
                    after = x
                else:
                    x = x0 * (1 - (t - d)) + x1 * (t - d)
                t -= d
        assert inputs["step"].item() == step
        torch.testing.assert_close(inputs["chain"][0, 0], torch.cat([before, after]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(actions, x[:, :2, :3], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logprob[0, 0], density, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
def test_the_values_of_pi0_follow_the_robots_state_but_not_its_actions(tmp_path: Path, noise: str) -> None:
    """From the observation alone, and beside log-probs."""
    policy = make(tmp_path, KINDS[3] | {"noise": noise}, "chunk")
    observed = {name: torch.from_numpy(x) for name, x in stacked(observations(policy, 2)).items()}
    with torch.no_grad():
        alone = policy.features(observed)
        assert alone.shape == (2, policy.hidden_size)
        for number in (0.2, 0.7):
            uniforms = torch.full((2, policy.num_uniforms), number, dtype=torch.float64)
            _, inputs, _ = policy.draw(observed, uniforms)
            torch.testing.assert_close(policy.evaluate(observed, inputs)[2], alone, rtol=1e-4, atol=1e-5)
        moved = policy.features(observed | {"state": observed["state"] + 1})
    assert (moved - alone).abs().max() > 1e-2


def test_flow_noise_counts_every_step_and_the_initial_noise(tmp_path: Path) -> None:
    policy = make(tmp_path, KINDS[4] | {"denoise_steps": 3}, "chunk")
    assert isinstance(policy, Pi0Policy)
    observed = {name: torch.from_numpy(x) for name, x in stacked(observations(policy, 2)).items()}
    uniforms = torch.rand(
        2, policy.num_uniforms, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        _, inputs, logprob = policy.draw(observed, uniforms)
        chain, prefix = inputs["chain"][:, 0], policy._prefix(observed)
        assert chain.shape == (2, 4, 4, 5)
        total = torch.distributions.Normal(0, 1).log_prob(chain[:, 0])
        for n in range(3):
            velocity, out, _ = policy._velocity(prefix, observed, chain[:, n], torch.full((2,), n))
            deviation = policy._transition(chain[:, n], velocity, out, torch.full((2,), n))[1]
            assert deviation.min() >= 0.08
            assert deviation.max() <= 0.16
            total = total + torch.distributions.Normal(chain[:, n] - velocity / 3, deviation).log_prob(
                chain[:, n + 1]
            )
    torch.testing.assert_close(logprob[:, 0], total[:, :2, :3].sum((1, 2)) / 4, rtol=1e-4, atol=1e-4)


def test_evaluation_of_pi0_is_that_of_transformers(tmp_path: Path) -> None:
    """ODE steps from the same noise, with one image and a prompt without padding."""
    policy = make(tmp_path, KINDS[3] | {"denoise_steps": 4}, "chunk")
    policy.processor.config = policy.config.model_copy(update={"max_prompt_tokens": 4})
    observed = observations(policy, 1)[0]
    assert (observed["prompt_ids"] >= 0).all()
    evaluated = policy.act(stacked([observed]), None).actions
    module: Any = policy.module
    noise = torch.randn(policy.num_uniforms - 1, generator=torch.Generator().manual_seed(0))[:20].view(
        1, 4, 5
    )
    pixels = (
        torch.nn.functional.interpolate(
            torch.from_numpy(observed["image"]).permute(2, 0, 1)[None].float(),
            (16, 16),
            mode="bicubic",
            antialias=True,
        )
        .round()
        .clamp(0, 255)
        / 127.5
        - 1
    )
    ids = torch.cat([torch.full((1, 4), 64), torch.from_numpy(observed["prompt_ids"])[None]], dim=1)
    actions = module.sample_actions(
        state=torch.nn.functional.pad(torch.from_numpy(observed["state"])[None], (0, 4)),
        input_ids=ids,
        pixel_values=pixels[:, None],
        pixel_attention_mask=torch.ones(1, 1, dtype=torch.bool),
        attention_mask=torch.ones_like(ids),
        noise=noise,
        num_steps=4,
    )
    expected = policy.processor.actions.unnormalize(actions[0, :2, :3].numpy())
    np.testing.assert_allclose(evaluated[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("noise", ["flow_sde", "flow_noise"])
def test_demonstrations_of_pi0_lie_on_the_straight_way_to_the_actions(noise: Any) -> None:
    """Denoising with the velocity that leads from the noise to the actions passes through the chain, and ends
    at them."""
    config = VlaConfig(kind="pi0", noise=noise, denoise_steps=4)
    actions = torch.randn(2000, 3, 2, generator=torch.Generator().manual_seed(1))
    inputs = demonstrated(config, actions, torch.Generator().manual_seed(0))
    chain, step = inputs["chain"], inputs["step"]
    t = (1 - step / 4)[:, None, None]
    if noise == "flow_noise":
        assert chain.shape == (2000, 5, 3, 2)
        velocity = chain[:, 0] - actions
    else:
        assert chain.shape == (2000, 2, 3, 2)
        velocity = (chain[:, 0] - actions) / t
        counts = step.bincount(minlength=4)
        assert (counts > 0).all()
        assert counts.argmax() == 0, "the first step has the least weight in the log-prob"
    # The division by t multiplies the rounding of the subtraction by up to 4.
    for number in range(chain.shape[1] - 1):
        mean, _ = transition(config, chain[:, number], velocity, step + number)
        torch.testing.assert_close(mean, chain[:, number + 1], atol=1e-5, rtol=1e-5)
    if noise == "flow_noise":
        torch.testing.assert_close(chain[:, -1], actions)


def test_a_published_pi0_config_has_the_published_shapes(tmp_path: Path) -> None:
    """A config of LeRobot, which names PaliGemma and the expert, but not their sizes."""
    config = {
        "type": "pi0", "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m", "chunk_size": 50,
        "n_action_steps": 50, "max_state_dim": 32, "max_action_dim": 32, "num_inference_steps": 10, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    meta = torch.device("meta")
    with meta:
        model = load_pi0(str(tmp_path), dtype=torch.bfloat16, device=meta, is_hollow=True)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    siglip, gemma, expert = "model.vlm.vision_tower.", "model.vlm.language_model.", "model.dit."
    expected = {
        f"{siglip}embeddings.patch_embedding.weight": (1152, 3, 14, 14),
        f"{siglip}embeddings.position_embedding.weight": (256, 1152),
        f"{siglip}encoder.layers.26.self_attn.q_proj.weight": (1152, 1152),
        f"{siglip}encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        "model.vlm.multi_modal_projector.linear.weight": (2048, 1152),
        f"{gemma}embed_tokens.weight": (257152, 2048),
        f"{gemma}layers.17.self_attn.q_proj.weight": (8 * 256, 2048),
        f"{gemma}layers.17.self_attn.k_proj.weight": (256, 2048),
        f"{gemma}layers.17.mlp.gate_proj.weight": (16384, 2048),
        f"{expert}layers.17.self_attn.q_proj.weight": (8 * 256, 1024),
        f"{expert}layers.17.self_attn.v_proj.weight": (256, 1024),
        f"{expert}layers.17.self_attn.o_proj.weight": (1024, 8 * 256),
        f"{expert}layers.17.mlp.down_proj.weight": (1024, 4096),
        "embed_action_time.action_in_proj.weight": (1024, 32),
        "embed_action_time.state_proj.weight": (1024, 32),
        "embed_action_time.action_time_mlp_in.weight": (1024, 2 * 1024),
        "embed_action_time.action_time_mlp_out.weight": (1024, 1024),
        "action_out_proj.weight": (32, 1024),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    for after_last in (f"{siglip}encoder.layers.27.", f"{gemma}layers.18.", f"{expert}layers.18."):
        assert not [name for name in shapes if name.startswith(after_last)]
    assert not [name for name in shapes if "head" in name]
    text, vision = model.config.vlm_config.text_config, model.config.vlm_config.vision_config
    for part in (text, model.config.dit_config):
        assert (part.num_attention_heads, part.num_key_value_heads, part.head_dim) == (8, 1, 256)
    assert (vision.num_attention_heads, vision.image_size) == (16, 224)
    assert (model.config.chunk_size, model.config.num_inference_steps) == (50, 10)
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(3.50e9, rel=5e-3)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_pi0_loads_published_names(tmp_path: Path, prefix: str) -> None:
    """openpi names output heads instead of embeddings; LeRobot puts `model.` before the same names."""
    model = tiny_pi0(tmp_path)
    replaced = {
        "language_model.model.": "language_model.",
        "vision_tower.": "vision_tower.vision_model.",
        "model.language_model.embed_tokens": "lm_head",
    }
    published = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for old, new in replaced.items():
            name = name.replace(old, new)
        published[prefix + name] = tensor
    vlm, expert = (f"{prefix}paligemma_with_expert.{part}" for part in ("paligemma", "gemma_expert"))
    assert published.keys() > {
        f"{vlm}.model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        f"{vlm}.model.language_model.layers.0.self_attn.q_proj.weight",
        f"{vlm}.lm_head.weight",
        f"{expert}.model.layers.0.self_attn.q_proj.weight",
        f"{expert}.lm_head.weight",
        f"{prefix}action_time_mlp_in.weight",
        f"{prefix}state_proj.weight",
    }
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_pi0(str(tmp_path), dtype=torch.float32, device=CPU)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_observations(tmp_path: Path, kind: dict[str, Any]) -> None:
    """One value per observation, 0 at first; in one pass with the log-probs those of the decisions."""
    policy = make(tmp_path, kind, "chunk")
    batch = pack([play(policy)[0]], CPU)
    expected = policy.forward(batch, frozenset({"logprobs"}))["logprobs"]
    policy.add_value_head("value_head", seed=0)
    assert not policy.forward(batch, frozenset({"values"}))["values"].any()
    torch.nn.init.ones_(policy.module.get_parameter("value_head.weight"))
    values = policy.forward(batch, frozenset({"values"}))["values"]
    assert values.shape == batch.mask.shape
    assert len(values.unique()) == 4
    out = policy.forward(batch, frozenset({"logprobs", "values", "value_deviation"}))
    assert torch.equal(out["logprobs"], expected)
    torch.testing.assert_close(out["values"][batch.mask], values[batch.mask])
    with pytest.raises(ModelError, match="choose another, such as value_head"):
        policy.add_value_head("value_layers", seed=0)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
@pytest.mark.parametrize("detaches", ["never", "alone", "always"])
@pytest.mark.parametrize("outputs", [{"values", "logprobs"}, {"values"}])
def test_the_value_loss_trains_the_policys_layers_unless_detached(
    tmp_path: Path, kind: dict[str, Any], detaches: Any, outputs: Any
) -> None:
    policy = make(tmp_path, kind, "chunk")
    policy.add_value_head("value_head", seed=0, detaches=detaches)
    torch.nn.init.ones_(policy.module.get_parameter("value_head.weight"))
    batch = pack([play(policy)[0]], CPU)
    policy.forward(batch, frozenset(outputs))["values"].sum().backward()
    trained = {name for name, p in policy.module.named_parameters() if p.grad is not None}
    value_layers = {name for name in trained if name.startswith(("value_layers.", "value_head."))}
    assert value_layers
    assert (trained == value_layers) is (
        detaches == "always" or (detaches == "alone" and outputs == {"values"})
    )


def test_unusable_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.vla\.form is not set"):
        make(tmp_path, {"kind": "openvla_oft"})
    with pytest.raises(ModelError, match=r"num_images=3.*2 images \(image, wrist\)"):
        make(tmp_path, KINDS[1] | {"num_images": 3})
    with pytest.raises(ModelError, match="logprob_level=token"):
        make(tmp_path, KINDS[3], "token")
    with pytest.raises(ModelError, match="exceed"):
        make(tmp_path, KINDS[3] | {"num_action_chunks": 5}, "chunk")
    policy = make(tmp_path, KINDS[1])
    with pytest.raises(ModelError, match="action_dim=3"):
        Processor(
            policy.config,
            replace(SPACES, actions=ActionSpace("discrete", 3)),
            tiny_tokenizer(),
            policy.processor.actions,
            None,
        )
    policy.processor.config = VlaConfig(max_prompt_tokens=4)
    with pytest.raises(ModelError, match=r"instruction 'push red cube' has 16 tokens.*raise it"):
        observations(policy, 1)
    with pytest.raises(ModelError, match="not pi0"):
        load_pi0(str(tmp_path), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", KINDS[2:4])
def test_ranks_after_the_first_read_no_weights(tmp_path: Path, kind: dict[str, Any]) -> None:
    """What they get from the first has to have the same names, types and shapes."""
    make(tmp_path, kind, "chunk" if kind["kind"] == "pi0" else "token")
    model = ModelConfig(path=str(tmp_path), vla=VlaConfig(**kind, action_dim=3), dtype="bf16")
    whole = load_module(model, 0, CPU)
    (tmp_path / "model.safetensors").write_text("not read")
    hollow = load_module(model, 0, CPU, is_hollow=True)
    tensors, others = whole.state_dict(keep_vars=True), hollow.state_dict(keep_vars=True)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        other = others[name]
        assert (tensor.dtype, tensor.shape, tensor.requires_grad) == (
            other.dtype,
            other.shape,
            other.requires_grad,
        )
    for (name, buffer), (_, other) in zip(whole.named_buffers(), hollow.named_buffers(), strict=True):
        if name not in tensors:  # they were not sent
            assert torch.equal(buffer, other), name


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "pi05"}, "'pi05', which is not supported"),
        ({"type": "pi05"}, "'pi05', which is not supported"),
        ({"type": "smolvla"}, "type 'smolvla', not pi0"),
        ({"model_type": "openvla"}, "type 'openvla', not pi0"),
    ],
)
def test_other_families_are_refused_before_anything_else(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    """Before their statistics, which are missing here too."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").touch()
    model = ModelConfig(path=str(tmp_path), vla=VlaConfig(kind="pi0"))
    with pytest.raises(ModelError, match=words):
        make_processor(model, SPACES)
