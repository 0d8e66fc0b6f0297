"""Rollout: environments, engines, sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .base import Section


class SamplingConfig(Section):
    """How tokens are drawn. Log-probs are those of the distribution drawn from."""

    max_new_tokens: PositiveInt = 256
    """Limit for one turn of the policy."""
    min_new_tokens: NonNegativeInt = 0
    """End tokens are impossible before so many tokens. Log-probs in training are those without this rule."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it, in training too."""
    greedy: bool = False
    """Take the likeliest token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens with this probability; 1 for off."""
    top_k: NonNegativeInt = 0
    """Keep the k likeliest tokens; 0 for off."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens below this share of the likeliest one's probability; 0 for off."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive and multiplies negative logits of tokens seen before; 1 for off."""
    stop_strings: tuple[str, ...] = ()
    """Generation ends once the text, special tokens included, contains one of them (the string is kept)."""
    stop_token_ids: tuple[int, ...] = ()
    """Further end tokens beside the model's (model.eos_token_id)."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}; lower it"
            )
        return self


class SingleTurnEnv(Section):
    """The policy answers once; rewards judge the answer."""

    kind: Literal["single_turn"] = "single_turn"
    """One answer per prompt."""


class ToolEnv(Section):
    """A conversation in which the policy may call tools; replies are context, never trained on."""

    kind: Literal["tools"]
    """Several turns with tools."""
    tools: tuple[Literal["calculator"], ...] = ("calculator",)
    """Tools that can be called."""
    max_turns: PositiveInt = 4
    """Turns of the policy after which the trajectory is truncated."""
    max_context_tokens: PositiveInt = 1024
    """Length of prompt, turns and replies after which the trajectory is truncated."""
    tool_timeout_s: PositiveFloat = 5.0
    """Limit for one call of a tool."""


class GymnasiumEnv(Section):
    """A Gymnasium environment, stepped in vectors."""

    kind: Literal["gymnasium"]
    """A vectorised simulator."""
    id: str
    """Its registered name, for example CartPole-v1."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to gymnasium.make."""
    num_envs: PositiveInt = 8
    """Copies stepped together; more than prompts_per_round * group_size are never all in use."""
    eval_episodes: PositiveInt = 100
    """Episodes of one evaluation, each from a reset state of its own."""


class VideoConfig(Section):
    """Recording of episodes."""

    save: bool = False
    """Write a video of every rollout."""
    overlay: bool = True
    """Write reward, return and success into the picture."""
    dir: str | None = None
    """Folder; `video/` in the run's folder when null."""


class RobotSettings(Section):
    """How a robot simulator runs, in training or in evaluation."""

    num_envs: PositiveInt | None = None
    """Simulators in all, over all workers; one per trajectory of a round when null."""
    max_episode_steps: PositiveInt = 80
    """Env steps after which an episode is truncated."""
    auto_reset: bool = False
    """Begin a new episode when one ends, at the end of its action chunk."""
    ignore_terminations: bool = False
    """Only max_episode_steps ends an episode."""
    fixed_reset_states: bool = True
    """Simulators keep their reset states within a round, so that a group shares one."""
    relative_reward: bool = True
    """The reward of an env step is the change of the simulator's own."""
    reward_scale: float = 5.0
    """Factor of the simulator's reward."""
    group_size: PositiveInt | None = None
    """Simulators that share a reset state; rollout.group_size when null."""
    seed: NonNegativeInt = 0
    """Added to the run's seed for reset states."""
    camera_height: PositiveInt = 256
    """Pixels."""
    camera_width: PositiveInt = 256
    """Pixels."""
    video: VideoConfig = VideoConfig()
    """Recording."""


class _RobotEnv(RobotSettings):
    eval: RobotSettings | None = None
    """Settings of evaluation; those of training when null."""
    episodes_per_round: PositiveInt = 1
    """Times the simulators are run through in a round."""
    offload: bool = False
    """Put the simulators' state aside and end their processes while the policy trains."""
    pipeline_stages: PositiveInt = 1
    """Parts of the simulators that take turns with the policy: while one moves, the policy answers another."""


class ManiskillEnv(_RobotEnv):
    """ManiSkill."""

    kind: Literal["maniskill"]
    """The simulator ManiSkill (extra `maniskill`)."""
    task: str
    """Its registered name, for example PutCarrotOnPlateInScene-v1."""


class LiberoEnv(_RobotEnv):
    """LIBERO."""

    kind: Literal["libero"]
    """The simulator LIBERO (extra `libero`)."""
    suite: Literal[
        "libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130"
    ] = "libero_10"
    """Its set of tasks."""


EnvConfig = Annotated[
    SingleTurnEnv | ToolEnv | GymnasiumEnv | ManiskillEnv | LiberoEnv, Field(discriminator="kind")
]


class NativeEngineConfig(Section):
    """Limits of the native engine."""

    max_running: PositiveInt = 256
    """Sequences decoded together."""
    kv_budget_tokens: PositiveInt = 131_072
    """Tokens of key/value cache in all; a request is admitted when its longest possible length fits."""
    prefill_tokens: PositiveInt = 8192
    """Prompt tokens in one forward pass."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the weights that it computes with: auto shares the trainer's own tensors, the others hold a copy."""
    cuda_graphs: bool = True
    """Capture the decoding step on CUDA devices."""


class _ServedEngine(Section):
    replicas: PositiveInt | None = None
    """Engines side by side; requests go to the least loaded, those of a group together. null: as many as rollout has devices
    for."""
    tensor_parallel: PositiveInt = 1
    """Devices that share each layer of one engine."""
    pipeline_parallel: PositiveInt = 1
    """Devices that share the layers of one engine out among them."""
    servers: tuple[str, ...] = ()
    """URLs of running servers, in place of engines of this run's own."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Type of the engine's weights; the trainer's for auto."""
    memory_fraction: float = Field(default=0.8, gt=0.0, le=1.0)
    """Share of the device's memory for weights and cache."""
    max_running: PositiveInt = 256
    """Sequences decoded together."""
    max_model_tokens: PositiveInt | None = None
    """Longest sequence that the engine accepts; the longest possible trajectory when null."""
    cuda_graphs: bool = True
    """Capture the decoding step on CUDA devices."""
    cuda_graph_max_batch: PositiveInt | None = None
    """Largest batch that is captured; the engine's own choice when null."""
    prefix_caching: bool = True
    """Reuse the cache of equal beginnings."""
    chunked_prefill: bool = True
    """Long prompts are read in pieces between decoding steps."""
    prefill_tokens: PositiveInt = 8192
    """Prompt tokens in one forward pass."""
    attention: str | None = None
    """Attention kernels, by the engine's own name; its choice when null."""
    detokenize: bool = False
    """Let the engine make text too (for its logs; rewards get braid's own text)."""
    load_weights: bool = False
    """Read the folder's weights at the start; false: random ones until the first publication."""


class VllmConfig(_ServedEngine):
    """vLLM (`rollout.engine=vllm`, extra `vllm`)."""

    block_size: PositiveInt | None = None
    """Tokens of one cache page; vLLM's choice when null."""
    log_stats: bool = True
    """vLLM writes its own statistics."""
    executor: Literal["mp", "ray", "uni"] = "mp"
    """How vLLM runs its workers."""
    in_process: bool = True
    """vLLM's scheduler runs in the engine's own process, so that the order of requests is the same every time."""


class SglangConfig(_ServedEngine):
    """SGLang (`rollout.engine=sglang`, extra `sglang`)."""

    deterministic: bool = True
    """Every request is drawn with random numbers of its own, and its numbers hang on no other request; false is faster."""
    decode_log_interval: PositiveInt = 40
    """Decoding steps between two lines of SGLang's log."""
    torch_compile: bool = False
    """torch.compile of SGLang's decoding step."""
    torch_compile_max_batch: PositiveInt = 32
    """Largest batch that is compiled."""


class PublishConfig(Section):
    """How new weights travel to engines in other processes."""

    transport: Literal["auto", "shared_memory", "nccl", "gloo", "files"] = "auto"
    """auto: the cheapest that the placement allows."""
    bucket_bytes: PositiveInt = 128 * 2**20
    """Bytes sent at a time."""
    existing_group: Literal["auto", "replace", "refuse"] = "auto"
    """When a server already has a group for weights: make a new one or stop. auto: replace for servers, refuse for
    engines of this run."""


class FilterConfig(Section):
    """Which groups are worth training on, by the rewards of their valid trajectories as training sees them. A dropped group is
    as if it had not been sampled: it is in no statistic, loss or denominator."""

    min_std: NonNegativeFloat | None = None
    """Groups whose rewards have a standard deviation of at most this are dropped (0: those with equal rewards)."""
    min_mean: float | None = None
    """Groups whose mean reward is at most this are dropped."""
    max_mean: float | None = None
    """Groups whose mean reward is at least this are dropped."""
    then: Literal["mask", "resample", "replace"] = "mask"
    """mask: train without them. resample: draw further batches of prompts_per_round prompts until the round is full (DAPO); what
    is over is dropped too. replace: train on copies of kept groups in their place."""
    max_batches: PositiveInt = 30
    """resample: batches of prompts drawn for one round at most; then the round goes on with what was kept."""
    min_kept_fraction: float = Field(default=0.3, ge=0.0, le=1.0)
    """replace: share of kept groups below which the round is trained without the others instead."""


class RolloutConfig(Section):
    """How a round's trajectories are produced."""

    prompts_per_round: PositiveInt = 32
    """Prompts (or reset states) of one round."""
    group_size: PositiveInt = 8
    """Trajectories per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """How training trajectories are sampled."""
    max_sequence_tokens: PositiveInt | None = None
    """Longest prompt plus response (replies too), in training and evaluation: a long prompt leaves less for the answer. null: the
    sum of their limits."""
    engine: Literal["native", "vllm", "sglang"] = "native"
    """What samples."""
    native: NativeEngineConfig = NativeEngineConfig()
    """Limits of the native engine."""
    vllm: VllmConfig = VllmConfig()
    """Options of vLLM."""
    sglang: SglangConfig = SglangConfig()
    """Options of SGLang."""
    publish: PublishConfig = PublishConfig()
    """How new weights travel to engines in other processes."""
    request_batch: PositiveInt | None = None
    """Prompts handed to the engine at a time, the next when all of them are done; all of a round when null."""
    print_outputs: bool = False
    """Log every answer as text."""
    check_weights: bool = False
    """After each publication compare a fingerprint of the engine's weights with the trainer's."""
    check_weights_dir: str | None = None
    """Folder for both sets of weights when they differ; `check_weights/` in the run's folder when null."""
    filter: FilterConfig = FilterConfig()
    """Groups left out of training."""
    retries: NonNegativeInt = 1
    """Further tries of a trajectory whose environment or engine failed."""
    max_invalid_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of invalid trajectories in a round above which the run ends with their reasons."""
