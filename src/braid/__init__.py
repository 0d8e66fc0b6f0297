"""braid: reinforcement learning after pre-training, for language models, agents and robot policies."""

__version__ = "0.1.0"
