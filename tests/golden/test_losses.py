"""Policy and value losses against numbers worked out by hand."""

import torch

from braid.algorithms.policy_loss import policy_gradient, ppo_clip
from braid.algorithms.value_loss import value_loss

CLOSE = {"atol": 1e-6, "rtol": 0}  # exp(log(x)) in float32
RATIOS = torch.tensor([1.5, 0.5, 1.5, 0.5, 3.0])
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0])


def _ppo(clip_high, dual_clip):
    old = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    return ppo_clip(
        old + RATIOS.log(), old, ADVANTAGES, clip_low=0.2, clip_high=clip_high, dual_clip=dual_clip
    )


def test_ppo_clip_equals_hand_computed_values():
    # rho A:         1.5   0.5  -1.5  -0.5  -3
    # clip(rho) A:   1.2   0.8  -1.2  -0.8  -1.2
    # min:           1.2   0.5  -1.5  -0.8  -3
    loss, diagnostics = _ppo(clip_high=0.2, dual_clip=None)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.5, 1.5, 0.8, 3.0]), **CLOSE)
    torch.testing.assert_close(diagnostics["ratio"], RATIOS, **CLOSE)
    assert diagnostics["clip_fraction"].tolist() == [1, 0, 0, 1, 0]
    # rho - 1 - ln rho: 0.5 - 0.405465, -0.5 + 0.693147, and so on, 2 - 1.098612
    torch.testing.assert_close(
        diagnostics["approx_kl"], torch.tensor([0.094535, 0.193147, 0.094535, 0.193147, 0.901388]), **CLOSE
    )
    assert "dual_clip_fraction" not in diagnostics


def test_an_upper_bound_of_its_own_moves_only_the_upper_clip():
    loss, _ = _ppo(clip_high=0.28, dual_clip=None)
    torch.testing.assert_close(loss, torch.tensor([-1.28, -0.5, 1.5, 0.8, 3.0]), **CLOSE)


def test_the_dual_clip_bounds_the_loss_of_bad_tokens():
    # -2 A = 2 where A < 0: only 3 exceeds it
    loss, diagnostics = _ppo(clip_high=0.2, dual_clip=2.0)
    torch.testing.assert_close(loss, torch.tensor([-1.2, -0.5, 1.5, 0.8, 2.0]), **CLOSE)
    assert diagnostics["dual_clip_fraction"].tolist() == [0, 0, 0, 0, 1]


def test_policy_gradient_equals_hand_computed_values():
    loss = policy_gradient(torch.tensor([-0.5, -2.0]), torch.tensor([3.0, -1.0]))
    assert loss.tolist() == [1.5, -2.0]


def test_value_loss_equals_hand_computed_values():
    values, old, returns = torch.tensor([2.0, 0.5, 3.0]), torch.ones(3), torch.tensor([3.0, 1.0, 0.0])
    # plain: (2 - 3)^2 / 2, (0.5 - 1)^2 / 2, 3^2 / 2
    assert value_loss(values, old, returns, clip=None).tolist() == [0.5, 0.125, 4.5]
    # kept within 0.5 of 1: 1.5, 0.5, 1.5; their losses 1.5^2 / 2, 0.125, 1.5^2 / 2; the larger ones
    assert value_loss(values, old, returns, clip=0.5).tolist() == [1.125, 0.125, 4.5]
