"""The machines of a run on Ray: joins a cluster, or starts one here, and reserves the machines that the run
needs.

Machine `i` of a run is node `i` of its layout. The driver's machine comes first, if it is part of the run;
the others follow by address. On each, a Ray actor reserves the run's GPUs and reports their CUDA names; the
workers of the run are started beside it.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray  # noqa: TID251
from ray import _raylet  # noqa: TID251  # pyright: ignore[reportAttributeAccessIssue]
from ray._private.node import Node  # noqa: TID251
from ray._private.services import canonicalize_bootstrap_address  # noqa: TID251
from ray._private.worker import global_worker  # noqa: TID251
from ray.exceptions import RayError, RayTaskError  # noqa: TID251
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: TID251

import braid
from braid.config.cluster import ClusterConfig
from braid.errors import ConfigError, MachineError, Problem, WorkerError
from braid.processes import is_running

from .interrupts import interrupts_held
from .workers import Placement

logger = logging.getLogger(__name__)
_ANSWER_S = 5.0
"""Time for a cluster to accept a connection and answer. Ray itself tries for minutes."""
_SETTINGS = b"\x04"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _SETTINGS + bytes(5)
"""The preface of HTTP/2, which Ray speaks: a line and a SETTINGS frame; the server answers with one too (RFC
9113, 3.4)."""
_OBJECT_BYTES = 512 * 2**20
_START_ATTEMPTS = 5
_START_LIMITS = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_register_timeout_seconds": "300",
}
"""Ray's own limits for its processes to come up; 30 to 60 s by default, which a loaded machine exceeds."""
_REAP_S = 30.0
"""Longest wait for processes of Ray that were killed to disappear."""
_SIOCGIFADDR = 0x8915
"""Linux: the address of a network interface (netdevice(7))."""


def connect(config: ClusterConfig, *, num_processes: int) -> bool:
    """Join the cluster of `cluster.address` (else of RAY_ADDRESS), or start one here for
    `num_processes` worker processes. Does nothing if already connected. Returns whether this call connected.
    Raises ConfigError if no cluster answers or it cannot be joined, WorkerError if Ray does not start within
    `cluster.start_timeout_s`."""
    if ray.is_initialized():
        return False
    # Otherwise Ray would report usage over the network, run workers at niceness 15 (if one of several ranks
    # has to share a core, all wait for it), and hide all GPUs from workers that reserve none.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    for name, limit in _START_LIMITS.items():
        os.environ.setdefault(name, limit)
    if config.num_nodes > 1 and not config.is_joined:
        raise _problem("cluster.num_nodes", f"the run needs {config.num_nodes} machines, but {_ALONE}")
    with interrupts_held() as caught:  # an interrupted start of Ray leaves processes behind, or crashes
        if config.is_joined:
            _join(config.ray_address)
        else:
            _start(num_processes, config.start_timeout_s, caught)
    if caught:
        leave()
        signal.raise_signal(caught[0])
    return True


def leave() -> None:
    """Leave the cluster, if connected. One that `connect` started is stopped; its processes have ended when
    this returns."""
    if ray.is_initialized():
        node: Any = global_worker.node
        processes = [info.process for infos in node.all_processes.values() for info in infos]
        ray.shutdown()  # waits for a second for each that it has killed, which a busy machine exceeds
        deadline = time.monotonic() + _REAP_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    if _added:
        for name in _added:
            os.environ.pop(name, None)
        _added.clear()
        _read_secret()


_SECRET, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"  # environment variables
_added: set[str] = set()
"""Which of the two variables this process's cluster has added. Ray adds the second, and another cluster
without a secret could not be started or joined while it is set."""


def _read_secret() -> None:
    """Have Ray read both again, which it otherwise reads once. Older versions of Ray have no secret."""
    if (loader := getattr(_raylet, "AuthenticationTokenLoader", None)) is not None:
        getattr(_raylet, "Config").initialize("")  # noqa: B009  # not in its stub
        loader.instance().reset_cache()


def _start(num_processes: int, timeout_s: float, caught: Sequence[int]) -> None:
    """Start a cluster on this machine. A start that fails is repeated until one succeeds, `timeout_s` has
    passed, or a signal was `caught`."""
    if not {_SECRET, f"{_SECRET}_PATH"} & os.environ.keys():
        # Otherwise Ray keeps one in the home folder, which may be missing or not writable.
        _added.update({_SECRET, _MODE} - os.environ.keys())
        os.environ[_SECRET] = secrets.token_hex(32)
        _read_secret()
    begin = time.monotonic()
    for attempt in range(1, _START_ATTEMPTS + 1):
        try:
            _init(num_processes)
            return
        except Exception as error:  # Ray raises a bare Exception if one of its processes is late
            _end_processes(error)
            why = " ".join(str(error).split())
            if isinstance(error, OSError) and not isinstance(error, TimeoutError):
                leave()
                folder = os.environ.get("RAY_TMPDIR", "unset")
                raise _problem(
                    "cluster",
                    f"cannot start Ray on this machine ({why}). Its files are in RAY_TMPDIR ({folder}), by "
                    "default /tmp; set it to a writable folder with free space and a short path",
                ) from error
            if caught:
                return  # the caller raises the signal again
            spent = time.monotonic() - begin
            if attempt == _START_ATTEMPTS or spent >= timeout_s:
                leave()
                raise WorkerError(
                    f"Ray did not start on this machine in {attempt} attempts over {spent:.0f} s ({why})",
                    "the machine may be overloaded or short of memory; stop other work on it, or raise "
                    f"cluster.start_timeout_s ({timeout_s:g}) if Ray needs more time. Ray's logs are in "
                    "RAY_TMPDIR, by default /tmp/ray",
                ) from error
            logger.warning("Ray did not start (%s); retrying", why)


def _init(num_processes: int) -> None:
    ray.init(
        address="local",
        num_cpus=num_processes,  # Ray starts this many processes in advance for workers
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_BYTES,
    )
    node: Any = global_worker.node
    _remove_old_sessions(Path(node.get_session_dir_path()))


def _remove_old_sessions(session: Path) -> None:
    """Remove the folders of sessions that other runs started, of which no process is left; Ray never removes
    them."""
    with suppress(OSError):
        (session / _STARTED_BY_RUN).touch()
    marked = [mark.parent for mark in session.parent.glob(f"session_*/{_STARTED_BY_RUN}")]
    old: list[Path] = []
    for folder in marked:
        driver = folder.name.rpartition("_")[2]
        if not folder.is_symlink() and driver.isdecimal() and not is_running(int(driver)):
            old.append(folder)
    commands: list[bytes] = []
    for file in Path("/proc").glob("[0-9]*/cmdline") if old else ():
        with suppress(OSError):
            commands.append(file.read_bytes())
    for folder in old:
        is_used = any(os.fsencode(folder.name) in command for command in commands)
        with suppress(OSError):  # a start beside this one may remove it first
            if not is_used and os.getuid() in (0, folder.stat().st_uid):
                shutil.rmtree(folder, ignore_errors=True)


def _end_processes(error: Exception) -> None:
    """End the processes of a start that failed. `ray.shutdown` ends those of a node that was up; a node that
    failed earlier is found only in the frames of the error."""
    ray.shutdown()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(node := frame.f_locals.get("self"), Node):
            node.kill_all_processes(check_alive=False, wait=True)


_STARTED_BY_RUN = "started_by_braid"
"""A file in the folder of a Ray session that a run has started."""
_ALONE = (
    "a cluster started by a run has only this machine. Run `ray start --head` here and `ray start "
    "--address=HOST:6379` on the other machines, then set cluster.address=auto; or set cluster.num_nodes=1"
)


def _join(address: str) -> None:
    if "://" in address:
        raise _cannot_join(address, "that is a Ray Client address; use the cluster's address, HOST:6379")
    try:
        bootstrap = canonicalize_bootstrap_address(address) or ""
        host, _, port = bootstrap.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S) as line:
            if os.environ.get("RAY_USE_TLS") != "1":
                line.sendall(_PREFACE)
                if not line.recv(9).startswith(_SETTINGS, 3):
                    raise ValueError("not a Ray cluster")
    except (OSError, ValueError) as error:  # none was found, its name or form is wrong, or it does not answer
        raise _cannot_join(
            address,
            f"no cluster answers there ({error}). Run `ray start --head` on its first machine and set the "
            "address to HOST:6379, or remove it to start a cluster on this machine",
        ) from None
    try:
        ray.init(address=bootstrap, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        ray.shutdown()
        why = " ".join(str(error.__cause__ or error).split())
        if "Version mismatch" in why:
            advice = (
                f"the cluster needs the same versions as this machine: Ray {ray.__version__}, Python "
                f"{sys.version.split()[0]}"
            )
        else:
            advice = f"this machine must be part of the cluster: run `ray start --address={bootstrap}` here"
        raise _cannot_join(address, f"{why}; {advice}") from error


def _cannot_join(address: str, why: str) -> ConfigError:
    return _problem("cluster.address", f"cannot join the Ray cluster {address!r}: {why}")


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError([Problem(key, message)])


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of the run: its Ray node id, its address, and the GPUs that the run has there, as in
    CUDA_VISIBLE_DEVICES. `interface` is the network interface of its address, empty if unknown."""

    node_id: str
    address: str
    gpus: tuple[str, ...] = ()
    interface: str = ""


class Holder:
    """An actor that reserves GPUs of its machine."""

    def tell(self) -> tuple[str, tuple[str, ...], str]:
        """braid's version, the GPUs, and the network interface by which other machines reach this one."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        named = os.environ.get("GLOO_SOCKET_IFNAME")
        return braid.__version__, tuple(gpus), named or interface_of(ray.util.get_node_ip_address())


class Machines:
    """The machines reserved by a run, by node number in its layout."""

    def __init__(
        self,
        config: ClusterConfig,
        num_gpus: Sequence[int],
        devices_per_node: int,
        *,
        is_restart: bool = False,
    ) -> None:
        """Reserves a machine for each of `num_gpus`, with at least that many GPUs (none for a run on CPUs).
        On a restart it waits for machines that have left the cluster. Raises ConfigError if the cluster lacks
        such machines or they have another version of braid, WorkerError if they are not free in time, and
        MachineError if one does not come back or does not answer in time."""
        self._devices_per_node = devices_per_node
        self._holders: list[Any] = []
        try:
            self._machines = self._reserve(config, num_gpus, is_restart=is_restart)
        except BaseException:
            self.close()
            raise
        if not any(num_gpus):
            self.close()
        _reserved[:] = [machine.address for machine in self._machines]

    def _reserve(self, config: ClusterConfig, num_gpus: Sequence[int], *, is_restart: bool) -> list[Machine]:
        timeout_s, is_told = config.start_timeout_s, False
        deadline = time.monotonic() + timeout_s
        while True:
            there = _alive()
            nodes = [node for node in there if _gpus(node) >= max(num_gpus)][: len(num_gpus)]
            machines = [Machine(node["NodeID"], node["NodeManagerAddress"]) for node in nodes]
            addresses = [node["NodeManagerAddress"] for node in there]
            if len(machines) == len(num_gpus):
                if not config.is_joined and not any(num_gpus):
                    return machines  # nothing to reserve or to look up
                held = self._hold(machines, num_gpus, deadline - time.monotonic(), timeout_s)
                if None not in held:
                    return [machine for machine in held if machine is not None]
                self.close()
                missing = [m.address for m, answer in zip(machines, held, strict=True) if answer is None]
            elif is_restart:
                missing = [address for address in _reserved if address not in addresses]
            else:
                raise _too_few(config, there, len(num_gpus), max(num_gpus))
            what = (
                f"the machine{'s' * (len(missing) > 1)} {', '.join(missing)}"
                if missing
                else "another machine"
            )
            advice = f"`ray start --address={ray.get_runtime_context().gcs_address}` there adds it again"
            if time.monotonic() >= deadline:
                raise MachineError(
                    f"{what} did not join the Ray cluster within {timeout_s:g} s (cluster.start_timeout_s): "
                    f"the placement needs {len(num_gpus)} machines, and the cluster has {len(there)} "
                    f"({', '.join(addresses)}); {advice}"
                )
            if not is_told:
                logger.warning(
                    "waiting up to %g s (cluster.start_timeout_s) for %s, which the Ray cluster has lost; %s",
                    timeout_s, what, advice,
                )  # fmt: skip
            is_told = True
            time.sleep(_LOOK_S)

    @property
    def is_one(self) -> bool:
        """Whether all workers of the run are on one machine."""
        return len(self._machines) == 1

    def spot(
        self, placement: Placement, variables: Mapping[str, str]
    ) -> tuple[NodeAffinitySchedulingStrategy, dict[str, str]]:
        """Ray's scheduling options for the worker of a placement, and its environment variables, including
        the user's `variables`."""
        machine = self._machines[placement.node]
        env = dict(variables)
        if len(self._machines) > 1 and machine.interface:
            # By default gloo uses the address of the host name, which is often a loopback address, and NCCL
            # the first interface.
            env.setdefault("GLOO_SOCKET_IFNAME", machine.interface)
            env.setdefault("NCCL_SOCKET_IFNAME", f"={env['GLOO_SOCKET_IFNAME']}")  # not those it begins
        if machine.gpus and placement.devices:
            first = placement.node * self._devices_per_node
            env["CUDA_VISIBLE_DEVICES"] = ",".join(
                machine.gpus[device - first] for device in placement.devices
            )
        return NodeAffinitySchedulingStrategy(machine.node_id, soft=False), env

    def close(self) -> None:
        """Release the machines. Idempotent."""
        holders, self._holders = self._holders, []
        for holder in holders:
            ray.kill(holder, no_restart=True)

    def _hold(
        self, machines: Sequence[Machine], num_gpus: Sequence[int], left_s: float, timeout_s: float
    ) -> list[Machine | None]:
        """The machines with what their actors report; None in the place of one that the cluster has lost."""
        holder: Any = ray.remote(num_cpus=0, max_restarts=0)(Holder)
        for machine, count in zip(machines, num_gpus, strict=True):
            there = NodeAffinitySchedulingStrategy(machine.node_id, soft=False)
            self._holders.append(holder.options(num_gpus=count, scheduling_strategy=there).remote())
        telling = [holder.tell.remote() for holder in self._holders]
        _, late = ray.wait(telling, num_returns=len(telling), timeout=max(0.0, left_s))
        if late:
            names = ", ".join(machines[telling.index(call)].address for call in late)
            raise WorkerError(
                f"no process started on {names} within {timeout_s:g} s (cluster.start_timeout_s): their "
                "GPUs are in use, or the machines have failed; check with `ray status`"
            )
        return [_checked(machine, call) for machine, call in zip(machines, telling, strict=True)]


_LOOK_S = 0.5
"""Interval, in seconds, at which a restart looks for missing machines."""
_reserved: list[str] = []
"""Addresses of the machines that this process reserved last: of a restart, those of the run so far."""


def _alive() -> list[Mapping[str, Any]]:
    """The machines that Ray takes for alive, the driver's first. One that has lost its power is among them
    until Ray notices, after a minute at most."""
    here = ray.get_runtime_context().get_node_id()
    return sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeID"] != here, _order(node["NodeManagerAddress"]), node["NodeID"]),
    )


def _too_few(
    config: ClusterConfig, there: Sequence[Mapping[str, Any]], num_nodes: int, num_gpus: int
) -> ConfigError:
    of_each = f" with {num_gpus} GPUs each" if num_gpus else ""
    has = ", ".join(f"{node['NodeManagerAddress']} ({_gpus(node)} GPUs)" for node in there)
    fewer = "set cluster.num_nodes, cluster.devices_per_node and cluster.placement to what is available"
    if config.is_joined:
        address = ray.get_runtime_context().gcs_address
        advice = f"add machines (`ray start --address={address}`), or {fewer}"
    else:
        advice = _ALONE if len(there) < num_nodes else fewer
    return _problem(
        "cluster.num_nodes",
        f"the placement needs {num_nodes} machine{'s' * (num_nodes > 1)}{of_each}, but the Ray cluster has "
        f"{len(there)}: {has}; " + advice,
    )


def num_cluster_gpus() -> int:
    """Number of GPUs of the connected cluster."""
    return sum(_gpus(node) for node in ray.nodes() if node["Alive"])


def _gpus(node: Mapping[str, Any]) -> int:
    return int(node["Resources"].get("GPU", 0))


def _order(address: str) -> tuple[bool, int, str]:
    """Addresses by their numbers; names after them."""
    try:
        return False, int(ipaddress.ip_address(address)), ""
    except ValueError:
        return True, 0, address


def _checked(machine: Machine, call: Any) -> Machine | None:
    """The machine with what its actor reports; None if the actor ended with the machine."""
    try:
        version, gpus, interface = ray.get(call)
    except RayError as error:
        if not (isinstance(error, RayTaskError) or getattr(error, "actor_init_failed", False)):
            return None  # it was not braid's code that failed
        last = str(error).strip().splitlines()[-1]
        raise _problem(
            "cluster.address",
            f"the machine {machine.address} cannot run braid {braid.__version__}: {last}; install the same "
            "version on all machines",
        ) from error
    if version != braid.__version__:
        raise _problem(
            "cluster.address",
            f"the machine {machine.address} has braid {version}, but this one {braid.__version__}; install "
            "the same version on all machines",
        )
    return Machine(machine.node_id, machine.address, gpus, interface)


def family_of(host: str) -> socket.AddressFamily:
    """Address family of `host`: IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def interface_of(address: str) -> str:
    """The network interface that has an address; empty if unknown."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an address, or a system without this call
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
