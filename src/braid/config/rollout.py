"""Rollout: environments, engines, sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from .base import Section


class SamplingConfig(Section):
    """Sampling of tokens. Recorded log-probs are those of the distribution sampled from."""

    max_new_tokens: PositiveInt = 256
    """Maximum number of tokens per turn of the policy."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum number of tokens before an end token may be sampled. Log-probs in training ignore it."""
    temperature: PositiveFloat = 1.0
    """Temperature that divides the logits, in training too."""
    greedy: bool = False
    """Greedy decoding."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling: keep the smallest set of tokens with this total probability; 1 disables it."""
    top_k: NonNegativeInt = 0
    """Keep the k most likely tokens; 0 disables it."""
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Drop tokens whose probability is below this fraction of the most likely token's; 0 disables it."""
    repetition_penalty: PositiveFloat = 1.0
    """Divides positive and multiplies negative logits of tokens that already occurred; 1 disables it."""
    stop_strings: tuple[str, ...] = ()
    """Stop when the text, including special tokens, contains one of these (the string is kept)."""
    stop_token_ids: tuple[int, ...] = ()
    """End tokens in addition to the model's (model.eos_token_id)."""

    @model_validator(mode="after")
    def _min_below_max(self) -> SamplingConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens={self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}; lower it"
            )
        return self


class Timeouts(Section):
    """Time limits of an episode, in seconds. A call that takes longer is a failure of the environment."""

    start_s: PositiveFloat = 300.0
    """Time limit of an environment's start."""
    step_s: PositiveFloat = 300.0
    """Time limit of an environment's reply to a turn."""
    close_s: PositiveFloat = 30.0
    """Time limit of closing an environment."""
    episode_s: PositiveFloat | None = None
    """Time limit of an episode, sampling included, after which it is truncated; null for none."""


class SingleTurnEnv(Section):
    """The policy answers once, and rewards score the answer."""

    kind: Literal["single_turn"] = "single_turn"
    """One response per prompt."""


class ChatEnv(Section):
    """Settings of conversations of several turns."""

    max_turns: PositiveInt = 4
    """Maximum turns of the policy, after which the trajectory is truncated."""
    max_context_tokens: PositiveInt = 1024
    """Maximum tokens of prompt, turns and replies, after which the trajectory is truncated."""
    tool_format: (
        Literal["hermes", "qwen_xml", "glm", "llama", "mistral", "deepseek", "pythonic", "harmony", "tag"]
        | None
    ) = None
    """Format of the policy's tool calls; null: that of the chat template, or `tag`
    (`<calculator>6*7</calculator>`) without one."""
    thinking: Literal["keep", "as_template"] = "keep"
    """The policy's reasoning in earlier turns: keep it, so that a conversation is one training row, or drop it where
    the chat template does, which begins a new segment and row."""


class _SteppedEnv(ChatEnv):
    cut_turns: Literal["end", "continue"] = "end"
    """A turn cut at sampling.max_new_tokens ends the episode as truncated, or the environment replies to it."""
    replies: Literal["messages", "text"] = "messages"
    """The environment's replies: messages of the chat template; or text without roles, after which the policy goes on with
    the same answer. An end token is then dropped from the context, which begins a new segment and row."""
    timeouts: Timeouts = Timeouts()
    """Time limits."""
    rewards_at: Literal["turn", "end"] = "turn"
    """Position of the environment's rewards: at the end of the turn that earned them, or their sum at the end of the
    episode. Matters to estimators of returns: gae, reinforce, gigpo, and advantage_level=turn."""


class McpServer(Section):
    """Tools of an MCP server: a command that speaks MCP over its standard streams, or the URL of a running server
    (streamable HTTP)."""

    kind: Literal["mcp"] = "mcp"
    """Tools of an MCP server."""
    name: str = ""
    """Prefix of tool names that occur more than once; the server's own name when empty."""
    command: str | None = None
    """Program to start, in the config's folder."""
    args: tuple[str, ...] = ()
    """Arguments of the command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, in addition to PATH, HOME and the like."""
    url: str | None = None
    """URL of a running server."""
    per_episode: bool = False
    """Start or connect to the server for each episode, for servers with state; false: once per rollout worker."""
    error_is_failure: bool = False
    """Treat an error result of a tool as a failure of the environment; false: the policy reads it."""

    @model_validator(mode="after")
    def _one_of_both(self) -> McpServer:
        if (self.command is None) == (self.url is None):
            raise ValueError("set either `command` or `url` of an MCP server")
        return self


class SearchTool(Section):
    """A search tool over documents, ranked by BM25 (extra `agents`)."""

    kind: Literal["search"] = "search"
    """Search over documents."""
    index: str
    """JSON lines file of the documents, each with `id`, `title` and `text`."""


def _tool_kind(value: Any) -> str:
    if isinstance(value, dict):
        return value.get("kind", "search" if "index" in value else "mcp")
    return getattr(value, "kind", "name")


ToolSource = Annotated[
    Annotated[str, Tag("name")] | Annotated[McpServer, Tag("mcp")] | Annotated[SearchTool, Tag("search")],
    Discriminator(_tool_kind),
]


class PythonSandbox(Section):
    """Sandbox of the tool `python`."""

    isolation: Literal["auto", "bubblewrap", "sandlock", "process"] = "auto"
    """Sandbox: bubblewrap, sandlock, or with auto the first of them that works on this machine. process: only limits on
    time, memory and files; the program can read files, use the network and kill processes."""
    memory_bytes: int = Field(default=2**30, ge=2**26, le=2**32)
    """Address space limit of an episode's Python process, in bytes."""


class ToolsEnv(_SteppedEnv):
    """A conversation in which the policy may call tools, by the tool calls of its chat template."""

    kind: Literal["tools"]
    """Multiple turns with tool calls."""
    tools: tuple[ToolSource, ...] = ("calculator",)
    """Available tools: `calculator`, `python`, a function or class (package.module.name or file.py:name), an MCP server
    ({command, args, env} or {url}), or a search index ({index})."""
    tool_timeout_s: PositiveFloat = 30.0
    """Timeout of one tool call, in seconds."""
    max_result_characters: PositiveInt = 10_000
    """Maximum length of a tool's result, which is cut after it."""
    python: PythonSandbox = PythonSandbox()
    """Sandbox of the tool `python`."""


class MixedEnvConfig(Section):
    """One kind of environment in a mixture."""

    name: str
    """Name of an adapter, or a class of your own, as env.name."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    share: NonNegativeFloat = 1.0
    """Share of the training tasks, relative to those of the others, for environments that make their own tasks."""
    eval_share: NonNegativeFloat | None = None
    """Share of the evaluation's episodes; null for `share`."""
    max_turns: PositiveInt | None = None
    """Maximum turns of the policy, after which the trajectory is truncated; null for env.max_turns, which is an upper
    bound."""


class OpponentsConfig(Section):
    """Agents that are played by earlier weights of the policy: those that an environment names in `opponents`."""

    every_rounds: NonNegativeInt = 0
    """Give opponents the policy's weights in rounds that are a multiple of this; 0: they keep its first weights."""


class AgentEnvConfig(_SteppedEnv):
    """A text environment, or a mixture of several: adapters by name, or classes of your own."""

    kind: Literal["agent"]
    """A text environment of several turns."""
    name: str | None = None
    """Name of an adapter (gymnasium, skyrl_gym, gem, reasoning_gym, textarena, textarena_self_play, textworld, openenv, guess,
    templated, team), or package.module.Class or file.py:Class of your own; null for a mixture."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    mix: dict[str, MixedEnvConfig] = Field(default_factory=dict)
    """Kinds of environments, by names of your own, which are the sources of their tasks. With data, a prompt's source
    or column mix_key names its kind."""
    mix_key: str | None = None
    """Column of the data that names the kind of a prompt's environment in mix; null for the prompt's source."""
    opponents: OpponentsConfig | None = None
    """Weights of the opponents in an environment of several agents; null if there are none. Needs a second copy of the
    policy's weights in every rollout worker, and the native engine."""
    run_in: Literal["auto", "inline", "thread", "process"] = "auto"
    """Where the environment's methods run: on the event loop (async methods), in threads, or in processes. auto: as the
    environment demands; async methods inline, others in threads."""
    processes: PositiveInt = 2
    """Processes per rollout worker where run_in is process; each runs one episode at a time."""
    tasks: PositiveInt = 4096
    """Number of tasks, each a seed, for environments that need no data (data.train is empty)."""
    eval_episodes: PositiveInt = 100
    """Episodes per evaluation where data.eval is empty, each with its own seed."""

    @model_validator(mode="after")
    def _one_or_several(self) -> AgentEnvConfig:
        if (self.name is None) == (not self.mix):
            raise ValueError("set either `name`, or several environments in `mix`")
        for of in ("share", "eval_share"):
            shares = [
                kind.share if (share := getattr(kind, of)) is None else share for kind in self.mix.values()
            ]
            if self.mix and not any(shares):
                raise ValueError(f"every {of} in `mix` is 0; raise one of them")
        return self


class ProgramEnv(ChatEnv):
    """A program that plays an episode by calling the policy as an OpenAI-compatible server."""

    kind: Literal["program"]
    """A program that calls the policy."""
    program: str | tuple[str, ...] = Field(min_length=1)
    """Python function `(task, base_url, api_key) -> reward` (package.module.function or file.py:function), or a command
    line as a list, which reads OPENAI_BASE_URL, OPENAI_API_KEY, BRAID_TASK and BRAID_SEED; or external: programs that run
    elsewhere and ask for episodes, with the key in BRAID_EXTERNAL_KEY."""
    max_turns: PositiveInt = 50
    """Maximum calls of an episode, after which they are refused and the trajectory is truncated."""
    episode_timeout_s: PositiveFloat = 600.0
    """Time limit of an episode, in seconds; a program that takes longer is stopped and has failed."""
    concurrency: PositiveInt = 64
    """Maximum number of programs that run at a time, per rollout worker."""
    host: str = "127.0.0.1"
    """Address on which the server listens, and by which programs call it."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the server; 0 for any free one."""


class VideoConfig(Section):
    """Videos of episodes (extra `video`)."""

    save: bool = False
    """Save a video of every evaluation: a grid of its first episodes. Frames are the first image of the observations, or
    what the environment renders (render_mode rgb_array)."""
    train_every_rounds: PositiveInt | None = None
    """Save a video of the first episodes of a round's rollout, too, every so many rounds; null: never."""
    num_episodes: PositiveInt = 9
    """Episodes in a video."""
    overlay: bool = True
    """Draw instruction, step, reward, return and success below each episode."""
    frames_per_s: PositiveInt = 10
    """Frames per second."""
    dir: str | None = None
    """Output folder; `video/` in the run's folder when null."""

    @property
    def are_saved(self) -> bool:
        """Whether there are any."""
        return self.save or self.train_every_rounds is not None


class SimulatorEnv(Section):
    """Environments of a simulator."""

    num_envs: PositiveInt = 8
    """Environments stepped together; at most prompts_per_round * group_size of them are used."""
    processes: NonNegativeInt = 1
    """Child processes among which the environments are divided; they step in parallel, with the deadline
    rollout.env_timeout_s. 0: in the run's own process, without a deadline; for debuggers, and for environments whose
    steps take microseconds. Changes no result."""
    pipeline_stages: PositiveInt = 1
    """Parts into which the environments of each process are divided: while one part is stepped, the actions of
    another are computed. Changes no result. Needs env.processes of at least 1."""
    offload: bool = False
    """End the child processes after each sampling, and start them again for the next, so that the policy is trained with
    the memory that they had."""
    max_episode_steps: PositiveInt | None = None
    """Maximum env steps, after which an episode is truncated; null for the environment's own limit."""
    ignore_terminations: bool = False
    """Go on after the task itself has ended, until max_episode_steps; success_once still tells whether the task was
    fulfilled in between."""
    reward_scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor on the environment's rewards, also in evaluations and metrics."""
    relative_reward: bool = False
    """Use the change of the environment's reward since the previous env step as the reward of an env step; 0 before
    the first."""
    auto_reset: bool = False
    """Start another episode when one ends, at the end of its action chunk, until max_steps_per_rollout. Each is a
    trajectory of the group. Evaluations run one episode per reset state."""
    max_steps_per_rollout: PositiveInt | None = None
    """Env steps of each of a round's prompts_per_round * group_size rollouts, in whole action chunks; an episode that
    has not ended by then is truncated, and its last state's value bootstrapped. null: until the episode ends."""
    fixed_reset_states: bool = True
    """Start all episodes of a group in the same reset state; false: each in one of its own."""
    reset_seeds: PositiveInt | tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] | None = None
    """Seeds of the reset states of training: a list, or a number for the seeds below it; visited once per epoch, in
    order without data.shuffle. null: new random ones in every round."""
    eval_reset_seeds: PositiveInt | tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] | None = None
    """Seeds of the reset states of evaluations, a list or the seeds below a number, one episode each; null:
    eval_episodes random ones, the same in every evaluation."""
    eval_episodes: PositiveInt = 100
    """Episodes per evaluation, each from a different reset state."""
    video: VideoConfig = VideoConfig()
    """Videos of episodes."""

    @model_validator(mode="after")
    def _rollouts(self) -> SimulatorEnv:
        if self.auto_reset and self.max_steps_per_rollout is None:
            raise ValueError("auto_reset=true needs the length of a rollout; set max_steps_per_rollout")
        if self.ignore_terminations and self.max_episode_steps is None:
            raise ValueError("ignore_terminations=true needs a time limit; set max_episode_steps")
        for key in ("reset_seeds", "eval_reset_seeds"):
            if getattr(self, key) == ():
                raise ValueError(f"{key} is empty; name at least one seed, or set it to null")
        if self.reset_seeds is not None and not self.fixed_reset_states:
            raise ValueError("reset_seeds are those of whole groups; set fixed_reset_states=true")
        return self


class GymnasiumEnv(SimulatorEnv):
    """A vectorized Gymnasium environment."""

    kind: Literal["gymnasium"]
    """A vectorized Gymnasium environment."""
    id: str
    """Registered id of the environment, for example CartPole-v1; or your own: package.module.Class, or file.py:Class
    relative to the config's folder, a gymnasium.Env or a function that makes one."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of gymnasium.make, or of the class or function."""
    rescale_actions: bool = False
    """Rescale actions from [-1, 1] to the bounds of the environment's, such as PushT's pixels."""
    vectorized: bool = False
    """Make one VectorEnv per process, with gymnasium.make_vec or a class or function of your own that takes `num_envs`, instead
    of separate environments. It must take a list of seeds, one per environment. Unless its auto-reset mode is DISABLED,
    its episodes begin together."""


class MetaworldEnv(SimulatorEnv):
    """MetaWorld: 50 tasks of a Sawyer arm in MuJoCo (extra `metaworld`)."""

    kind: Literal["metaworld"]
    """A task of MetaWorld."""
    task: str
    """Name of the task, for example reach-v3."""
    instruction: str | None = None
    """Text for policies that read it; the task's name in words when null."""
    max_episode_steps: PositiveInt = 500  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    terminate_on_success: bool = False
    """End an episode at its first success."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """Images of the observations: name -> camera (corner, corner2, corner3, corner4, topview, behindGripper, gripperPOV).
    With cameras the state is only the gripper's position and opening."""
    image_size: PositiveInt = 64
    """Height and width of images, in pixels."""
    shadows: bool = False
    """Render shadows, reflections, sky and antialiasing, as MetaWorld does; on a CPU twelve times slower."""


class _CameraEnv(SimulatorEnv):
    camera_height: PositiveInt = 256
    """Height of camera images, in pixels."""
    camera_width: PositiveInt = 256
    """Width of camera images, in pixels."""


class ManiskillEnv(_CameraEnv):
    """ManiSkill: tasks of robot arms in SAPIEN (extra `maniskill`). Needs a Vulkan device."""

    kind: Literal["maniskill"]
    """A task of ManiSkill."""
    task: str
    """Registered name of the task, for example PutCarrotOnPlateInScene-v1."""
    obs_mode: str | None = None
    """Observations, in ManiSkill's words: state, rgb, ...; the task's default when null."""
    control_mode: str | None = None
    """Controller of the robot, in ManiSkill's words; the task's default when null."""
    reward_mode: str | None = None
    """Rewards: success, 1 while the task is fulfilled; put_on, 0.1 for a grasp of the object and 0.1 for one of five steps
    besides; or in ManiSkill's words normalized_dense, dense, sparse, none. The task's default when null."""
    on_gpu: bool = False
    """Simulate all environments of a process in one scene on the GPU; false: each in a scene of its own on the CPU."""
    gripper: Literal["signed", "open_is_one"] = "signed"
    """Meaning of the last number of an action: signed, as in the simulator, opens the gripper if it is positive;
    open_is_one, as in OpenVLA's data, if it is above 0.5."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of ManiSkill's environment, such as sim_config."""


class LiberoEnv(_CameraEnv):
    """LIBERO: language-conditioned tasks of a Panda arm (extra `libero`). Its assets come from the Hub."""

    kind: Literal["libero"]
    """A task suite of LIBERO."""
    suite: Literal[
        "libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130"
    ] = "libero_10"
    """Task suite. The seed of a reset is the number of its initial state, modulo their number: those of the first task, of
    the second, ..."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Numbers of the suite's tasks to use; null for all."""
    max_episode_steps: PositiveInt = 512  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    gripper: Literal["signed", "open_is_one"] = "signed"
    """Meaning of the last number of an action: signed, as in the simulator, closes the gripper if it is positive;
    open_is_one, as in OpenVLA's data, opens it if it is above 0.5."""


class RobosuiteEnv(SimulatorEnv):
    """robosuite: manipulation tasks in MuJoCo (extra `robosuite`)."""

    kind: Literal["robosuite"]
    """A task of robosuite."""
    task: str
    """Name of the task, for example Lift."""
    robots: tuple[str, ...] = ("Panda",)
    """Names of the robots."""
    max_episode_steps: PositiveInt = 200  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """Images of the observations: name -> camera (agentview, frontview, robot0_eye_in_hand, ...). With cameras the state is only
    the robots'."""
    camera_height: PositiveInt = 128
    """Height of camera images, in pixels."""
    camera_width: PositiveInt = 128
    """Width of camera images, in pixels."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of robosuite.make, such as controller_configs."""


EnvConfig = Annotated[
    SingleTurnEnv
    | ToolsEnv
    | AgentEnvConfig
    | ProgramEnv
    | GymnasiumEnv
    | MetaworldEnv
    | ManiskillEnv
    | LiberoEnv
    | RobosuiteEnv,
    Field(discriminator="kind"),
]


CPU_KV_BUDGET_TOKENS = 131_072


class NativeEngineConfig(Section):
    """Options of the native engine."""

    max_running: PositiveInt = 256
    """Maximum number of sequences decoded together."""
    kv_budget_tokens: PositiveInt | None = None
    """Capacity of the key/value cache in tokens; a request is admitted once its longest possible length fits.
    null: 80% of the free memory on CUDA devices, 131,072 tokens on CPUs."""
    prefill_tokens: PositiveInt = 8192
    """Maximum prompt tokens per forward pass."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the engine's weights and computation. auto: the arithmetic of training, with the trainer's
    tensors; under train.autocast (by default on CUDA), with a copy whose linear layers have its dtype. Others
    keep a copy if they differ from model.dtype."""
    cuda_graphs: bool = True
    """Capture the decode step in a CUDA graph, on CUDA devices."""
    prefix_caching: bool = True
    """Keep the key/value cache of a conversation for its next turn, for up to kv_budget_tokens tokens on top; on CUDA
    devices the default budget is halved for it."""
    recompute_cache: bool = False
    """Recompute the key/value cache of turns that continue with new weights (pipeline.on_new_weights=interrupt),
    instead of keeping it."""


class _ServedEngine(Section):
    replicas: PositiveInt | None = None
    """Number of engine replicas. Requests go to the least loaded one, those of a group to the same one. null:
    as many as fit on the rollout devices."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel size of one engine."""
    pipeline_parallel: PositiveInt = 1
    """Pipeline-parallel size of one engine."""
    servers: tuple[str, ...] = ()
    """URLs of running servers to use instead of starting engines."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the engine's weights; auto for the trainer's."""
    memory_fraction: float = Field(default=0.8, gt=0.0, le=1.0)
    """Fraction of device memory for weights and cache."""
    max_running: PositiveInt = 256
    """Maximum number of sequences decoded together."""
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


class VllmConfig(_ServedEngine):
    """vLLM (`rollout.engine=vllm`, extra `vllm`)."""

    block_size: PositiveInt | None = None
    """Tokens per cache block; vLLM's default when null."""
    log_stats: bool = True
    """Let vLLM log its statistics."""
    executor: Literal["mp", "ray", "uni"] = "mp"
    """vLLM's distributed executor backend."""
    in_process: bool = True
    """Run vLLM's scheduler in the engine's process, which makes the order of requests reproducible."""


class SglangConfig(_ServedEngine):
    """SGLang (`rollout.engine=sglang`, extra `sglang`)."""

    deterministic: bool = True
    """Give every request its own random numbers, independent of others in the batch; false is faster."""
    decode_log_interval: PositiveInt = 40
    """Decode steps between two log lines of SGLang."""
    torch_compile: bool = False
    """Apply torch.compile to SGLang's decode step."""
    torch_compile_max_batch: PositiveInt = 32
    """Largest batch size that is compiled."""


class WeightSyncConfig(Section):
    """Weight sync to engines in other processes."""

    transport: Literal["auto", "shared_memory", "nccl", "gloo", "files"] = "auto"
    """Transport of the weights. auto: the cheapest that the placement allows."""
    bucket_bytes: PositiveInt = 128 * 2**20
    """Bytes sent per transfer."""
    existing_group: Literal["auto", "replace", "refuse"] = "auto"
    """What to do if a server already has a weight sync group: replace it, or stop. auto: replace for external
    servers, refuse for engines that this run started."""


class FilterConfig(Section):
    """Filter of the groups to train on, by the training rewards of their valid trajectories. A dropped group
    counts in no statistic, loss or denominator."""

    min_std: NonNegativeFloat | None = None
    """Drop groups whose rewards have at most this standard deviation (0: equal rewards); null: no limit."""
    min_mean: float | None = None
    """Drop groups whose mean reward is at most this; null for no limit."""
    max_mean: float | None = None
    """Drop groups whose mean reward is at least this; null for no limit."""
    then: Literal["mask", "resample", "replace"] = "mask"
    """mask: train without the dropped groups. resample: sample further batches of prompts_per_round prompts
    until the round is full (DAPO); surplus groups are dropped. replace: train on copies of kept groups in
    their place."""
    max_batches: PositiveInt = 30
    """resample: maximum number of prompt batches per round; then the round continues with the groups kept so
    far."""
    min_kept_fraction: float = Field(default=0.3, ge=0.0, le=1.0)
    """replace: fraction of kept groups below which dropped groups are masked instead."""


class RolloutConfig(Section):
    """Rollout settings: how a round's trajectories are sampled, by which engine, and which are kept."""

    prompts_per_round: PositiveInt = 32
    """Prompts (or reset states) per round."""
    group_size: PositiveInt = 8
    """Trajectories per prompt."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling of training trajectories."""
    max_sequence_tokens: PositiveInt | None = None
    """Maximum tokens of prompt and response (including replies), in training and evaluation; a long prompt
    leaves less for the response. null: the sum of their limits."""
    engine: Literal["native", "vllm", "sglang"] = "native"
    """Inference engine."""
    native: NativeEngineConfig = NativeEngineConfig()
    """Options of the native engine."""
    vllm: VllmConfig = VllmConfig()
    """Options of vLLM."""
    sglang: SglangConfig = SglangConfig()
    """Options of SGLang."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Weight sync to engines in other processes."""
    request_batch: PositiveInt | None = None
    """Maximum number of prompts sampled at a time; null for the whole round."""
    print_outputs: bool = False
    """Log every response as text."""
    check_weights: bool = False
    """Compare a fingerprint of the engine's weights with the trainer's after each weight sync."""
    check_weights_dir: str | None = None
    """Folder that stores both weights if they differ; `check_weights/` in the run's folder when null."""
    filter: FilterConfig = FilterConfig()
    """Filter of the groups to train on."""
    env_timeout_s: PositiveFloat = 300.0
    """Timeout of one call of a simulator, in seconds: of all environments of a process (env.processes), or of its start.
    The episodes of a late one have failed."""
    retries: NonNegativeInt = 1
    """Retries of a trajectory whose environment or engine failed."""
    max_invalid_fraction: float = Field(default=0.5, ge=0.0, le=1.0)
    """Fraction of invalid trajectories in a round above which the run ends with their reasons."""
