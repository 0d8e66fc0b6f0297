"""RLinf's keys of agents: the loop of turns, tools, and several agents."""

from __future__ import annotations

from typing import Any

from .conditions import needs, unless
from .rows import always, ignored, missing, rows, section, to
from .table import Source, implied, unsupported

_PARSERS = {"searchr1-qwen": "tag", "rstar2-qwen": "hermes", "wideseek_r1-qwen": "hermes"}
_SEVERAL = "write an environment (braid.env.kind=agent); an agent cannot start others"
_SCORED = "score it with braid.reward.parts: pattern, length, judge, or a function"


def has_loop(source: Source) -> bool:
    """Whether the policy calls tools."""
    return source.has("agentloop.toolcall_parser")


def base(source: Source) -> dict[str, Any]:
    """Native settings of files in which the policy calls tools."""
    if not has_loop(source):
        return {}
    tools = ["python"] if source["agentloop.toolcall_parser"] == "rstar2-qwen" else []
    return {"env.kind": "tools", "env.tools": tools, "env.max_context_tokens": source["runner.seq_length"]}


_LOOPS = needs("agentloop.toolcall_parser")
_GIVEN = unless(lambda s: "env.tools" in s.own, "braid.env.tools names the tools")

# One rule per line.
# fmt: off
RULES = rows(
    section("agentloop", "env")(
        to("toolcall_parser", ".tool_format", "text", lambda v, _: _PARSERS.get(v, unsupported(
            f"use {', '.join(_PARSERS)}, or braid.env.kind=tools with a tool_format")),
           note="searchr1: <search>query</search>; the others: Qwen's JSON in <tool_call>"),
        to("max_turns", ".max_turns", "count", _LOOPS),
        to("max_tool_response_length", ".max_result_characters", "count", _LOOPS, lambda v, _: 4 * v,
           note="in characters, four per token"),
        to("tool_response_truncate_side", "", "left|middle|right", _LOOPS, lambda v, _: implied(
            "results are cut at their end") if v == "right" else unsupported("use right")),
        always("is_dynamic_rollout_batch", "a context that was only appended to is one row, and the loss counts "
               "trajectories however they are cut", "bool"),
        ignored("group_name", "agents run in the rollout workers"),
        missing("workflow max_planner_turns max_worker_turns max_sa_turns max_workers_per_planner "
                "max_toolcall_per_worker", _SEVERAL),
        missing("format_reward call_search_reward length_limit max_length_limit length_penalty "
                "over_context_penalty use_llm_judge use_local_judge llm_ip llm_port llm_type", _SCORED,
                default=False)),
    section("tools")(
        missing("search.{server_addr,topk}", "use an index: braid.env.tools=[{index: documents.jsonl}], or a "
                "server of MCP: braid.env.tools=[{url: ...}]", _GIVEN),
        missing("online use_access_summary enable_cache cache_size cache_file use_jina",
                "use a server of MCP: braid.env.tools=[{url: ...}]", _GIVEN, default=False),
        to("codejudge.*", "", "any", _GIVEN, lambda *_: implied("code runs in the sandbox of the tool python"))),
    always("actor.pack_traj", "turns that continue a context are one row", "bool"),
    ignored("rollout.use_fixed_worker", "a group always goes to the same engine"),
    ignored("rollout.sglang.tool_call_parser", "calls are parsed by agentloop.toolcall_parser"),
    missing("agentlightning.*", "run the program with braid.env.kind=program"),
)
# fmt: on
