"""The native engine: continuous batching over the trainer's Hugging Face module, in the same process."""
