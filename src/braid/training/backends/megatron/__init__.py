"""Training with Megatron-core. The only package that imports Megatron-core and mbridge.

checks.py    supported models and parallel layouts
ranks.py     process groups, and which rows each rank trains on
model.py     a Hugging Face model built from Megatron layers: packed attention, hidden states to log-probs
names.py     conversion of weights and moments between Megatron shards and Hugging Face names
backend.py   the backend of one rank (training.backend.TrainingBackend)
"""
