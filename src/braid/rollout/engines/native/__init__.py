"""The embedded engine: continuous batching over the Hugging Face module that the trainer holds.

`engine` schedules requests and steps the model, `cache` keeps keys and values and attends over them, `sampler` turns
logits into tokens, `stopping` finds stop strings, `decoder` runs one decoding step (as CUDA graphs where asked).
"""

from .engine import Counters, NativeEngine

__all__ = ["Counters", "NativeEngine"]
