"""What works for the model families of 2026, tried in small.

    python -m tests.models.families

writes the table of docs/models.md, after architectures.py has written its own, which says what trains and
samples. The other cells are what braid does with a tiny model of the architecture: vLLM is asked for the class,
adapters are added to all layers, and tool calls and thinking are those of the chat format over the published
template.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import transformers
from tests.models.architectures import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, PAGE, tiny_of, write
from tests.models.architectures import recorded as recorded_architectures
from tests.models.test_chat import ASK, _format

from braid.config.backends import LoraConfig
from braid.config.rollout import RolloutConfig
from braid.errors import ModelError
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.lora import add_adapters, named_adapters
from braid.models.roles import check_engine
from braid.rollout.engines.vllm.kind import Vllm

_END = "<!-- end of the families -->"
UNKNOWN = "?"
"""The cell of vLLM where it is not installed."""
COLUMNS = ("family", "model type", "training", "native engine", "vLLM", "adapters", "tool calls", "thinking")


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture, and the name of a published chat template of its models in TRL's wheel; None where it
    has none."""

    name: str
    model_type: str
    template: str | None = None


FAMILIES = (
    Family("Qwen3", "qwen3", "qwen3"),
    Family("Qwen3, mixtures", "qwen3_moe", "qwen3"),
    Family("Qwen3-Next", "qwen3_next", "qwen3"),
    Family("Qwen3.5", "qwen3_5_text", "qwen3_5_think"),
    Family("Qwen3.5, mixtures", "qwen3_5_moe_text", "qwen3_5_think"),
    Family("Llama 4", "llama4_text"),
    Family("Gemma 3", "gemma3_text", "gemma3"),
    Family("Gemma 4", "gemma4_text", "gemma4"),
    Family("DeepSeek-V3, R1", "deepseek_v3", "deepseekv3"),
    Family("DeepSeek-V3.2", "deepseek_v32"),
    Family("DeepSeek-V4", "deepseek_v4"),
    Family("GLM-4", "glm4"),
    Family("GLM-4.5 to 4.7", "glm4_moe", "glm4moe"),
    Family("GLM-4.7-Flash", "glm4_moe_lite"),
    Family("GLM-5", "glm_moe_dsa"),
    Family("gpt-oss", "gpt_oss", "gptoss"),
    Family("Kimi Linear", "kimi_linear"),
    Family("Nemotron 3", "nemotron_h", "nemotron_3_nano"),
    Family("SmolLM2", "llama"),
    Family("SmolLM3", "smollm3"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3"),
    Family("OLMo-hybrid", "olmo_hybrid"),
    Family("OLMoE", "olmoe"),
    Family("Granite 3", "granite"),
    Family("Granite 4", "granitemoehybrid"),
    Family("LFM2", "lfm2", "lfm2"),
    Family("MiniMax-M1", "minimax"),
    Family("MiniMax-M2", "minimax_m2"),
    Family("MiniMax-M3", "minimax_m3_vl_text"),
    Family("Mistral", "mistral"),
    Family("Ministral 3", "ministral3"),
    Family("Mixtral", "mixtral"),
)


def cells(family: Family) -> tuple[str, ...]:
    """The table's cells after the model type."""
    verdict = recorded_architectures()[family.model_type]
    trains = verdict.replace("runs", "yes").replace("trains; samples with another engine", "yes")
    if not trains.startswith("yes"):
        return (re.sub(r" \(.*", "", trains), "", "", "", *_chat(family.template))
    samples = trains if verdict.startswith("runs") else "no"
    return (trains, samples, _vllm(family.model_type), _adapters(family.model_type), *_chat(family.template))


def _vllm(model_type: str) -> str:
    """Whether braid samples the architecture with vLLM, and the installed vLLM has its class."""
    try:
        check_engine(CausalLM(tiny_of(model_type)), RolloutConfig(engine=Vllm()))
    except ModelError:
        return "refused"
    if find_spec("vllm") is None:
        return UNKNOWN
    return "yes" if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] in _known_to_vllm() else "unknown there"


@cache
def _known_to_vllm() -> set[str]:
    # the import takes ten seconds
    from vllm.model_executor.models.registry import ModelRegistry  # noqa: TID251

    return set(ModelRegistry.get_supported_archs())


def _adapters(model_type: str) -> str:
    """Whether adapters of all layers, experts included, are trained."""
    lm = CausalLM(tiny_of(model_type))
    try:
        add_adapters(lm.model, LoraConfig(rank=2, targets=("all-linear",)), seed=0)
    except ModelError:
        return "refused"
    tensors = dict(named_adapters(lm.model))
    for tensor in tensors.values():
        tensor.data += 0.1  # B = 0 would leave A without a gradient
    rows = torch.randint(90, (4 * 12,), generator=torch.Generator().manual_seed(0))
    batch = PackedBatch({"input_ids": rows}, torch.arange(len(rows)) % 12 > 0, (12,) * 4)
    lm.forward(batch, frozenset({"logprobs"}))["logprobs"].sum().backward()
    idle = [name for name, tensor in tensors.items() if tensor.grad is None or not tensor.grad.any()]
    assert not idle, f"adapters without a gradient: {idle}"
    return "yes"


def _chat(template: str | None) -> tuple[str, str]:
    """Format of tool calls and start of the reasoning."""
    if template is None:
        return "untested", "untested"
    chat = _format(template)
    turn = chat.example_turn("42", chat.opening([ASK]))
    thinking = re.match(r"\s*(\S+)", turn.prefill + turn.raw_text) if turn.reasoning else None
    marker = "no" if thinking is None else f"`{thinking[1].partition('<|message|>')[0]}`".replace("|", "\\|")
    try:
        chat.check(uses_tools=True)
    except ModelError as error:
        reasons = {
            "does not show tools": "its template shows no tools",
            "is unknown": "their format is unknown",
        }
        return f"no: {next(short for part, short in reasons.items() if part in str(error))}", marker
    return f"`{chat._tool_format}`", marker


def table() -> str:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = (
        f"| {family.name} | `{family.model_type}` | {' | '.join(cells(family))} |".replace("  ", " ")
        for family in FAMILIES
    )
    return "\n".join((f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows))


def recorded() -> dict[str, list[str]]:
    """Family -> cells after the model type, as docs/models.md has them."""
    text = PAGE.read_text()
    part = text[text.index("| family |") : text.index(_END)].splitlines()[2:]
    lines = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in part if line)
    return {name: rest for name, _, *rest in lines}


if __name__ == "__main__":
    write("| family |", _END, table())
