"""GPUs are counted as NVML lists them and CUDA_VISIBLE_DEVICES allows."""

from __future__ import annotations

import pynvml
import pytest

from braid.plan.machine import count_gpus


@pytest.mark.parametrize(
    ("visible", "num_gpus"),
    [
        (None, 4),
        ("", 0),
        ("-1", 0),
        ("2", 1),
        ("0, 3", 2),
        ("1,-1,2", 1),
        ("GPU-a,GPU-b", 2),
        ("0,1,2,3,4", 4),
    ],
)
def test_visible_gpus_are_counted(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, num_gpus: int
) -> None:
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == num_gpus


def test_without_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert count_gpus() == 0
