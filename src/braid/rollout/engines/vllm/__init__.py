"""vLLM as a rollout engine: in a child process, or as an existing server.

engine.py    VllmEngine: the client of a child process that runs vLLM
process.py   the child process, and the extension of vLLM's workers; the only file that imports vllm
kind.py      Vllm: its settings
options.py   converts them to vLLM's arguments
server.py    VllmServer: an existing server, over HTTP
"""
