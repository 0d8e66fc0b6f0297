"""Boxes around objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.pictures import picture

from braid.config.reward import RewardConfig
from braid.errors import ConfigError, RewardError
from braid.rewards.base import Services
from braid.rewards.detection import boxes_in, task_reader
from braid.rewards.kinds import DetectionReward
from braid.rewards.scorer import build_scorer
from braid.types import Placed, Prompt, Trajectory

Answered = Callable[..., Trajectory]
CAT, DOG = (0, 0, 10, 10), (20, 20, 40, 40)
BOTH = [("cat", CAT), ("dog", DOG)]
HALF_A_DOG = (20, 20, 40, 30)


def listed(boxes: Sequence[tuple[str, tuple[float, ...]]]) -> str:
    return json.dumps([{"bbox_2d": list(corners), "label": label} for label, corners in boxes])


def in_tag(text: str) -> str:
    return f"It shows:\n<answer>\n{text}\n</answer>"


def score(
    part: dict[str, Any],
    trajectory: Trajectory,
    services: Services | None = None,
) -> float:
    config = RewardConfig.model_validate({"parts": [{"kind": "detection", **part}]})
    scorer = build_scorer(config, base_dir=Path(), services=services)
    asyncio.run(scorer.score([trajectory]))
    assert trajectory.is_valid, trajectory.reason
    assert trajectory.reward is not None
    return trajectory.reward


ONLY_LABEL = {"completeness": 0, "iou_threshold": 0.5}
ONLY_OVERLAP = ONLY_LABEL | {"iou_by_label": 0, "iou_by_overlap": 1}


def only(name: str) -> dict[str, float]:
    return {"iou_by_label": 0, name: 1}


@pytest.mark.parametrize(
    ("part", "boxes", "reference", "expected"),
    [
        ({}, BOTH, BOTH, 1.0),
        # at 0.5 a mean IoU of 3/4, complete: 0.7 * 3/4 + 0.3; at the ten others 1/2, half complete: 1/2
        ({}, [("cat", CAT), ("dog", HALF_A_DOG)], BOTH, (0.825 + 10 * 0.5) / 11),
        ({"iou_threshold": 0.5}, [("cat", CAT), ("dog", HALF_A_DOG)], BOTH, 0.825),
        # a second cat: nothing is missed, half the boxes are wrong, and there is one too many
        ({"iou_threshold": 0.5}, [("cat", (0, 0, 10, 8)), ("CAT", CAT)], [("Cat", CAT)], 0.6 * (0.7 + 0.3 * 0.75)),
        ({"iou_threshold": 0.5}, [("cat", CAT)], BOTH, 0.6 * (0.7 * 0.5 + 0.3 * 0.75)),
        # the labels are mixed up: no match by label, two by overlap that count 0
        ({}, [("dog", CAT), ("cat", DOG)], BOTH, 0.0),
        (only("iou_by_overlap"), [("dog", CAT), ("cat", DOG)], BOTH, 0.3),
        # the first reference takes the better box by label; by overlap the best pair comes first
        (ONLY_LABEL, [("cat", CAT)], [("cat", (0, 0, 10, 8)), ("cat", CAT)], 0.6 * 0.8 / 2),
        (ONLY_OVERLAP, [("cat", CAT)], [("cat", (0, 0, 10, 8)), ("cat", CAT)], 0.6 * 1.0 / 2),
        # of 101 recalls, 51 are up to 1/2: precision 1 if the match comes first, else 1/2
        (only("map50"), [("cat", CAT), ("cat", (50, 0, 60, 10))], [("cat", CAT), ("cat", DOG)], 51 / 101),
        (only("map50"), [("cat", (50, 0, 60, 10)), ("cat", CAT)], [("cat", CAT), ("cat", DOG)], 0.5 * 51 / 101),
        # an IoU of 0.8 passes seven of the ten thresholds; a label of the reference without a box has 0
        (only("map"), [("cat", (0, 0, 10, 8))], [("cat", CAT)], 0.7),
        (only("map75"), [("cat", (0, 0, 10, 8))], [("cat", CAT)], 1.0),
        (only("map"), [("cat", (0, 0, 10, 8)), ("cow", DOG)], BOTH, 0.7 / 2),
        ({"map50": 3, "iou_threshold": 0.9, "completeness": 0}, [("cat", (0, 0, 10, 8))], [("cat", CAT)], 3 / 4),
        (ONLY_LABEL, [("cat", (5, 5, 5, 5)), ("dog", DOG)], BOTH, 0.5),
    ],
)  # fmt: skip
def test_boxes_have_the_scores_worked_by_hand(
    part: dict[str, Any], boxes: list[Any], reference: list[Any], expected: float, answered: Answered
) -> None:
    answer = answered(in_tag(listed(boxes)), answer=listed(reference))
    assert score({"format": 0, **part}, answer) == pytest.approx(expected, abs=1e-12)
    marked = answered(in_tag(listed(boxes)), answer=in_tag(listed(reference)))
    assert score({"format": 0.25, **part}, marked) == pytest.approx((expected + 0.25) / 1.25, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (in_tag(listed(BOTH)), 1.0),
        (f"<answer>{listed(BOTH)}</answer>", 0.8),
        (f"{in_tag(listed(BOTH))}\n</answer>", 0.8),
        (listed(BOTH), 0.0),
        (in_tag("a cat and a dog"), 0.0),
        (f"<think>{in_tag(listed(BOTH))}", 0.0),
        (f"<think>{in_tag(listed([]))}</think>{in_tag(listed(BOTH))}", 1.0),
    ],
)
def test_the_format_counts_beside_the_boxes_and_not_without(
    text: str, expected: float, answered: Answered
) -> None:
    assert score({"format": 0.25}, answered(text, answer=listed(BOTH))) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("[{'bbox_2d': [0, 0, 1, 1], 'label': 'Cat'}]", ["cat"]),
        ('[{"bbox_2d": [0, 0, 1, 1], "label": "the dog\'s hat"}]', ["the dog's hat"]),
        ('[{"bbox_2d": [0, 0, 1, 1], "label": "a"}, {"bbox_2d": [0, 0, 1, 2], "label": "b"}, {"bbox_2d": [0, 0', ["a", "b"]),
        ('[[{"bbox_2d": [0, 0, 1, 1], "label": "a"}]]', ["a"]),
        ('[{"bbox_2d": [0, 0, 1, 1], "label": "a"}, {"bbox_2d": [0, 0, 1, 2], "label": "b"}, '
         '{"bbox_2d": [0, 0, 1, 1], "label": "c"}]', ["a", "b"]),
        ('[{"bbox_2d": [2, 0, 1, 1], "label": "a"}, {"bbox_2d": [0, 0, 1], "label": "a"}, 7, {"label": "a"}]', []),
        ('[{"bbox_2d": [0, 0, true, 1], "label": "a"}, {"bbox_2d": [0, 0, 1, NaN], "label": "a"}]', []),
        (f'[{{"bbox_2d": [0, 0, 1, {10**400}], "label": "a"}}, {{"bbox_2d": [0, 0, 1, 1], "label": 7}}]', []),
        ('{"bbox_2d": [0, 0, 1, 1], "label": "a"}', []),
        ("[" * 100_000, []),
        ("", []),
    ],
)  # fmt: skip
def test_boxes_are_read_from_json_as_models_write_it(text: str, labels: list[str]) -> None:
    assert [box.label for box in boxes_in(text)] == labels


def test_pixels_are_scaled_to_thousandths_of_the_image_that_the_model_reads(answered: Answered) -> None:
    part = {"format": 0, "coordinates": "pixels"}
    services = Services({}, image_size=lambda _: (200, 100))
    boxes, reference = listed([("cat", (20, 10, 100, 50))]), listed([("cat", (100, 100, 500, 500))])
    answer = answered(in_tag(boxes), answer=reference)
    answer.prompt = Prompt(
        "a:0", "a", (1,), answer.prompt.messages, answer.prompt.fields, (Placed(0, 1, picture(0)),)
    )
    assert score(part, answer, services) == 1.0
    with pytest.raises(ConfigError, match=r"coordinates: needs a policy that reads images"):
        score(part, answer)


def orsta(**settings: Any) -> dict[str, Any]:
    return {"answer": listed(BOTH), "reward_model": settings}


def test_a_row_s_own_weights_take_the_place_of_the_config_s(answered: Answered) -> None:
    answer, part = in_tag(listed([("dog", CAT), ("cat", DOG)])), {"settings_key": "reward_model"}
    ratios = {"iou_max_iou_first": 0.5, "map": 0.5, "iou_completeness": 0.4}
    row = orsta(format_ratio=0.25, accuracy_ratio=1.0, verifier_parm={"det_reward_ratio": ratios})
    # 0.4 by overlap and 0 by COCO's precision, half each
    assert score(part, answered(answer, **row)) == pytest.approx((0.2 + 0.25) / 1.25)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({}, r"no verifier_parm\.det_reward_ratio; set reward\.parts\[0\]\.settings_key to a column"),
        ({"verifier_parm": {"det_reward_ratio": {"map75": 0.0}}}, r"a measure and one of the two ratios"),
        ({"verifier_parm": {"det_reward_ratio": {"map": -1}}}, r"map of a row's settings is -1, but"),
        ({"verifier_parm": {"det_reward_ratio": {"map": 1, "iou_completeness": 2}}}, r"iou_completeness at most 1"),
    ],
)  # fmt: skip
def test_settings_of_a_row_that_say_nothing_are_refused(
    settings: dict[str, Any], error: str, answered: Answered
) -> None:
    config = DetectionReward(kind="detection", settings_key="reward_model")
    with pytest.raises(RewardError, match=error):
        task_reader(config, "reward.parts[0]")(answered("", **orsta(**settings)).prompt)


@pytest.mark.parametrize("reference", ["a cat", "[]", [], None, ["cat"]])
def test_a_reference_without_boxes_is_refused(reference: Any, answered: Answered) -> None:
    read = task_reader(DetectionReward(kind="detection"), "reward.parts[0]")
    with pytest.raises(RewardError, match="is no list of boxes; it must be one such as"):
        read(answered("", answer=reference).prompt)


def test_a_reference_may_be_a_list(answered: Answered) -> None:
    assert score({}, answered(in_tag(listed(BOTH)), answer=json.loads(listed(BOTH)))) == 1.0


def test_a_part_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="all measures have weight 0; set iou_by_label"):
        DetectionReward(kind="detection", iou_by_label=0)
