"""The `env` section: where episodes take place."""

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

from braid.sections import Section


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
    """The policy's reasoning in earlier turns: keep it, so that a conversation is one training row, or drop
    it where the chat template does, which begins a new segment and row."""


class _SteppedEnv(ChatEnv):
    cut_turns: Literal["end", "continue"] = "end"
    """A turn cut at sampling.max_new_tokens ends the episode as truncated, or the environment replies to
    it."""
    replies: Literal["messages", "text"] = "messages"
    """The environment's replies: messages of the chat template; or text without roles, after which the policy
    goes on with the same answer. An end token is then dropped from the context, which begins a new segment
    and row."""
    timeouts: Timeouts = Timeouts()
    """Time limits."""
    rewards_at: Literal["turn", "end"] = "turn"
    """Position of the environment's rewards: at the end of the turn that earned them, or their sum at the end
    of the episode. Matters to estimators of returns: gae, reinforce, gigpo, and advantage_level=turn."""


class McpServer(Section):
    """Tools of an MCP server: a command that speaks MCP over its standard streams, or the URL of a running
    server (streamable HTTP)."""

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
    """Start or connect to the server for each episode, for servers with state; false: once per rollout
    worker."""
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
    """Sandbox: bubblewrap, sandlock, or with auto the first of them that works on this machine. process: only
    limits on time, memory and files; the program can read files, use the network and kill processes."""
    memory_bytes: int = Field(default=2**30, ge=2**26, le=2**32)
    """Address space limit of an episode's Python process, in bytes."""


class ToolsEnv(_SteppedEnv):
    """A conversation in which the policy may call tools, by the tool calls of its chat template."""

    kind: Literal["tools"]
    """Multiple turns with tool calls."""
    tools: tuple[ToolSource, ...] = ("calculator",)
    """Available tools: `calculator`, `python`, a function or class (package.module.name or file.py:name), an
    MCP server ({command, args, env} or {url}), or a search index ({index})."""
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
    """Share of the training tasks, relative to those of the others, for environments that make their own
    tasks."""
    eval_share: NonNegativeFloat | None = None
    """Share of the evaluation's episodes; null for `share`."""
    max_turns: PositiveInt | None = None
    """Maximum turns of the policy, after which the trajectory is truncated; null for env.max_turns, which is
    an upper bound."""


class OpponentsConfig(Section):
    """Agents that are played by earlier weights of the policy: those that an environment names in
    `opponents`."""

    every_rounds: NonNegativeInt = 0
    """Give opponents the policy's weights in rounds that are a multiple of this; 0: they keep its first
    weights."""


class AgentEnvConfig(_SteppedEnv):
    """A text environment, or a mixture of several: adapters by name, or classes of your own."""

    kind: Literal["agent"]
    """A text environment of several turns."""
    name: str | None = None
    """Name of an adapter (gymnasium, skyrl_gym, gem, reasoning_gym, textarena, textarena_self_play,
    textworld, openenv, guess, templated, team), or package.module.Class or file.py:Class of your own; null
    for a mixture."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""
    mix: dict[str, MixedEnvConfig] = Field(default_factory=dict)
    """Kinds of environments, by names of your own, which are the sources of their tasks. With data, a
    prompt's source or column mix_key names its kind."""
    mix_key: str | None = None
    """Column of the data that names the kind of a prompt's environment in mix; null for the prompt's
    source."""
    opponents: OpponentsConfig | None = None
    """Weights of the opponents in an environment of several agents; null if there are none. Needs a second
    copy of the policy's weights in every rollout worker, and the native engine."""
    run_in: Literal["auto", "inline", "thread", "process"] = "auto"
    """Where the environment's methods run: on the event loop (async methods), in threads, or in processes.
    auto: as the environment demands; async methods inline, others in threads."""
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
    """Python function `(task, base_url, api_key) -> reward` (package.module.function or file.py:function), or
    a command line as a list, which reads OPENAI_BASE_URL, OPENAI_API_KEY, BRAID_TASK and BRAID_SEED; or
    external: programs that run elsewhere and ask for episodes, with the key in BRAID_EXTERNAL_KEY."""
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
    """Save a video of every evaluation: a grid of its first episodes. Frames are the first image of the
    observations, or what the environment renders (render_mode rgb_array)."""
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
    rollout.env_timeout_s. 0: in the run's own process, without a deadline; for debuggers, and for
    environments whose steps take microseconds. Changes no result."""
    pipeline_stages: PositiveInt = 1
    """Parts into which the environments of each process are divided: while one part is stepped, the actions
    of another are computed. Changes no result. Needs env.processes of at least 1."""
    offload: bool = False
    """End the child processes after each sampling, and start them again for the next, so that the policy is
    trained with the memory that they had."""
    max_episode_steps: PositiveInt | None = None
    """Maximum env steps, after which an episode is truncated; null for the environment's own limit."""
    ignore_terminations: bool = False
    """Go on after the task itself has ended, until max_episode_steps; success_once still tells whether the
    task was fulfilled in between."""
    reward_scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor on the environment's rewards, also in evaluations and metrics."""
    step_penalty: float = Field(default=0.0, allow_inf_nan=False)
    """Subtracted from the scaled reward of each env step."""
    relative_reward: bool = False
    """Use the change of the environment's reward since the previous env step as the reward of an env step; 0
    before the first."""
    auto_reset: bool = False
    """Start another episode when one ends, at the end of its action chunk, until max_steps_per_rollout. Each
    is a trajectory of the group. Evaluations run one episode per reset state."""
    max_steps_per_rollout: PositiveInt | None = None
    """Env steps of each of a round's prompts_per_round * group_size rollouts, in whole action chunks; an
    episode that has not ended by then is truncated, and its last state's value bootstrapped. null: until the
    episode ends."""
    fixed_reset_states: bool = True
    """Start all episodes of a group in the same reset state. If false, each has its own."""
    reset_seeds: PositiveInt | tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] | None = None
    """Seeds of the reset states of training: a list, or a number for the seeds below it; visited once per
    epoch, in order without data.shuffle. null: new random ones in every round."""
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
    """Registered id of the environment, for example CartPole-v1; or your own: package.module.Class, or
    file.py:Class relative to the config's folder, a gymnasium.Env or a function that makes one."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of gymnasium.make, or of the class or function."""
    rescale_actions: bool = False
    """Rescale actions from [-1, 1] to the bounds of the environment's, such as PushT's pixels."""
    vectorized: bool = False
    """Make one VectorEnv per process, with gymnasium.make_vec or a class or function of your own that takes
    `num_envs`, instead of separate environments. It must take a list of seeds, one per environment. Unless
    its auto-reset mode is DISABLED, its episodes begin together."""


class MetaworldEnv(SimulatorEnv):
    """MetaWorld: 50 tasks of a Sawyer arm in MuJoCo (extra `metaworld`)."""

    kind: Literal["metaworld"]
    """A task of MetaWorld."""
    task: str
    """Name of the task, for example reach-v3, or of one of MetaWorld's sets: MT10, MT25, MT50, and ML10, ML25
    and ML45 with -train or -test. Of a set, the seed of a reset, modulo the number of tasks, decides the
    episode's."""
    instruction: str | None = None
    """Text for policies that read it; the task's name in words when null."""
    max_episode_steps: PositiveInt = 500  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    terminate_on_success: bool = False
    """End an episode at its first success."""
    reward_mode: Literal["dense", "success"] = "dense"
    """Rewards: those of MetaWorld, or 1 while the task is fulfilled."""
    cameras: dict[str, str] = Field(default_factory=dict)
    """Images of the observations: name -> camera (corner, corner2, corner3, corner4, topview, behindGripper,
    gripperPOV). With cameras the state is only the gripper's position and opening."""
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
    """Rewards: success, 1 while the task is fulfilled; put_on, 0.1 for a grasp of the object and 0.1 for one
    of five steps besides; or in ManiSkill's words normalized_dense, dense, sparse, none. The task's default
    when null."""
    on_gpu: bool = False
    """Simulate all environments of a process in one scene on the GPU. If false, each has its own scene on the
    CPU."""
    gripper: Literal["signed", "open_is_one"] = "signed"
    """Meaning of the last number of an action: signed, as in the simulator, opens the gripper if it is
    positive; open_is_one, as in OpenVLA's data, if it is above 0.5."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keyword arguments of ManiSkill's environment, such as sim_config."""


class LiberoEnv(_CameraEnv):
    """LIBERO: language-conditioned tasks of a Panda arm (extra `libero`). Its assets come from the Hub."""

    kind: Literal["libero"]
    """A task suite of LIBERO."""
    suite: Literal[
        "libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130"
    ] = "libero_10"
    """Task suite. The seed of a reset is the number of its initial state, modulo their number: those of the
    first task, of the second, ..."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Numbers of the suite's tasks to use; null for all."""
    max_episode_steps: PositiveInt = 512  # pyright: ignore[reportIncompatibleVariableOverride]  # frozen
    """Maximum env steps, after which an episode is truncated."""
    gripper: Literal["signed", "open_is_one"] = "signed"
    """Meaning of the last number of an action: signed, as in the simulator, closes the gripper if it is
    positive; open_is_one, as in OpenVLA's data, opens it if it is above 0.5."""
    open_gripper: bool = True
    """Open the gripper in the env steps before an episode, in which objects fall into place."""


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
    """Images of the observations: name -> camera (agentview, frontview, robot0_eye_in_hand, ...). With
    cameras the state is only the robots'."""
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
