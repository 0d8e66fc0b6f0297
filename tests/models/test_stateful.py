"""Layers that carry a state: packed rows are the model's own rows, and the checks at load time notice when
they are not."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from braid.config.backends import LoraConfig
from braid.config.load import load_config
from braid.errors import ModelError
from braid.models import selfcheck, stateful
from braid.models.attention import PackedAttention
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.flops import attention_flops
from braid.models.lora import add_adapters
from braid.models.roles import make_policy
from braid.models.selfcheck import check_against_plain
from braid.models.sequence_parallel import SequenceGroup
from braid.models.stateful import StatefulCall
from braid.models.tiny import tiny_model
from braid.rollout.engines.native import selfcheck as native_check
from braid.rollout.engines.native.selfcheck import check_decoding
from braid.rollout.engines.native.states import StateCache

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of packages that are not installed
HYBRIDS = ["qwen3_5_text", "bamba", "minimax", "jamba"]
"""A gated delta net, Mamba 2, Mamba 1, and lightning attention, whose state is in the model's type."""
ROWS = (70, 12, 9, 5, 30, 31)
SHARED = ((0, 0), (0, 8), (0, 8), (0, 0), (0, 0), (4, 30))
"""The third row continues the first's prefix by one token, the last all of the fifth."""


def hybrid(architecture: str, **changes: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(architecture, **changes)
    # MiniMax's blocks would be longer than all rows, and take a second each
    short = frozenset({"block_size", "index_topk"})
    return tiny_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, short)


def batch() -> tuple[list[Tensor], PackedBatch]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(96, (n,), generator=generator) for n in ROWS]
    for row, (source, num) in zip(rows, SHARED, strict=True):
        row[:num] = rows[source][:num]
    stored = [row[num:] for row, (_, num) in zip(rows, SHARED, strict=True)]
    mask = torch.ones(sum(map(len, stored)), dtype=torch.bool)
    for row, (_, num) in enumerate(SHARED):
        if not num:
            mask[sum(len(part) for part in stored[:row])] = False
    return rows, PackedBatch({"input_ids": torch.cat(stored)}, mask, ROWS, shared=SHARED)


def row_logprobs(model: PreTrainedModel, rows: list[Tensor]) -> Tensor:
    parts = []
    for row, (_, num) in zip(rows, SHARED, strict=True):
        logp = model(input_ids=row[None], use_cache=False).logits[0].log_softmax(-1)
        parts.append(torch.cat((logp.new_zeros(1), logp[:-1].gather(1, row[1:, None])[:, 0]))[num:])
    return torch.cat(parts)


def gradients(model: torch.nn.Module, line: Tensor) -> dict[str, Tensor]:
    (line @ torch.linspace(-1.0, 1.0, len(line), dtype=line.dtype)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_packed_rows_with_shared_prefixes_are_as_near_to_float64_as_the_models_own_rows(
    architecture: str, checkpointing: bool
) -> None:
    plain, (rows, packed) = hybrid(architecture), batch()
    exact = deepcopy(plain).double()
    exact.set_experts_implementation("eager")  # the others know no float64
    lm = CausalLM(deepcopy(plain))
    lm.set_gradient_checkpointing(checkpointing)
    ours = lm.forward(packed, frozenset({"logprobs"}))["logprobs"]
    unpacked, reference = row_logprobs(plain, rows), row_logprobs(exact, rows)
    error, own_error = (ours - reference).abs(), (unpacked - reference).abs()
    # Rounding of other, equally long sums: the largest of few hundred errors varies by a few times.
    assert error.mean() <= 2 * own_error.mean() + 1e-6
    assert error.max() <= 4 * own_error.max() + 1e-5
    mine, theirs = gradients(lm.module, ours), gradients(plain, unpacked)
    exactly = gradients(exact, reference)
    assert mine.keys() == theirs.keys()
    largest = max(g.norm() for g in exactly.values())
    for name, gradient in exactly.items():
        own_error = (theirs[name] - gradient).norm()
        assert (mine[name] - gradient).norm() <= 8 * own_error + 1e-5 * largest, name


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "bamba"])
def test_the_rounding_of_half_precision_is_allowed_for(architecture: str) -> None:
    lm = CausalLM(hybrid(architecture).to(torch.bfloat16))  # pyright: ignore[reportArgumentType]
    check_against_plain(lm)
    for check in (native_check._DECODING, native_check._RESUMING):
        selfcheck.check_own_weights(lm, check, None)


def test_a_shared_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, (_, packed) = CausalLM(hybrid("bamba")), batch()
    computed: list[int] = []
    call = StatefulCall.__call__

    def counted(self: StatefulCall, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.index == 0:
            computed.append(x.shape[0] * x.shape[1])
        return call(self, x, *args, **kwargs)

    monkeypatch.setattr(StatefulCall, "__call__", counted)
    lm.forward(packed, frozenset({"logprobs"}))
    assert packed.num_positions <= sum(computed) <= packed.num_positions + 8  # of padding


def test_prefixes_within_prefixes_are_computed_with_each_row() -> None:
    lm, rows = CausalLM(hybrid("qwen3_5_text")), [torch.arange(20), torch.arange(15), torch.arange(9)]
    shared = ((0, 0), (0, 12), (1, 6))
    context = PackedAttention([len(row) for row in rows], lm.device, shared)
    ids = torch.cat([row[num:] for row, (_, num) in zip(rows, shared, strict=True)])
    with torch.no_grad():
        packed = lm.hidden(ids, ids, context)
        whole = torch.arange(20)
        alone = lm.hidden(whole, whole, PackedAttention([20], lm.device))
    assert (packed - alone[ids]).abs().max() < 1e-4


def on_a_rank(rank: int, architecture: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    lm, (_, packed) = CausalLM(hybrid(architecture)), batch()
    lm.leave_gradients_to_autograd()
    world = dist.group.WORLD
    assert world is not None
    line = lm.forward(replace(packed, sequence=SequenceGroup(world)), frozenset({"logprobs"}))["logprobs"]
    grads = gradients(lm.module, line)
    for grad in grads.values():
        dist.all_reduce(grad)
    if rank == 0:
        torch.save((line.detach(), grads), f"{folder}/computed.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["bamba", "glm_moe_dsa"])
def test_ranks_that_share_sequences_compute_what_one_does(architecture: str, tmp_path: Path) -> None:
    """Layers with a state, and layers with an indexer."""
    spawn(on_a_rank, (architecture, str(tmp_path)), nprocs=2)
    line, grads = torch.load(tmp_path / "computed.pt")
    lm, (_, packed) = CausalLM(hybrid(architecture)), batch()
    lm.leave_gradients_to_autograd()
    alone = lm.forward(packed, frozenset({"logprobs"}))["logprobs"]
    assert (line - alone).abs().max() <= 2e-5
    expected = gradients(lm.module, alone)
    largest = max(grad.norm() for grad in expected.values())
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert (grads[name] - grad).norm() <= 1e-5 * largest, name


def wrong(architecture: str, check: Callable[[CausalLM], None]) -> str:
    """The message of a model that is refused."""
    selfcheck._agreed.clear()
    with pytest.raises(ModelError) as refused:
        check(CausalLM(hybrid(architecture)))
    selfcheck._agreed.clear()
    return str(refused.value)


def one_row(self: PackedAttention, call: StatefulCall, x: Tensor) -> Any:
    return stateful.flat(call(x[None])[0])


def without_states(self: StatefulCall, x: Tensor, states: Any = (), *, keeps: bool = False) -> Any:
    return call_of_class(self, x, [torch.zeros_like(state) for state in states], keeps=keeps)


call_of_class = StatefulCall.__call__


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_rows_that_leak_into_one_another_are_caught(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedAttention, "mix", one_row)
    assert "cannot run with packed rows" in wrong(architecture, check_against_plain)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "minimax", "bamba"])
def test_a_state_that_is_lost_at_a_prefix_is_caught(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StatefulCall, "__call__", without_states)
    assert "cannot run with packed rows" in wrong(architecture, check_against_plain)


def nothing(self: StateCache, *args: Any) -> None:
    """In the place of a method of StateCache."""


@pytest.mark.parametrize("method", ["move", "restore"])
def test_states_that_do_not_follow_their_sequence_are_caught(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateCache, method, nothing)
    assert "cannot run with the native engine's slots and snapshots of states" in wrong(
        "qwen3_5_text", check_decoding
    )


def test_a_state_that_is_lost_in_decoding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StatefulCall, "__call__", without_states)
    assert "cannot run with the native engine" in wrong("qwen3_5_text", check_decoding)


def test_limits_of_step_sizes_other_than_the_configs_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers' Nemotron-H, before they are set."""
    lm = CausalLM(hybrid("bamba"))
    for module in lm.model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (1.0, float("inf"))
    with pytest.raises(ModelError, match="limits the step sizes of its state-space layers to 1 to inf in a"):
        check_decoding(lm)
    monkeypatch.setattr(native_check, "step_limits", lambda _: None)
    with pytest.raises(ModelError, match="with these weights gives different log-probs with the native eng"):
        selfcheck.check_own_weights(lm, native_check._DECODING, None)


def test_nemotron_h_has_the_limits_of_its_checkpoint() -> None:
    config = AutoConfig.for_model("nemotron_h")
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    limits = [
        m.time_step_limit for m in tiny_model(kind, config, frozenset()).modules() if hasattr(m, "A_log")
    ]
    assert set(limits) == {(0.0, float("inf"))}


def test_layers_whose_code_takes_no_cache_are_refused() -> None:
    model = hybrid("qwen3_5_text")
    for layer in model.base_model.layers:  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
        if hasattr(layer, "linear_attn"):
            layer.linear_attn = torch.nn.Identity()
    with pytest.raises(ModelError, match="has layers of type linear_attention whose code takes no cache"):
        CausalLM(model)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_whose_weights_nothing_checks_are_refused(engine: str, tmp_path: Path) -> None:
    hybrid("qwen3_5_text").save_pretrained(tmp_path)
    overrides = [f"model.path={tmp_path}", f"rollout.engine={engine}"]
    data = [
        "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
        "reward.parts=[{kind: exact}]",
    ]
    config = load_config(None, [*overrides, *data]).config
    with pytest.raises(ModelError, match=rf"rollout\.engine={engine} cannot sample Qwen3_5ForCausalLM"):
        make_policy(config, torch.device("cpu"))


@pytest.mark.parametrize("targets", [("all-linear",), ("in_proj", "out_proj")])
def test_adapters_of_stateful_layers_all_take_part(targets: tuple[str, ...]) -> None:
    lm, (_, packed) = CausalLM(hybrid("jamba")), batch()
    add_adapters(lm.model, LoraConfig(rank=2, targets=targets), seed=0)
    lm.forward(packed, frozenset({"logprobs"}))["logprobs"].sum().backward()
    trained = {name: p.grad for name, p in lm.model.named_parameters() if p.requires_grad}
    assert trained
    assert all(grad is not None for grad in trained.values())
    assert not any("dt_proj" in name for name in trained)


def test_an_adapter_that_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ModelError, match="has no layer 'dt_proj'"):
        add_adapters(CausalLM(hybrid("jamba")).model, LoraConfig(rank=2, targets=("dt_proj",)), seed=0)


def test_only_layers_with_attention_count_pairs_of_positions() -> None:
    config = AutoConfig.for_model("qwen3_5_text")
    pairs = 4 * config.num_attention_heads * config.head_dim * 10 * 11 // 2
    assert attention_flops(config, [10]) == config.layer_types.count("full_attention") * pairs
    assert attention_flops(AutoConfig.for_model("mamba"), [10]) == 0
