"""Child processes: start, handshake, messages, deadlines, the death of either side, and shared memory.

    host                  module                          messages, all in frames of Channel
    engine (vLLM)         rollout.engines.vllm.process    pickles, both ways at any time
    engine (SGLang)       a command, `guarded`            HTTP
    simulators            envs.simulators.processes       pickles: numbered requests, answers; shared images
    agents' environments  envs.agents.hosts               pickles: one call at a time
    scorers of rewards    rewards.isolated                pickled requests, answers in JSON
    Python sessions       isolation.session               JSON
    tools, programs       a command, `guarded`            MCP; HTTP

A Child is a Python module in a process and session of its own, so that Ctrl-C does not reach it. The parent
has one end of a Channel, and `connect` gives the module the other. Where making its object takes long, that
is the first request, and the answer says that the process is up. A side that waits notices the death of the
other by its pidfd (`Channel`, `end_with`), also while other processes hold the connection. A process ends
with its parent, however that ends, and with it all that it has started. What JSON carries cannot execute code
in the parent.

Two kinds of processes stand apart: the code in a sandbox (isolation.sandbox), which sees no other process,
and the watchdog of a worker of Ray (cluster.watchdog), which outlives the worker to clean up after it.
"""

from .channel import Channel
from .child import START_LIMIT_S, Child, connect
from .system import (
    FOLDER,
    children,
    descendants,
    end,
    end_this_process,
    end_with,
    guarded,
    how_it_ended,
    is_running,
    kill,
    kill_group,
    stacks_on_signal,
    with_variable,
)

__all__ = [
    "FOLDER",
    "START_LIMIT_S",
    "Channel",
    "Child",
    "children",
    "connect",
    "descendants",
    "end",
    "end_this_process",
    "end_with",
    "guarded",
    "how_it_ended",
    "is_running",
    "kill",
    "kill_group",
    "stacks_on_signal",
    "with_variable",
]
