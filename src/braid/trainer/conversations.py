"""Builds the text environments of a config, and the format of the policy's conversations with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from braid.config.env import AgentEnvConfig, ChatEnv, ProgramEnv, SingleTurnEnv, ToolsEnv
from braid.config.schema import RunConfig
from braid.envs.agents.base import AgentEnv
from braid.envs.agents.build import AgentEnvs, MixedEnvs
from braid.envs.agents.single_turn import SingleTurn
from braid.envs.agents.toolboxes import ToolEnvs
from braid.errors import ConfigError, Problem
from braid.functions import load_function
from braid.models.chat import ChatFormat
from braid.rollout.sessions.programs import Program, run_command, run_function


def chat_format(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, end_token_ids: Sequence[int]
) -> ChatFormat:
    """The format of the policy's conversations. Raises ModelError if its chat template cannot be
    continued."""
    env, data = config.env, config.data
    of_chat: dict[str, Any] = {}
    if isinstance(env, ChatEnv):
        of_chat = {"tool_format": env.tool_format, "thinking": env.thinking}
    if isinstance(env, ToolsEnv | AgentEnvConfig):
        of_chat["replies"] = env.replies
    chat = ChatFormat(
        tokenizer,
        end_token_ids=end_token_ids,
        use_template=data.use_chat_template != "never",
        template_kwargs=data.chat_template_kwargs,
        **of_chat,
    )
    if isinstance(env, ToolsEnv | AgentEnvConfig) and env.max_turns > 1 and env.replies == "messages":
        chat.check(uses_tools=isinstance(env, ToolsEnv) or env.name == "team")
    return chat


def env_maker(
    config: RunConfig, base_dir: Path
) -> tuple[Callable[[], AgentEnv], Callable[[], Awaitable[None]] | None]:
    """Makes environments, and closes what they share."""
    match config.env:
        case SingleTurnEnv():
            return SingleTurn, None
        case ToolsEnv() as env:
            tools = ToolEnvs(env, base_dir)
            return tools, tools.close
        case AgentEnvConfig() as env:

            def hosted(name: str, kwargs: dict[str, Any]) -> AgentEnvs:
                return AgentEnvs(name, kwargs, base_dir, env.run_in, env.processes)

            if env.name is not None:
                envs = hosted(env.name, env.kwargs)
            else:
                kinds = {kind: (hosted(of.name, of.kwargs), of.max_turns) for kind, of in env.mix.items()}
                envs = MixedEnvs(kinds, env.mix_key)
            return envs, envs.close
        case other:
            raise AssertionError(f"{other.kind} is a simulator, not a text environment")


def external_key(env: ProgramEnv) -> str | None:
    """The key of programs that are not started here; None if they are. Raises ConfigError without a good
    one."""
    if env.program != "external":
        return None
    name = "BRAID_EXTERNAL_KEY"
    if len(key := os.environ.get(name, "")) < 16:
        why = f"external programs need a secret of at least 16 characters in the environment variable {name}"
        raise ConfigError(
            [Problem("env.program", f"{why}; set it for the run and for the programs", "config")]
        )
    if env.port == 0:
        raise ConfigError(
            [
                Problem(
                    "env.port",
                    "external programs have to know the port; set it, for example to 8123",
                    "config",
                )
            ]
        )
    return key


def program_of(env: ProgramEnv, base_dir: Path) -> Program:
    """The program that plays the episodes. Raises ConfigError if it does not exist."""
    if isinstance(env.program, str):
        return partial(run_function, load_function(env.program, base_dir=base_dir, key="env.program"))
    name = env.program[0]
    if shutil.which(name) is None and not isfile(base_dir / name):
        problem = f"no such command: {name!r}; install it, or write its path, relative to {base_dir}"
        raise ConfigError([Problem("env.program", problem, "config")])
    return partial(run_command, env.program, base_dir)
