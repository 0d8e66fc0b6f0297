"""Devices and the placement of roles."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from braid.sections import Section, Unused

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

Role = Literal["policy", "critic", "reference", "inference", "reward", "rollout", "env"]


def _as_text(value: Any) -> Any:
    """Convert an int to text: YAML reads a single device index as a number."""
    return str(value) if type(value) is int else value


class ClusterConfig(Section):
    """Processes and devices. With a single process everything runs in the `braid` process itself."""

    runtime: Literal["auto", "in_process", "ray"] = "auto"
    """How workers are run. auto: in the driver process when the placement has one device and nothing requires
    more, else on Ray."""
    address: str | None = None
    """Ray cluster to join: HOST:PORT, or `auto` for the cluster of this machine. null: RAY_ADDRESS if set,
    else a new cluster is started on this machine. `local` always starts one."""
    num_nodes: PositiveInt = 1
    """Number of machines. More than one requires a running cluster to join."""
    devices_per_node: PositiveInt | None = None
    """Accelerators (or CPU processes) per machine. null: this machine's GPUs; on CPU, as many as placed."""
    placement: dict[str, Annotated[str, BeforeValidator(_as_text)]] = Field(default_factory=dict)
    """Maps roles (policy, critic, reference, inference, reward, rollout, env; comma-separated) to device
    indices: `all`, `0-3`, `0,2,4`, `0-7:0-3` (devices:processes). Roles that share devices take turns. A role
    that is not listed is placed with the policy; a policy that is not listed, on all devices (with backend
    single on device 0). See placement.md."""
    group_names: dict[Role, str] = Field(default_factory=dict)
    """Names of worker groups in messages and process titles; the role name by default."""
    env: dict[str, Annotated[str | None, BeforeValidator(_as_text)]] = Field(default_factory=dict)
    """Environment variables set in every worker, in the driver, and in its scoring processes; null leaves a
    variable unchanged. A run's config.yaml stores `${oc.env:NAME,null}` instead of a secret: a value whose
    name has the word TOKEN, KEY, SECRET, PASSWORD, CREDENTIALS or AUTH in it, or a URL with a password."""
    buffer_processes: PositiveInt = 1
    """Processes that hold the rollout buffer, on the machines of the rollout workers in turn. More than one
    when its rows, such as images, need more memory than one machine has."""
    start_timeout_s: PositiveFloat = 600.0
    """Timeout for starting all workers, in seconds."""
    call_timeout_s: PositiveFloat = 3600.0
    """Timeout of one call to a role, in seconds."""

    @property
    def ray_address(self) -> str:
        """The Ray cluster to join; `local`, Ray's address for a new cluster on this machine, if the run
        starts its own."""
        return self.address or os.environ.get("RAY_ADDRESS") or "local"

    @property
    def is_joined(self) -> bool:
        """Whether the Ray cluster exists independently of the run."""
        return self.ray_address != "local"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables to set."""
        return {name: value for name, value in self.env.items() if value is not None}

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.layout.mode != "in_process":
            return
        why = "everything runs in one process"
        yield why, "cluster.{group_names,address,buffer_processes,start_timeout_s,call_timeout_s}"
        if not self.placement:
            yield f"{why}, on the first device", "cluster.{num_nodes,devices_per_node}"


class InferenceConfig(Section):
    """Workers that compute log-probs before the update, if `cluster.placement` gives them devices."""

    tensor_parallel: PositiveInt | None = None
    """Megatron tensor-parallel size; the policy's when null."""
    pipeline_parallel: PositiveInt | None = None
    """Megatron pipeline-parallel size; the policy's when null."""
    sequence_parallel: bool | None = None
    """Megatron sequence parallelism; the policy's when null."""

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.layout.role("inference") is None:
            why = "inference has no separate devices: the policy's workers compute log-probs"
            yield why, "inference.*"
        yield from config.train.backend.unused_inference(self)
