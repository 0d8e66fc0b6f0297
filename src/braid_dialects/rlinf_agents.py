"""RLinf's keys of agents: the loop of turns, tools, and several agents."""

from __future__ import annotations

from typing import Any

from .conditions import needs, overridden, unless
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, unsupported

_PARSERS = {"searchr1-qwen": "tag", "rstar2-qwen": "hermes", "wideseek_r1-qwen": "hermes"}
_SCORED = "score it with braid.reward.parts: pattern, length, judge, or a function"


def kind(source: Source) -> str:
    """The kind of environment: planner and workers or one of the user's own, one in which the policy calls
    tools, or single answers."""
    if _is_own(source) or _is_team(source):
        return "agent"
    return "tools" if source.has("agentloop.toolcall_parser") else "single_turn"


def _is_own(source: Source) -> bool:
    return "env.name" in source.braid_values


def _is_team(source: Source) -> bool:
    """Whether braid's own planner and workers play."""
    return source["agentloop.workflow"] == "mas" and not _is_own(source)


def base(source: Source) -> dict[str, Any]:
    """Native settings of files whose episodes have several turns."""
    if kind(source) == "single_turn":
        return {}
    if kind(source) == "agent":
        turns = [source[f"agentloop.max_{role}_turns"] for role in ("planner", "worker")]
        longest = {"env.max_turns": max(filter(None, turns))} if any(turns) else {}
        team = {"env.kind": "agent", "env.name": "team", "env.kwargs.tools": []} if _is_team(source) else {}
        return longest | team | {"env.max_context_tokens": source["runner.seq_length"]}
    tools = ["python"] if source["agentloop.toolcall_parser"] == "rstar2-qwen" else []
    return {"env.kind": "tools", "env.tools": tools, "env.max_context_tokens": source["runner.seq_length"]}


def use_template(value: bool, source: Source) -> str:
    """Whether conversations go through the chat template."""
    if value:
        return "always"
    return "auto" if source["agentloop.workflow"] == "mas" else "never"


def _argument(value: int, source: Source) -> Any:
    """A limit that the environment of several agents keeps."""
    return Became({f"env.kwargs.{source.name}": value})


def _result_limit(value: int, source: Source) -> Became:
    at = "env.kwargs" if _is_team(source) else "env"
    return Became({f"{at}.max_result_characters": 4 * value})


def _workflow(value: str, source: Source) -> Became:
    if _is_team(source):
        note = "its prompts are braid's own: env.kwargs.planner_prompt and worker_prompt"
        return Became({"env.name": "team"}, note=note)
    plays = "braid.env.name plays planner and workers" if value == "mas" else "one agent, which calls tools"
    return implied(plays)


_FOR_WORKERS = "; of workers: braid.env.kwargs.tools"
_LOOPS = unless(lambda s: kind(s) == "single_turn", "agentloop.toolcall_parser is not set")
_OF_TOOLS = unless(_is_own, "tools are those of braid.env.name")
_GIVEN = unless(
    lambda s: "env.tools" in s.braid_values or "env.kwargs.tools" in s.braid_values,
    "the tools are named in braid's keys",
)
_SINGLE = unless(lambda s: s["agentloop.workflow"] == "mas", "for workflow=sa only")

# One rule per line.
# fmt: off
RULES = rows(
    section("agentloop", "env")(
        to("toolcall_parser", ".tool_format", "text", lambda v, _: _PARSERS.get(v, unsupported(
            f"use {', '.join(_PARSERS)}, or braid.env.kind=tools with a tool_format")),
           note="searchr1: <search>query</search>; the others: Qwen's JSON in <tool_call>"),
        to("max_turns", ".max_turns", "count", _LOOPS),
        to("max_sa_turns", ".max_turns", "count", _SINGLE, _LOOPS, overridden("agentloop.max_turns")),
        to("max_tool_response_length", "", "count", _LOOPS, _OF_TOOLS, _result_limit,
           note="in characters, four per token"),
        to("tool_response_truncate_side", "", "left|middle|right", _LOOPS, _OF_TOOLS, lambda v, _: implied(
            "results are cut at their end") if v == "right" else unsupported("use right")),
        always("is_dynamic_rollout_batch",
            "a context that was only appended to is one row, and the loss counts trajectories however they "
            "are cut", "bool"),
        ignored("group_name", "agents run in the rollout workers"),
        to("workflow", "", "sa|mas", _workflow),
        to("max_planner_turns max_worker_turns max_workers_per_planner max_toolcall_per_worker", "env.kwargs", "count",
           needs("agentloop.workflow", "mas"), _argument, note=
               "an argument of the environment; max_turns of a conversation are the larger of "
               "max_planner_turns and max_worker_turns. Workers and calls are per turn"),
        missing("format_reward call_search_reward length_limit max_length_limit length_penalty "
                "over_context_penalty use_llm_judge use_local_judge llm_ip llm_port llm_type", _SCORED,
                default=False)),
    section("tools", "", _OF_TOOLS)(
        missing("search.dummy_mode", "tools give what they find; to find nothing: braid.env.tools with a function",
                _GIVEN, default=False),
        missing("search.{server_addr,topk}", "use an index: braid.env.tools=[{index: documents.jsonl}], or a "
                f"server of MCP: braid.env.tools=[{{url: ...}}]{_FOR_WORKERS}", _GIVEN),
        missing("online use_access_summary enable_cache cache_size cache_file use_jina",
                f"use a server of MCP: braid.env.tools=[{{url: ...}}]{_FOR_WORKERS}", _GIVEN, default=False),
        to("codejudge.*", "", "any", _GIVEN, lambda *_: implied("code runs in the sandbox of the tool python"))),
    always("actor.pack_traj", "turns that continue a context are one row", "bool"),
    missing("rollout.use_fixed_worker",
            "one model plays planner and workers; to have another play one of them: braid.env.kind=agent with an "
            "environment that asks a server for its turns", default=False),
    missing("agentloop.fixed_role", "it says who plays with the second model of rollout.use_fixed_worker",
            needs("rollout.use_fixed_worker")),
    ignored("rollout_fixed_worker.* rollout_fixed_worker.{model,sglang,vllm}.* rollout_fixed_worker.sglang.server.*",
            "for the second model of rollout.use_fixed_worker only"),
    ignored("rollout.sglang.tool_call_parser", "calls are parsed by agentloop.toolcall_parser"),
    missing("agentlightning.*", "run the program with braid.env.kind=program"),
)
# fmt: on
