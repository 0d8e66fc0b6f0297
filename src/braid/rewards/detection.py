"""Boxes around objects in an answer against those of a reference (Ma et al. 2025, arXiv 2505.18129)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from braid.errors import RewardError
from braid.json_text import parse_json
from braid.reasoning import without_reasoning
from braid.rewards.kinds import DetectionReward
from braid.types import Prompt, Trajectory
from braid.users import shown

from .answers import tagged_answer
from .base import Making, Score, column_of

IOU_THRESHOLDS = (*(np.arange(50, 100, 5) / 100).tolist(), 0.99)
"""What iou_threshold=average averages over."""
COCO_THRESHOLDS = IOU_THRESHOLDS[:-1]
COCO_RECALLS = np.linspace(0, 1, 101)
COCO_MOST_BOXES = 100
"""Boxes of a label that COCO's average precision counts."""
SIZE_PENALTY = 0.6
"""Factor of the score for each box too many or too few."""
_MEASURES = {
    "iou_by_label": "iou_max_label_first",
    "iou_by_overlap": "iou_max_iou_first",
    "map": "map",
    "map50": "map50",
    "map75": "map75",
}
"""Names of measures, and of their weights in a row's own settings."""


class Box(NamedTuple):
    """Corners (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2, and a label in lower case."""

    corners: tuple[float, float, float, float]
    label: str


@dataclass(frozen=True, slots=True)
class Task:
    """What a row asks for: the reference's boxes, weights of the measures, shares of completeness and of the
    format, and whether the answer's coordinates are pixels."""

    boxes: list[Box]
    weights: Mapping[str, float]
    completeness: float
    format_share: float
    in_pixels: bool


def detection(config: DetectionReward, making: Making) -> Score:
    """The score of an answer, from 0 to 1; see DetectionReward."""
    read, image_size = task_reader(config, making.key), making.services.image_size
    thresholds = IOU_THRESHOLDS if config.iou_threshold == "average" else (config.iou_threshold,)
    if config.coordinates == "pixels" and image_size is None:
        raise making.without_service(f"{making.key}.coordinates", "a policy that reads images")

    def score(trajectory: Trajectory) -> float:
        task = read(trajectory.prompt)
        text = without_reasoning(trajectory.answer_text, is_parsed=bool(trajectory.reasoning_text))
        boxes = boxes_in(tagged_answer(text) or "")
        if not boxes:
            return 0.0
        has_format = "\n<answer>\n" in text and text.count("\n</answer>") == 1
        if task.in_pixels:
            assert image_size is not None
            if not (images := trajectory.prompt.images):
                raise RewardError("coordinates=pixels needs a prompt with an image", is_final=True)
            boxes = in_thousandths(boxes, image_size(images[0].image))
        accuracy = accuracy_of(boxes, task, thresholds)
        return (1 - task.format_share) * accuracy + task.format_share * has_format

    return score


def task_reader(config: DetectionReward, key: str) -> Callable[[Prompt], Task]:
    """What reads the task of a row. It raises RewardError for a reference without boxes and for invalid
    settings."""
    usual = {name: getattr(config, name) for name in _MEASURES}

    def read(prompt: Prompt) -> Task:
        reference = prompt.fields.get("answer")
        if isinstance(reference, str):
            tagged = tagged_answer(reference)
            boxes = boxes_in(reference if tagged is None else tagged)
        else:
            boxes = _boxes(reference)
        if not boxes:
            raise RewardError(
                f"the reference answer {shown(reference)} is no list of boxes; it must be one such as "
                '[{"bbox_2d": [10, 20, 50, 80], "label": "cat"}], or JSON text'
            )
        in_pixels, format_share = config.coordinates == "pixels", config.format / (1 + config.format)
        if not config.settings_key:
            return Task(boxes, usual, config.completeness, format_share, in_pixels)
        name = f"{key}.settings_key"
        column = column_of(prompt, config.settings_key, key=name)
        settings = _mapping(column)
        details = _mapping(settings.get("verifier_parm"))
        if not (ratios := _mapping(details.get("det_reward_ratio"))):
            raise RewardError(
                f"column {config.settings_key!r} has no verifier_parm.det_reward_ratio; set {name} to a "
                "column that has one, or to '' for the weights of the config"
            )
        weights = {name: _weight(ratios, theirs) for name, theirs in _MEASURES.items()}
        shape, content = _weight(settings, "format_ratio", 0.1), _weight(settings, "accuracy_ratio", 1.0)
        completeness = _weight(ratios, "iou_completeness")
        if not sum(weights.values()) or not shape + content or completeness > 1:
            raise RewardError(
                f"column {config.settings_key!r}: weights {dict(ratios)}, format_ratio {shape:g} and "
                f"accuracy_ratio {content:g}; a measure and one of the two ratios must be above 0, "
                "iou_completeness at most 1"
            )
        in_pixels = in_pixels and details.get("det_verifier_normalized") is not False
        return Task(boxes, weights, completeness, shape / (shape + content), in_pixels)

    return read


def _mapping(value: Any) -> Mapping[str, Any]:
    """The value, or an empty mapping in place of one that is none."""
    return value if isinstance(value, Mapping) else {}


def _weight(settings: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise RewardError(f"{name} of a row's settings is {value!r}, but must be a number of at least 0")
    return float(value)


def boxes_in(text: str) -> list[Box]:
    r"""The valid boxes in a JSON list, which may be quoted as in Python and may be truncated; the first of
    those with equal corners. Empty without any."""
    text = text.strip().replace("[[", "[").replace("]]", "]")
    if not text.endswith("]"):
        text = text.rpartition("},")[0] + "}]"
    for form in (text, text.replace("'", '"').replace("\\", "")):
        try:
            items = parse_json(form)
        except ValueError:
            continue
        return _boxes(items)
    return []


def _boxes(items: Any) -> list[Box]:
    boxes = dict[tuple[float, ...], Box]()
    for item in items if isinstance(items, list) else []:
        if (box := _box(item)) is not None:
            boxes.setdefault(box.corners, box)
    return list(boxes.values())


def _box(item: Any) -> Box | None:
    """The box of an item of a list; None if it is none."""
    if not isinstance(item, Mapping):
        return None
    corners, label = item.get("bbox_2d"), item.get("label")
    if not isinstance(corners, list) or len(corners) != 4 or not isinstance(label, str):
        return None
    if not all(type(value) in (int, float) and abs(value) < 1e9 for value in corners):
        return None
    x1, y1, x2, y2 = map(float, corners)
    return Box((x1, y1, x2, y2), label.lower()) if x1 <= x2 and y1 <= y2 else None


def in_thousandths(boxes: Sequence[Box], size: tuple[int, int]) -> list[Box]:
    """Boxes in pixels of an image of `size` (width, height) as whole thousandths of its sides."""
    scaled: list[Box] = []
    for corners, label in boxes:
        x1, y1, x2, y2 = (int(value / side * 1000) for value, side in zip(corners, size * 2, strict=True))
        scaled.append(Box((x1, y1, x2, y2), label))
    return scaled


def accuracy_of(boxes: Sequence[Box], task: Task, thresholds: Sequence[float]) -> float:
    """The weighted mean of the measures of boxes, times the penalty for their number; from 0 to 1."""
    ious = overlaps(boxes, task.boxes)
    labels = np.array([[box.label == other.label for other in task.boxes] for box in boxes])

    def iou(match: Callable[[NDArray[np.float64], NDArray[np.bool_], float], list[float]]) -> float:
        scores: list[float] = []
        for threshold in thresholds:
            matches = match(ious, labels, threshold)
            missed, wrong = (1 - len(matches) / num for num in (len(task.boxes), len(boxes)))
            complete = 1 - (missed + wrong) / 2
            mean = sum(matches) / len(task.boxes)
            scores.append((1 - task.completeness) * mean + task.completeness * complete)
        return sum(scores) / len(scores)

    measures: dict[str, Callable[[], float]] = {
        "iou_by_label": lambda: iou(match_by_label),
        "iou_by_overlap": lambda: iou(match_by_overlap),
        "map": lambda: mean_average_precision(boxes, task.boxes, ious, COCO_THRESHOLDS),
        "map50": lambda: mean_average_precision(boxes, task.boxes, ious, (0.5,)),
        "map75": lambda: mean_average_precision(boxes, task.boxes, ious, (0.75,)),
    }
    mean = sum(weight * measures[name]() for name, weight in task.weights.items() if weight)
    penalty = SIZE_PENALTY ** abs(len(boxes) - len(task.boxes))
    return penalty * mean / sum(task.weights.values())


def overlaps(boxes: Sequence[Box], others: Sequence[Box]) -> NDArray[np.float64]:
    """Intersection over union [boxes, others]; 0 where boxes do not overlap."""
    one, other = (np.array([box.corners for box in some]) for some in (boxes, others))
    low, high = np.maximum(one[:, None, :2], other[:, :2]), np.minimum(one[:, None, 2:], other[:, 2:])
    shared = np.clip(high - low, 0, None).prod(axis=-1)
    areas = [(some[:, 2:] - some[:, :2]).prod(axis=-1) for some in (one, other)]
    union = areas[0][:, None] + areas[1] - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=shared > 0)


def match_by_label(ious: NDArray[np.float64], labels: NDArray[np.bool_], threshold: float) -> list[float]:
    """IoU of matches: each box of the reference, in order, takes the best free box of its label, if its IoU
    is at least the threshold. `ious`, `labels` (whether labels are equal): [boxes, reference's boxes]."""
    free = np.where(labels, ious, -1.0)
    matches: list[float] = []
    for column in range(free.shape[1]):
        best = int(free[:, column].argmax())
        if free[best, column] >= threshold:
            matches.append(float(free[best, column]))
            free[best] = -1.0
    return matches


def match_by_overlap(ious: NDArray[np.float64], labels: NDArray[np.bool_], threshold: float) -> list[float]:
    """IoU of matches: the pair of free boxes with the highest IoU matches first, down to the threshold; it
    counts as 0 if the labels are unequal."""
    free, matches = ious.copy(), list[float]()
    for _ in range(min(free.shape)):
        row, column = divmod(int(free.argmax()), free.shape[1])
        if free[row, column] < threshold:
            break
        matches.append(float(free[row, column] * labels[row, column]))
        free[row], free[:, column] = -1.0, -1.0
    return matches


def mean_average_precision(
    boxes: Sequence[Box], others: Sequence[Box], ious: NDArray[np.float64], thresholds: Sequence[float]
) -> float:
    """COCO's average precision of `boxes` over the labels of the reference's boxes `others`, and over IoU
    thresholds: the mean over 101 recalls of the best precision at that recall or a higher one. Boxes of other
    labels do not count; all have one confidence, and keep their order."""
    values: list[float] = []
    for label in {box.label for box in others}:
        rows = [i for i, box in enumerate(boxes) if box.label == label][:COCO_MOST_BOXES]
        columns = [i for i, box in enumerate(others) if box.label == label]
        for threshold in thresholds:
            hits = _hits(ious[np.ix_(rows, columns)], threshold)
            right = np.cumsum(hits)
            precision = right / np.arange(1, len(rows) + 1)
            best = np.maximum.accumulate(precision[::-1])[::-1]
            places = np.searchsorted(right / len(columns), COCO_RECALLS, side="left")
            values.append(float(np.append(best, 0.0)[places].mean()))
    return sum(values) / len(values)


def _hits(ious: NDArray[np.float64], threshold: float) -> list[bool]:
    """Whether each box, in order, finds a free box of the reference; it takes the best, the last of
    equals."""
    free, hits = ious.copy(), list[bool]()
    for row in range(len(free)):
        column = free.shape[1] - 1 - int(free[row, ::-1].argmax())
        hits.append(bool(free[row, column] >= threshold))
        if hits[-1]:
            free[:, column] = -1.0
    return hits
