"""Load-time check that a model under packed attention matches transformers' own forward pass, which any
decoder that is loaded must pass. First a tiny copy of the architecture is compared in float32, with rows
longer than every window and length limit that the run can exceed; then the model itself, with its own weights
and type."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from braid.errors import ModelError
from braid.images import image_of
from braid.plan import rotary_problem
from braid.types import Image, Placed, Row

from . import attention
from .attention import LayerCall, PackedAttention, causal_attention
from .batch import PackedBatch
from .causal_lm import CausalLM
from .tiny import length_keys, tiny_model
from .vision import Span, Vision

_log = logging.getLogger(__name__)

_LENGTHS = (24, 17, 7)
"""Row lengths: ragged, two above tiny.SHORT and one below it."""
_LENGTHS_WITH_STATES = (80, 17, 9, 7)
"""Row lengths for models whose layers carry a state: the first crosses a chunk of 64 positions (gated delta
nets) after its shared prefix, too, and the third continues the state there by one token."""
_NUM_SHARED = 8
"""Number of prefix tokens that all rows but the first and the last share with the first."""
_LEAST = 2e-5
"""Base tolerance in nats: a few float32 rounding errors of log-probs of magnitude 10."""
_OF_LARGEST, _OF_MEAN, _OF_WRAPPED = 8.0, 3.0, 6.0
"""Additional tolerance as a multiple of the plain module's own rounding error, for the largest and the mean
difference, and the mean one of a backend, which may also add its residuals in half precision. A wrong mask
changes log-probs by 0.1 or more."""

_agreed: set[tuple[Any, ...]] = set()
"""Tiny copies that agreed: class, config, lengths, check. A run's roles mostly have the same."""


@dataclass(frozen=True, slots=True)
class Check:
    """A computation under test of log-probs [n, V] at the last n positions of each row of tokens [L], its
    description in errors (`what`), and the advice if it is wrong (`instead`)."""

    logprobs: Callable[[CausalLM, Sequence[Tensor]], list[Tensor]]
    what: str
    instead: str


def check_against_plain(lm: CausalLM, longest: int | None = None) -> None:
    """Compare packed rows with the model's own forward pass over each row (eager attention, no cache). Raises
    ModelError. `longest` is the run's longest row in tokens (None: any); differences beyond it are
    ignored."""
    check_tiny_copy(lm, PACKED_ROWS, longest)
    check_own_weights(lm, PACKED_ROWS, longest)
    if lm.vision is not None:
        check_images(lm, lm.vision)


@torch.no_grad()
def check_tiny_copy(lm: CausalLM, check: Check, longest: int | None) -> bool:
    """Compare on a tiny copy; False if it could not be built. Raises ModelError if it disagrees, or if it
    could not be built and the run's rows may exceed a length at which results may differ."""
    name, lengths = type(lm.model).__name__, length_keys(lm.model.config)
    passed = frozenset(key for key, length in lengths.items() if longest is None or longest > length)
    if (problem := rotary_problem(lm.model.config.to_dict(), longest)) is not None:
        raise ModelError(problem)
    copy = (type(lm.model), repr(lm.model.config.to_dict() | {"_name_or_path": ""}), passed, check)
    if copy in _agreed:
        return True
    try:
        difference = _difference(lm, check, passed)
    except _NotBuiltError as error:
        if passed:
            key = min(passed, key=lambda k: lengths[k])
            raise ModelError(
                f"{name}: cannot build a tiny copy to check {check.what} beyond {key}={lengths[key]} "
                f"({error}); limit prompt and answer together to {lengths[key]} tokens, or {check.instead}"
            ) from error
        _log.info("cannot build a tiny copy of %s (%s); only its own weights are checked", name, error)
        return False
    if difference is None:
        _agreed.add(copy)
        return True
    by_length = sorted(passed, key=lambda k: (lengths[k], k))
    for key, without in [*((key, {key}) for key in by_length), *((key, passed) for key in by_length[:1])]:
        if _difference(lm, check, passed - without) is None:
            raise ModelError(
                f"{name} is computed incorrectly with {check.what} for rows longer than its {key} of "
                f"{lengths[key]} tokens ({difference}); limit prompt and answer together to that length, or "
                f"{check.instead}"
            )
    raise ModelError(f"{name} cannot run with {check.what}: {difference}; {check.instead}")


@torch.no_grad()
def check_own_weights(lm: CausalLM, check: Check, longest: int | None) -> None:
    """Compare on the model itself; raises ModelError if it disagrees. Differences are averaged because
    rounding may select another expert at a few positions."""
    model, rows = lm.model, _random_rows(lm, longest)
    with _plain_attention(model):
        plain = _plain_logprobs(model, rows)
        _check_numbers(model, plain)
        rounding = _rounding(model, plain, lambda: _plain_logprobs(model, rows)).mean().item()
    ours = [_of_free(lm, part) for part in check.logprobs(lm, rows)]
    error = _errors(ours, [_of_free(lm, part) for part in plain]).mean().item()
    allowed = _OF_MEAN * rounding + _LEAST
    if not error <= allowed:
        raise ModelError(
            f"{type(model).__name__} with these weights gives different log-probs with {check.what} than in "
            f"its own forward pass: by {error:.2g} nats on average, where rounding explains {allowed:.2g}; "
            f"{check.instead}"
        )


@torch.no_grad()
def check_images(lm: CausalLM, vision: Vision) -> None:
    """Compare packed rows with no, one and two images, two of which share one, with the model's own forward
    pass over each; and see that another image gives other log-probs. Raises ModelError."""
    model, name = lm.model, type(lm.model).__name__
    rows = [image_row(lm, vision, seeds) for seeds in ((), (0,), (0, 1))]
    with _plain_attention(model):
        plain = [_of_free(lm, _plain_row(model, vision, *row)) for row in rows]
        with _Wider(model.dtype):
            wide = [_of_free(lm, _plain_row(model, vision, *row)) for row in rows]
    rounding = _errors(plain, wide).mean().item()
    error = _errors([_of_free(lm, part) for part in packed_images(lm, rows)], plain).mean().item()
    allowed = _OF_MEAN * rounding + _LEAST
    if not error <= allowed:
        raise ModelError(
            f"{name} gives different log-probs with packed rows that have images than in its own forward "
            f"pass: by {error:.2g} nats on average, where rounding explains {allowed:.2g}; remove "
            "model.vision, or choose another model"
        )
    ids, images = rows[1]
    other = [one._replace(image=noise(7)) for one in images]
    (swapped,) = packed_images(lm, [(ids, other)])
    end = images[0].start + images[0].num
    change = _errors([_of_free(lm, swapped)[end:]], [plain[1]]).mean().item()
    if not change > 3 * allowed:
        raise ModelError(
            f"{name} gives the same log-probs with another image (they differ by {change:.2g} nats): it "
            "does not see images; choose another model, or train it on images from a checkpoint that does"
        )


def noise(seed: int) -> Image:
    """An image of noise, whose sides differ."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    return image_of(pixels, Path())


def image_row(lm: CausalLM, vision: Vision, seeds: Sequence[int]) -> tuple[Tensor, list[Placed]]:
    """Tokens [L] of a row with these images of noise, and where they are; it ends with nine of text."""
    numbers, free = random.Random(len(seeds)), _free_ids(lm)
    ids = numbers.choices(free, k=3)
    for _ in seeds:
        ids += [vision.placeholder, *numbers.choices(free, k=2)]
    expanded, placed = vision.expand([*ids, *numbers.choices(free, k=9)], list(map(noise, seeds)))
    return torch.tensor(expanded, device=lm.device), list(placed)


def packed_images(lm: CausalLM, rows: Sequence[tuple[Tensor, Sequence[Placed]]]) -> list[Tensor]:
    """Log-probs [L, V] of each row from one packed forward pass."""
    lengths = [len(ids) for ids, _ in rows]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(lm.device)
    sight = lm.sight([Span(0, len(ids), images) for ids, images in rows])
    line = torch.cat([ids for ids, _ in rows])
    hidden = lm.hidden(line, positions, PackedAttention(lengths, lm.device), sight)
    return list(lm.logits(hidden).log_softmax(-1).split(lengths))


def _plain_row(model: PreTrainedModel, vision: Vision, ids: Tensor, images: Sequence[Placed]) -> Tensor:
    inputs = vision.plain_inputs(ids[None], images)
    for module in (model, model.base_model):  # some keep the positions of the row before
        if hasattr(module, "rope_deltas"):
            vars(module)["rope_deltas"] = None
    logits = model(input_ids=ids[None], use_cache=False, **inputs).logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


@dataclass(frozen=True, slots=True)
class PlainLogprobs:
    """Log-probs of the masked tokens of `rows` in the model's own forward pass: a flat array, and its mean
    rounding error in the type in which a backend computes. Some rows have images if the model reads them."""

    rows: list[Row]
    values: NDArray[np.float32]
    rounding: float

    @classmethod
    @torch.no_grad()
    def of(
        cls, lm: CausalLM, longest: int | None, dtype: torch.dtype | None, *, is_hollow: bool
    ) -> PlainLogprobs:
        """`longest` as in check_against_plain; `dtype` is the type in which the backend computes, None for
        the model's own. Of a model without weights there are only the rows."""
        model, vision, reserved = lm.model, lm.vision, [] if lm.vision is None else list(lm.vision.reserved)
        read: list[tuple[Tensor, Sequence[Placed]]] = [(ids, ()) for ids in _random_rows(lm, longest)]
        if vision is not None:
            read += [image_row(lm, vision, seeds) for seeds in ((0,), (0, 1))]
        arrays = [(ids.cpu().numpy(), tuple(images)) for ids, images in read]
        rows = [
            Row({"input_ids": ids}, (np.arange(len(ids)) > 0) & ~np.isin(ids, reserved), i, i, images=images)
            for i, (ids, images) in enumerate(arrays)
        ]
        if is_hollow:
            return cls(rows, np.zeros(0, np.float32), 0.0)

        def compute() -> list[Tensor]:
            if vision is None:
                return _plain_logprobs(model, [ids for ids, _ in read])
            return [_plain_row(model, vision, *row) for row in read]

        with _plain_attention(model):
            plain = compute()
            _check_numbers(model, plain)
            if dtype is None or torch.finfo(dtype).eps <= torch.finfo(model.dtype).eps:
                error = _rounding(model, plain, compute)
            else:
                with torch.autocast(lm.device.type, dtype):
                    error = _errors(compute(), plain)
        logits = torch.cat([p[:-1] for p in plain]).div(lm.temperature)
        logits[:, reserved] = float("-inf")
        logprobs = logits.log_softmax(-1)
        values = logprobs.gather(1, torch.cat([ids[1:] for ids, _ in read])[:, None])[:, 0]
        values = values.float().cpu().numpy()[np.concatenate([row.mask[1:] for row in rows])]
        return cls(rows, values, error.mean().item() / min(1.0, lm.temperature))

    def check(self, logprobs: Sequence[NDArray[np.float32]], backend: str) -> None:
        """Raise ModelError if a backend's log-probs [L] of the rows differ by more than rounding."""
        masked = [values[row.mask] for values, row in zip(logprobs, self.rows, strict=True)]
        error = float(np.abs(np.concatenate(masked) - self.values).mean())
        allowed = _OF_WRAPPED * self.rounding + _LEAST
        if not error <= allowed:
            raise ModelError(
                f"train.backend={backend} gives different log-probs than the model's own forward pass: by "
                f"{error:.2g} nats on average, where rounding explains {allowed:.2g}; set dtypes in its "
                "options to null, or choose another backend"
            )


def _check_numbers(model: PreTrainedModel, plain: Sequence[Tensor]) -> None:
    """Raise ModelError if the model's own log-probs are NaN, and say whether its weights are the cause."""
    if not any(part.isnan().any() for part in plain):
        return
    weights = dict(model.named_parameters())
    bad = [name for name, weight in weights.items() if not weight.isfinite().all()]
    kind, path = type(model).__name__, model.name_or_path
    which = f"{kind}{f' in {path}' if path else ''}"
    if bad:
        raise ModelError(
            f"{len(bad)} of the {len(weights)} weights of {which} contain NaN or infinity, among them "
            f"{bad[0]}: the file is damaged, or its training diverged; use an intact copy or an earlier "
            "checkpoint"
        )
    raise ModelError(
        f"the log-probs of {which} in its own forward pass are NaN, although its weights are finite: it "
        f"overflows in {str(model.dtype).removeprefix('torch.')}; set its dtype to fp32 (model.dtype) or to "
        "a type with a wider range"
    )


class _NotBuiltError(Exception):
    pass


def _difference(lm: CausalLM, check: Check, passed: frozenset[str]) -> str | None:
    """Description of the difference in a tiny copy, or None if it agrees."""
    try:
        model = tiny_model(type(lm.model), lm.model.config, passed)
        rows = _random_rows(tiny := CausalLM(deepcopy(model)))
        plain = _plain_logprobs(model, rows, fresh=True)
    except Exception as error:  # transformers' code may raise anything for unexpected sizes
        raise _NotBuiltError(f"{type(error).__name__}: {error}") from error
    try:
        ours = check.logprobs(tiny, rows)
    except ModelError as error:
        return str(error)
    except Exception as error:  # likewise for unexpected calls
        return f"its code raises {type(error).__name__}: {error}"
    worst = _errors(ours, plain).max().item()
    if worst <= _LEAST:
        return None
    rounding = _rounding(model, plain, lambda: _plain_logprobs(model, rows, fresh=True))
    if worst <= _LEAST + _OF_LARGEST * rounding.max().item():
        return None
    return f"log-probs differ by up to {worst:.2g} nats from its own forward pass{_reason(tiny, rows[0])}"


def _random_rows(lm: CausalLM, longest: int | None = None) -> list[Tensor]:
    """Random tokens of rows of at most `longest` tokens, with shared prefixes."""
    generator = torch.Generator().manual_seed(0)
    lengths = _LENGTHS_WITH_STATES if lm.has_states else _LENGTHS
    lengths = [min(length, longest or length) for length in lengths]
    free = torch.tensor(_free_ids(lm))
    places = (torch.randint(len(free), (n,), generator=generator) for n in lengths)
    rows = [free[chosen].to(lm.device) for chosen in places]
    for row in rows[1:-1]:
        row[:_NUM_SHARED] = rows[0][: min(_NUM_SHARED, len(row))]
    return rows


def _free_ids(lm: CausalLM) -> list[int]:
    """The tokens that the policy may write."""
    reserved = () if lm.vision is None else lm.vision.reserved
    return [token for token in range(lm.vocab_size) if token not in reserved]


def _of_free(lm: CausalLM, logprobs: Tensor) -> Tensor:
    """Log-probs [L, V] among the tokens that the policy may write."""
    return logprobs if lm.vision is None else logprobs[:, _free_ids(lm)].log_softmax(-1)


def _plain_logprobs(model: PreTrainedModel, rows: Sequence[Tensor], *, fresh: bool = False) -> list[Tensor]:
    """Log-probs [L, V] of each row by itself. With `fresh` each row gets a new copy of the model, because
    some models keep state between calls."""
    out: list[Tensor] = []
    for row in rows:
        logits = (deepcopy(model) if fresh else model)(input_ids=row[None], use_cache=False).logits[0]
        out.append(logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1))
    return out


def _packed_logprobs(lm: CausalLM, rows: Sequence[Tensor]) -> list[Tensor]:
    """Log-probs [L, V] of each row from one packed forward pass, in which all rows but the first and the last
    share the first row's prefix."""
    shared = ((0, 0), *((0, min(_NUM_SHARED, len(row) - 1)) for row in rows[1:-1]), (0, 0))
    stored = [row[num:] for row, (_, num) in zip(rows, shared, strict=True)]
    ids = torch.cat(stored)
    batch = PackedBatch({}, torch.ones_like(ids, dtype=torch.bool), tuple(map(len, rows)), shared=shared)
    hidden = lm.hidden(ids, batch.positions, PackedAttention(batch.lengths, lm.device, shared))
    parts = lm.logits(hidden).log_softmax(-1).split([len(part) for part in stored])
    return [torch.cat((parts[source][:num], part)) for part, (source, num) in zip(parts, shared, strict=True)]


PACKED_ROWS = Check(
    _packed_logprobs, "packed rows", "choose another model; docs/models.md lists the architectures that run"
)


@contextmanager
def _plain_attention(model: PreTrainedModel) -> Generator[None]:
    """Use transformers' eager attention within this block."""
    attention.use(model, "eager")
    try:
        yield
    finally:
        attention.use(model, attention.IMPLEMENTATION)


def _rounding(
    model: PreTrainedModel, plain: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]
) -> Tensor:
    """Rounding errors of `plain`, log-probs that `compute` gives, relative to the same computed in a wider
    type; or, if the model's code cannot compute in that type, the rounding error of log-probs of magnitude
    10."""
    try:
        with _Wider(model.dtype):
            return _errors(plain, compute())
    except Exception as error:  # an architecture's code may raise anything for an unexpected type
        _log.info("cannot compute %s in a wider type: %s", type(model).__name__, error)
        return torch.tensor(10 * torch.finfo(model.dtype).eps)


_KEEP_TYPE = ("__get__", "__set__", "__setitem__", "__deepcopy__")
"""Functions of tensors that are no computation. A deep copy's arguments hold all that was copied before."""


class _Wider(TorchFunctionMode):
    """Runs a model of type `dtype` in float32, or a float32 model in float64. Inputs are cast per function
    call, which avoids a second copy of the weights."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._narrow, self._wide = dtype, torch.float64 if dtype == torch.float32 else torch.float32

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _KEEP_TYPE or (name.endswith("_") and not name.endswith("__")):
            return func(*args, **kwargs)  # the latter write to a tensor in place
        try:
            return func(*_cast(args, self._wide), **_cast(kwargs, self._wide))
        except RuntimeError:  # a kernel that supports only narrow types
            return func(*_cast(args, self._narrow), **_cast(kwargs, self._narrow))


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, values)


def _errors(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> Tensor:
    """Absolute differences of log-probs [T, V] at the positions present in `ours`."""
    return torch.cat([(a - b[-len(a) :]).abs() for a, b in zip(ours, plain, strict=True)])


def _reason(lm: CausalLM, row: Tensor) -> str:
    """Suffix of an error message: whether the layers bypass transformers' attention interface."""
    calls: list[LayerCall] = []

    def kernel(call: LayerCall, *qkv: Tensor) -> Tensor:
        calls.append(call)
        return causal_attention(call, *qkv)

    context = PackedAttention([len(row)], lm.device, kernel=kernel)
    lm.hidden(row, torch.arange(len(row), device=lm.device), context)
    if calls:
        return "; its layers may compute positions or masks themselves"
    return ", since its layers do not attend through transformers' attention interface"
