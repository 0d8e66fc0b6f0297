"""The native engine: continuous batching over the trainer's Hugging Face module, in the same process.

`engine` schedules requests and steps the model, `cache` stores keys and values and computes attention over
them, `sampler` turns logits into tokens, `stopping` finds stop strings, `decoder` runs a decoding step (with
CUDA graphs if enabled).
"""

from .engine import Counters, NativeEngine

__all__ = ["Counters", "NativeEngine"]
