"""SGLang as a rollout engine: a server started by the run, or an existing one.

engine.py    SglangEngine: a server that is started and stopped with the run
options.py   converts rollout.sglang to SGLang's arguments
server.py    SglangServer: an existing server, over HTTP
"""
