"""Simulated runs of the pipelined loop's control plane.

A schedule is a run in virtual time: slow workers, groups that fail, are rejected or cancelled, stops, and
crashes (also those of a worker), after which the run restarts from its last saved state. Everything in it
follows from its seed. `Schedule` keeps its own account of every draw and checks each decision against it.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections import Counter
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any

from braid.trainer.pipeline import Draw, Drop, Finish, Pipeline, PipelineSettings, Submit, Sync, Train

OPEN = ("waiting", "running", "finished", "training")
"""What a draw can be before it is trained or dropped."""


class Prompts:
    """A sampler of a few prompts, over and over."""

    def __init__(self, num_drawn: int = 0) -> None:
        self.num_drawn = num_drawn

    def take(self, k: int) -> list[int]:
        first, self.num_drawn = self.num_drawn, self.num_drawn + k
        return [i * 3 % 7 for i in range(first, self.num_drawn)]


def replay(seed: int) -> None:
    """Run one schedule again, with its events and decisions on standard output."""
    Schedule(seed, is_told=True).run()


def check(seeds: range) -> Counter[str]:
    """Run the schedules of `seeds`. Returns how often what happened in them."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts.update(Schedule(seed).run())
        except Exception as error:
            raise AssertionError(
                f"schedule {seed} fails: tests.trainer.pipeline_schedules.replay({seed})"
            ) from error
    return counts


def on_policy(settings: PipelineSettings, verdict: Any) -> list[tuple[list[Draw], dict[Draw, str]]]:
    """The groups of each round of the on-policy loop: those that it trains on, and those that it drops."""
    prompts, size = Prompts(), settings.prompts_per_round
    rounds = []
    for round_ in range(1, settings.num_rounds + 1):
        kept: list[Draw] = []
        dropped: dict[Draw, str] = {}
        for batch in range(settings.max_batches if settings.then == "resample" else 1):
            for number, prompt in enumerate(prompts.take(size), batch * size):
                draw = Draw(round_, number, prompt)
                reason = verdict(draw, round_ - 1) or ("surplus" if len(kept) == size else None)
                if reason is None:
                    kept.append(draw)
                else:
                    dropped[draw] = reason
            if len(kept) == size:
                break
        rounds.append((kept, dropped))
    return rounds


class Schedule:
    """One simulated run."""

    def __init__(self, seed: int, *, is_told: bool = False) -> None:
        self.rng = rng = Random(seed)
        self.is_told = is_told
        self.salt = rng.getrandbits(32)
        random, pick = rng.random, rng.choice
        size, max_lag = int(random() * 4) + 1, pick((0, 0, 1, 1, 2, 4))
        self.settings = PipelineSettings(
            max_lag=max_lag,
            groups_in_flight=int(random() * (max_lag + 1) * size * 1.3) + 1,
            on_new_weights=pick(("finish", "interrupt")),
            over_lag=pick(("drop", "resample", "keep")),
            prompts_per_round=size,
            num_rounds=int(random() * 6) + 1,
            then=pick(("mask", "resample", "replace")),
            max_batches=int(random() * 4) + 1,
        )
        self.spread = pick((0.0, 0.5, 1.5, 2.5))  # of the log-normal durations
        self.slowness = [1.0, 1.0, pick((1.0, 20.0))]  # of the workers
        self.is_coarse = random() < 0.2  # many events at the same time
        self.reject = pick((0.0, 0.0, 0.3, 0.8, 1.0))
        self.invalid = pick((0.0, 0.0, 0.0, 0.1, 0.1, 1.0))
        self.cancel = pick((0.0, 0.0, 0.0, 0.1))
        self.update_s, self.sync_s = pick((0.1, 1.0, 4.0)), pick((0.0, 0.3))

        self.now, self.num_events = 0.0, 0
        self.events: list[tuple[float, int, str, Any]] = []
        for kind, chance in (("crash", 0.4), ("crash", 0.2), ("save", 0.3), ("save", 0.1), ("stop", 0.1)):
            if random() < chance:
                self._at(random() * 2 * self.settings.num_rounds, kind)
        self.num_happened: Counter[str] = Counter()

        self.prompts = Prompts()
        self.pipeline = Pipeline(self.settings, self.prompts.take)
        self.what: dict[Draw, str] = {}  # each draw is: one of OPEN, "trained", or why it was dropped
        self.rounds: list[tuple[list[Draw], dict[Draw, str]]] = []
        self.num_given_back = self.num_replaced = 0
        self._start()
        self.saved = self._account()

    def _start(self) -> None:
        """The processes of a run that starts, or starts again."""
        self.version: dict[Draw, int] = {}  # of the oldest token of a finished group
        self.reason: dict[Draw, str | None] = {}
        self.overtaken: set[Draw] = set()
        self.is_to_replace = False
        self.trained_version = self.engine_version = self.first_version = len(self.rounds)
        self.new_weights_at: list[float] = []
        self.busy = ""  # training or syncing
        self.num_running = 0
        self.is_over = self.is_stopping = False

    # What happens

    def run(self) -> Counter[str]:
        """Run to the end. Returns how often each event happened."""
        self._decide()
        while not self.is_over:
            assert self.events, "deadlock: nothing is under way"
            self.now, _, kind, about = heappop(self.events)
            getattr(self, f"_{kind}")(about)
            self.num_happened[kind] += 1
            self._tell("event", kind, about)
            self._decide()
        return self.num_happened

    def _at(self, delay: float, kind: str, about: Any = None) -> None:
        if self.is_coarse:
            delay = float(round(delay))
        self.num_events += 1
        heappush(self.events, (self.now + delay, self.num_events, kind, about))

    def _finish_group(self, about: tuple[Draw, float]) -> None:
        draw, started_at = about
        self.num_running -= 1
        if self.rng.random() < self.cancel:
            self.what[draw] = "cancelled"
            self.num_given_back += 1
            self.num_happened["cancelled"] += 1
            self.pipeline.cancelled(draw)
            return
        self.what[draw] = "finished"
        self.version[draw] = self.first_version + bisect_right(self.new_weights_at, started_at)
        reason = self.reason[draw] = self.verdict(draw, self.version[draw])
        self.is_to_replace = self._is_replaced(reason)
        self.pipeline.finished(draw, self.version[draw], reason)

    def verdict(self, draw: Draw, version: int) -> str | None:
        """Why to drop a group: depends on nothing but its key and the weights."""
        word = (draw.round * 7919 + draw.number * 104729 + version * 31 + self.salt) * 2654435761 & 0xFFFFFFFF
        if word % 1009 < 1009 * self.invalid:
            return "baseline" if word & 1 else "invalid"
        return "min_std" if (word >> 10) % 1013 < 1013 * self.reject else None

    def _is_replaced(self, reason: str | None) -> bool:
        settings = self.settings
        most = (settings.max_batches - 1) * settings.prompts_per_round if settings.max_lag else 0
        is_meant = reason in ("invalid", "baseline") or (reason is not None and settings.then == "resample")
        return is_meant and self.num_replaced < most

    def _end_update(self, _: None) -> None:
        for draw, what in self.what.items():
            if what == "training":
                self.what[draw] = self.reason[draw] or "trained"
        self.trained_version, self.num_replaced, self.busy = self.trained_version + 1, 0, ""
        self.pipeline.updated()

    def _end_sync(self, _: None) -> None:
        if self.settings.on_new_weights == "interrupt":
            self.new_weights_at.append(self.now)
        self.engine_version, self.busy = self.engine_version + 1, ""
        self.pipeline.synced()

    def _save(self, _: None) -> None:
        self.saved = self._account()
        self._at(self.rng.random() * 3, "crash")

    def _account(self) -> tuple[Any, ...]:
        """The saved state, and this account at the same time."""
        state = json.loads(json.dumps(self.pipeline.state()))
        open_draws = sorted(draw for draw, what in self.what.items() if what in OPEN)
        assert [tuple(draw) for draw in state["draws"]] == open_draws
        counts = self.prompts.num_drawn, self.num_given_back, self.num_replaced
        return state, counts, dict(self.what), self.rounds[: self.trained_version]

    def _crash(self, _: None) -> None:
        state, (num_drawn, self.num_given_back, self.num_replaced), what, rounds = self.saved
        self.what = {draw: "waiting" if now in OPEN else now for draw, now in what.items()}
        self.rounds = list(rounds)
        self.prompts = Prompts(num_drawn)
        self.pipeline = Pipeline(self.settings, self.prompts.take)
        self.pipeline.load(state)
        self.events = [event for event in self.events if event[2] in ("crash", "save", "stop")]
        heapify(self.events)
        self._start()

    def _stop(self, _: None) -> None:
        self.is_stopping = True
        self.pipeline.stop()

    # What is decided

    def _decide(self) -> None:
        while (decision := self.pipeline.decide()) is not None:
            self._tell("decision", decision)
            match decision:
                case Submit(draws):
                    self._submit(draws)
                case Train(kept, dropped):
                    self._train(kept, dict(dropped))
                case Sync(version, when):
                    self._sync(version, when)
                case Drop(draws):
                    self._drop(dict(draws))
                case Finish(is_complete):
                    self._finish(is_complete)
                    if self.is_over:
                        return
        self._check_rest()

    def _submit(self, draws: list[Draw]) -> None:
        assert not self.is_stopping
        assert draws
        assert draws == sorted(draws), "oldest first"
        settings, rng = self.settings, self.rng
        num_known = len(self.what)
        expected = Prompts(num_known)
        for draw in draws:
            match self.what.get(draw):
                case None:
                    assert [draw.prompt] == expected.take(1), "every prompt in turn"
                    place = divmod(expected.num_drawn - 1, settings.prompts_per_round)
                    assert not settings.max_lag or place == (draw.round - 1, draw.number), "a key of its own"
                case "finished":
                    assert settings.over_lag == "resample"
                    assert self._is_late(draw)
                    self.num_happened["resampled"] += 1
                case what:
                    assert what == "waiting", f"{draw} is sampled again while {what}"
            self.what[draw] = "running"
            self.overtaken.discard(draw)
            duration = rng.choice(self.slowness) * (
                rng.lognormvariate(0, self.spread) if self.spread else 1.0
            )
            started_at = self.now + rng.random() * 0.5 * duration
            self._at(duration, "finish_group", (draw, started_at))
        self.num_running += len(draws)
        assert expected.num_drawn == self.prompts.num_drawn, "a prompt is lost"
        assert self.num_running <= settings.groups_in_flight
        assert len(self.what) - self.num_given_back <= self._bound()

    def _bound(self) -> int:
        """Most draws, less those given back, that may have been submitted."""
        settings = self.settings
        rounds = min(self.engine_version + settings.max_lag + 1, settings.num_rounds)
        if settings.max_lag or settings.then != "resample":
            return rounds * settings.prompts_per_round
        sampled = sum(len(kept) + len(dropped) for kept, dropped in self.rounds)
        return sampled + settings.max_batches * settings.prompts_per_round

    def _is_late(self, draw: Draw) -> bool:
        """Whether the next round would use a finished group above max_lag."""
        next_version = self.trained_version + (self.busy == "training")
        return self.reason[draw] is None and next_version - self.version[draw] > self.settings.max_lag

    def _train(self, kept: list[Draw], dropped: dict[Draw, str]) -> None:
        settings, what = self.settings, self.what
        assert not self.busy
        assert not self.is_stopping
        assert self.trained_version == self.engine_version < settings.num_rounds
        members = sorted([*kept, *dropped])
        assert all(what[draw] == "finished" for draw in members)
        assert kept == sorted(kept), "oldest first"
        for draw in kept:
            assert self.reason[draw] is None
            lag = self.trained_version - self.version[draw]
            if lag > settings.max_lag:
                assert settings.over_lag == "keep"
                assert draw in self.overtaken, "too old, although no younger group was trained before it"
                self.num_happened["kept_over_lag"] += 1
        for draw in members:
            what[draw] = "training"
        for draw, reason in dropped.items():
            assert reason == (self.reason[draw] or "surplus")
            self.reason[draw] = reason
        if settings.max_lag:
            assert len(members) == settings.prompts_per_round
            assert "surplus" not in dropped.values()
        else:
            assert len(kept) <= settings.prompts_per_round <= len(members)
        for draw, now in what.items():
            if draw < members[-1]:
                assert now != "finished", f"{draw} is older"
                if now in ("running", "waiting"):
                    self.overtaken.add(draw)
        self.rounds.append((kept, dropped))
        self.busy = "training"
        self._at(self.rng.random() * self.update_s, "end_update")

    def _sync(self, version: int, when: str) -> None:
        assert not self.busy
        assert version == self.trained_version == self.engine_version + 1
        assert when == self.settings.on_new_weights
        if when == "finish":
            self.new_weights_at.append(self.now)  # turns that begin later wait for the new weights
        self.busy = "syncing"
        self._at(self.rng.random() * self.sync_s, "end_sync")

    def _drop(self, draws: dict[Draw, str]) -> None:
        settings = self.settings
        assert settings.max_lag, "the on-policy loop drops nothing before the end of a round"
        for draw, reason in draws.items():
            assert self.what[draw] == "finished"
            if reason == "over_lag":
                assert settings.over_lag == "drop"
                assert self._is_late(draw)
            else:
                assert reason == self.reason[draw]
                assert self._is_replaced(reason)
                self.num_replaced += 1
                self.is_to_replace = False
            self.what[draw] = reason
            self.num_happened[reason] += 1
        self.num_given_back += len(draws)

    def _finish(self, is_complete: bool) -> None:
        assert not self.busy
        if not is_complete:
            assert self.is_stopping
            self.saved = self._account()
            self._crash(None)
            return
        assert self.trained_version == self.engine_version == self.settings.num_rounds == len(self.rounds)
        counts = Counter(what if what == "trained" else f"dropped/{what}" for what in self.what.values())
        counted = self.pipeline.counts
        assert counts == {
            name: n for name, n in counted.items() if name == "trained" or name[:8] == "dropped/"
        }
        assert not self.pipeline.state()["draws"]
        assert not any(what in OPEN for what in self.what.values())
        assert len(self.what) == self.prompts.num_drawn
        if not self.settings.max_lag and not self.cancel:
            assert self.rounds == on_policy(self.settings, self.verdict)
            self.num_happened["on_policy"] += 1
        self.is_over = True

    # What always holds

    def _check_rest(self) -> None:
        """After the last decision, until the next event: whatever could be under way is."""
        settings = self.settings
        assert not self.is_to_replace, "a group keeps its place that another prompt should take"
        assert self.busy or self.num_running or self.is_stopping, "deadlock"
        if self.is_stopping:
            return
        is_busy = self.num_running == settings.groups_in_flight
        now = list(self.what.values())
        assert is_busy or "waiting" not in now
        if settings.over_lag != "keep":
            assert not any(what == "finished" and self._is_late(draw) for draw, what in self.what.items())
        if settings.max_lag:
            is_full = len(self.what) - self.num_given_back == self._bound()
            assert is_full or is_busy, "neither the places nor the groups in flight are used up"
            assert self.busy or now.count("finished") < settings.prompts_per_round

    def _tell(self, *what: object) -> None:
        if self.is_told:
            sys.stdout.write(" ".join([f"{self.now:8.3f}", *map(str, what)]) + "\n")
