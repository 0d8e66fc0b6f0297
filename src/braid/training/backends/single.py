"""Training in this process, on one device."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from braid.config.train import TrainConfig
from braid.errors import CheckpointError, TrainingError
from braid.models.base import Output, TrainableModel, copy_weights
from braid.models.batch import PackedBatch
from braid.models.flops import Flops
from braid.models.logprobs import TiledLogits
from braid.models.lora import merged_weights
from braid.models.value_head import ValueHead
from braid.training.backend import Diagnostics, HeldBytes, Loss, StepReport, Work
from braid.training.loss_scale import LossScale
from braid.training.offload import HOST, move_states, move_weights, moved, num_bytes, release_memory
from braid.training.optimizer import (
    build_optimizer,
    load_optimizer_state,
    lr_factor,
    master_weights,
    optimizer_state,
    set_rate,
)
from braid.training.packing import grouped_micro_batches, pack, unpack
from braid.training.shards import Written, read_whole, write_state
from braid.types import Row

if TYPE_CHECKING:  # imports transformers
    from braid.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)


class SingleBackend:
    """A model, its optimizer and its learning rate schedule. See training.backend.TrainingBackend.

    A step whose loss or gradient is not finite, or that exceeds a limit of its loss, changes neither weights
    nor optimizer state (moments and step count), but still advances the schedule, which follows the run's
    steps. Gradients are allocated only during a step.

    Trainable half-precision weights have float32 master weights: the optimizer updates the masters, and the
    state holds them in place of the weights (see optimizer.master_weights). They are offloaded together with
    the optimizer's moments.
    """

    def __init__(
        self,
        model: TrainableModel,
        config: TrainConfig,
        *,
        total_steps: int,
        device: torch.device,
        keeps_weights: bool = False,
    ) -> None:
        """`total_steps` is the length of the schedule; 0 for a model that is never trained, which has no
        optimizer. With `keeps_weights` the weights stay on the device regardless of `config.offload`, because
        they are used elsewhere too."""
        self._model = model
        self._config = config
        self._total_steps = total_steps
        self._device = device
        self._leaves_weights = config.offload.weights and not keeps_weights
        self._masters: dict[Tensor, Tensor] = {}
        self._optimizer = self._build_optimizer() if total_steps else None
        is_fp16 = config.autocast == "fp16" or any(
            p.dtype == torch.float16 for p in model.module.parameters()
        )
        self._scale = LossScale(config.grad_scaler) if config.grad_scaler and is_fp16 else None
        self._work = Work()
        self._num_steps = 0
        self._skipped_in_row = 0

    def data_place(self) -> tuple[int, int]:
        """See ShardedBackend: a single share of all rows."""
        return 0, 1

    def infer(
        self,
        rows: Sequence[Row],
        outputs: frozenset[Output],
        spare: Row | None = None,  # noqa: ARG002
    ) -> list[dict[str, NDArray[np.float32]]]:
        """See TrainingBackend. `spare` is unused on a single rank."""
        start = time.perf_counter()
        results: list[dict[str, NDArray[np.float32]]] = [{} for _ in rows]
        with torch.no_grad(), self._autocast():
            for indices in self._infer_batches(rows):
                batch = self._pack([rows[i] for i in indices], with_fields=False)
                for name, flat in self._forward(batch, outputs).items():
                    for index, array in zip(indices, unpack(flat, batch), strict=True):
                        results[index][name] = array
        if self._config.count_flops:
            self._work.infer_flops += self._flops_of(rows).forward
            self._work.infer_s += time.perf_counter() - start
        return results

    def use_reference(self, logits: Callable[[PackedBatch], TiledLogits]) -> None:
        """See ShardedBackend."""
        cast("CausalLM", self._model).reference = logits

    def logits(self, batch: PackedBatch) -> TiledLogits:
        """See ShardedBackend."""
        dtype = autocast_dtype(self._config, self._device)
        # Called within the policy's pass: not in its autocast type, nor with its cache of converted weights,
        # which knows adapters by the tensors that AdapterReference lends to the reference.
        with (
            torch.no_grad(),
            torch.autocast(self._device.type, dtype, enabled=dtype is not None, cache_enabled=False),
        ):
            return cast("Any", self._forward(batch, frozenset({"logits"}))["logits"])

    def train(
        self,
        rows: Sequence[Row],
        weights: Sequence[float],
        loss: Loss,
        spare: Row | None = None,  # noqa: ARG002
    ) -> StepReport:
        """See TrainingBackend. Raises TrainingError after `max_skipped_steps` consecutive skipped steps."""
        start = time.perf_counter()
        if (head := self._model.value_head) is not None and head.normalizes:
            self._observe(head, self._returns(rows))
        running = Running(self._device)
        try:
            self._accumulate(rows, weights, loss, running)
            num_tokens = sum(row.num_tokens for row in rows)
            report = self._report(running, num_tokens, loss.limits)
            if not (report.is_skipped or report.is_stopped):
                self._update(report)
        finally:
            self._drop_gradients()
        report = self._scaled(report)
        if self._config.count_flops:
            self._work.train_flops += self._flops_of(rows).training
            self._work.train_s += time.perf_counter() - start
        self._count(report, loss.limits)
        return report

    def _build_optimizer(self) -> torch.optim.Optimizer | None:
        self._masters = master_weights(self._model.module)
        return build_optimizer(
            self._model.module, self._config.optimizer, self._model.value_head, self._masters
        )

    def _observe(self, head: ValueHead, returns: NDArray[np.floating]) -> None:
        if head.weight not in self._masters:
            head.observe(returns)
            return
        head.observe(returns, [(self._masters[head.weight], self._masters[head.bias])])
        self._spread_masters(head.parameters())

    def _returns(self, rows: Sequence[Row]) -> NDArray[np.floating]:
        """Returns at all positions of a step that the policy wrote."""
        return np.concatenate([row.fields["returns"][row.mask] for row in rows])

    def _accumulate(
        self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, running: Running
    ) -> None:
        """Run forward and backward passes over all rows of a step."""
        for batch in self._batches(rows, weights, loss):
            self._learn(batch, loss, running)
        if self._scale is not None:
            self._scale.unscale(self._gradients())

    def _drop_gradients(self) -> None:
        self._model.module.zero_grad(set_to_none=True)
        for master in self._masters.values():
            master.grad = None

    def _flops_of(self, rows: Sequence[Row]) -> Flops:
        return self._model.flops([len(row) for row in rows], sum(row.num_tokens for row in rows))

    def _batches(self, rows: Sequence[Row], weights: Sequence[float], loss: Loss) -> Iterator[PackedBatch]:
        """The micro-batches of a step."""
        for indices in self._micro_batches(rows, loss):
            yield self._pack([rows[i] for i in indices], [weights[i] for i in indices])

    def _pack(
        self, rows: Sequence[Row], weights: Sequence[float] | None = None, *, with_fields: bool = True
    ) -> PackedBatch:
        return pack(rows, self._device, weights=weights, with_fields=with_fields)

    def _report(self, running: Running, num_tokens: int, limits: Mapping[str, float]) -> StepReport:
        return running.report(self._grad_norm(), self._lr(), num_tokens, limits)

    def _learn(self, batch: PackedBatch, loss: Loss, running: Running) -> None:
        """Forward and backward pass of one micro-batch."""
        with self._autocast():
            outputs = self._forward(batch, loss.outputs)
        share, diagnostics = loss.compute(outputs, batch)
        (share if self._scale is None else share * self._scale.value).backward()
        running.add(share.detach(), diagnostics)

    def _forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        return self._model.forward(batch, outputs)

    def _micro_batches(self, rows: Sequence[Row], loss: Loss) -> list[list[int]]:
        config, is_whole = self._config, loss.whole_trajectories
        return grouped_micro_batches(
            rows, config.micro_batch_tokens, config.micro_batch_rows, whole_trajectories=is_whole
        )

    def _infer_batches(self, rows: Sequence[Row]) -> list[list[int]]:
        config = self._config
        max_tokens = config.infer_batch_tokens or config.micro_batch_tokens
        return grouped_micro_batches(rows, max_tokens, config.infer_batch_rows)

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = autocast_dtype(self._config, self._device)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype)  # pyright: ignore[reportReturnType]

    def _lr(self) -> float:
        optimizer = self._config.optimizer
        return optimizer.lr * lr_factor(self._num_steps, self._total_steps, optimizer.schedule)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.module.parameters() if p.grad is not None]

    def _grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients."""
        return torch.nn.utils.get_total_norm(self._gradients())

    def _update(self, report: StepReport) -> None:
        assert self._optimizer is not None, "the model was built without an optimizer"
        limit = self._config.max_grad_norm
        if limit is not None and report.grad_norm > limit:
            torch._foreach_mul_(self._gradients(), limit / report.grad_norm)
        set_rate(self._optimizer, report.lr)
        if self._config.offload.optimizer:
            self._move_optimizer(self._device)
        self._step(self._optimizer)
        self._rest_optimizer()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        for p, master in self._masters.items():
            master.grad = p.grad
        optimizer.step()
        self._spread_masters(self._masters)

    @torch.no_grad()
    def _spread_masters(self, parameters: Iterable[Tensor]) -> None:
        """Set parameters to their master weights, rounded."""
        for p in parameters:
            p.copy_(self._masters[p])

    def _rest_optimizer(self) -> None:
        """Offload the optimizer state between steps if the config says so."""
        if self._optimizer is not None and self._config.offload.optimizer:
            self._move_optimizer(HOST)

    def _move_optimizer(self, device: torch.device) -> None:
        assert self._optimizer is not None, "the model was built without an optimizer"
        move_states(self._optimizer, device)
        for master in self._masters.values():
            master.data = moved(master.data, device)

    def _scaled(self, report: StepReport) -> StepReport:
        """Add the loss scale and overflow flag to the report, and update the scale. A loss that is not finite
        before scaling, or a gradient that is not finite at the minimum scale, is not an overflow."""
        scale = self._scale
        if scale is None:
            return report
        is_overflow = report.is_skipped and math.isfinite(report.loss) and scale.can_shrink
        report = replace(report, is_overflow=is_overflow, loss_scale=scale.value)
        if is_overflow or not report.is_skipped:
            scale.update(is_overflow=is_overflow)
        return report

    def _count(self, report: StepReport, limits: Mapping[str, float]) -> None:
        self._num_steps += 1
        if report.is_overflow:
            logger.info(
                "step %d of %d: gradient overflow at a loss scale of %g; halving it",
                self._num_steps,
                self._total_steps,
                report.loss_scale,
            )
            return
        if report.is_stopped:
            means = {name: report.metrics[name] for name in limits}
            what = ", ".join(
                f"{name} {total / count:g} is above {limits[name]:g}"
                for name, (total, count) in means.items()
                if total > count * limits[name]
            )
            logger.warning("step %d of %d not taken: %s", self._num_steps, self._total_steps, what)
        if not report.is_skipped:
            self._skipped_in_row = 0
            return
        self._skipped_in_row += 1
        what = f"loss {report.loss:g}, gradient norm {report.grad_norm:g}"
        logger.warning("step %d of %d skipped: %s", self._num_steps, self._total_steps, what)
        if self._skipped_in_row >= self._config.max_skipped_steps:
            finite = self._num_steps - self._skipped_in_row
            raise TrainingError(
                f"{self._skipped_in_row} consecutive optimizer steps had a loss or gradient that is not finite "
                f"(train.max_skipped_steps). The last was step {self._num_steps} of {self._total_steps} ({what}); "
                f"{f'the last finite one was step {finite}' if finite else 'no step was finite'}. Lower train.optimizer.lr, or "
                "check the stored samples for extreme rewards"
            )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainingBackend."""
        return self._model.named_weights()

    def full_weights(self, merged: bool = False) -> dict[str, Tensor]:
        """See ShardedBackend; live tensors on their current device."""
        return dict(self.iter_weights(merged=merged))

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See ShardedBackend."""
        weights = merged_weights(self._model.module) if merged else self.named_weights()
        return ((name, tensor.detach()) for name, tensor in weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See ShardedBackend."""
        copy_weights(weights, self.named_weights())
        copy_weights(weights, self._trained_weights())

    def _trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights in the precision in which they are trained."""
        return ((name, self._masters.get(tensor, tensor).detach()) for name, tensor in self.named_weights())

    def _trained_parameters(self) -> dict[str, Tensor]:
        """The tensors that the optimizer updates, by the parameter's name in the module."""
        return {name: self._masters.get(p, p) for name, p in self._model.module.named_parameters()}

    def to_host(self) -> None:
        """See TrainingBackend. Moves only weights: gradients are allocated only during a step, and optimizer
        states are offloaded after each step."""
        if self._leaves_weights:
            move_weights(self._model.module, HOST)
        release_memory()

    def to_device(self) -> None:
        """See TrainingBackend."""
        if self._leaves_weights:
            move_weights(self._model.module, self._device)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """See TrainingBackend."""
        return self._model.flops(lengths, num_outputs)

    def take_work(self) -> Work:
        """See TrainingBackend."""
        work, self._work = self._work, Work()
        return work

    def held_bytes(self) -> HeldBytes:
        """See TrainingBackend."""
        weights = list(self._model.module.parameters())
        trained = [self._masters.get(p, p) for p in weights if p.requires_grad] if self._optimizer else []
        return HeldBytes(
            weights=sum(p.nbytes for p in weights),
            gradients=sum(p.nbytes for p in trained),
            optimizer=num_bytes(self._optimizer) + sum(p.nbytes for p in self._masters.values()),
            is_on_device=all(p.device.type == self._device.type for p in weights),
        )

    def state(self) -> dict[str, Any]:
        """See TrainingBackend."""
        optimizer = self._optimizer
        return {
            "weights": dict(self._trained_weights()),
            "optimizer": None
            if optimizer is None
            else optimizer_state(optimizer, self._trained_parameters()),
            **self._counters(),
        }

    def save(self, folder: str) -> Written:
        """See ShardedBackend. Without a process group the state is returned for the caller to write."""
        state = self.state()
        return write_state(Path(folder), state) if dist.is_initialized() else Written(state)

    def restore(self, saved: dict[str, Any], folder: str) -> None:
        """See ShardedBackend."""
        self.load(saved if "weights" in saved else {**saved, **read_whole(Path(folder))})

    def _counters(self) -> dict[str, Any]:
        return {
            "num_steps": self._num_steps,
            "skipped_in_row": self._skipped_in_row,
            "loss_scale": None if self._scale is None else self._scale.state(),
        }

    def _load_counters(self, state: Mapping[str, Any]) -> None:
        if self._scale is not None and state.get("loss_scale") is not None:
            self._scale.load(state["loss_scale"])
        self._num_steps, self._skipped_in_row = state["num_steps"], state["skipped_in_row"]

    def load(self, state: dict[str, Any]) -> None:
        """See TrainingBackend."""
        _check_same_model(dict(self.named_weights()), state["weights"])
        self.load_weights(state["weights"])
        if self._optimizer is not None:
            load_optimizer_state(self._optimizer, self._trained_parameters(), state["optimizer"])
            self._rest_optimizer()
        self._load_counters(state)


class Running:
    """Loss and metrics of a step, accumulated on the device; `report` is the step's only synchronization with
    it."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._means: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, share: Tensor, diagnostics: Diagnostics) -> None:
        self._loss += share
        for name, pair in diagnostics.means.items():
            pair = torch.stack([x.double() for x in pair])
            self._means[name] = self._means[name] + pair if name in self._means else pair
        for name, value in diagnostics.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def merge(self, add: Callable[[Tensor], Tensor], greatest: Callable[[Tensor], Tensor]) -> None:
        """Reduce over ranks: `add` and `greatest` all-reduce a tensor to its sum and maximum."""
        add(self._loss)
        for name in sorted(self._means):
            self._means[name] = add(self._means[name])
        for name in sorted(self._maxima):
            self._maxima[name] = greatest(self._maxima[name])

    def report(
        self, grad_norm: Tensor, lr: float, num_tokens: int, limits: Mapping[str, float]
    ) -> StepReport:
        """Copy the numbers to the host and decide whether the step is skipped or stopped."""
        parts = [
            self._loss[None],
            grad_norm[None],
            *self._means.values(),
            *(x[None] for x in self._maxima.values()),
        ]
        loss, norm, *rest = torch.cat([part.double() for part in parts]).tolist()
        pairs, greatest = rest[: 2 * len(self._means)], rest[2 * len(self._means) :]
        metrics = dict(zip(self._means, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        return StepReport(
            loss=loss,
            grad_norm=norm,
            lr=lr,
            is_skipped=not is_finite,
            is_stopped=is_finite
            and any(metrics[name][0] > metrics[name][1] * limits[name] for name in limits),
            num_tokens=num_tokens,
            metrics=metrics,
            maxima=dict(zip(self._maxima, greatest, strict=True)),
        )


def autocast_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """Autocast type of forward passes; None to compute in the type of the weights."""
    kind = config.autocast
    if kind == "none" or (kind == "auto" and device.type != "cuda"):
        return None
    return torch.float16 if kind == "fp16" else torch.bfloat16


def _check_same_model(mine: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    wrong = sorted(mine.keys() ^ saved.keys()) or [n for n in mine if mine[n].shape != saved[n].shape]
    if wrong:
        name = wrong[0]
        here, there = (f"{tuple(of[name].shape)}" if name in of else "absent" for of in (mine, saved))
        raise CheckpointError(
            f"the checkpoint is of a different model: {name} is {here} in this run and {there} in the checkpoint "
            f"({len(wrong)} weights differ); resume with the model of the checkpoint, or start a new run"
        )
