"""Several machines on one: Linux namespaces, joined by a bridge, with a Ray node in each.

Each machine has its own address, host name, processes, /tmp and /dev/shm, and no default route. It shares the
checkout, Python and one folder with the others, as over a network file system. All end with the process that
made them, however that ends. Making them takes root or unprivileged user namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.leftovers import LIMIT_S, await_end, runs

_ROOT = Path(__file__).parents[1]
_IS_ROOT = os.geteuid() == 0
_NEW = ["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"]
_NETWORK = """
ip link add bridge0 type bridge && ip link set bridge0 up && echo up && cat
:"""
_MACHINE = """
hostname "$1" && shift && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /mnt || exit
for folder; do
  case $folder in /tmp/*) mkdir -p "/mnt${folder#/tmp}"; mount --rbind "$folder" "/mnt${folder#/tmp}" || exit ;; esac
done
mount --rbind /mnt /tmp && ip link set lo up && echo up && cat
:"""
"""Both wait until standard input is closed. A shell that waits also reaps processes whose parent has
ended."""
_RAY = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray takes a machine that does not answer for dead after 12 s instead of a minute."""


def need_machines() -> None:
    """Skip the test, with the reason, where no machines can be made."""
    if missing := [program for program in ("ip", "nsenter", "unshare") if shutil.which(program) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (iproute2, util-linux)")
    try:
        with _network() as network:
            Machine(network, 1, []).close()
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")


class _Namespaces:
    """Namespaces in which a shell waits. All their processes end with it."""

    def __init__(self, around: _Namespaces | None, options: Sequence[str], script: str, *args: str) -> None:
        """They are made inside those `around` them. Raises OSError if that is not allowed."""
        command = [*(around.entering("net", "pid") if around else []), "unshare", *options, *_NEW]
        self._process = subprocess.Popen(
            [*command, "sh", "-c", script, "sh", *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "up\n":
            self._process.kill()
            raise OSError(" ".join(self._process.communicate()[1].split()))
        started = psutil.Process(self._process.pid).children(recursive=True)
        self.first = next(process for process in started if process.name() == "sh")

    def entering(self, *kinds: str) -> list[str]:
        """The beginning of a command that runs in the namespaces of these kinds."""
        user = [] if _IS_ROOT else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.first.pid}", *user, *(f"--{kind}" for kind in kinds)]

    def close(self) -> None:
        """Kill all their processes at once."""
        inside = self.first.children(recursive=True)
        self.first.kill()
        self._process.communicate()
        await_end(inside)


@contextmanager
def _network() -> Iterator[_Namespaces]:
    network = _Namespaces(None, [] if _IS_ROOT else ["--user", "--map-root-user"], _NETWORK)
    try:
        yield network
    finally:
        network.close()


class Machine:
    """Machine `number` of a network. It is up from the start; `join` starts its Ray node."""

    def __init__(self, network: _Namespaces, number: int, shared: Sequence[Path]) -> None:
        self._network, self._port = network, f"port{number}"
        self.name, self.address = f"machine{number}", f"10.77.0.{number}"
        folders = [str(folder) for folder in (*shared, _ROOT, sys.prefix, sys.base_prefix)]
        self._inside = _Namespaces(network, ["--uts", "--ipc"], _MACHINE, self.name, *folders)
        try:
            self._connect()
        except BaseException:
            self._inside.close()
            raise

    def _connect(self) -> None:
        # Not in the network's namespace of processes: the number of the first process is one outside.
        link = f"link add {self._port} type veth peer name eth0 netns {self._inside.first.pid}"
        for line in (link, f"link set {self._port} master bridge0", f"link set {self._port} up"):
            _run([*self._network.entering("net"), "ip", *line.split()])
        for line in (f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            _run([*self._inside.entering("net"), "ip", *line.split()])

    def command(self, *command: str) -> list[str]:
        """A command of the machine."""
        return [*self._inside.entering("mount", "uts", "ipc", "net", "pid"), *command]

    def join(self, head: Machine) -> None:
        """Start a Ray node, in the cluster of the machine `head`, which may be this one."""
        which = (
            "--head --port=6379 --include-dashboard=false"
            if head is self
            else f"--address={head.address}:6379"
        )
        options = f"--node-ip-address={self.address} --num-cpus=1 --object-store-memory={80 * 2**20} --disable-usage-stats"
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *which.split(), *options.split()]
        _run(self.command(*ray), {**environment(), **_RAY})

    def processes(self) -> list[psutil.Process]:
        """Those that the machine runs."""
        return self._inside.first.children(recursive=True)

    def cut(self) -> None:
        """Pull its network cable."""
        _run([*self._network.entering("net"), "ip", "link", "set", self._port, "down"])

    def mend(self) -> None:
        _run([*self._network.entering("net"), "ip", "link", "set", self._port, "up"])

    def close(self) -> None:
        """Cut its power. Idempotent."""
        if runs(self._inside.first):
            _run([*self._network.entering("net"), "ip", "link", "delete", self._port])
            self._inside.close()


def environment() -> dict[str, str]:
    """The environment of processes on machines: this one's, without its cluster."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in ("TMPDIR", "GLOO_SOCKET_IFNAME")
        and not name.startswith(("RAY_AUTH_", "RAY_ADDRESS", "RAY_TMPDIR"))
    }


def _run(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Raises OSError with what the command said if it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stdout}{done.stderr}".strip())


class Cluster:
    """Two machines with the folder `shared`, in one Ray cluster."""

    def __init__(self, network: _Namespaces, shared: Path, stack: ExitStack) -> None:
        self._network, self._shared, self._stack = network, shared, stack
        self.one = self._start(1)
        self.other = self._start(2)

    def _start(self, number: int) -> Machine:
        machine = Machine(self._network, number, [self._shared])
        self._stack.callback(machine.close)
        machine.join(self.one if number > 1 else machine)
        return machine

    def replace_other(self) -> None:
        """The second machine loses its power, if it still has it, and starts again."""
        self.other.close()
        self.other = self._start(2)


@contextmanager
def two_machines(shared: Path) -> Iterator[Cluster]:
    """A Cluster, until the end of the block."""
    with ExitStack() as stack:
        yield Cluster(stack.enter_context(_network()), shared, stack)
