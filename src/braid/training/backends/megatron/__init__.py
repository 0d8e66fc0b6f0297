"""Training by Megatron-core. The one package that imports it, and mbridge with it.

checks.py    which models are built here, and how they can be shared out
ranks.py     the process groups, and which rows a rank is given
model.py     Megatron's layers for a Hugging Face model; attention over packed rows; hidden states to log-probs
names.py     weights and moments between Megatron's shards and Hugging Face's names
backend.py   one rank of it, as training.group.ShardedBackend wants it
"""
