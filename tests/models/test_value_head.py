"""PopArt: moments of returns by hand, predictions that stay, gradients of one size, names of weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.rounding import assert_near, rounding

from braid.config.model import MlpSpec
from braid.errors import ModelError
from braid.models.mlp import MlpValue
from braid.models.value_head import MIN_DEVIATION, RATE, ValueHead
from braid.types import ActionSpace, Spaces

_SPACES = Spaces(3, ActionSpace("discrete", 2))


def _head(*, normalizes: bool = True) -> ValueHead:
    head = ValueHead(4, normalizes=normalizes)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.5, -1.0, 2.0, 0.25]]))
        head.bias.fill_(0.125)
    return head


def _hidden() -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def test_the_first_returns_are_the_moments_whatever_the_rate() -> None:
    head = _head()
    assert head.moments_of_returns == (0.0, 1.0)
    head.observe(np.array([2.0, 4.0, 6.0, 8.0]))
    # mean 5; mean of squares (4 + 16 + 36 + 64) / 4 = 30; variance 30 - 25 = 5
    assert head.moments_of_returns == pytest.approx((5.0, math.sqrt(5.0)))


def test_later_returns_move_the_moments_at_the_rate() -> None:
    head = _head()
    head.observe(np.array([0.0, 2.0]))
    head.observe(np.array([10.0, 12.0]))
    # weights of the two: RATE (1 - RATE) and RATE, over their sum
    old, new = (1 - RATE) / (2 - RATE), 1 / (2 - RATE)
    mean, square = old * 1.0 + new * 11.0, old * 2.0 + new * 122.0
    assert head.moments_of_returns == pytest.approx((mean, math.sqrt(square - mean**2)))


def test_predictions_stay_when_the_moments_move() -> None:
    head, hidden = _head(), _hidden()
    before = head(hidden)
    for returns in ([3.0, 5.0], [-100.0, 700.0], [0.1, 0.1]):
        head.observe(np.array(returns))
        # each of three moves adds and subtracts terms as large as the returns, four at a time
        torch.testing.assert_close(head(hidden), before, rtol=0, atol=rounding(3 * 4, size=700.0))


def test_the_output_layer_moves_as_the_formula_says() -> None:
    head = _head()
    head.observe(np.array([2.0, 4.0, 6.0, 8.0]))
    # from mean 0 and deviation 1 to 5 and sqrt 5: w / sqrt 5 and (b + 0 - 5) / sqrt 5
    root = math.sqrt(5.0)
    torch.testing.assert_close(head.weight.detach()[0], torch.tensor([0.5, -1.0, 2.0, 0.25]) / root)
    assert head.bias.item() == pytest.approx((0.125 - 5.0) / root)


def test_gradients_do_not_depend_on_the_scale_of_returns() -> None:
    # (v - R)^2 / deviation^2 is the loss on normalised values: the same for returns a thousand times as large
    hidden, gradients = _hidden(), []
    for scale in (1.0, 1000.0):
        head = ValueHead(4, normalizes=True)
        returns = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]) * scale
        head.observe(returns.numpy())
        (head(hidden) - returns).square().mean().backward()
        gradients.append(head.weight.grad)
    assert_near(gradients[1], gradients[0], rounding(6 * 4))  # six values, each a sum of four terms


def test_the_gradient_is_that_of_the_normalised_loss() -> None:
    head, hidden = _head(), _hidden()
    returns = torch.tensor([1.0, 3.0, 2.0, 5.0, 4.0, 3.0])
    head.observe(returns.numpy())
    mean, deviation = head.moments_of_returns
    (head(hidden) - returns).square().mean().backward()
    plain = torch.nn.Linear(4, 1)
    plain.load_state_dict({"weight": head.weight.detach(), "bias": head.bias.detach()})
    (plain(hidden)[:, 0] - (returns - mean) / deviation).square().mean().backward()
    torch.testing.assert_close(head.weight.grad, plain.weight.grad)
    torch.testing.assert_close(head.bias.grad, plain.bias.grad)


def test_equal_returns_do_not_inflate_predictions() -> None:
    head = ValueHead(4, normalizes=True)
    head.observe(np.full(5, 3.0))
    assert head.moments_of_returns == (pytest.approx(3.0), MIN_DEVIATION)
    # all values were 0 and are still
    torch.testing.assert_close(head(_hidden()), torch.zeros(6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("returns", [[], [1.0, math.nan], [math.inf]])
def test_non_finite_returns_do_not_change_the_moments(returns: list[float]) -> None:
    head = _head()
    head.observe(np.array(returns))
    assert head.moments_of_returns == (0.0, 1.0)


def test_without_normalizing_it_is_a_linear_layer() -> None:
    head, hidden = _head(normalizes=False), _hidden()
    assert set(head.state_dict()) == {"weight", "bias"}
    expected = hidden @ head.weight[0] + head.bias
    torch.testing.assert_close(head(hidden), expected)


def test_the_moments_are_part_of_the_weights_under_the_heads_name() -> None:
    critic = MlpValue(MlpSpec(hidden_sizes=(4,)), _SPACES, seed=0, head_name="v", normalizes=True)
    names = [name for name, _ in critic.named_weights()]
    assert names == ["body.layers.0.weight", "body.layers.0.bias", "v.weight", "v.bias", "v.moments"]


def test_a_head_cannot_have_the_name_of_the_backbone() -> None:
    with pytest.raises(ModelError, match=r"critic\.head_name=body"):
        MlpValue(MlpSpec(), _SPACES, seed=0, head_name="body")
