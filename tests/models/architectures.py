"""Every causal language model of the installed transformers, tried in small.

    python tests/models/architectures.py

writes the tables of docs/models.md (a minute or two). A model is built from its architecture's default config,
made tiny, with windows switched on; it is refused with a sentence, or its packed log-probs and gradients and
the native engine's greedy tokens and log-probs are those of plain transformers, for ragged rows beyond every
window.
"""

from __future__ import annotations

import asyncio
import re
import warnings
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from tests.native_engines import make_engine
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from braid.errors import ModelError
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.fused import fuse
from braid.models.loading import save_pretrained
from braid.models.selfcheck import check_against_plain
from braid.models.stateful import use_step_limits
from braid.models.tiny import length_keys, tiny_model
from braid.models.tokenizer import character_tokenizer
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.native.selfcheck import check_decoding

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_UNSET: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "topk_group": 1,
    "n_group": 1,
    "layer_types": ["full_attention"] * 32,
}
"""For configs whose defaults leave out what their models need:"""
_INCOMPLETE = (
    "deepseek_v2",
    "dots1",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "lfm2_moe",
    "ministral",
    "nemotron",
)
_END_OF_ROUTERS = "<!-- end of the routers -->"
_LONG = 100
"""Rows of the tiny models stay below it, and tiny.NEVER beyond."""


def verdict(name: str) -> str:
    """The table's cell for an architecture. Raises AssertionError when one is let in and computed wrongly."""
    try:
        kind, config = _sizes(name)
        passed = frozenset(length_keys(config))
        model = tiny_model(kind, config, passed)
        with torch.no_grad():
            deepcopy(model)(input_ids=torch.arange(9)[None], use_cache=False)
    except Exception as error:  # whatever transformers raises for a config of defaults
        return _refused_at_full_size(name) or f"not built: {type(error).__name__}"
    try:
        return _tried(model, None)
    except ModelError as error:
        limit = re.search(r"for rows longer than its (\w+) of \d+ tokens", str(error))
        if limit is None:
            return _refusal(str(error))
    return f"{_tried(tiny_model(kind, config, frozenset()), _LONG)}, rows up to its {limit[1]}"


def tiny_of(name: str, **settings: Any) -> PreTrainedModel:
    """A tiny model of an architecture's default config with other `settings`."""
    kind, config = _sizes(name)
    vars(config).update(settings)
    return tiny_model(kind, config, frozenset())


def _sizes(name: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class of an architecture and its default config, completed where its defaults make no model."""
    config = CONFIG_MAPPING[name]()
    more: dict[str, Any] = {}
    if vars(config).get("sliding_window", 0) is None:
        more = {"sliding_window": 4096, "use_sliding_window": True}
    if name in _INCOMPLETE:
        more |= {key: value for key, value in _UNSET.items() if vars(config).get(key, 0) is None}
    if name.startswith("lfm2"):
        more["layer_types"] = ["conv", "full_attention"] * 16
    config = CONFIG_MAPPING[name](**more)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if kind.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    return kind, config


def _refused_at_full_size(name: str) -> str | None:
    """For what cannot be made tiny: whether its layers are refused as they are."""
    try:
        kind, config = _sizes(name)
        with torch.device("meta"):
            model = kind._from_config(config)
    except Exception:  # see verdict
        return None
    try:
        CausalLM(model)
    except ModelError as error:
        return _refusal(str(error))
    return None


def _refusal(error: str) -> str:
    if layers := re.search(r"has layers of type ([^;]+), which braid does not", error):
        return f"refused: layers of type {layers[1]}"
    if "position_bias" in error:
        return "refused: attention with a position bias"
    if "do not attend through" in error:
        return "refused: attention that bypasses transformers' interface"
    return (
        "refused: nonstandard positions, masks or head"
        if "log-probs differ" in error
        else "refused: its code fails"
    )


def _tried(model: PreTrainedModel, longest: int | None) -> str:
    """Raises ModelError when it is refused."""
    plain = deepcopy(model)
    fuse(model)
    lm = CausalLM(model)
    check_against_plain(lm, longest)
    _compare_training(lm, plain)
    _compare_export(lm, plain)
    try:
        check_decoding(lm, longest)
    except ModelError:
        return "trains; samples with another engine"
    _compare_sampling(lm, plain)
    return "runs"


def _compare_training(lm: CausalLM, plain: PreTrainedModel) -> None:
    """Ragged rows, of which all but the first and the last share 8 tokens with the first. For a model with
    states one crosses a chunk of 64 positions, and one continues a state by one token."""
    generator = torch.Generator().manual_seed(1)
    lengths = (80, 17, 9, 7) if lm.has_states else (24, 17, 7)
    rows = [torch.randint(90, (n,), generator=generator) for n in lengths]
    shared = ((0, 0), *(((0, 8),) * (len(rows) - 2)), (0, 0))
    for row in rows[1:-1]:
        row[:8] = rows[0][:8]
    stored = [row[num:] for row, (_, num) in zip(rows, shared, strict=True)]
    mask = torch.ones(sum(map(len, stored)), dtype=torch.bool)
    mask[[0, -len(rows[-1])]] = False
    batch = PackedBatch({"input_ids": torch.cat(stored)}, mask, lengths, shared=shared)
    ours = lm.forward(batch, frozenset({"logprobs"}))["logprobs"]
    expected = [F.pad(_token_logprobs(plain, row), (1, 0)) for row in rows]
    line = torch.cat([logp[num:] for logp, (_, num) in zip(expected, shared, strict=True)])
    rounding = _rounding(plain, rows)
    assert (ours - line).abs().max() <= 2e-5 + 8 * rounding, "packed log-probs"
    weights = torch.linspace(-1.0, 1.0, len(line))
    mine, theirs = _gradient(lm.module, ours @ weights), _gradient(plain, line @ weights)
    largest = max(g.norm() for g in theirs.values())
    for name, expected_grad in theirs.items():
        # Some hundred roundings, of terms that cancel; a wrong mask or position changes gradients by a tenth
        # and more.
        error = (mine[name] - expected_grad).norm()
        assert error <= (1e-3 + 100 * rounding) * largest, f"gradient of {name}"


@torch.no_grad()
def _compare_export(lm: CausalLM, plain: PreTrainedModel) -> None:
    """What is exported has every weight under the name that transformers reads, and no other."""
    with TemporaryDirectory() as folder:
        save_pretrained(lm, character_tokenizer("abc"), Path(folder))
        loaded, info = type(plain).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), "missing, unknown or of another shape"
    loaded.set_attn_implementation(plain.config._attn_implementation)
    use_step_limits(loaded)  # which transformers does not read from Nemotron-H's config
    row = torch.arange(5, 17)
    error = (plain_logits(loaded, row) - plain_logits(plain, row)).abs().max()
    assert error <= 2e-5, "logits of the exported model"


def _compare_sampling(lm: CausalLM, plain: PreTrainedModel) -> None:
    """Ragged prompts side by side, answers of 6 tokens; they pass the few positions that a tiny copy states."""
    lm.config.max_position_embeddings = 128
    engine = make_engine(lm, max_running=4, kv_budget_tokens=1024)
    prompts = [tuple(range(5, 5 + n)) for n in (3, 18, 11)]
    sampling = Sampling(max_new_tokens=6, greedy=True)

    async def answers() -> list[Completion]:
        requests = [Request(prompt, sampling, key=(i,)) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    for prompt, answer in zip(prompts, asyncio.run(answers()), strict=True):
        row = torch.tensor([*prompt, *answer.token_ids])
        with torch.no_grad():
            logp = plain_logits(plain, row).log_softmax(-1)[len(prompt) - 1 : -1]
        allowed = 2e-5 + 8 * _rounding(plain, [row])
        chosen = logp.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        assert (chosen >= logp.amax(-1) - allowed).all(), "greedy tokens"
        assert (chosen - torch.tensor(answer.logprobs)).abs().max() <= allowed, "log-probs of the engine"


def plain_logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    return model(input_ids=row[None], use_cache=False).logits[0]


def _token_logprobs(model: PreTrainedModel, row: Tensor) -> Tensor:
    return plain_logits(model, row).log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]


@torch.no_grad()
def _rounding(model: PreTrainedModel, rows: list[Tensor]) -> float:
    """The plain module's own error in float32."""
    exact = deepcopy(model).double()
    exact.set_experts_implementation("eager")  # grouped products take no float64
    pairs = ((_token_logprobs(model, row), _token_logprobs(exact, row)) for row in rows)
    rounding = max((a - b).abs().max().item() for a, b in pairs)
    has_experts = any("Experts" in type(m).__name__ for m in model.modules())
    assert not has_experts or rounding < 2e-4, (
        "rounding changes the choice of experts: a comparison says nothing"
    )
    return rounding


def _gradient(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def table() -> str:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = (f"| `{name}` | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]} | {verdict(name)} |" for name in NAMES)
    return "\n".join(("| model type | class | |", "|---|---|---|", *rows))


def recorded() -> dict[str, str]:
    """Model type -> cell, as docs/models.md has it."""
    text = PAGE.read_text()
    part = text[text.index("| model type") :]
    return dict(re.findall(r"^\| `([\w.-]+)` \| \w+ \| (.*) \|$", part, re.MULTILINE))


def routers(name: str) -> tuple[str, str] | None:
    """Whether an architecture's experts are replayed, and whether it has a load-balancing loss; None for one
    that has no experts or does not run."""
    try:
        lm = CausalLM(tiny_of(name))
    except Exception:  # see verdict
        return None
    if lm.routers is None:
        return None
    try:
        lm.prepare_routers("train.router_replay")
    except ModelError as error:
        why = re.search(r"cannot be used for it: (.*); set it to", str(error))
        return f"refused: {why[1]}" if why else "refused", "refused"
    try:
        lm.check_balance()
    except ModelError:
        return "yes", "refused"
    return "yes", "yes"


def table_of_routers() -> str:
    pairs = ((name, routers(name)) for name in NAMES)
    rows = (f"| `{name}` | {cells[0]} | {cells[1]} |" for name, cells in pairs if cells is not None)
    return "\n".join(("| mixture | router replay | load balancing |", "|---|---|---|", *rows))


def recorded_routers() -> dict[str, tuple[str, str]]:
    """Model type -> what `routers` says, as docs/models.md has it."""
    text = PAGE.read_text()
    part = text[text.index("| mixture |") : text.index(_END_OF_ROUTERS)]
    return {n: (a, b) for n, a, b in re.findall(r"^\| `([\w.-]+)` \| (.*) \| (.*) \|$", part, re.MULTILINE)}


def write(start: str, end: str, new: str) -> None:
    """Replace the page's text from `start` to the line `end`."""
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(start)] + new + text[text.index(f"\n{end}") :])


if __name__ == "__main__":
    write("| model type", "<!-- end of the table -->", table())
    write("| mixture |", _END_OF_ROUTERS, table_of_routers())
