"""DeepSpeed ZeRO-3 as a training backend.

kind.py      DeepSpeed: its settings
backend.py   DeepSpeedBackend: one rank's part of a model; the only file that imports deepspeed
"""
