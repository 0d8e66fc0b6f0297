"""SGLang as a rollout engine: a server started by the run, or an existing one.

engine.py    SglangEngine: a server that is started and stopped with the run
kind.py      Sglang: its settings
options.py   converts them to SGLang's arguments
server.py    SglangServer: an existing server, over HTTP
"""
