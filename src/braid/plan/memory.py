"""Memory of each device by role and part, and which stage of a round needs most, from the config alone.

Bytes are those that PyTorch allocates; what its allocator keeps beside them is not counted. The constants are
fits to the allocations of training steps on CPUs (docs/plan.md, benchmarks/plan.py). On GPUs, and for
architectures other than Llama, Qwen2 and Qwen3, they are estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.config.train import TrainConfig

from .layout import RoleLayout
from .machine import gpu_bytes, memory_bytes
from .parallel import TRAINING_ROLES
from .plan import Memory, Plan
from .sizes import BYTES, ModelSize, size_of_folder, training_dtype

ROLLOUT, LOGPROBS, SYNC = "rollout", "log-probs", "weight sync"
"""Stages of a round, beside the update of each role that is trained (`update_of`)."""
PROCESS = "process"
"""The role of what belongs to no model."""
_SAVED = {"fp32": (4.0, 3.0, 4.0), "autocast": (5.0, 1.5, 3.65), "half": (5.0, 1.5, 3.65)}
"""What autograd saves per position and layer, in numbers of 4 bytes for each unit of the hidden size, the
intermediate size, and the width of queries and keys: inputs of both norms and of the products, queries and
keys before and after their norms and rotation, the gate's inputs and output. In half precision the results of
norms are there in both types, and attention on CPUs is in float32."""
_HEAD_NORMS = {"fp32": 1.0, "autocast": 0.9, "half": 0.9}
"""How much less it is for queries and keys without norms."""
_AT_HEAD = {"fp32": 5.0, "autocast": 6.3, "half": 6.3}
"""Numbers per position, for each unit of the hidden size, from the last layer to the logits."""
_IN_MLP = {"fp32": 2.0, "autocast": 2.0, "half": 1.0}
"""Numbers per position, for each unit of the intermediate size, in the backward pass of a gate."""
_CHUNK_NUMBERS = 2**17
"""Numbers of an activation that the fused gate converts at a time (models.fused)."""
_TILE_BYTES = 8 * 2**20
"""Tiles of logits on CPUs (models.logprobs)."""
_PROCESS_BYTES = 450 * 2**20
"""Resident memory of a process that has imported PyTorch and transformers."""
_CONTEXT_BYTES = 500 * 2**20
"""Memory of a process's CUDA context: an estimate."""


def update_of(role: str) -> str:
    """The stage in which a role is trained."""
    return f"{role} update"


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes of one `part` of a `role` on a device, in the `stages` in which they are there."""

    role: str
    part: str
    num_bytes: int
    stages: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of `devices`, which all hold the same. `capacity` in bytes, None if unknown."""

    devices: tuple[int, ...]
    capacity: int | None
    uses: tuple[Use, ...]

    def at(self, stage: str) -> int:
        """Bytes in a stage, at its peak."""
        return sum(use.num_bytes for use in self.uses if stage in use.stages)

    @property
    def stage(self) -> str:
        """The stage that needs most."""
        return max(dict.fromkeys(stage for use in self.uses for stage in sorted(use.stages)), key=self.at)

    @property
    def peak(self) -> int:
        """Bytes in the stage that needs most."""
        return self.at(self.stage)

    @property
    def largest(self) -> Use:
        """The largest use in the stage that needs most, beside the process itself."""
        uses = [use for use in self.uses if self.stage in use.stages and use.role != PROCESS]
        return max(uses, key=lambda use: use.num_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the capacity; None if that is unknown."""
        return None if self.capacity is None else self.peak <= self.capacity


class MicroBatch(NamedTuple):
    """Packed positions of the largest micro-batch of a step on one rank, those among them that the policy
    wrote, and the number of micro-batches."""

    tokens: int
    written: int
    passes: int


def micro_batch(config: RunConfig, plan: Plan, train: TrainConfig, num_ranks: int = 1) -> MicroBatch | None:
    """The micro-batches of a step at full length, cut as training.packing does; None if lengths are not
    bounded. A group's prompt is stored once."""
    rows, longest, written = _step(config, plan)
    if not longest or not written:
        return None
    rows = max(1, rows // num_ranks)
    group = min(rows, config.rollout.group_size) if plan.verb == "train" else 1
    prompt, num_groups = longest - written, math.ceil(rows / group)
    most_rows = train.micro_batch_rows or rows
    whole = prompt + group * written
    if whole <= train.micro_batch_tokens and group <= most_rows:
        count = math.ceil(num_groups / min(train.micro_batch_tokens // whole, most_rows // group))
        num = math.ceil(num_groups / count)
        return MicroBatch(num * whole, num * group * written, count)
    fitting = max(1, min((train.micro_batch_tokens - prompt) // written, most_rows))
    pieces = math.ceil(group / fitting)
    num = math.ceil(group / pieces)
    return MicroBatch(prompt + num * written, num * written, pieces * num_groups)


def _step(config: RunConfig, plan: Plan) -> tuple[int, int | None, int | None]:
    """Rows of an optimizer step, their maximum length, and how much of it is learned at most."""
    if plan.verb == "sft" and config.sft is not None:
        longest = config.sft.max_tokens or (plan.model_size and plan.model_size.max_positions)
        return config.sft.rows_per_step, longest, longest
    if plan.verb == "prefer" and config.prefer is not None:
        longest = config.prefer.max_tokens or (plan.model_size and plan.model_size.max_positions)
        return 2 * config.prefer.pairs_per_step, longest, longest
    return plan.rows_per_step, plan.max_trajectory_tokens, plan.max_output_tokens


def plan_memory(config: RunConfig, plan: Plan, *, capacity: int | None = None) -> list[DeviceMemory]:
    """Memory of each device of the run; those that hold the same are one entry. `capacity` is that of each
    device in bytes, by default this machine's. Empty if the model's size is unknown or the policy is a
    robot's, whose observations vary."""
    if plan.model_size is None or plan.model_size.vocab_size == 0:
        return []
    roles = plan.layout.roles
    devices = sorted({device for role in roles for device in role.devices}) or [0]
    per_node = plan.layout.devices_per_node
    if capacity is None:
        capacity = gpu_bytes() if plan.layout.has_gpus else memory_bytes() // min(len(devices), per_node)
    alike: dict[tuple[Use, ...], list[int]] = {}
    for device in devices:
        here = [role for role in roles if device in role.devices or plan.layout.mode == "in_process"]
        uses = _one_pass_at_a_time([use for use in _uses(config, plan, here, capacity) if use.num_bytes])
        alike.setdefault(uses, []).append(device)
    return [DeviceMemory(tuple(numbers), capacity, uses) for uses, numbers in alike.items()]


def _one_pass_at_a_time(uses: list[Use]) -> tuple[Use, ...]:
    """The uses, of the passes without gradients only that of the role that needs most: they take turns."""
    passes = [use for use in uses if use.stages == {LOGPROBS}]
    most = max(passes, key=lambda use: use.num_bytes, default=None)
    return tuple(use for use in uses if use not in passes or (most and use.role == most.role))


def _stages(plan: Plan) -> frozenset[str]:
    """The stages of a round."""
    if plan.verb == "eval":
        return frozenset({ROLLOUT})
    if plan.verb in ("sft", "prefer"):
        return frozenset({update_of("policy"), *([LOGPROBS] if plan.needs_reference else [])})
    stages = {ROLLOUT, SYNC, update_of("policy")}
    if plan.needs_critic or plan.needs_reference or _computes_old_logprobs(plan):
        stages.add(LOGPROBS)
    return frozenset(stages | ({update_of("critic")} if plan.needs_critic else set()))


def _computes_old_logprobs(plan: Plan) -> bool:
    return plan.old_logprobs in ("recompute", "interpolated")


def _uses(config: RunConfig, plan: Plan, roles: Iterable[RoleLayout], capacity: int | None) -> Iterator[Use]:
    """Everything on a device that has these roles."""
    everywhere, held = _stages(plan), {memory.role: memory for memory in plan.memory}
    processes = 0
    for role in roles:
        if role.role in TRAINING_ROLES:
            memory = held.get("policy" if role.role == "inference" else role.role)
            if memory is not None:
                yield from _training_uses(config, plan, role, memory, everywhere)
            processes += 1
        elif role.role == "rollout":
            yield from _rollout_uses(config, plan, role, everywhere, capacity)
            processes += 1
    if plan.layout.mode == "in_process":
        processes = 1
    each = _CONTEXT_BYTES if plan.layout.has_gpus else _PROCESS_BYTES
    yield Use(PROCESS, "libraries", each * processes, everywhere)
    if plan.round_bytes is not None and not plan.layout.has_gpus:
        yield Use(PROCESS, "trajectories", plan.round_bytes[1], everywhere)


def _training_uses(
    config: RunConfig, plan: Plan, role: RoleLayout, memory: Memory, everywhere: frozenset[str]
) -> Iterator[Use]:
    name: TrainingRole = role.role  # pyright: ignore[reportAssignmentType]  # the caller checks
    train, num_ranks = train_config(config, name), max(1, len(role.workers))
    shares = train.backend.shares(train, num_ranks)
    is_trained = name in ("policy", "critic") and plan.verb != "eval"
    mine = {update_of(name)} if is_trained else {LOGPROBS}
    computes = frozenset(everywhere & (mine | {LOGPROBS}))
    leaves = frozenset(computes | {SYNC} & everywhere) if "weights" in role.offload else everywhere
    has_gpus = plan.layout.has_gpus
    yield Use(
        name, "weights", round(memory.weights_bytes * shares.weights), leaves if has_gpus else everywhere
    )
    size = _size_of(config, plan, name)
    width = memory.weights_bytes / max(1, memory.parameters)
    layers = size.num_layers if shares.gathered_layers is None else shares.gathered_layers
    gathered = round(layers * (memory.weights_bytes / size.num_layers))
    yield Use(name, "gathered weights", gathered, computes)
    precision = _precision(config, train, has_gpus=has_gpus, width=width)
    if is_trained:
        rests = "optimizer" in role.offload and has_gpus
        optimizer = round(memory.optimizer_bytes * shares.optimizer)
        yield Use(name, "optimizer states", optimizer, frozenset(mine) if rests else everywhere)
        batch = micro_batch(config, plan, train, num_ranks)
        if batch is not None:
            lora = config.model.lora if name == "policy" else None
            rank = 0 if lora is None else lora.rank
            parts = (shares.gradients, shares.activations)
            yield from _step_uses(size, memory, train, batch, *parts, precision, rank)
    infer = train.infer_batch_tokens or train.micro_batch_tokens
    batch = micro_batch(config, plan, train.model_copy(update={"micro_batch_tokens": infer}), num_ranks)
    if batch is not None and (name != "policy" or _computes_old_logprobs(plan)):
        layer = 4 * (3 * size.intermediate_size + 6 * size.hidden_size)
        logits = 0 if name == "critic" else _logits_bytes(size, train, batch.written, is_update=False)
        passing = round(batch.tokens * shares.activations) * layer
        part = ("activations", passing) if passing >= logits else ("logits", logits)
        yield Use(name, *part, frozenset({LOGPROBS} & everywhere))


def _size_of(config: RunConfig, plan: Plan, role: TrainingRole) -> ModelSize:
    assert plan.model_size is not None, "the caller checks"
    path = {"critic": config.critic.path, "reference": config.reference.path}.get(role)
    return (None if path is None else size_of_folder(path)) or plan.model_size


def _precision(config: RunConfig, train: TrainConfig, *, has_gpus: bool, width: float) -> str:
    """The key of `_SAVED`."""
    if width < BYTES["fp32"]:
        return "half"
    computes_in = training_dtype(config.model_copy(update={"train": train}), has_gpus=has_gpus)
    return "fp32" if computes_in == "fp32" else "autocast"


def saved_numbers(size: ModelSize, precision: str, adapter_rank: int = 0) -> float:
    """Numbers of 4 bytes that autograd saves per position and layer: a fit to steps of 16 shapes. Adapters
    save the input of their second product."""
    of_hidden, of_wide, of_heads = _SAVED[precision]
    of_heads -= 0.0 if size.has_head_norms else _HEAD_NORMS[precision]
    heads = (size.num_heads + size.num_kv_heads) * size.head_dim
    norms = 2 + size.num_heads + (size.num_heads + size.num_kv_heads) * size.has_head_norms
    adapters = adapter_rank * len(size.linear) / max(1, size.num_layers)
    wide = size.intermediate_size
    return of_hidden * size.hidden_size + of_wide * wide + of_heads * heads + norms + adapters


def _step_uses(
    size: ModelSize,
    memory: Memory,
    train: TrainConfig,
    batch: MicroBatch,
    of_gradients: float,
    of_activations: float,
    precision: str,
    adapter_rank: int,
) -> Iterator[Use]:
    """What a micro-batch's forward and backward pass takes: the largest sum of three moments. With several
    micro-batches, all gradients are there from the second on.

    The head's gradient: all layers are saved, and no layer has a gradient. The last layer's feed-forward
    network: the head's gradient and that of one matrix are there. With layers recomputed also the first
    layer, when the others have their gradients.
    """
    hidden, wide, num_layers = size.hidden_size, size.intermediate_size, size.num_layers
    layer, tokens = saved_numbers(size, precision, adapter_rank), batch.tokens * of_activations
    has_head = memory.role != "critic"
    logits = _logits_bytes(size, train, batch.written, is_update=True) if has_head else 0
    is_whole = memory.gradients_bytes >= 4 * memory.parameters  # not only adapters
    of_head = 4 * size.vocab_size * hidden if is_whole and has_head else 0
    of_matrix = 4 * hidden * wide if is_whole else 0
    all_layers = memory.gradients_bytes
    per_layer = max(0, all_layers - of_head) // num_layers
    kept = num_layers * (hidden if train.gradient_checkpointing else layer)
    again = layer if train.gradient_checkpointing else 0.0
    in_mlp = again + _IN_MLP[precision] * wide + 1.5 * hidden
    chunks = 2 * min(tokens * wide, _CHUNK_NUMBERS)
    moments = [
        (of_head, tokens * (kept + _AT_HEAD[precision] * hidden), logits),
        (of_head + of_matrix, tokens * (kept + in_mlp) + chunks, 0),
    ]
    if train.gradient_checkpointing:
        moments.append((max(0, all_layers - per_layer + of_matrix), tokens * in_mlp + chunks, 0))
    if batch.passes > 1:
        moments = [(all_layers, activations, logits) for _, activations, logits in moments]
    gradients, activations, logits = max(
        moments, key=lambda moment: moment[0] * of_gradients + 4 * moment[1] + moment[2]
    )
    stages = frozenset({update_of(memory.role)})
    yield Use(memory.role, "gradients", round(gradients * of_gradients), stages)
    yield Use(memory.role, "activations", round(4 * activations), stages)
    yield Use(memory.role, "logits", logits, stages)


def _logits_bytes(size: ModelSize, train: TrainConfig, written: int, *, is_update: bool) -> int:
    """Logits of the positions that the policy wrote, which are kept if all fit `train.logprob_chunk_bytes`,
    and a tile of them; in a backward pass two, and the gradient of the tile before."""
    whole = 4 * written * size.vocab_size
    tile = min(train.logprob_chunk_bytes, _TILE_BYTES, whole)
    tiles = max(2 * tile, tile + 2 * min(tile, whole - tile)) if is_update else tile
    return (whole if whole <= train.logprob_chunk_bytes else 0) + tiles


def _rollout_uses(
    config: RunConfig, plan: Plan, role: RoleLayout, everywhere: frozenset[str], capacity: int | None
) -> Iterator[Use]:
    """The engine's weights and cache. It sleeps while others use its devices, except in a pipeline."""
    sleeps = bool(plan.engines_in_turns) or plan.layout.mode == "in_process"
    stages = frozenset({ROLLOUT} & everywhere) if sleeps and not plan.is_pipelined else everywhere
    engine, size, has_gpus = config.rollout.engine, plan.model_size, plan.layout.has_gpus
    assert size is not None, "the caller checks"
    for memory in plan.memory:
        if memory.role.startswith("reward:"):
            yield Use(memory.role, "weights", memory.weights_bytes, everywhere)
    samples_in = BYTES[engine.dtype_in(config, size.parameters, has_gpus=has_gpus)]
    if engine.is_served:
        num_devices = engine.num_devices()
        if not num_devices:
            return
        weights = size.parameters * samples_in // num_devices
        yield Use("rollout", "weights", weights, stages)
        if has_gpus and capacity is not None:
            cache = max(0, round(engine.device_fraction * capacity) - weights)
            yield Use("rollout", "KV cache", cache, stages)
        buffers = 2 * config.rollout.weight_sync.bucket_bytes
        yield Use("rollout", "buffers for sync", buffers, everywhere & {SYNC})
        return
    if plan.layout.mode == "in_process":
        for memory in plan.memory:
            if memory.role in engine.held_bytes(config, size.parameters, has_gpus=has_gpus):
                yield Use("rollout", memory.role, memory.weights_bytes, everywhere)
    else:
        yield Use("rollout", "weights", size.parameters * samples_in, everywhere)
        largest = size.vocab_size * size.hidden_size * samples_in
        buffers = 2 * config.rollout.weight_sync.bucket_bytes + largest
        yield Use("rollout", "buffers for sync", buffers, everywhere & {SYNC})
    longest, running = plan.max_trajectory_tokens, plan.max_concurrent
    if longest is None or not running:
        return
    num_engines = max(1, len(role.workers))
    running = min(math.ceil(running / num_engines), engine.max_running)
    rows = min(1 << (running - 1).bit_length(), engine.max_running)
    tokens = rows * -(-longest // 32) * 32  # the cache's rows double, and their lengths are multiples of 32
    if (budget := engine.kv_budget(has_gpus=has_gpus)) is not None:
        tokens = min(tokens, budget)
    yield Use("rollout", "KV cache", tokens * (plan.kv_bytes_per_token or 0), stages)
    yield Use("rollout", "states", rows * plan.state_bytes_per_sequence, stages)
    yield Use("rollout", "logits", 3 * 4 * running * size.vocab_size, stages)
