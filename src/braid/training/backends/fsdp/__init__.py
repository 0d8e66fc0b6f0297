"""PyTorch's FSDP and FSDP2 as training backends.

kind.py      Fsdp and Fsdp2: their settings
backend.py   FsdpBackend: one rank's shard of a model
"""
