"""Steps of `make gpu`, small, in one process: python -m tests.gpu.in_one_process DEVICE STEP ..."""

from __future__ import annotations

import sys

import torch

from .machine import STEPS, Machine

if __name__ == "__main__":
    device, *names = sys.argv[1:]
    for step in STEPS:
        if step.__name__ in names:
            assert isinstance(step(Machine(torch.device(device), is_tiny=True)), dict), step
