"""An agent that knows nothing of braid: OpenAI's client, a tool, and a loop. It plays the episodes of
openai_agent.yaml."""

from __future__ import annotations

import atexit
import json
import math
from typing import Any

from openai import DefaultHttpxClient, OpenAI

HTTP = DefaultHttpxClient()  # shared by all episodes, since creating one is slow
atexit.register(HTTP.close)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Multiply numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 83*42."}},
            "required": ["expression"],
        },
    },
}


def calc(expression: str) -> str:
    """The product, or an error for the model to read."""
    try:
        return str(math.prod(int(factor) for factor in expression.split("*")))
    except ValueError:
        return "error"


def play(task: Any, base_url: str, api_key: str) -> None:
    """Answer the task, with the tool calls that the model makes. The run's rewards score the last answer."""
    messages = list(task.messages)
    client = OpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said: Any = answer.choices[0].message
        messages.append(said)
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            result = calc(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
