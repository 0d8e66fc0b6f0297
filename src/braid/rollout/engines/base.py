"""The family of rollout engines: what the config, the plan and the workers ask a kind.

What samples is a rollout.engine.RolloutEngine, which a kind builds, starts or connects to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt

from braid.kinds import Kind

if TYPE_CHECKING:
    import torch

    from braid.config.schema import RunConfig
    from braid.models.causal_lm import CausalLM
    from braid.models.vision import Vision
    from braid.plan import Plan
    from braid.weights.sending import SendOptions

    from .native.engine import NativeEngine
    from .native.stopping import Decode
    from .remote import RemoteEngine


class InProcess(NamedTuple):
    """What a run gives an engine that samples in one of the run's own processes.

    `decode` turns token ids into text, for stop strings. With `autocast` the model runs under autocast of
    this type, as in training. With `owns_weights` the engine samples with a copy of the model's weights.
    `records_experts`: completions have the experts that a mixture of experts chose. `bytes_to_come` returns
    the device memory that others will take while the engine's cache exists, and have not taken yet: the cache
    leaves it to them.
    """

    decode: Decode
    autocast: torch.dtype | None = None
    owns_weights: bool = False
    records_experts: bool = False
    bytes_to_come: Callable[[], int] | None = None


class Engine(Kind):
    """A kind of rollout engine. Those that sample in the run's own processes build on the native engine;
    others are a ServedEngine."""

    max_running: PositiveInt = 256
    """Maximum number of sequences decoded together."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the engine's weights; auto for the trainer's."""

    config_key = "rollout.engine"
    records_experts: ClassVar[bool] = False
    """Whether its completions have the experts that the model chose (train.router_replay)."""
    reads_images: ClassVar[bool] = False
    """Whether it gets the images of prompts; of which models, `image_problems` says."""
    is_served: ClassVar[bool] = False
    """Whether it runs in other processes, to which weights are sent merged with their adapters."""
    parallel_sizes: ClassVar[tuple[str, ...]] = ()
    """Its keys that ask for several devices, whose defaults are those of one."""
    package: ClassVar[str] = ""
    """The package that it imports, installed by the extra of its name; none if empty."""
    install: ClassVar[str] = ""
    """How to install it."""
    needs_gpu: ClassVar[bool] = False
    """Whether engines that the run starts need a GPU."""

    def build(self, lm: CausalLM, run: InProcess) -> NativeEngine:
        """An engine in this process, which samples with `lm`."""
        raise NotImplementedError(f"{type(self).__name__} runs in other processes")

    @property
    def device_fraction(self) -> float:
        """The fraction of its devices' memory that it takes when it starts."""
        return 0.0

    def num_devices(self) -> int:
        """Devices of one engine; 0 if they are not the run's."""
        return 1

    def dtype_in(self, config: RunConfig, num_parameters: int | None, *, has_gpus: bool) -> str:
        """Dtype in which it computes. `num_parameters`: of the policy, None if unknown."""
        raise NotImplementedError

    def kv_budget(self, *, has_gpus: bool) -> int | None:
        """Capacity of its cache in tokens; None if that is not known before it starts."""
        return None

    def held_bytes(self, config: RunConfig, parameters: int, *, has_gpus: bool) -> Mapping[str, int]:
        """Bytes of the weights that it holds besides the trainer's, in processes that train, by name."""
        return {}

    def problems(self, config: RunConfig, plan: Plan, *, on_cpu: bool) -> Iterator[tuple[str, str]]:
        """(key, message) of what it cannot do on this machine; `on_cpu`: without a GPU."""
        yield from ()

    def image_problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """(key, message) of why it cannot sample with images from the model of the config, though it
        `reads_images`."""
        yield from ()

    def unused(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        """(reason, keys) of settings without effect, as patterns of plan.unused."""
        if config.run.device == "cpu":
            keys = "rollout.engine.{cuda_graphs,cuda_graph_max_batch}"
            yield "there are no CUDA graphs with run.device=cpu", keys
        if self.is_served or plan.layout.mode != "in_process":
            keys = "rollout.{check_weights,check_weights_dir}"
            yield "weights sent to other processes are always verified by fingerprints on arrival", keys


class Model(NamedTuple):
    """What an engine process loads: `folder` and `tokenizer` are paths, `dtype` is the trainer's, `longest`
    the longest trajectory in tokens. It `sleeps` while others use its devices. `vision` is how it reads
    images; None for one that reads only text."""

    folder: str
    tokenizer: str
    dtype: str
    longest: int
    trust_remote_code: bool
    sleeps: bool
    seed: int
    vision: Vision | None = None


class Process(NamedTuple):
    """How an engine process is started: its log file, the time limits of its start and of a call in seconds,
    a `folder` of its own, and whether it has GPUs."""

    log: Path
    sending: SendOptions
    start_timeout_s: float
    timeout_s: float
    folder: Path
    on_gpu: bool


class ServedEngine(Engine):
    """Engines in processes that the run starts, or in servers that are running already."""

    replicas: PositiveInt | None = None
    """Number of engine replicas. Requests go to the least loaded one, those of a group to the same one. null:
    as many as fit on the rollout devices."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel size of one engine."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline-parallel size of one engine."""
    servers: tuple[str, ...] = ()
    """URLs of running servers to use instead of starting engines."""
    memory_fraction: float = Field(default=0.8, gt=0.0, le=1.0)
    """Fraction of device memory for weights and cache."""
    max_model_tokens: PositiveInt | None = None
    """Maximum sequence length of the engine, in tokens; the longest possible trajectory when null."""
    cuda_graphs: bool = True
    """Capture the decode step in CUDA graphs, on CUDA devices."""
    cuda_graph_max_batch: PositiveInt | None = None
    """Largest batch size captured in a CUDA graph; the engine's default when null."""
    prefix_caching: bool = True
    """Reuse the key/value cache of common prefixes."""
    chunked_prefill: bool = True
    """Split the prefill of long prompts into chunks between decode steps."""
    prefill_tokens: PositiveInt = 8192
    """Maximum prompt tokens per forward pass."""
    attention: str | None = None
    """Attention backend, by the engine's name for it; the engine's default when null."""
    detokenize: bool = False
    """Let the engine detokenize too, for its logs (rewards use braid's own text)."""
    load_weights: bool = False
    """Load the model folder's weights at startup; false: random weights until the first weight sync."""

    is_served = True
    parallel_sizes = ("tensor_parallel", "pipeline_parallel", "replicas")
    unused_while = (("cuda_graphs", False, "cuda_graph_max_batch"),)
    reads_folders: ClassVar[bool] = False
    """Whether it reads new weights from files."""

    def start(self, number: int, model: Model, process: Process) -> RemoteEngine:
        """Start engine `number` of the run. Raises EngineError if it does not come up."""
        raise NotImplementedError

    def connect(self, url: str, *, max_tokens: int, sending: SendOptions, timeout_s: float) -> RemoteEngine:
        """A client of the server at `url`; arguments as in http.ServerEngine."""
        raise NotImplementedError

    def must_define(self) -> tuple[str, ...]:
        return ("connect",) if self.servers else ("start",)

    @property
    def device_fraction(self) -> float:
        return self.memory_fraction

    def num_devices(self) -> int:
        return 0 if self.servers else self.tensor_parallel * self.pipeline_parallel

    def dtype_in(self, config: RunConfig, num_parameters: int | None, *, has_gpus: bool) -> str:
        return config.model.dtype if self.dtype == "auto" else self.dtype

    def unused(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        if self.servers:
            others = ",".join(set(type(self).model_fields) - {"kind", "servers", "max_model_tokens"})
            why = "external servers have their own options (rollout.engine.servers)"
            yield why, f"rollout.engine.{{{others}}}"
        yield from super().unused(config, plan)
