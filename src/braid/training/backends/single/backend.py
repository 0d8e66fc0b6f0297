"""Training in this process, on one device."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from braid.checks import add_sums
from braid.checks.sampler import TOKEN_SUMS
from braid.config.train import TrainConfig
from braid.errors import TrainingError
from braid.models.base import Output, TrainableModel, check_fit
from braid.models.batch import PackedBatch
from braid.models.flops import Flops
from braid.models.logprobs import TiledLogits
from braid.models.lora import merged_weights
from braid.models.routing import Routed
from braid.models.value_head import ValueHead
from braid.training.backend import Diagnostics, HeldBytes, Loss, StepReport, Work
from braid.training.balance import Balance, Load, load_metrics
from braid.training.loss_scale import LossScale
from braid.training.offload import (
    HOST,
    is_out_of_memory,
    move_states,
    move_weights,
    moved,
    num_bytes,
    release_memory,
)
from braid.training.optimizer import build_optimizer, lr_factor, master_weights, peak_rates, set_rate
from braid.training.packing import grouped_micro_batches, pack, unpack, unpack_choices
from braid.training.shards import (
    Boxes,
    WholeMoments,
    Written,
    joined,
    read_into,
    stored_moments,
    write_state,
)
from braid.types import Row

if TYPE_CHECKING:  # imports transformers
    from braid.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)
T = TypeVar("T")


class SingleBackend:
    """A model, its optimizer and its learning rate schedule. See training.backend.TrainingBackend.

    A step whose loss or gradient is not finite, or that exceeds a limit of its loss, changes neither weights
    nor optimizer state (moments and step count), but still advances the schedule, which follows the run's
    steps. Gradients are allocated only during a step.

    Trainable half-precision weights have float32 master weights: the optimizer updates the masters, and the
    state holds them in place of the weights (see optimizer.master_weights). They are offloaded together with
    the optimizer's moments.
    """

    _num_sharers = 1
    """Number of ranks that share each row."""

    def __init__(
        self,
        model: TrainableModel,
        config: TrainConfig,
        *,
        total_steps: int,
        device: torch.device,
    ) -> None:
        """`total_steps` is the length of the schedule; 0 for a model that is never trained, which has no
        optimizer."""
        self._model = model
        self._config = config
        self._total_steps = total_steps
        self._device = device
        self._leaves_weights = config.offload.weights
        self._masters: dict[Tensor, Tensor] = {}
        self._optimizer: Any = self._build_optimizer() if total_steps else None
        is_fp16 = config.autocast == "fp16" or any(
            p.dtype == torch.float16 for p in model.module.parameters()
        )
        self._scale = LossScale(config.grad_scaler) if config.grad_scaler and is_fp16 else None
        self._spare: PackedBatch | None = None
        self._runs_tower = False
        self._work = Work()
        self._num_steps = self._skipped_in_row = 0
        self._micro_batch_tokens = config.micro_batch_tokens

    @property
    def model(self) -> TrainableModel:
        """The model that is trained."""
        return self._model

    def keep_weights(self) -> None:
        """Leave the weights on the device regardless of `config.offload`, because they are used elsewhere
        too."""
        self._leaves_weights = False

    def data_place(self) -> tuple[int, int]:
        """See TrainingBackend: a single share of all rows."""
        return 0, 1

    def infer(
        self, rows: Sequence[Row], outputs: frozenset[Output], spare: Row | None = None
    ) -> list[dict[Output, NDArray[Any]]]:
        start, config = time.perf_counter(), self._config
        self._runs_tower = self._needs_tower(rows, trains=False)
        results: list[dict[Output, NDArray[Any]]] = [{} for _ in rows]
        max_tokens = config.infer_batch_tokens or config.micro_batch_tokens
        cuts = grouped_micro_batches(rows, max_tokens, config.infer_batch_rows)
        batches = self._batches(rows, cuts, self._num_passes(len(cuts)), spare)
        with torch.no_grad():
            for number, (batch, flat) in enumerate(self._outputs(batches, outputs)):
                for name in outputs if number < len(cuts) else ():
                    arrays = (unpack_choices if name in ("experts", "top_tokens") else unpack)(
                        flat[name], batch
                    )
                    for index, array in zip(cuts[number], arrays, strict=True):
                        results[index][name] = array
        if config.count_flops:
            self._work.infer_flops += self._flops_of(rows).forward
            self._work.infer_s += time.perf_counter() - start
        return results

    def _outputs(
        self, batches: Iterable[PackedBatch], outputs: frozenset[Output]
    ) -> Iterator[tuple[PackedBatch, dict[str, Tensor]]]:
        """Forward passes over `batches`."""
        for batch in batches:
            with self._autocast():
                flat = self._forward(batch, outputs)
            yield batch, flat

    def use_reference(self, logits: Callable[[PackedBatch], TiledLogits]) -> None:
        cast("CausalLM", self._model).reference = logits

    def logits(self, batch: PackedBatch) -> TiledLogits:
        dtype = autocast_dtype(self._config, self._device)
        # Called within the policy's pass: not in its autocast type, nor with its cache of converted weights,
        # which knows adapters by the tensors that AdapterReference lends to the reference.
        with (
            torch.no_grad(),
            torch.autocast(self._device.type, dtype, enabled=dtype is not None, cache_enabled=False),
        ):
            return cast("Any", self._forward(batch, frozenset({"logits"}))["logits"])

    def train(
        self, rows: Sequence[Row], weights: Sequence[float], loss: Loss, spare: Row | None = None
    ) -> StepReport:
        """See TrainingBackend. All ranks return the same report. Raises TrainingError after
        `max_skipped_steps` consecutive skipped steps."""
        start = time.perf_counter()
        self._runs_tower = self._needs_tower(rows, trains=True)
        head = self._model.value_head
        if head is not None and head.normalizes and "values" in loss.outputs:
            local_returns = [row.fields["returns"][row.mask] for row in rows] if self._counts_rows else []
            returns = self._over_ranks(np.concatenate([np.zeros(0, np.float32), *local_returns]))
            self._observe(head, np.concatenate(returns))
        config = self._config
        try:
            while True:
                cuts = self._cuts(rows, loss, self._micro_batch_tokens)
                num_passes = self._num_passes(len(cuts))
                try:
                    running = self._running(rows, cuts, num_passes, spare)
                    batches = self._batches(rows, cuts, num_passes, spare, weights)
                    self._accumulate(batches, num_passes, loss, running)
                    break
                except RuntimeError as error:
                    smaller = self._smaller(error, cuts, rows, loss)
                self._start_again(smaller)  # not in the except clause, where the error holds the graph
            if self._scale is not None:
                self._scale_gradients(1.0 / self._scale.value)
            report = self._report(running, sum(row.num_tokens for row in rows), loss.limits)
            if not (report.is_skipped or report.is_stopped):
                probes = self._probes() if loss.is_checked else []
                self._update(report)
                report.checks.update(_changes(probes))
        finally:
            self._drop_gradients()
        if config.count_flops:
            self._work.train_flops += self._flops_of(rows).training
            self._work.train_s += time.perf_counter() - start
        self._count(report, loss.limits)
        return report

    def _cuts(self, rows: Sequence[Row], loss: Loss, max_tokens: int) -> list[list[int]]:
        """The rows of each micro-batch of a step."""
        whole = loss.whole_trajectories
        return grouped_micro_batches(
            rows, max_tokens, self._config.micro_batch_rows, whole_trajectories=whole
        )

    def _running(
        self, rows: Sequence[Row], cuts: Sequence[Sequence[int]], num_passes: int, spare: Row | None
    ) -> Running:
        """The sums of a step before its first pass."""
        has_experts = self._model.num_experts > 0
        here = sum(map(len, rows)) if self._counts_rows else 0
        num_positions = self._over_ranks(here) if has_experts else [here]
        running = Running(self._device, sum(num_positions))
        if self._config.router_aux_coef and has_experts:
            is_one_pass = len(num_positions) == num_passes == 1
            counts = None if is_one_pass else self._choices(self._batches(rows, cuts, num_passes, spare))
            running.balance = Balance(self._config.router_aux_coef, running.num_positions, counts)
        return running

    def _smaller(
        self, error: RuntimeError, cuts: Sequence[Sequence[int]], rows: Sequence[Row], loss: Loss
    ) -> int:
        """Tokens of micro-batches of which there are more than these `cuts`, with which memory ran out: from
        half of the largest on. Raises `error` if it is another, if they cannot be smaller, or on ranks,
        whose passes are collective."""
        if not is_out_of_memory(error) or dist.is_initialized():
            raise error
        tokens = min(self._micro_batch_tokens, max(sum(len(rows[i]) for i in cut) for cut in cuts))
        while tokens > 1:
            tokens //= 2
            if len(self._cuts(rows, loss, tokens)) > len(cuts):
                return tokens
        error.add_note(
            "a micro-batch of a single row does not fit: set train.gradient_checkpointing=true, or lower "
            "rollout.sampling.max_new_tokens; braid plan says what takes the memory"
        )
        raise error

    def _start_again(self, smaller: int) -> None:
        """Free what the step has computed, to take it in micro-batches of `smaller` tokens, as all steps
        from here on. The loss is normalized over the step, so the gradients are the same up to rounding."""
        self._drop_gradients()
        release_memory()
        before, self._micro_batch_tokens = self._micro_batch_tokens, smaller
        logger.warning(
            "step %d of %d ran out of memory in micro-batches of up to %d tokens; taking it again in "
            "micro-batches of %d, as all steps from here on (set train.micro_batch_tokens=%d)",
            self._num_steps + 1,
            self._total_steps,
            before,
            smaller,
            smaller,
        )

    def _build_optimizer(self) -> torch.optim.Optimizer:
        self._masters = master_weights(self._model.module)
        config = self._config.optimizer
        return build_optimizer(self._model.module, config, peak_rates(self._model, config), self._masters)

    @property
    def _counts_rows(self) -> bool:
        """Whether this rank counts its rows, among the ranks that share them."""
        return True

    @property
    def _gradient_factor(self) -> float:
        """By how much the loss is multiplied before the backward pass, since gradients are averaged over
        ranks."""
        return 1.0

    def _probes(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of the first elements of each trained tensor on this rank: the tensor that the optimizer updates,
        a copy of it, and whether there is a gradient that AdamW does not take for 0. Empty where a library
        owns the optimizer."""
        trained = [p for p in self._model.module.parameters() if p.grad is not None]
        heads = [(_head(self._masters.get(p, p)), _head(p.grad)) for p in trained]
        return [(weights, weights.clone(), gradient.abs() > _LEAST_GRADIENT) for weights, gradient in heads]

    def _over_ranks(self, value: T) -> list[T]:
        """`value` of every rank."""
        return [value]

    def _num_passes(self, num_micro_batches: int) -> int:
        """Passes that every rank runs: the most micro-batches of any of them."""
        return max(self._over_ranks(num_micro_batches))

    @torch.no_grad()
    def _observe(self, head: ValueHead, returns: NDArray[np.floating]) -> None:
        """Update the head's statistics with the returns of a step at the positions that the policy wrote."""
        masters = {p: self._masters[p] for p in (head.weight, head.bias) if p in self._masters}
        head.observe(returns, [(masters[head.weight], masters[head.bias])] if masters else [])
        for p, master in masters.items():
            p.copy_(master)

    def _accumulate(
        self, batches: Iterable[PackedBatch], num_passes: int, loss: Loss, running: Running
    ) -> None:
        """Run the forward and backward passes of a step."""
        routed: frozenset[Output] = frozenset({"routed"} if self._model.num_experts else ())
        for number, batch in enumerate(batches, start=1):
            with self._synced(is_last=number == num_passes):
                with self._autocast():
                    outputs: dict[str, Any] = self._forward(batch, loss.outputs | routed)
                share, diagnostics = loss.compute(outputs, batch)
                total = self._counted(share, diagnostics, batch, running)
                if self._model.num_experts:
                    total = total + self._balanced(outputs["routed"], batch, running)
                self._go_back(total)

    def _balanced(self, routed: Routed, batch: PackedBatch, running: Running) -> Tensor | float:
        """The scaled load-balancing loss of a micro-batch, counted in `running`. With sequence parallelism
        each rank has that of its slice. All ranks have the same graph, also for a spare row."""
        balance = None if running.balance is None else running.balance.share(routed)
        if batch is not self._spare:
            running.add_routed(routed, balance)
        elif balance is not None:
            balance = balance * 0.0
        return 0.0 if balance is None else balance if self._scale is None else balance * self._scale.value

    @torch.no_grad()
    def _choices(self, batches: Iterable[PackedBatch]) -> Tensor:
        """Routed.counts over the micro-batches of all ranks, from forward passes."""
        counts = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch, outputs in self._outputs(batches, frozenset({"routed"})):
            if batch is not self._spare:
                counts = counts + cast("Any", outputs["routed"]).counts
        parts = [part for part in self._over_ranks(counts.cpu()) if part.ndim]
        return torch.stack(parts).sum(0).to(self._device)

    def _counted(
        self, share: Tensor, diagnostics: Diagnostics, batch: PackedBatch, running: Running
    ) -> Tensor:
        """The scaled loss of a micro-batch, whose `share` of the step's loss is counted in `running`."""
        if batch is self._spare:
            share = share * 0.0
        elif self._counts_rows:
            running.add(share.detach(), diagnostics)
            if diagnostics.weight is not None and share.requires_grad:
                share.register_hook(partial(running.weigh, diagnostics.weight))
        return share if self._scale is None else share * self._scale.value

    def _synced(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Context for one forward and backward pass. Gradients must be synchronized in the last pass at the
        latest."""
        return nullcontext()

    def _go_back(self, loss: Tensor) -> None:
        loss.backward()

    def _drop_gradients(self) -> None:
        self._model.module.zero_grad(set_to_none=True)
        for master in self._masters.values():
            master.grad = None

    def _flops_of(self, rows: Sequence[Row]) -> Flops:
        """This rank's part of the FLOPs of `rows`."""
        whole = self._model.flops([len(row) for row in rows], sum(row.num_tokens for row in rows))
        return Flops(whole.forward // self._num_sharers, whole.training // self._num_sharers)

    def _batches(
        self,
        rows: Sequence[Row],
        cuts: Sequence[Sequence[int]],
        num_passes: int,
        spare: Row | None,
        weights: Sequence[float] | None = None,
    ) -> Iterator[PackedBatch]:
        """The micro-batches `cuts` of `rows`, then the spare row until there are `num_passes`. For training
        with `weights`."""
        for indices in cuts:
            of_cut = None if weights is None else [weights[i] for i in indices]
            yield self._pack([rows[i] for i in indices], of_cut)
        if num_passes > len(cuts):
            assert spare is not None, "ranks have a spare row"
            self._spare = self._pack([spare], None if weights is None else [0.0])
            yield from itertools.repeat(self._spare, num_passes - len(cuts))

    def _pack(self, rows: Sequence[Row], weights: Sequence[float] | None) -> PackedBatch:
        batch = pack(rows, self._device, weights=weights, with_fields=weights is not None)
        return replace(batch, runs_tower=True) if self._runs_tower else batch

    def _needs_tower(self, rows: Sequence[Row], *, trains: bool) -> bool:
        """Whether the vision tower runs also in passes without images: where some rank has images in this
        call, since all ranks then gather the tower; and in a step without any, in which a trained tower has
        a gradient of 0, as in any other layout, and not none, with which an optimizer leaves its moments as
        they are. The spare row is one of some rank's."""
        vision = self._model.vision
        if vision is None:
            return False
        have_images = self._over_ranks(any(row.images for row in rows))
        return len(have_images) > 1 if any(have_images) else trains and vision.is_trained

    def _report(self, running: Running, num_tokens: int, limits: Mapping[str, float]) -> StepReport:
        """Report of the step over the rows of all ranks, the same on each."""
        local_tokens = num_tokens if self._counts_rows else 0
        load = running.load.numbers()
        parts = self._over_ranks((*running.numbers(self._grad_norm()), load, local_tokens))
        metrics: dict[str, tuple[float, float]] = {}
        maxima: dict[str, float] = {}
        checks: dict[str, float] = {}
        for _, _, means, greatest, sums, _, _ in parts:
            add_sums(checks, sums)
            for name, (total, count) in means.items():
                before = metrics.get(name, (0.0, 0.0))
                metrics[name] = (before[0] + total, before[1] + count)
            for name, value in greatest.items():
                maxima[name] = max(value, maxima.get(name, -math.inf))
        metrics |= load_metrics([part[5] for part in parts], running.num_positions)
        loss, norm = sum(part[0] for part in parts), parts[0][1]
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        optimizer, scale = self._config.optimizer, self._scale
        if "loss_weight" in checks:  # of the gradients, to which the ranks' own factors belong
            checks["loss_weight"] /= self._gradient_factor * (1.0 if scale is None else scale.value)
        return StepReport(
            loss=loss,
            grad_norm=norm,
            lr=optimizer.lr * lr_factor(self._num_steps, self._total_steps, optimizer.schedule),
            is_skipped=not is_finite,
            is_stopped=is_finite
            and any(metrics[name][0] > metrics[name][1] * limits[name] for name in limits),
            num_tokens=sum(part[-1] for part in parts),
            # A gradient that is not finite at the lowest scale is the model's fault.
            is_overflow=scale is not None and scale.can_shrink and not is_finite and math.isfinite(loss),
            loss_scale=None if scale is None else scale.value,
            metrics=metrics,
            maxima=maxima,
            checks=checks,
        )

    def _forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        return self._model.forward(batch, outputs)

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = autocast_dtype(self._config, self._device)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self._device.type, dtype)  # pyright: ignore[reportReturnType]

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.module.parameters() if p.grad is not None]

    def _grad_norm(self) -> Tensor:
        """Global L2 norm of the gradients."""
        return torch.nn.utils.get_total_norm(self._gradients())

    def _scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_(self._gradients(), factor)

    def _update(self, report: StepReport) -> None:
        assert self._optimizer is not None, "the model was built without an optimizer"
        limit = self._config.max_grad_norm
        if limit is not None and report.grad_norm > limit:
            self._scale_gradients(limit / report.grad_norm)
        set_rate(self._optimizer, report.lr)
        if self._config.offload.optimizer:
            self._move_optimizer(self._device)
        self._step()
        self._rest_optimizer()

    def _step(self) -> None:
        for p, master in self._masters.items():
            master.grad = p.grad
        self._optimizer.step()
        self._spread()

    @torch.no_grad()
    def _spread(self) -> None:
        """Set parameters to their master weights, rounded."""
        for p, master in self._masters.items():
            p.copy_(master)

    def _rest_optimizer(self) -> None:
        """Offload the optimizer state between steps if the config says so."""
        if self._optimizer is not None and self._config.offload.optimizer:
            self._move_optimizer(HOST)

    def _move_optimizer(self, device: torch.device) -> None:
        move_states(self._optimizer, device)
        for master in self._masters.values():
            master.data = moved(master.data, device)

    def _count(self, report: StepReport, limits: Mapping[str, float]) -> None:
        self._num_steps += 1
        if self._scale is not None and (report.is_overflow or not report.is_skipped):
            self._scale.update(is_overflow=report.is_overflow)
        if report.is_overflow:
            logger.info(
                "step %d of %d: gradient overflow at a loss scale of %g; halving it",
                self._num_steps,
                self._total_steps,
                report.loss_scale,
            )
            return
        if report.is_stopped:
            what = ", ".join(
                f"{name} {total / count:g} is above {limit:g}"
                for name, limit in limits.items()
                for total, count in [report.metrics[name]]
                if total > count * limit
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
                f"{self._skipped_in_row} consecutive optimizer steps had a loss or gradient that is not "
                f"finite (train.max_skipped_steps). The last was step {self._num_steps} of "
                f"{self._total_steps} ({what}); "
                f"{f'the last finite one was step {finite}' if finite else 'no step was finite'}. Lower "
                "train.optimizer.lr, or check the stored samples for extreme rewards"
            )

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_weights()

    def full_weights(self, merged: bool = False) -> dict[str, Tensor]:
        """See TrainingBackend; live tensors where they are in host memory."""
        return {name: tensor.to(HOST) for name, tensor in self.iter_weights(merged=merged)}

    def iter_weights(self, *, merged: bool = False) -> Iterator[tuple[str, Tensor]]:
        weights = merged_weights(self._model.module) if merged else self.named_weights()
        return ((name, tensor.detach()) for name, tensor in weights)

    def load_weights(self, weights: Mapping[str, Tensor], *, heads_differ: bool = False) -> None:
        with self._awake():
            boxes = self._weight_boxes()
            check_fit(weights, {name: box.shape for name, box in boxes.items()}, heads_differ=heads_differ)
            self._take(boxes, weights)

    @torch.no_grad()
    def _take(self, boxes: Mapping[str, Boxes], weights: Mapping[str, Tensor]) -> None:
        """Copy those of the whole tensors `weights` that the model has into its `boxes`."""
        for name in boxes.keys() & weights.keys():
            boxes[name].take(weights[name])
        self._spread()

    def to_host(self) -> None:
        """See TrainingBackend. Moves only weights: gradients are allocated only during a step, and optimizer
        states are offloaded after each step."""
        if self._leaves_weights:
            self._move_weights(HOST)
        release_memory()

    def to_device(self) -> None:
        if self._leaves_weights:
            self._move_weights(self._device)

    def _move_weights(self, device: torch.device) -> None:
        move_weights(self._model.module, device)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        return self._model.flops(lengths, num_outputs)

    def take_work(self) -> Work:
        work, self._work = self._work, Work()
        return work

    def held_bytes(self) -> HeldBytes:
        weights = list(self._model.module.parameters())
        trained = [self._masters.get(p, p) for p in weights if p.requires_grad] if self._optimizer else []
        return HeldBytes(
            weights=sum(p.nbytes for p in weights),
            gradients=sum(p.nbytes for p in trained),
            optimizer=num_bytes(self._optimizer) + sum(p.nbytes for p in self._masters.values()),
            is_on_device=all(p.device.type == self._device.type for p in weights),
        )

    def bytes_to_come(self) -> int:
        """Device memory that the next update takes, beside activations, and that is not taken yet."""
        if self._optimizer is None:
            return 0
        trained = [self._masters.get(p, p) for p in self._model.module.parameters() if p.requires_grad]
        num_moments = 0 if self._config.optimizer.kind == "sgd" else 2
        states = [t for moments in self._optimizer.state.values() for t in moments.values()]
        kind = self._device.type
        held = sum(t.nbytes for t in states if t.device.type == kind)
        masters = sum(t.nbytes for t in self._masters.values() if t.device.type != kind)
        return (
            max(0, num_moments * sum(p.nbytes for p in trained) - held)
            + masters
            + sum(p.nbytes for p in trained)
        )

    def state(self) -> dict[str, Any]:
        with self._awake():
            return joined([self._sharded_state()])

    def load(self, state: dict[str, Any]) -> None:
        self.restore(state, "")

    def save(self, folder: str) -> Written:
        """See TrainingBackend. Without a process group the state is returned for the caller to write."""
        if not dist.is_initialized():
            return Written(self.state())
        with self._awake():
            return write_state(Path(folder), self._sharded_state())

    def restore(self, saved: dict[str, Any], folder: str) -> None:
        source = saved if "weights" in saved else Path(folder)
        with self._awake():
            moments = None if self._optimizer is None else self._moment_boxes(stored_moments(source))
            read_into(source, {"weights": self._weight_boxes(), "optimizer": moments})
            self._spread()
        self._rest_optimizer()
        if self._scale is not None and saved.get("loss_scale") is not None:
            self._scale.load(saved["loss_scale"])
        self._num_steps, self._skipped_in_row = saved["num_steps"], saved["skipped_in_row"]

    def _sharded_state(self) -> dict[str, Any]:
        """`state` with this rank's boxes in place of whole tensors."""
        return {
            "weights": self._weight_boxes(),
            "optimizer": self._moments() if self._optimizer is not None else None,
            "num_steps": self._num_steps,
            "skipped_in_row": self._skipped_in_row,
            "loss_scale": None if self._scale is None else self._scale.state(),
        }

    def _awake(self) -> AbstractContextManager[None]:
        """Context in which the boxes can be read and written, even after `to_host`."""
        return nullcontext()

    def _weight_boxes(self) -> dict[str, Boxes]:
        """This rank's boxes of the weights by checkpoint name, in the precision in which they are trained.
        Covers all weights, including those with no part on this rank."""
        return {name: Boxes.of(self._masters.get(tensor, tensor)) for name, tensor in self.named_weights()}

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts of the tensors that the optimizer updates, by the parameter's name in the
        module."""
        return ((name, self._masters.get(p, p)) for name, p in self._model.module.named_parameters())

    def _boxes_of(self, name: str, tensor: Tensor) -> Boxes:
        """This rank's boxes of a tensor that is sharded like the parameter `name`, or not sharded."""
        return Boxes.of(tensor)

    def _moments(self) -> dict[str, dict[str, Boxes]]:
        """This rank's boxes of the moments and step counts, by parameter."""
        states = self._optimizer.state
        return {
            name: {key: self._boxes_of(name, value) for key, value in states[p].items()}
            for name, p in self._trained()
            if p in states
        }

    def _moment_boxes(self, like: WholeMoments) -> dict[str, dict[str, Boxes]]:
        """Replace the optimizer state by zeros for this rank's parts of the moments in `like`, and return
        their boxes."""
        states = self._optimizer.state
        states.clear()
        for name, p in self._trained():
            if name in like:
                states[p] = {
                    key: torch.zeros_like(p, dtype=dtype)
                    if shape
                    else torch.zeros((), dtype=dtype, device=p.device)
                    for key, (shape, dtype) in like[name].items()
                }
        return self._moments()


class Running:
    """Loss and metrics of a step, accumulated on the device; `report` is the step's only synchronization with
    it. Those of a mixture of experts are over `num_positions`; `balance` is its load-balancing loss, None
    without one."""

    def __init__(self, device: torch.device, num_positions: int) -> None:
        self.num_positions = num_positions
        self.balance: Balance | None = None
        self.load = Load()
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._means: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}
        self._checks: Tensor | None = None
        self._weight: Tensor | None = None

    def weigh(self, weight: Tensor, gradient: Tensor) -> None:
        """Count the weight of a micro-batch in the step's gradient, when `gradient` reaches its loss."""
        counted = weight.detach().double() * gradient.detach().double()
        self._weight = counted if self._weight is None else self._weight + counted

    def add(self, share: Tensor, diagnostics: Diagnostics) -> None:
        self._loss += share
        for name, pair in diagnostics.means.items():
            pair = torch.stack([x.double() for x in pair])
            self._means[name] = self._means[name] + pair if name in self._means else pair
        for name, value in diagnostics.maxima.items():
            self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value
        if (sums := diagnostics.checks) is not None:
            self._checks = sums if self._checks is None else self._checks + sums

    def add_routed(self, routed: Routed, balance: Tensor | None) -> None:
        """Add what routers chose, and the part of the load-balancing loss."""
        self.load.add(routed, balance)
        if balance is not None:
            self._loss += balance.detach()

    def numbers(
        self, grad_norm: Tensor
    ) -> tuple[float, float, dict[str, tuple[float, float]], dict[str, float], dict[str, float]]:
        """Loss, `grad_norm`, means, maxima and sums for the checks, copied to the host."""
        scalars = (self._loss, grad_norm, *self._maxima.values())
        parts = [*(x[None] for x in scalars), *self._means.values()]
        names: list[str] = []
        if self._weight is not None:
            parts, names = [*parts, self._weight[None]], ["loss_weight"]
        if self._checks is not None:
            parts, names = [*parts, self._checks], [*names, *TOKEN_SUMS]
        loss, norm, *rest = torch.cat([part.double() for part in parts]).tolist()
        maxima = dict(zip(self._maxima, rest, strict=False))
        sums = rest[len(maxima) : len(rest) - len(names)]
        means = dict(zip(self._means, zip(sums[::2], sums[1::2], strict=True), strict=True))
        return loss, norm, means, maxima, dict(zip(names, rest[len(rest) - len(names) :], strict=True))


_PROBED = 4096
"""Elements of each tensor whose change in a step is observed."""

_LEAST_GRADIENT = 1e-7
"""Below it AdamW divides by its epsilon, and a step may be too small to change a weight."""


def _head(tensor: Tensor | None) -> Tensor:
    """The first elements of a tensor's part on this rank, as a view."""
    assert tensor is not None, "the tensor has a gradient"
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().flatten()[:_PROBED]


@torch.no_grad()
def _changes(probes: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """How many of the probed weights had a gradient, and how many of these have changed; empty without
    probes."""
    if not probes:
        return {}
    sums = torch.stack(
        [torch.stack([has_one.sum(), (has_one & (new != old)).sum()]) for new, old, has_one in probes]
    )
    probed, changed = sums.sum(0).tolist()
    return {"probed_weights": probed, "changed_weights": changed}


def autocast_dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    """Autocast type of forward passes; None to compute in the type of the weights."""
    kind = config.autocast
    if kind == "none" or (kind == "auto" and device.type != "cuda"):
        return None
    return torch.float16 if kind == "fp16" else torch.bfloat16
