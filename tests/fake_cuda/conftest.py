"""Tests in on_device run only in a process that has the device; test_suite.py starts them."""

from __future__ import annotations

import os

collect_ignore = [] if "FAKE_CUDA" in os.environ else ["on_device"]
