"""vLLM as a rollout engine: in a process of its own, or as a server that runs already.

engine.py    VllmEngine: this side of a process that runs vLLM
process.py   the other side, and what is added to vLLM's workers; the one file that imports vllm
options.py   rollout.vllm in vLLM's own words
server.py    VllmServer: a running server, by HTTP
"""
