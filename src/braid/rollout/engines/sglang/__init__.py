"""SGLang as a rollout engine: a server that this run starts, or one that runs already.

engine.py    SglangEngine: a server of this run's own, started and ended with it
options.py   rollout.sglang in SGLang's own words
server.py    SglangServer: a running server, by HTTP
"""
