"""What vLLM and transformers import of torchvision beside a model that reads images. Nothing of it runs."""

__version__ = "0.28.0"
