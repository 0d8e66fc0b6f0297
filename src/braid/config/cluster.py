"""Which devices there are, and which roles sit on which of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from .base import Section

Role = Literal["policy", "critic", "reference", "inference", "reward", "rollout", "env"]


def _as_text(value: Any) -> Any:
    """A device number alone is a number in YAML."""
    return str(value) if type(value) is int else value


class ClusterConfig(Section):
    """Processes and devices. With one process everything runs where `braid` was started."""

    runtime: Literal["auto", "in_process", "ray"] = "auto"
    """auto: in this process when the placement has one device and nothing needs more, else Ray."""
    address: str | None = None
    """Ray cluster to join: HOST:PORT, or `auto` for the one that this machine is part of. null: that of RAY_ADDRESS, else one is
    started on this machine. `local` always starts one."""
    num_nodes: PositiveInt = 1
    """Machines. More than one needs a cluster to join."""
    devices_per_node: PositiveInt | None = None
    """Accelerators (or CPU processes) of each. null: the GPUs of this machine; on CPU as many as the placement names."""
    placement: dict[str, Annotated[str, BeforeValidator(_as_text)]] = Field(default_factory=dict)
    """Roles (policy, critic, reference, inference, reward, rollout, env), comma-separated, to device numbers: `all`, `0-3`,
    `0,2,4`, `0-7:0-3` (devices:processes). Roles on the same devices take turns. A role that is not named sits with the policy;
    the policy, not named, on all devices (with the backend single on device 0). See placement.md."""
    group_names: dict[Role, str] = Field(default_factory=dict)
    """Names of the worker groups in messages and process titles; the role's own when absent."""
    env: dict[str, Annotated[str | None, BeforeValidator(_as_text)]] = Field(default_factory=dict)
    """Environment variables of every worker, and of this process and those that score in it; null leaves one as it is. A run's
    config.yaml has `${oc.env:NAME,null}` in place of each value."""
    start_timeout_s: PositiveFloat = 600.0
    """Limit for all workers to be up."""
    call_timeout_s: PositiveFloat = 3600.0
    """Limit for one call of a role."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that are to be set."""
        return {name: value for name, value in self.env.items() if value is not None}


class InferenceConfig(Section):
    """The workers that compute log-probs before the update, where `cluster.placement` gives them devices of their own."""

    load_from_policy: bool = True
    """Take the weights from the policy's workers in place of the model folder."""
    tensor_parallel: PositiveInt | None = None
    """Megatron tensor parallelism; the policy's when null."""
    pipeline_parallel: PositiveInt | None = None
    """Megatron pipeline parallelism; the policy's when null."""
    sequence_parallel: bool | None = None
    """Megatron sequence parallelism; the policy's when null."""
