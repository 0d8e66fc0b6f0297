"""Training in one process.

kind.py      Single: the kind of `train.backend`
backend.py   SingleBackend: a model with its optimizer, the base of the other backends
"""
