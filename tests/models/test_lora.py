"""Adapters: they start at zero, are the only trained weights, merge on export, and load from peft's
folders."""

from __future__ import annotations

import asyncio
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.native_engines import make_engine
from transformers import AutoConfig, AutoModelForCausalLM

from braid.algorithms.recipes import RECIPES
from braid.config.backends import LoraConfig
from braid.config.model import ModelConfig
from braid.config.train import OptimizerConfig, TrainConfig
from braid.errors import ModelError
from braid.models.adapter_reference import AdapterReference
from braid.models.base import copy_weights
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.models.tokenizer import character_tokenizer
from braid.models.value import ValueModel
from braid.plan.sizes import size_of_folder
from braid.rollout.engine import Request, Sampling
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, supervised_loss
from braid.types import Row

CPU = torch.device("cpu")
LOGPROBS = frozenset({"logprobs"})
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
}


def _config(**lora: Any) -> ModelConfig:
    return ModelConfig.model_validate({"build": SIZES, "lora": {"rank": 4, **lora}})


def _load(config: ModelConfig) -> CausalLM:
    return load_policy(config, temperature=1.0, seed=0, device=CPU)


def _plain() -> CausalLM:
    return _load(ModelConfig.model_validate({"build": SIZES}))


def _adapted(**lora: Any) -> CausalLM:
    """A model with non-zero adapters."""
    lm = _load(_config(**lora))
    generator = torch.Generator().manual_seed(1)
    for _, tensor in lm.named_weights():
        tensor.data.normal_(0, 0.2, generator=generator)
    return lm


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row({"input_ids": rng.integers(3, 60, n)}, np.arange(n) > 1, group=i, trajectory=i)
        for i, n in enumerate((9, 5, 12))
    ]


def _logprobs(lm: Any) -> torch.Tensor:
    ids = torch.arange(3, 40)
    batch = PackedBatch({"input_ids": ids}, torch.arange(37) % 18 > 0, (18, 19))
    with torch.no_grad():
        return lm.forward(batch, LOGPROBS)["logprobs"]


def _backend(lm: Any, **settings: Any) -> SingleBackend:
    return SingleBackend(lm, TrainConfig(optimizer=OptimizerConfig(lr=0.02)), total_steps=10, device=CPU)


def _train(backend: SingleBackend, steps: int = 1) -> list[float]:
    rows = _rows()
    weights = [1.0 / sum(row.num_tokens for row in rows)] * len(rows)
    return [backend.train(rows, weights, supervised_loss()).loss for _ in range(steps)]


def test_fresh_adapters_change_no_bit() -> None:
    assert torch.equal(_logprobs(_load(_config())), _logprobs(_plain()))


def test_the_seed_decides_fresh_adapters() -> None:
    one, same = _load(_config()), _load(_config())
    other = load_policy(_config(), temperature=1.0, seed=1, device=CPU)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    first, second, third = (dict(lm.named_weights())[name] for lm in (one, same, other))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_only_adapters_are_trained() -> None:
    lm = _load(_config())
    before = {name: p.detach().clone() for name, p in lm.module.named_parameters()}
    losses = _train(_backend(lm), 10)
    assert losses[-1] < losses[0]
    changed = {name for name, p in lm.module.named_parameters() if not torch.equal(before[name], p)}
    assert changed == {name for name in before if ".lora_" in name}


def test_every_linear_layer_but_the_head_has_one() -> None:
    names = {name.split(".")[-3] for name, _ in _load(_config()).named_weights()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_layers_that_get_one_can_be_chosen() -> None:
    names = {name.split(".")[-3] for name, _ in _load(_config(targets=["q_proj", "v_proj"])).named_weights()}
    assert names == {"q_proj", "v_proj"}


def test_alpha_scales_what_adapters_add() -> None:
    # alpha / rank: with alpha 8 and rank 4 twice what alpha 4 adds, for the one layer that is adapted
    weights = [
        dict(_adapted(alpha=alpha, targets=["q_proj"]).merged_weights())[
            "model.layers.0.self_attn.q_proj.weight"
        ]
        for alpha in (4.0, 8.0)
    ]
    base = dict(_plain().merged_weights())["model.layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(weights[1] - base, 2 * (weights[0] - base))


def test_merged_weights_are_those_that_peft_merges() -> None:
    lm = _adapted()
    ours = {name: tensor.clone() for name, tensor in lm.merged_weights()}
    theirs = deepcopy(lm.model)
    for module in theirs.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.merge()
    merged = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in theirs.state_dict().items()
        if ".lora_" not in name
    }
    assert ours.keys() == merged.keys() - {"lm_head.weight"} == dict(_plain().named_weights()).keys(), "tied"
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, merged[name])


def test_an_exported_folder_is_the_adapted_model_without_adapters(tmp_path: Path) -> None:
    lm = _adapted()
    before = _logprobs(lm)
    save_pretrained(lm, load_tokenizer(_config()), tmp_path)
    assert torch.equal(_logprobs(lm), before)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any("lora" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(
        _logprobs(CausalLM(model)), before, rtol=0, atol=1e-5
    )  # W + BA is rounded once


def test_a_checkpoint_contains_adapters_and_resumes_bit_exactly() -> None:
    unbroken = _backend(_load(_config()))
    _train(unbroken, 3)
    state = deepcopy(unbroken.state())
    assert all("lora_" in name for name in state["weights"])
    resumed = _backend(_load(_config()))
    resumed.load(state)
    assert _train(resumed, 2) == _train(unbroken, 2)
    for (_, one), (_, other) in zip(resumed.named_weights(), unbroken.named_weights(), strict=True):
        assert torch.equal(one, other)


def test_the_reference_of_fresh_adapters_stays_the_base_while_they_learn() -> None:
    lm = _load(_config())
    reference, base = AdapterReference(lm), _logprobs(lm)
    _train(_backend(lm), 3)
    learned = _logprobs(lm)
    assert not torch.allclose(learned, base, atol=1e-3)
    assert torch.equal(_logprobs(reference), base)
    assert torch.equal(_logprobs(lm), learned)  # the policy's adapters are back in their place


@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_the_full_kl_of_an_adapted_policy_is_from_the_base(autocast: Literal["none", "bf16"]) -> None:
    """In one process policy and reference are the same tensors, except for the adapters."""
    lm, base = _load(_config()), _load(_config())
    config = TrainConfig(autocast=autocast)
    shared = AdapterReference(lm)
    generator = torch.Generator().manual_seed(1)
    for _, tensor in lm.named_weights():
        tensor.data.normal_(0, 0.2, generator=generator)
    loss = policy_loss(replace(RECIPES["grpo"], kl_coef=1.0, kl_estimator="full"))
    reports, kls = [], []
    for model, reference in ((deepcopy(lm), base), (lm, shared)):
        policy = SingleBackend(model, config, total_steps=9, device=CPU)
        policy.use_reference(SingleBackend(reference, config, total_steps=0, device=CPU).logits)
        rows = _rows()
        for row in rows:
            row.fields["advantages"] = np.zeros(len(row), np.float32)
        kls.append([result["kl"] for result in policy.infer(rows, frozenset({"kl"}))])
        reports.append([policy.train(rows, [1 / 20] * 3, loss) for _ in range(2)])
    for mine, other in zip(*kls, strict=True):
        np.testing.assert_array_equal(mine, other)
        assert mine.max() > 0.01
    assert reports[0] == reports[1]
    assert reports[0][0].grad_norm > 0


def test_the_reference_of_trained_adapters_keeps_them() -> None:
    lm = _adapted()
    reference, start = AdapterReference(lm), _logprobs(lm)
    _train(_backend(lm), 3)
    assert torch.equal(_logprobs(reference), start)


def test_the_reference_can_take_over_the_policy_again() -> None:
    lm = _load(_config())
    reference = AdapterReference(lm)
    _train(_backend(lm), 2)
    copy_weights(dict(lm.named_weights()), reference.named_weights())
    assert torch.equal(_logprobs(reference), _logprobs(lm))


def test_a_reference_comes_back_from_a_checkpoint() -> None:
    one, other = AdapterReference(_adapted()), AdapterReference(_load(_config()))
    other_backend = SingleBackend(other, TrainConfig(), total_steps=0, device=CPU)
    other_backend.load(SingleBackend(one, TrainConfig(), total_steps=0, device=CPU).state())
    assert torch.equal(_logprobs(other), _logprobs(one))


def test_a_critic_starts_from_the_merged_weights_and_trains_them_all() -> None:
    lm = _adapted()
    critic = ValueModel.copy_of(lm)
    merged = dict(lm.merged_weights())
    for name, tensor in critic.named_weights():
        if not name.startswith("value_head."):
            torch.testing.assert_close(tensor.detach(), merged[name])
    assert all(p.requires_grad for p in critic.module.parameters())
    assert all(torch.equal(merged[n], t) for n, t in lm.merged_weights())


def test_the_engine_samples_from_the_adapted_weights() -> None:
    lm = _adapted()
    engine = make_engine(lm)
    prompt = (5, 9, 7)
    request = Request(prompt, Sampling(max_new_tokens=12), key=(0, 1))
    completion = asyncio.run(engine.generate(request))
    ids = np.array([*prompt, *completion.token_ids])
    row = Row({"input_ids": ids}, np.arange(len(ids)) >= 3, group=0, trajectory=0)
    (adapted,) = _backend(lm).infer([row], LOGPROBS)
    (plain,) = SingleBackend(_plain(), TrainConfig(), total_steps=0, device=CPU).infer([row], LOGPROBS)
    np.testing.assert_allclose(completion.logprobs, adapted["logprobs"][3:], rtol=0, atol=1e-5)  # fp32
    assert np.abs(completion.logprobs - plain["logprobs"][3:]).max() > 1e-2


def _peft_folder(folder: Path, **settings: Any) -> torch.Tensor:
    """An adapter folder that peft itself wrote; the log-probs of the model that it came from."""
    model = _plain().model
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "up_proj"], **settings})
    wrapped = peft.get_peft_model(model, config)
    for name, p in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, 0, 0.3)
    wrapped.save_pretrained(str(folder))
    return _logprobs(CausalLM(wrapped.base_model.model))


def test_an_adapter_folder_of_peft_is_loaded_unchanged(tmp_path: Path) -> None:
    expected = _peft_folder(tmp_path)
    lm = _load(_config(path=str(tmp_path)))
    torch.testing.assert_close(_logprobs(lm), expected, rtol=0, atol=1e-6)
    assert {t.shape[0] for n, t in lm.named_weights() if "lora_A" in n} == {3}
    assert all(p.requires_grad == (".lora_" in name) for name, p in lm.module.named_parameters())


def test_a_folder_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"is not an adapter folder: it lacks adapter_config\.json and adapter_model"
    ):
        _load(_config(path=str(tmp_path)))


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    _peft_folder(tmp_path)
    wider = ModelConfig.model_validate(
        {"build": {**SIZES, "hidden_size": 64}, "lora": {"path": str(tmp_path)}}
    )
    with pytest.raises(ModelError, match="was made for another model: 4 of its matrices do not fit"):
        _load(wider)


def test_adapters_of_another_kind_are_refused(tmp_path: Path) -> None:
    _peft_folder(tmp_path, use_dora=True)
    with pytest.raises(ModelError, match="plain LoRA"):
        _load(_config(path=str(tmp_path)))


def test_a_layer_that_is_not_there_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ModelError, match=r"has no layer 'q_prog', did you mean 'q_proj'\?; available: down_proj"
    ):
        _load(_config(targets=["q_prog"]))


@pytest.mark.parametrize(
    ("target", "what"), [("lm_head", "the output head"), ("embed_tokens", "an embedding")]
)
def test_layers_that_cannot_have_an_adapter_are_refused(tmp_path: Path, target: str, what: str) -> None:
    """In a folder too; embeddings are no linear layers, so they are not found among the targets."""
    _peft_folder(tmp_path)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    settings["target_modules"].append(target)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=f"{target}' is {what}, which cannot have an adapter"):
        _load(_config(path=str(tmp_path)))
    with pytest.raises(ModelError, match=what if target == "lm_head" else "has no layer"):
        _load(_config(targets=[target]))


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
        "v_head_dim": 16, "num_key_value_heads": 2,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, as a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 96, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
    more = {"num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **{**sizes, **tokens, **more, **MIXTURES[request.param]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    save_pretrained(CausalLM(model), character_tokenizer("".join(map(chr, range(33, 117)))), folder)
    return folder


def _of_mixture(folder: Path, **lora: Any) -> CausalLM:
    """A mixture with non-zero adapters."""
    lm = _load(ModelConfig.model_validate({"path": str(folder), "lora": {"rank": 3, "alpha": 5.0, **lora}}))
    generator = torch.Generator().manual_seed(1)
    for _, tensor in lm.named_weights():
        tensor.data.normal_(0, 0.2, generator=generator)
    return lm


def test_adapters_of_experts_are_merged_into_exports_critics_and_copies(
    mixture: Path, tmp_path: Path
) -> None:
    plain, lm = _load(ModelConfig(path=str(mixture))), _of_mixture(mixture)
    before = _logprobs(lm)
    assert (before - _logprobs(plain)).abs().max() > 0.1
    merged = {name: tensor.detach() for name, tensor in lm.merged_weights()}
    expected = dict(plain.merged_weights())
    assert {name: t.shape for name, t in merged.items()} == {n: t.shape for n, t in expected.items()}
    experts = [name for name in merged if "experts." in name and merged[name].ndim == 3]
    assert experts
    assert not any(torch.allclose(merged[name][e], expected[name][e]) for name in experts for e in range(4))

    save_pretrained(lm, load_tokenizer(ModelConfig(path=str(mixture))), tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    torch.testing.assert_close(
        _logprobs(CausalLM(loaded)), before, rtol=0, atol=2e-5
    )  # W + BA is rounded once

    critic = ValueModel.copy_of(lm)
    for name, tensor in critic.named_weights():
        if not name.startswith("value_head."):
            torch.testing.assert_close(tensor.detach(), merged[name])
    assert all(p.requires_grad for p in critic.module.parameters())
    reference = AdapterReference(lm)
    assert torch.equal(_logprobs(reference), before)
    _train(_backend(lm), 2)
    assert torch.equal(_logprobs(reference), before)


def test_fresh_adapters_of_experts_change_no_bit_and_all_learn(mixture: Path) -> None:
    lm = _load(ModelConfig.model_validate({"path": str(mixture), "lora": {"rank": 3}}))
    assert torch.equal(_logprobs(lm), _logprobs(_load(ModelConfig(path=str(mixture)))))
    frozen = {name: p.detach().clone() for name, p in lm.module.named_parameters() if ".lora_" not in name}
    losses = _train(_backend(lm), 8)
    assert losses[-1] < losses[0]
    assert all(torch.equal(lm.module.get_parameter(name), p) for name, p in frozen.items())
    experts = [t for name, t in lm.named_weights() if ".experts." in name and "lora_B" in name]
    assert experts
    assert all(tensor.any() for tensor in experts)


@pytest.mark.parametrize("targets", [["all-linear"], ["o_proj", "experts.gate_up_proj"], ["down_proj"]])
def test_the_plan_knows_the_number_of_parameters_of_adapted_experts(
    mixture: Path, targets: list[str]
) -> None:
    lora = LoraConfig(rank=3, targets=tuple(targets))
    size = size_of_folder(mixture)
    assert size is not None
    made = _of_mixture(mixture, targets=targets).named_weights()
    assert size.adapter_parameters(lora) == sum(tensor.numel() for _, tensor in made)


def test_the_engine_samples_from_the_adapted_experts(mixture: Path) -> None:
    lm = _of_mixture(mixture)
    request = Request((5, 9, 7), Sampling(max_new_tokens=8), key=(0, 1))
    completion = asyncio.run(make_engine(lm).generate(request))
    ids = np.array([5, 9, 7, *completion.token_ids])
    row = Row({"input_ids": ids}, np.arange(len(ids)) >= 3, group=0, trajectory=0)
    (adapted,) = _backend(lm).infer([row], LOGPROBS)
    np.testing.assert_allclose(completion.logprobs, adapted["logprobs"][3:], rtol=0, atol=2e-5)  # fp32


def test_experts_are_chosen_or_left_out_by_name(mixture: Path) -> None:
    names = [
        name for name, _ in _of_mixture(mixture, targets=["o_proj", "experts.down_proj"]).named_weights()
    ]
    kinds = {name.partition("layers.")[2][2:].rpartition(".lora_")[0] for name in names}
    assert kinds == {"self_attn.o_proj", "mlp.experts"}
    names = [name for name, _ in _of_mixture(mixture, targets=["o_proj"]).named_weights()]
    assert not [name for name in names if "experts" in name]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"modules_to_save": ["o_proj"]}, r"modules_to_save=\['o_proj'\]"),
        ({"trainable_token_indices": [3, 4]}, r"trainable_token_indices=\[3, 4\]"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"bias": "all"}, "bias=all"),
    ],
)
def test_adapter_folders_that_train_more_than_matrices_say_so(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    _peft_folder(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(
        ModelError, match=rf"parts or options that are not supported: {reason}; use plain LoRA"
    ):
        _load(_config(path=str(tmp_path)))


def test_a_matrix_per_expert_is_refused_with_the_reason(mixture: Path, tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=2, target_modules=["o_proj"])
    peft.get_peft_model(_load(ModelConfig(path=str(mixture))).model, settings).save_pretrained(str(tmp_path))
    weights = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.mlp.experts.3.down_proj.lora_A.weight"
    save_file(weights | {name: torch.zeros(2, 24)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="matrices of each expert by itself, as of transformers 4"):
        _of_mixture(mixture, path=str(tmp_path))


def test_gradient_checkpointing_gives_adapters_the_same_gradients() -> None:
    plain, recomputed = _load(_config()), _load(_config())
    recomputed.set_gradient_checkpointing(True)
    assert _train(_backend(plain), 3) == pytest.approx(_train(_backend(recomputed), 3), rel=1e-6)
