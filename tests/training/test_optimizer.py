"""The learning rate schedule, weight decay, and restoring moments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from braid.config.schema import RunConfig
from braid.config.train import OptimizerConfig, ScheduleConfig
from braid.models.roles import make_critic, make_policy
from braid.training.optimizer import build_optimizer, lr_factor, peak_rates, set_rate


def _factors(total: int, **schedule: object) -> list[float]:
    config = ScheduleConfig.model_validate(schedule)
    return [lr_factor(step, total, config) for step in range(total)]


def test_a_constant_rate_is_the_peak_in_every_step() -> None:
    assert _factors(3) == [1, 1, 1]


def test_warmup_steps_rise_to_the_peak_and_none_is_zero() -> None:
    assert _factors(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1, 1]


def test_the_longer_of_the_two_warmups_applies() -> None:
    assert _factors(4, warmup_steps=1, warmup_fraction=0.5) == pytest.approx([1 / 3, 2 / 3, 1, 1])


def test_linear_decay_falls_from_the_peak_by_equal_amounts() -> None:
    # after one warmup step, four steps from 1 to the 0.2 that a fifth would have: 0.8 / 4 at a time
    assert _factors(5, warmup_steps=1, decay="linear", min_ratio=0.2) == pytest.approx(
        [0.5, 1, 0.8, 0.6, 0.4]
    )


def test_cosine_decay_is_half_way_down_in_the_middle() -> None:
    # (1 + cos(pi k / 4)) / 2 for k = 0 .. 3
    assert _factors(4, decay="cosine") == pytest.approx([1, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_steps_after_the_last_keep_the_least_rate() -> None:
    schedule = ScheduleConfig(decay="cosine", min_ratio=0.1)
    assert lr_factor(100, 10, schedule) == pytest.approx(0.1)


def test_a_warmup_longer_than_the_run_never_reaches_the_peak() -> None:
    assert _factors(2, warmup_steps=9) == pytest.approx([0.1, 0.2])


def test_weight_decay_shrinks_matrices_and_leaves_vectors() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = build_optimizer(module, OptimizerConfig(lr=0.1, weight_decay=0.5))
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in module.named_parameters():
        shrink = 1 - 0.1 * 0.5 if p.ndim == 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * shrink)


def test_parameters_that_are_not_trained_are_excluded() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    (group,) = build_optimizer(module, OptimizerConfig()).param_groups
    assert [p.shape for p in group["params"]] == [(2, 2)]


def test_the_first_step_is_that_of_the_formula() -> None:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, 2.0)
    module.weight.grad = torch.full((1, 1), 3.0)
    build_optimizer(module, OptimizerConfig(lr=0.1, weight_decay=0.5)).step()
    # corrected moments are 3 and 9: 2 * (1 - 0.1 * 0.5) - 0.1 * 3 / (3 + 1e-8)
    assert module.weight.item() == pytest.approx(1.8, abs=1e-6)


def _stepped(config: OptimizerConfig) -> tuple[nn.Linear, torch.optim.AdamW]:
    module = nn.Linear(2, 2)
    optimizer = build_optimizer(module, config)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return module, optimizer


def test_a_warmup_may_begin_above_zero() -> None:
    # from 0.4 to 1 in four equal parts, the first taken in step 0
    assert _factors(4, warmup_steps=3, start_ratio=0.4) == pytest.approx([0.55, 0.7, 0.85, 1])


def test_inverse_square_root_decay_is_the_root_of_warmup_over_step() -> None:
    factors = _factors(17, warmup_steps=4, decay="inverse_sqrt")
    assert factors[4] == 1
    assert factors[9] == pytest.approx((4 / 9) ** 0.5)
    assert factors[16] == pytest.approx(0.5)


def test_inverse_square_root_decay_without_warmup_starts_at_the_peak_and_stops_at_the_least_rate() -> None:
    assert _factors(5, decay="inverse_sqrt", min_ratio=0.55) == pytest.approx(
        [1, 2**-0.5, 3**-0.5, 0.55, 0.55]
    )


def test_warmup_stable_decay_falls_in_the_last_tenth_only() -> None:
    # 20 steps: the last 2 fall from 1 to the 0.2 of a step 20
    factors = _factors(20, decay="wsd", min_ratio=0.2)
    assert factors[:19] == [1.0] * 19
    assert factors[19] == pytest.approx(0.6)


@pytest.mark.parametrize("decay", ["linear", "cosine", "wsd"])
def test_a_decay_may_end_before_the_run_does(decay: str) -> None:
    factors = _factors(12, decay=decay, decay_steps=6, min_ratio=0.25)
    assert factors[6:] == [0.25] * 6
    assert factors[:6] == [lr_factor(s, 6, ScheduleConfig(decay=decay, min_ratio=0.25)) for s in range(6)]


def test_sgd_uses_the_plain_gradient() -> None:
    module = nn.Linear(1, 1)
    nn.init.constant_(module.weight, 2.0)
    nn.init.constant_(module.bias, 1.0)
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)
    build_optimizer(module, OptimizerConfig(kind="sgd", lr=0.1, weight_decay=0.5)).step()
    assert module.weight.item() == pytest.approx(2 - 0.1 * (3 + 0.5 * 2))  # a matrix decays
    assert module.bias.item() == pytest.approx(1 - 0.1 * 3)


def test_parameters_with_a_peak_rate_have_it_at_every_point_of_the_schedule() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    config = OptimizerConfig(kind="sgd", lr=0.1)
    optimizer = build_optimizer(module, config, dict.fromkeys(module[1].parameters(), 0.4))
    before = [p.detach().clone() for p in module.parameters()]
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    set_rate(optimizer, 0.05)  # half of the peak
    optimizer.step()
    moved = [(old - p.detach()).mean().item() for old, p in zip(before, module.parameters(), strict=True)]
    assert moved == pytest.approx([0.05, 0.05, 0.2, 0.2])  # float32 subtraction


VISION = {
    "architecture": "qwen3_vl", "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 8, "tower": {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "part", "is_changed"),
    [
        (make_policy, "all", "visual"),
        (make_policy, "projector", "merger"),
        (make_critic, "all", "visual|value_head"),
    ],
)
def test_the_tower_and_the_value_head_have_their_own_rates(make: Any, part: str, is_changed: str) -> None:
    model = {"build": VISION, "vision": {"train": part, "lr": 0.2}}
    optimizer = {"kind": "sgd", "lr": 0.1, "value_lr": 0.2}
    config = RunConfig.model_validate({"model": model, "train": {"optimizer": optimizer}})
    made = make(config, torch.device("cpu"))
    rates = peak_rates(made, config.train.optimizer)
    trained = {name: p for name, p in made.module.named_parameters() if p.requires_grad}
    assert any(re.search(is_changed, name) for name in trained)
    assert {name: rates.get(p, 0.1) for name, p in trained.items()} == {
        name: 0.2 if re.search(is_changed, name) else 0.1 for name in trained
    }


def test_without_rates_of_their_own_the_tower_and_the_value_head_have_that_of_the_model() -> None:
    config = RunConfig.model_validate({"model": {"build": VISION, "vision": {"train": "all"}}})
    assert peak_rates(make_critic(config, torch.device("cpu")), config.train.optimizer) == {}
