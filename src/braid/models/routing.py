"""Routed experts: which experts a mixture of experts chooses for each token, to choose them again in another
pass, and statistics of the choices.

The experts of a layer are called with the chosen indices [T, K] (transformers' interface for experts), which
a hook records. To replay choices, the router's last `topk` is answered with the given indices, and with the
router's own scores of them, so that whatever it computes from scores is computed from the current ones, and
gradients flow to the router. Where that `topk` is called is found by a tiny copy of the model, on which the
replay is checked, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from braid.errors import ModelError
from braid.types import UNKNOWN_EXPERT

from .experts import is_experts
from .tiny import tiny_model

_TOPK = (torch.topk, Tensor.topk)


def dtype_of_choices(num_experts: int) -> torch.dtype:
    """The smallest signed integer that holds the indices of experts, and UNKNOWN_EXPERT."""
    return torch.int8 if num_experts <= torch.iinfo(torch.int8).max + 1 else torch.int16


class Routed(NamedTuple):
    """Statistics of a pass over N tokens. `counts` [L, E] are tokens by layer and chosen expert, and `probs`
    [L, E] the differentiable sums over tokens of the softmax of the router's logits, of which `entropy` [L]
    is the sum of entropies. These two are None for routers of another kind."""

    counts: Tensor
    probs: Tensor | None
    entropy: Tensor | None


@dataclass(slots=True)
class Routing:
    """The routing of one forward pass. `replayed` [T, L, K] are the experts to choose in L layers,
    UNKNOWN_EXPERT where the router chooses. `choices` [T, K] and the router's `logits` [T, E] are recorded by
    layer."""

    replayed: Tensor | None = None
    keeps_logits: bool = False
    choices: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)

    def stacked(self, num_experts: int) -> Tensor:
        """The choices of all layers [T, L, K] in dtype_of_choices."""
        return torch.stack(self._by_layer(), dim=1).to(dtype_of_choices(num_experts))

    def _by_layer(self) -> list[Tensor]:
        """The choices in the order of layers."""
        return [self.choices[layer] for layer in range(len(self.choices))]

    def statistics(self, weights: Tensor, num_experts: int) -> Routed:
        """Sums over the tokens, each counted `weights` [T] times."""
        choices = torch.stack(self._by_layer())  # [L, T, K]
        times = weights.double()[:, None].expand(choices.shape).flatten(1)
        counts = times.new_zeros(len(choices), num_experts).scatter_add_(1, choices.flatten(1), times)
        if not self.logits:
            return Routed(counts, None, None)
        logprobs = [logits.float().log_softmax(-1) for logits in self.logits.values()]
        probs = [(x.exp() * weights[:, None]).sum(0) for x in logprobs]
        entropy = [-(x.exp() * x * weights[:, None]).sum().detach() for x in logprobs]
        return Routed(counts, torch.stack(probs), torch.stack(entropy))


ROUTING: ContextVar[Routing | None] = ContextVar("routing", default=None)


@contextmanager
def routed(routing: Routing | None) -> Generator[None]:
    """Record choices of experts in this block, and replay those of `routing`."""
    token = ROUTING.set(routing)
    try:
        yield
    finally:
        ROUTING.reset(token)


@dataclass(frozen=True, slots=True)
class Router:
    """Where a model's layers choose experts: the module that calls `topk`, by its name below the parent of
    the layer's experts (itself if empty), and which of its calls it is. `logits` is the place of the logits
    among its outputs, None for routers whose choice is not that of the largest logits."""

    owner: str
    call: int
    logits: int | None


class Routers:
    """The routers of a model whose layers have `num_experts` routed experts each."""

    def __init__(self, model: PreTrainedModel, layers: list[str]) -> None:
        self._model, self._layers = model, layers
        experts = model.get_submodule(layers[0])
        self.num_layers, self.num_experts = len(layers), int(cast("int", experts.num_experts))
        self._router: Router | None = None

    @property
    def has_logits(self) -> bool:
        return self._router is not None and self._router.logits is not None

    def prepare(self, key: str) -> None:
        """Allow to replay choices and to keep logits. Raises ModelError, naming the config's `key`, for an
        architecture in which that fails on a tiny copy."""
        if self._router is not None:
            return
        self._router = _find_router(self._model, key)
        _intercept(self._model, self._layers, self._router)


def find_routers(model: PreTrainedModel) -> Routers | None:
    """Have the experts of each layer record their choices; None for a model without experts of transformers'
    interface."""
    layers = list(_layers_of(model))
    for number, layer in enumerate(layers):
        model.get_submodule(layer).register_forward_pre_hook(partial(_record, number), with_kwargs=True)
    return Routers(model, layers) if layers else None


def _layers_of(model: nn.Module) -> Iterator[str]:
    return (name for name, module in model.named_modules() if is_experts(module))


def _parent(layer: str) -> str:
    """The name of the module that routes to experts, which adapters may be around."""
    return layer.replace(".base_layer", "").rpartition(".")[0]


def _record(layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if (routing := ROUTING.get()) is not None:
        # A layer that is recomputed for the backward pass chooses the same again.
        routing.choices.setdefault(layer, _indices(args, kwargs))


def _indices(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The argument of experts [T, K] that holds the chosen indices."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    (indices,) = (x for x in tensors if not x.is_floating_point())
    return indices


def _intercept(model: nn.Module, layers: Iterable[str], router: Router) -> None:
    for number, layer in enumerate(layers):
        owner: Any = model.get_submodule(f"{_parent(layer)}.{router.owner}".removesuffix("."))
        owner.forward = partial(_routed_forward, owner.forward, number, router)


def _routed_forward(
    forward: Callable[..., Any], layer: int, router: Router, *args: Any, **kwargs: Any
) -> Any:
    routing = ROUTING.get()
    if routing is None:
        return forward(*args, **kwargs)
    if routing.replayed is None:
        out = forward(*args, **kwargs)
    else:
        with _Replay(routing.replayed[:, layer], router.call):
            out = forward(*args, **kwargs)
    if routing.keeps_logits and router.logits is not None:
        routing.logits.setdefault(layer, out[router.logits].flatten(0, -2))
    return out


class _Replay(TorchFunctionMode):
    """Answers call number `call` of topk with the experts `chosen` [T, K] where these are known."""

    def __init__(self, chosen: Tensor, call: int) -> None:
        super().__init__()
        self._chosen, self._call, self._num_calls = chosen, call, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        self._num_calls += 1
        if self._num_calls - 1 != self._call:
            return out
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        assert self._chosen.shape == out.indices.shape, "choices are those of the tokens of the pass"
        chosen = torch.where(self._chosen == UNKNOWN_EXPERT, out.indices, self._chosen.long())
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class _Calls(TorchFunctionMode):
    """Notes the indices of each call of topk with the innermost module that runs."""

    def __init__(self, stack: list[str]) -> None:
        super().__init__()
        self.stack, self.calls = stack, list[tuple[str, Tensor]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.calls.append((self.stack[-1], out.indices))
        return out


def _find_router(model: PreTrainedModel, key: str) -> Router:
    """The router of a tiny copy of the model. Raises ModelError if there is none whose choices are replayed
    exactly."""
    name = type(model).__name__
    try:
        tiny = tiny_model(type(model), model.config, frozenset())
    except Exception as error:  # transformers' code may raise anything for unexpected sizes
        raise ModelError(
            f"{key}: cannot build a tiny copy of {name} to check its routers ({error}); set it to its "
            "default, or choose another model"
        ) from error
    numbers = ((type(module), getattr(module, "num_group", None)) for module in model.modules())
    grouped = {kind for kind, number in numbers if isinstance(number, int) and number > 1}
    for module in tiny.modules():
        if type(module) in grouped:  # its router first chooses groups of experts; a tiny copy has one
            vars(module).update(num_group=2, topk_group=1)
    try:
        return _checked_router(tiny)
    except _UnlikeError as error:
        raise ModelError(
            f"{key}: the routers of {name} cannot be used for it: {error}; set it to its default, or choose "
            "another model"
        ) from error


class _UnlikeError(Exception):
    pass


@torch.no_grad()
def _checked_router(tiny: PreTrainedModel) -> Router:
    """See _find_router; of the copy itself, which this changes."""
    layers = list(_layers_of(tiny))
    if not layers:
        raise _UnlikeError("it has no experts of transformers' interface for them")
    find_routers(tiny)
    embedding: Any = tiny.get_input_embeddings()
    vocab = embedding.weight.shape[0]
    ids = torch.randint(vocab, (1, 24), generator=torch.Generator().manual_seed(0))
    first, outputs = Routing(), dict[str, Any]()
    calls, handles = _watch(tiny, outputs)
    with routed(first), calls, _weights_of(tiny) as weights:
        plain = tiny(input_ids=ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    if len(first.choices) != len(layers):
        raise _UnlikeError("some layers do not call their experts")
    places = {_located(layer, first.choices[i], calls.calls) for i, layer in enumerate(layers)}
    if len(places) != 1:
        raise _UnlikeError("its layers choose experts in different ways")
    owner, call = places.pop()
    where = f"{_parent(layers[0])}.{owner}".removesuffix(".")
    if isinstance(tiny.get_submodule(where), GradientCheckpointingLayer):
        raise _UnlikeError("the decoder layer itself chooses experts")
    router = Router(owner, call, _place_of_logits(tiny, outputs.get(where), first.choices[0], weights[0]))
    _intercept(tiny, layers, router)
    _check_replay(tiny, ids, plain, first)
    return router


def _watch(model: nn.Module, outputs: dict[str, Any]) -> tuple[_Calls, list[Any]]:
    """A mode that notes calls of topk, and handles of hooks by which it knows the modules that run; their
    outputs are kept by name."""
    stack = [""]

    def leave(name: str, _: nn.Module, __: Any, out: Any) -> None:
        stack.pop()
        outputs[name] = out

    handles = list[Any]()
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
            handles.append(module.register_forward_hook(partial(leave, name)))
    return _Calls(stack), handles


def _located(layer: str, chosen: Tensor, calls: list[tuple[str, Tensor]]) -> tuple[str, int]:
    """The owner and number of the call of topk that chose the experts of a layer, as in Router."""
    parent = _parent(layer)
    for place in reversed(range(len(calls))):
        module, indices = calls[place]
        if indices.shape == chosen.shape and torch.equal(indices, chosen):
            if module != parent and not module.startswith(f"{parent}."):
                break
            number = sum(name == module for name, _ in calls[:place])
            return module.removeprefix(parent).removeprefix("."), number
    raise _UnlikeError("its experts are not chosen by a call of topk")


def _place_of_logits(model: Any, outputs: Any, chosen: Tensor, weights: Tensor) -> int | None:
    """Router.logits: of models for which transformers has a load-balancing loss, and whose weights are the
    softmax of the logits that it reads, up to a factor for each token."""
    if not hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func"):
        return None
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    place = getattr(recorded.get("router_logits"), "index", None)
    if place is None or not isinstance(outputs, tuple) or place >= len(outputs):
        return None
    logits = outputs[place].flatten(0, -2)
    largest = logits.topk(chosen.shape[-1], dim=-1).indices.sort(-1).values
    factors = weights.log() - logits.gather(-1, chosen)
    is_constant = torch.allclose(factors, factors[:, :1].expand_as(factors), atol=1e-4)
    return place if is_constant and torch.equal(largest, chosen.sort(-1).values) else None


@contextmanager
def _weights_of(model: nn.Module) -> Generator[list[Tensor]]:
    """The weights [T, K] with which layers call their experts in this block."""
    weights = list[Tensor]()

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        weights.append([x for x in tensors if x.is_floating_point()][-1])

    layers = [model.get_submodule(layer) for layer in _layers_of(model)]
    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        yield weights
    finally:
        for handle in handles:
            handle.remove()


def _check_replay(tiny: PreTrainedModel, ids: Tensor, plain: Tensor, first: Routing) -> None:
    """Raise _UnlikeError unless replaying the choices of the `first` pass changes nothing, unknown ones are
    the router's own, and experts get others with weights."""
    experts: Any = tiny.get_submodule(next(_layers_of(tiny)))
    chosen = first.stacked(experts.num_experts)

    def run(replayed: Tensor) -> tuple[Tensor, Tensor]:
        with routed(routing := Routing(replayed)):
            logits = tiny(input_ids=ids, use_cache=False).logits
        return logits, routing.stacked(experts.num_experts)

    for replayed in (chosen, torch.full_like(chosen, UNKNOWN_EXPERT)):
        logits, again = run(replayed)
        if not torch.equal(logits, plain) or not torch.equal(again, chosen):
            raise _UnlikeError("replaying its own choices changes its outputs")
    others = (chosen + 1) % experts.num_experts
    with _weights_of(tiny) as weights:
        logits, again = run(others)
    if not torch.equal(again, others) or torch.equal(logits, plain):
        raise _UnlikeError("it does not follow choices that are replayed")
    if not all(bool((x.isfinite() & (x != 0)).all()) for x in weights):
        raise _UnlikeError("the weights of replayed experts are not finite, or 0")
