"""The contract of training backends, on an MLP and on a language model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from braid.algorithms.recipes import RECIPES
from braid.config.model import MlpSpec
from braid.config.train import OptimizerConfig, ScheduleConfig, TrainConfig
from braid.errors import CheckpointError, ModelError, TrainingError
from braid.models.base import TrainableModel
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.mlp import MlpPolicy
from braid.models.value import ValueModel
from braid.report.names import position
from braid.training.backend import Diagnostics, Loss, StepReport, TrainingBackend
from braid.training.backends import BACKENDS
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, supervised_loss
from braid.types import ActionSpace, Row, Spaces

from .test_sharded_backends import ON_CPUS

CPU = torch.device("cpu")
LENGTHS = (5, 2, 9, 4, 7)
LOGPROBS = frozenset({"logprobs"})

IN_ONE_PROCESS = [name for name, kind in BACKENDS.items() if not kind.is_sharded]


def _new_backend(kind: str) -> Callable[..., TrainingBackend]:
    def build(model: TrainableModel, config: TrainConfig, total_steps: int) -> TrainingBackend:
        return BACKENDS[kind]().build(model, config, total_steps=total_steps, device=CPU)

    return build


def _perceptron(seed: int = 0, width: int = 8) -> MlpPolicy:
    return MlpPolicy(MlpSpec(hidden_sizes=(width,)), Spaces(3, ActionSpace("discrete", 4)), seed=seed)


def _perceptron_inputs(length: int, rng: np.random.Generator) -> dict[str, Any]:
    """The first position is read; each of the others is a decision."""
    return {
        "observations": {"state": rng.normal(size=(length, 3)).astype(np.float32)},
        "decision": np.arange(-1, length - 1, dtype=np.int32),
        "inputs": {"actions": rng.integers(0, 4, length)},
    }


def _language_model(seed: int = 0, width: int = 16) -> CausalLM:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=32,
        hidden_size=width,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def _language_inputs(length: int, rng: np.random.Generator) -> dict[str, Any]:
    return {"inputs": {"input_ids": rng.integers(0, 32, length)}}


MODELS: dict[str, tuple[Callable[..., TrainableModel], Callable[..., dict[str, Any]]]] = {
    "perceptron": (_perceptron, _perceptron_inputs),
    "language model": (_language_model, _language_inputs),
}


@dataclass
class Case:
    """A backend factory, and rows for it."""

    new_backend: Callable[..., TrainingBackend]
    new_model: Callable[..., TrainableModel]
    rows: list[Row]

    @property
    def weights(self) -> list[float]:
        """Equal weights for all policy tokens."""
        return [1.0 / sum(row.num_tokens for row in self.rows)] * len(self.rows)

    def make(self, *, total_steps: int = 10, seed: int = 0, width: int = 16, **train: Any) -> TrainingBackend:
        train = {"optimizer": OptimizerConfig(lr=0.01), **train}
        return self.new_backend(self.new_model(seed, width), TrainConfig(**train), total_steps)

    def step(self, backend: TrainingBackend, loss: Loss | None = None) -> StepReport:
        return backend.train(self.rows, self.weights, loss or policy_loss(RECIPES["grpo"]))


def test_every_backend_is_held_to_the_contract() -> None:
    """Here, in test_sharded_backends.py, or, of those that need a GPU, in a suite with a stand-in for it."""
    on_stand_ins = {"megatron"}  # test_megatron.py
    sharded = {name for name, kind in BACKENDS.items() if kind.is_sharded}
    assert sharded == {*ON_CPUS, *on_stand_ins}
    assert {*IN_ONE_PROCESS} == BACKENDS.keys() - sharded


@pytest.fixture(params=[(b, m) for b in IN_ONE_PROCESS for m in MODELS], ids=lambda p: f"{p[0]}, {p[1]}")
def case(request: pytest.FixtureRequest) -> Case:
    backend, model = request.param
    new_model, inputs = MODELS[model]
    rng = np.random.default_rng(0)
    rows = []
    for number, length in enumerate(LENGTHS):
        mask = np.arange(length) > 0
        advantages = np.where(mask, rng.normal(size=length), 0).astype(np.float32)
        behavior = np.where(mask, -rng.random(length), 0).astype(np.float32)
        fields = {"advantages": advantages, "behavior_logprobs": behavior}
        row = Row(mask=mask, group=number // 2, trajectory=number, fields=fields, **inputs(length, rng))
        rows.append(row)
    return Case(_new_backend(backend), new_model, rows)


def _frozen(backend: TrainingBackend) -> Any:
    return copy.deepcopy(backend.state())


def _flat(state: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {path: state}
    return {k: v for key, value in state.items() for k, v in _flat(value, f"{path}/{key}").items()}


def _differences(one: Any, other: Any) -> list[str]:
    """Paths where two states differ in any bit."""
    ones, others = _flat(one), _flat(other)
    assert ones.keys() == others.keys()
    return [
        path
        for path, value in ones.items()
        if not (torch.equal(value, others[path]) if isinstance(value, Tensor) else value == others[path])
    ]


def _poisoned(rows: Sequence[Row]) -> list[Row]:
    bad = copy.deepcopy(list(rows))
    bad[2].fields["advantages"][-1] = math.nan
    return bad


def _bad_gradient(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    """A loss of 0 whose gradient is inf * 0."""
    return (outputs["logprobs"] * 0.0).abs().sqrt().sum(), Diagnostics({})


def test_inference_gives_each_row_its_own_outputs(case: Case) -> None:
    results = case.make().infer(case.rows, frozenset({"logprobs", "entropy"}))
    for row, result in zip(case.rows, results, strict=True):
        assert result.keys() == {"logprobs", "entropy"}
        for values in result.values():
            assert values.dtype == np.float32
            assert values.shape == (len(row),)
            assert np.all(values[row.mask] != 0)
            assert not values[~row.mask].any()


def test_inference_does_not_depend_on_micro_batches_or_order(case: Case) -> None:
    whole = case.make().infer(case.rows, LOGPROBS)
    cut = case.make(micro_batch_tokens=8).infer(case.rows[::-1], LOGPROBS)[::-1]
    for one, other in zip(whole, cut, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=1e-6)  # fp32, of size 1


def test_inference_leaves_the_state_alone(case: Case) -> None:
    backend = case.make()
    before = _frozen(backend)
    backend.infer(case.rows, LOGPROBS)
    assert _differences(before, backend.state()) == []


def test_inference_over_no_rows_is_empty(case: Case) -> None:
    assert case.make().infer([], LOGPROBS) == []


def test_rows_without_policy_tokens_do_not_change_a_step(case: Case) -> None:
    backend, other = case.make(micro_batch_tokens=8), case.make(micro_batch_tokens=8)
    silent = copy.deepcopy(case.rows[2])
    silent.mask[:] = False
    plain = case.step(backend)
    more = other.train([*case.rows, silent], [*case.weights, 0.0], policy_loss(RECIPES["grpo"]))
    assert more.num_tokens == plain.num_tokens
    assert more.loss == pytest.approx(plain.loss, abs=1e-6)
    assert more.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)


def test_training_raises_the_likelihood_of_the_target(case: Case) -> None:
    backend = case.make(total_steps=60, optimizer=OptimizerConfig(lr=0.03))
    losses = [case.step(backend, supervised_loss()).loss for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_report_describes_the_step(case: Case) -> None:
    report = case.step(case.make())
    assert report.lr == 0.01
    assert report.num_tokens == sum(LENGTHS) - len(LENGTHS)
    assert not report.is_skipped
    assert report.grad_norm > 0
    total, count = report.metrics["policy/entropy"]
    assert count == report.num_tokens
    assert 0 < total / count < math.log(32) + 1e-5
    assert report.maxima["policy/ratio_max"] == 1.0
    for name in (*report.metrics, *report.maxima):
        position(name)  # declared, or raises


def test_named_weights_are_the_trained_ones(case: Case) -> None:
    backend = case.make()
    held = dict(backend.named_weights())
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    case.step(backend)
    now = dict(backend.named_weights())
    assert all(now[name].data_ptr() == held[name].data_ptr() for name in held)
    assert all(not torch.equal(now[name], before[name]) for name in held)


def test_gradients_are_gone_after_a_step(case: Case) -> None:
    backend = case.make()
    case.step(backend)
    assert all(tensor.grad is None for _, tensor in backend.named_weights())


def test_gradients_are_clipped_to_the_norm(case: Case) -> None:
    # AdamW's first moment after one step is (1 - beta1) times the clipped gradient
    backend = case.make(max_grad_norm=0.01)
    assert case.step(backend).grad_norm > 0.01
    moments = [tensors["exp_avg"] for tensors in backend.state()["optimizer"].values()]
    assert float(torch.nn.utils.get_total_norm(moments)) == pytest.approx(0.1 * 0.01, rel=1e-5)


def test_small_gradients_are_left_as_they_are(case: Case) -> None:
    clipped, free = case.make(max_grad_norm=1e6), case.make(max_grad_norm=None)
    case.step(clipped)
    case.step(free)
    assert _differences(clipped.state(), free.state()) == []


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_only_the_counters(case: Case, kind: str) -> None:
    backend = case.make()
    case.step(backend)
    before = _frozen(backend)
    if kind == "loss":
        report = backend.train(_poisoned(case.rows), case.weights, policy_loss(RECIPES["grpo"]))
        assert math.isnan(report.loss)
    else:
        report = case.step(backend, Loss(LOGPROBS, _bad_gradient))
        assert report.loss == 0.0
    assert report.is_skipped
    assert not math.isfinite(report.grad_norm)
    assert _differences(before, backend.state()) == ["/num_steps", "/skipped_in_row"]


def test_a_skipped_step_leaves_nothing_behind_for_the_next(case: Case) -> None:
    backend, unharmed = case.make(), case.make()
    backend.train(_poisoned(case.rows), case.weights, policy_loss(RECIPES["grpo"]))
    assert case.step(backend) == case.step(unharmed)
    assert _differences(backend.state(), unharmed.state()) == ["/num_steps"]


def test_a_skipped_step_counts_for_the_schedule(case: Case) -> None:
    schedule = ScheduleConfig(decay="linear")
    backend = case.make(total_steps=4, optimizer=OptimizerConfig(lr=0.04, schedule=schedule))
    rates = [case.step(backend).lr]
    rates.append(backend.train(_poisoned(case.rows), case.weights, policy_loss(RECIPES["grpo"])).lr)
    rates.append(case.step(backend).lr)
    assert rates == pytest.approx([0.04, 0.03, 0.02])


def test_a_step_past_a_limit_of_its_loss_changes_only_the_counter(case: Case) -> None:
    """The limit is on the mean over the whole step, whatever single micro-batches have."""
    backend = case.make(micro_batch_tokens=1, max_skipped_steps=1)
    base = policy_loss(RECIPES["grpo"])
    other = case.make()
    for one in (backend, other):
        case.step(one)
    total, count = case.step(other).metrics["policy/entropy"]
    limit, before = total / count, _frozen(backend)
    for _ in range(2):  # more than max_skipped_steps, which counts what is not finite
        report = case.step(backend, replace(base, limits={"policy/entropy": limit * 0.999}))
        assert report.is_stopped
        assert not report.is_skipped
    assert _differences(before, backend.state()) == ["/num_steps"]
    assert not case.step(backend, replace(base, limits={"policy/entropy": limit * 1.001})).is_stopped
    assert _differences(before, backend.state()) != ["/num_steps"]


def test_too_many_consecutive_skipped_steps_end_the_run(case: Case) -> None:
    backend, bad = case.make(max_skipped_steps=2), _poisoned(case.rows)
    loss = policy_loss(RECIPES["grpo"])
    backend.train(bad, case.weights, loss)
    case.step(backend)  # a finite one in between starts the count again
    backend.train(bad, case.weights, loss)
    with pytest.raises(TrainingError) as caught:
        backend.train(bad, case.weights, loss)
    assert str(caught.value) == (
        "2 consecutive optimizer steps had a loss or gradient that is not finite "
        "(train.max_skipped_steps). The last was step 4 of 10 (loss nan, gradient norm nan); the last "
        "finite one was step 2. Lower train.optimizer.lr, or check the stored samples for "
        "extreme rewards"
    )


def test_a_run_without_any_finite_step_is_reported(case: Case) -> None:
    with pytest.raises(TrainingError, match="no step was finite"):
        case.make(max_skipped_steps=1).train(_poisoned(case.rows), case.weights, policy_loss(RECIPES["grpo"]))


def test_a_loaded_backend_resumes_bit_exactly(case: Case) -> None:
    settings: dict[str, Any] = {
        "optimizer": OptimizerConfig(
            lr=0.01, weight_decay=0.1, schedule=ScheduleConfig(decay="cosine", warmup_steps=2)
        ),
        "max_skipped_steps": 2,
        "micro_batch_tokens": 8,
    }
    unbroken, resumed = case.make(**settings), case.make(seed=1, **settings)
    loss = policy_loss(RECIPES["grpo"])
    case.step(unbroken)
    case.step(unbroken)
    unbroken.train(_poisoned(case.rows), case.weights, loss)
    resumed.load(_frozen(unbroken))
    assert _differences(unbroken.state(), resumed.state()) == []
    assert [case.step(resumed) for _ in range(2)] == [case.step(unbroken) for _ in range(2)]
    assert _differences(unbroken.state(), resumed.state()) == []
    for backend in (unbroken, resumed):
        backend.train(_poisoned(case.rows), case.weights, loss)
        with pytest.raises(TrainingError):
            backend.train(_poisoned(case.rows), case.weights, loss)


def test_an_optimizer_without_moments_is_resumed_too(case: Case) -> None:
    sgd = OptimizerConfig(kind="sgd", lr=0.01)
    unbroken, resumed = case.make(optimizer=sgd), case.make(seed=1, optimizer=sgd)
    case.step(unbroken)
    assert unbroken.state()["optimizer"] == {}
    resumed.load(_frozen(unbroken))
    assert case.step(resumed) == case.step(unbroken)


def test_loading_copies(case: Case) -> None:
    source, other = case.make(), case.make(seed=1)
    case.step(source)
    other.load(source.state())
    before = _frozen(source)
    case.step(other)
    assert _differences(before, source.state()) == []


def test_a_model_that_is_never_trained_has_a_state_too(case: Case) -> None:
    source, other = case.make(total_steps=0), case.make(total_steps=0, seed=1)
    assert source.state()["optimizer"] is None
    other.load(source.state())
    assert _differences(source.state(), other.state()) == []


def test_the_state_of_another_model_is_refused(case: Case) -> None:
    with pytest.raises(CheckpointError, match=r"a different model: .* is \(.*\) in this run and \(.*\)"):
        case.make().load(case.make(width=32).state())
    state = case.make().state()
    name = next(iter(state["weights"]))
    del state["weights"][name]
    with pytest.raises(
        CheckpointError, match=f"{name} is .* and absent in the checkpoint \\(1 tensors differ\\)"
    ):
        case.make().load(state)


def test_only_weights_of_the_same_model_are_loaded(case: Case) -> None:
    backend = case.make()
    before = {name: tensor.clone() for name, tensor in backend.full_weights().items()}
    weights = dict(case.make(seed=1).full_weights())
    name = next(iter(weights))
    faults = {
        f"1 missing ({name})": {n: t for n, t in weights.items() if n != name},
        "1 unknown to the model (strange)": weights | {"strange": weights[name]},
        "of another shape (": case.make(width=32).full_weights(),
    }
    for fault, wrong_weights in faults.items():
        with pytest.raises(ModelError) as caught:
            backend.load_weights(wrong_weights)
        assert fault in str(caught.value)
        assert all(torch.equal(tensor, before[n]) for n, tensor in backend.full_weights().items())
    backend.load_weights(weights)
    assert all(torch.equal(tensor, weights[n]) for n, tensor in backend.full_weights().items())


def test_a_critic_takes_all_of_a_policy_but_its_head() -> None:
    policy = _language_model(seed=1)
    backend = SingleBackend(ValueModel.copy_of(_language_model()), TrainConfig(), total_steps=9, device=CPU)
    weights = {name: tensor.detach() for name, tensor in policy.named_weights()}
    with pytest.raises(ModelError, match=r"2 missing \(value_head\.weight, value_head\.bias\)"):
        backend.load_weights(weights)
    backend.load_weights(weights | {"lm_head.weight": torch.zeros(32, 16)}, heads_differ=True)
    assert all(torch.equal(backend.full_weights()[n], tensor) for n, tensor in weights.items())
    with pytest.raises(ModelError, match=r"1 missing \(model\.norm\.weight\)"):
        backend.load_weights({n: t for n, t in weights.items() if "model.norm" not in n}, heads_differ=True)
    with pytest.raises(ModelError, match=r"missing"):
        backend.load_weights({"transformer.norm.weight": torch.zeros(16)}, heads_differ=True)


def test_bf16_products_keep_weights_and_outputs_in_fp32(case: Case) -> None:
    exact, rounded = case.make(autocast="none"), case.make(autocast="bf16")
    for one, other in zip(exact.infer(case.rows, LOGPROBS), rounded.infer(case.rows, LOGPROBS), strict=True):
        assert other["logprobs"].dtype == np.float32
        np.testing.assert_allclose(
            one["logprobs"], other["logprobs"], rtol=0, atol=0.05
        )  # 8 bits of mantissa
    report = case.step(rounded)
    assert report.grad_norm == pytest.approx(case.step(exact).grad_norm, rel=0.05)
    assert all(tensor.dtype == torch.float32 for _, tensor in rounded.named_weights())
