"""Stands in for SGLang, which needs a GPU: `python -m sglang.launch_server` with the options that braid gives
it."""
