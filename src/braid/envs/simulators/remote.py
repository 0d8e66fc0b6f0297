"""Simulators in worker processes of their own, on other devices than the policy that acts in them
(`cluster.placement: {env: 4-7}`). A worker holds a SimulatorHost; a rollout worker has a RemoteSimulator of
one or more hosts, which no other uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

from numpy.typing import NDArray

from braid.types import Spaces

from .base import Simulator, Tick, as_array


class Peer(Protocol):
    """A worker in another process, which executes calls in order. See cluster.ray.Peer."""

    def start(self, method: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        """Call a method of the worker's class; the function that is returned waits for the value."""
        ...


class SimulatorHost:
    """A simulator as a worker. Its ticks have arrays, not tensors."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def about(self) -> tuple[int, Spaces, bool]:
        """The simulator's `num_envs`, `spaces` and `resets_together`."""
        return self._simulator.num_envs, self._simulator.spaces, self._simulator.resets_together

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int]) -> Tick:
        """Start episodes in these slots; observations are returned in host memory."""
        return _on_host(self._simulator.reset(seeds, filmed))

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        """Execute a chunk in each slot; observations are returned in host memory."""
        return _on_host(self._simulator.step(actions))

    def close(self) -> None:
        """Close the simulator."""
        self._simulator.close()


class RemoteSimulator:
    """The environments of several SimulatorHosts, in their order. See base.Overlapping."""

    def __init__(self, hosts: Sequence[Peer]) -> None:
        abouts = [host.start(SimulatorHost.about) for host in hosts]
        counts, spaces, together = zip(*(about() for about in abouts), strict=True)
        self.num_envs, self.spaces, self.resets_together = sum(counts), spaces[0], together[0]
        self._hosts = [
            (host, range(end - count, end))
            for host, count, end in zip(hosts, counts, accumulate(counts), strict=True)
        ]

    def reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Tick:
        return self.begin_reset(seeds, filmed)()

    def step(self, actions: Mapping[int, NDArray]) -> Tick:
        return self.begin_step(actions)()

    def begin_reset(self, seeds: Mapping[int, int], filmed: Collection[int] = ()) -> Callable[[], Tick]:
        """Begin a reset on the hosts of these slots; returns the function that waits for it."""
        return self._begin(SimulatorHost.reset, seeds, 0, filmed)

    def begin_step(self, actions: Mapping[int, NDArray]) -> Callable[[], Tick]:
        """Begin a step on the hosts of these slots; returns the function that waits for it."""
        return self._begin(SimulatorHost.step, actions, max(map(len, actions.values()), default=0))

    def close(self) -> None:
        """Close the simulators of all hosts. Those with processes start them again at the next reset."""
        for closed in [host.start(SimulatorHost.close) for host, _ in self._hosts]:
            closed()

    def _begin(
        self, method: Any, by_slot: Mapping[int, Any], num_actions: int, filmed: Collection[int] | None = None
    ) -> Callable[[], Tick]:
        asked: list[tuple[int, Callable[[], Tick]]] = []
        for host, slots in self._hosts:
            host_values = {slot - slots.start: value for slot, value in by_slot.items() if slot in slots}
            films = [] if filmed is None else [[slot - slots.start for slot in filmed if slot in slots]]
            if host_values:
                asked.append((slots.start, host.start(method, host_values, *films)))

        def finish() -> Tick:
            tick = Tick.empty(self.num_envs, self.spaces, num_actions)
            for first, part in asked:
                tick.take(part(), first)
            return tick

        return finish


def _on_host(tick: Tick) -> Tick:
    return replace(tick, observations={name: as_array(values) for name, values in tick.observations.items()})
