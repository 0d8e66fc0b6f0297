"""The control plane of the pipelined loop: what to sample, train on, sync and drop, and when.

A pure state machine, without I/O, clock or tensors. The loop reports events and executes the decisions of
`decide`:

    stage   consumes               waits for                      unblocked by           bound on lag
    sample  prompts (Submit)       a free place and a free slot   sync; a group that     max_lag for a group's
                                   (groups_in_flight)             finishes or leaves     first token
    train   the P oldest finished  P finished groups; the last    sample; sync           over_lag applies to
            groups (Train)         sync                                                  overtaken groups
    sync    new weights (Sync)     the update; running turns,     train; the engines     0 for tokens written
                                   with `finish`                                         until the next update

P is prompts_per_round. The version is the number of rounds trained; a token's lag is the version that is
trained less the version that wrote it. Each prompt drawn takes a place until its group is trained on or
dropped. There are

    (min(engine version + max_lag + 1, num_rounds) - version) * P

places (AReaL, arXiv 2505.24298, eq. 3, with the version that the engines have). So fewer than
(max_lag + 1) * P groups are older than a new one, and as training takes the oldest finished groups, the lag
of a group's first token exceeds max_lag only if the group was overtaken: younger groups were trained on while
it was running. `over_lag` decides on these. As num_rounds limits the places, nothing is sampled that no round
needs.

A group that the filter rejects keeps its place, and its round trains without it. With `then: resample`, and
where no member is valid, the next prompt takes the place instead, up to (max_batches - 1) * P times between
two updates.

max_lag 0 is the on-policy loop: a round is sampled completely (with `then: resample` in further batches of P)
before it is trained on, in the order of the draws, with the same random keys.

`state()` names every prompt that was drawn and neither trained on nor dropped. `load` submits all of them
again, with the same keys: their tokens are lost. Saved together with the weights and the sampler, no prompt
is lost or trained on twice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """The config's `pipeline` section, with prompts_per_round, num_rounds, and the keys `then` and
    `max_batches` of rollout.filter."""

    max_lag: int
    groups_in_flight: int
    on_new_weights: Literal["finish", "interrupt"]
    over_lag: Literal["drop", "resample", "keep"]
    prompts_per_round: int
    num_rounds: int
    then: Literal["mask", "resample", "replace"] = "mask"
    max_batches: int = 30


class Draw(NamedTuple):
    """A prompt, by index, drawn from the sampler. Its group is sampled with key (TRAIN_KEY, round) and this
    number, which also identify it. Older draws compare as smaller."""

    round: int
    number: int
    prompt: int


class Submit(NamedTuple):
    """Sample groups. Discard what was sampled for the same draws before."""

    draws: Sequence[Draw]


class Train(NamedTuple):
    """Train on the groups of `kept`, in this order, then report `updated`. `dropped` are the other groups of
    the round, with the reason. Either may be empty."""

    kept: Sequence[Draw]
    dropped: Mapping[Draw, str]


class Sync(NamedTuple):
    """Sync the weights to the engines as `version`, then report `synced`. Running turns finish first, or
    continue with the new weights (`interrupt`)."""

    version: int
    when: Literal["finish", "interrupt"]


class Drop(NamedTuple):
    """Discard finished groups that enter no round, with the reason: one of selection.Reason, or over_lag."""

    draws: Mapping[Draw, str]


class Finish(NamedTuple):
    """End the run: it is complete, or was asked to stop. After a stop, save `state()` and then cancel the
    running groups, without reporting them as cancelled."""

    is_complete: bool


Decision = Submit | Train | Sync | Drop | Finish


def start_of(version: int) -> dict[str, Any]:
    """The `state` of a pipeline without groups, whose weights are `version`."""
    return {
        "version": version,
        "next": [version + 1, 0],
        "num_extra": 0,
        "num_replaced": 0,
        "draws": [],
        "counts": {},
    }


class _Result(NamedTuple):
    """A finished group: the version of its oldest token, and the reason to leave it out, if any."""

    draw: Draw
    version: int
    reason: str | None


class Pipeline:
    """See the module. After each event, call `decide` until it returns None; then wait for the next event.

    `take` draws prompts (PromptSampler.take). `counts` are numbers of groups since the start of the run:
    `trained` (of these, `trained_over_lag`), `dropped/REASON`, and how often one was sampled again:
    `resampled/over_lag`.
    """

    def __init__(self, settings: PipelineSettings, take: Callable[[int], Iterable[int]]) -> None:
        self._settings, self._take = settings, take
        self.counts: Counter[str] = Counter()
        # The last round whose training started, ended, whose sync started, ended: in descending order.
        self._started = self.version = self._sync_started = self.engine_version = 0
        self._round, self._number = 1, 0  # of the next draw
        self._waiting: list[Draw] = []  # to be submitted again
        self._running: set[Draw] = set()
        self._results: list[_Result] = []  # oldest draw first
        self._training: list[_Result] = []
        self._dropping: dict[Draw, str] = {}
        self._num_extra = 0  # places of further batches in this round; max_lag 0
        self._num_replaced = 0  # places that were given to other prompts in this round
        self._is_stopping = False

    def finished(self, draw: Draw, version: int, reason: str | None = None) -> None:
        """A group is sampled and scored. `version` wrote its oldest token; `reason` is that of
        selection.reason_to_drop."""
        assert draw in self._running, f"{draw} is not running"
        self._running.remove(draw)
        if reason is not None and self._is_replaced(reason):
            self._num_replaced += 1
            self._drop(draw, reason)
        else:
            insort(self._results, _Result(draw, version, reason))

    def cancelled(self, draw: Draw) -> None:
        """A running group was cancelled. It is dropped, and its place is free."""
        assert draw in self._running, f"{draw} is not running"
        self._running.remove(draw)
        self.counts["dropped/cancelled"] += 1

    def updated(self) -> None:
        """The training of the round is complete."""
        assert self._started == self.version + 1, "no round is being trained"
        for result in self._training:
            self.counts["trained" if result.reason is None else f"dropped/{result.reason}"] += 1
            if result.reason is None and self.version - result.version > self._settings.max_lag:
                self.counts["trained_over_lag"] += 1
        self._training = []
        self.version += 1
        self._num_extra = self._num_replaced = 0
        if not self._settings.max_lag and self._number:
            self._round, self._number = self._round + 1, 0

    def synced(self) -> None:
        """All engines have the weights of the last Sync."""
        assert self._sync_started == self.engine_version + 1, "no weights are on their way"
        self.engine_version += 1

    def stop(self) -> None:
        """Finish after the update or sync in progress."""
        self._is_stopping = True

    def decide(self) -> Decision | None:
        """The next thing to do; None to wait for an event."""
        self._refuse_old()
        if self._dropping:
            dropped, self._dropping = self._dropping, {}
            return Drop(dropped)
        if self._is_stopping:
            at_rest = self._started == self.version and self._sync_started == self.engine_version
            return Finish(self.engine_version >= self._settings.num_rounds) if at_rest else None
        if self.version > self._sync_started:
            self._sync_started += 1
            return Sync(self.version, self._settings.on_new_weights)
        is_idle = self._started == self.engine_version
        if is_idle and self.version >= self._settings.num_rounds:
            return Finish(True)
        if draws := self._next_draws():
            return Submit(draws)
        return self._next_round() if is_idle else None

    def state(self) -> dict[str, Any]:
        """JSON data for `load`. The groups of a round in training are still to be trained on."""
        results = (result.draw for result in (*self._results, *self._training))
        return {
            "version": self.version,
            "next": [self._round, self._number],
            "num_extra": self._num_extra,
            "num_replaced": self._num_replaced,
            "draws": [list(draw) for draw in sorted((*self._waiting, *self._running, *results))],
            "counts": dict(self.counts),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state()`, before the first event. The engines must have its version."""
        self._started = self.version = self._sync_started = self.engine_version = state["version"]
        self._round, self._number = state["next"]
        self._num_extra, self._num_replaced = state["num_extra"], state["num_replaced"]
        self._waiting = [Draw(*draw) for draw in state["draws"]]
        self.counts = Counter(state["counts"])

    def start_at(self, version: int) -> None:
        """Before the first event: start with weights of `version` and without groups, unless they were
        loaded. A checkpoint of the on-policy loop has no pipeline."""
        if version != self.version:
            self.load(start_of(version))

    def _next_draws(self) -> list[Draw]:
        """Draws to submit now: first those to sample again, then new ones."""
        slots = self._settings.groups_in_flight - len(self._running)
        num_new = min(self._free_places(), slots - len(self._waiting))
        draws, self._waiting = self._waiting[:slots], self._waiting[slots:]
        if num_new > 0:
            draws += [self._draw(prompt) for prompt in self._take(num_new)]
        self._running.update(draws)
        return draws

    def _free_places(self) -> int:
        settings = self._settings
        rounds = min(self.engine_version + settings.max_lag + 1, settings.num_rounds) - self.version
        taken = len(self._waiting) + len(self._running) + len(self._results) + len(self._training)
        return rounds * settings.prompts_per_round + self._num_extra - taken

    def _draw(self, prompt: int) -> Draw:
        if self._settings.max_lag and self._number >= self._settings.prompts_per_round:
            self._round, self._number = self._round + 1, 0
        draw = Draw(self._round, self._number, prompt)
        self._number += 1
        return draw

    def _next_round(self) -> Train | Submit | None:
        """Start the next round if its groups are finished. With max_lag 0 it consists of all groups since the
        last round, and the filter may require another batch or leave a surplus."""
        settings, size = self._settings, self._settings.prompts_per_round
        if len(self._results) < size or (self._running and not settings.max_lag):
            return None
        if settings.max_lag:
            self._training, self._results = self._results[:size], self._results[size:]
        else:
            usable = [result for result in self._results if result.reason is None]
            if settings.then == "resample" and len(usable) < size and self._num_extra < self._max_replaced:
                self._num_extra += size
                return Submit(self._next_draws())
            surplus = {result: result._replace(reason="surplus") for result in usable[size:]}
            self._training, self._results = [surplus.get(result, result) for result in self._results], []
        self._started += 1
        kept = [result.draw for result in self._training if result.reason is None]
        return Train(kept, {draw: reason for draw, _, reason in self._training if reason is not None})

    @property
    def _max_replaced(self) -> int:
        return (self._settings.max_batches - 1) * self._settings.prompts_per_round

    def _is_replaced(self, reason: str) -> bool:
        """Whether the next prompt takes the place of a group dropped for this reason."""
        is_due = self._settings.then == "resample" or reason in ("invalid", "baseline")
        return is_due and self._settings.max_lag > 0 and self._num_replaced < self._max_replaced

    def _refuse_old(self) -> None:
        """Drop or resample the results that the next round could only use above max_lag."""
        oldest, over_lag = self._started - self._settings.max_lag, self._settings.over_lag
        old = [draw for draw, version, reason in self._results if version < oldest and reason is None]
        if not old or over_lag == "keep":
            return
        self._results = [result for result in self._results if result.draw not in old]
        if over_lag == "resample":
            self._waiting = sorted(self._waiting + old)
            self.counts["resampled/over_lag"] += len(old)
        else:
            for draw in old:
                self._drop(draw, "over_lag")

    def _drop(self, draw: Draw, reason: str) -> None:
        self._dropping[draw] = reason
        self.counts[f"dropped/{reason}"] += 1
