"""Objects found in an image."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, model_validator

from braid.types import Prompt

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making, Part


class DetectionReward(RewardPart):
    """How well the boxes of the answer fit those of the reference, from 0 to 1 (Ma et al. 2025, arXiv
    2505.18129). Both are a list such as [{"bbox_2d": [10, 20, 50, 80], "label": "cat"}] in an `<answer>` tag,
    x before y, labels in any case; a reference may do without the tag. The score is the mean of the measures
    below, with their weights, times 0.6 for each box that the answer has too many or too few; and of the
    format. An answer without a valid box scores 0."""

    kind: Literal["detection"]
    """Boxes around objects."""
    iou_by_label: NonNegativeFloat = 1.0
    """Weight of the IoU where each box of the reference takes the best box of its label."""
    iou_by_overlap: NonNegativeFloat = 0.0
    """Weight of the IoU where the best pairs of boxes count first, those of unequal labels as 0."""
    map: NonNegativeFloat = 0.0
    """Weight of COCO's mean average precision, over IoU thresholds from 0.5 to 0.95. The order of the boxes
    is that of their confidence."""
    map50: NonNegativeFloat = 0.0
    """Weight of COCO's average precision at IoU 0.5."""
    map75: NonNegativeFloat = 0.0
    """Weight of COCO's average precision at IoU 0.75."""
    completeness: float = Field(default=0.3, ge=0.0, le=1.0)
    """Share of completeness in both measures of IoU: 1 - (share of the reference's boxes that are missed +
    share of the answer's boxes that match none) / 2."""
    format: NonNegativeFloat = 0.1
    """Weight of the format's score; that of the boxes has weight 1. The format scores 1 if valid boxes are in
    an `<answer>` tag that is closed once and whose marks stand alone on their lines, else 0."""
    iou_threshold: Literal["average"] | Annotated[float, Field(gt=0.0, le=1.0)] = "average"
    """Least IoU of two boxes that match. average: the mean of the scores at 0.5, 0.55, ..., 0.95 and 0.99."""
    coordinates: Literal["reference", "pixels"] = "reference"
    """Coordinates of the answer's boxes: those of the reference; or pixels of the image as the model reads
    it, where the reference's are thousandths of its width and height (Qwen2.5-VL)."""
    settings_key: str = ""
    """Column with a row's own weights in the form of Orsta-Data-47k: format_ratio, accuracy_ratio, and
    verifier_parm with det_reward_ratio and det_verifier_normalized, false of which leaves pixels as they are.
    Weights that it lacks are 0."""

    is_deterministic: ClassVar[bool] = True

    @model_validator(mode="after")
    def _measures(self) -> DetectionReward:
        if not any((self.iou_by_label, self.iou_by_overlap, self.map, self.map50, self.map75)):
            raise ValueError(
                "all measures have weight 0; set iou_by_label, iou_by_overlap, map, map50 or map75 above 0"
            )
        return self

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.detection import detection

        return Part(detection(self, making))

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.detection import task_reader

        return task_reader(self, key)
