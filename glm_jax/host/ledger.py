"""The ledger of a run: every rollout from its submission to its one fate, in a file that replays to the same state."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from glm_jax.host.errors import LedgerError
from glm_jax.host.events import EventFile, read_events
from glm_jax.host.rollouts import ENDINGS, FATES, PURPOSES, TRAINED, Rollout


class Book:
    """What the events so far amount to: the rollouts without a fate, and counters of the others.

    Settled rollouts leave only their counts, so that the memory of a run does not grow with its length.
    """

    def __init__(self) -> None:
        self.live: dict[int, Rollout] = {}
        self.submitted = 0  # also the next id: ids are given in order, without gaps
        self.fates: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()  # why rollouts became invalid, failed or rejected
        self.monitored: Counter[str] = Counter()  # tool calls by what the monitor did, "action/rule"
        self.tokens = 0  # sampled

    def apply(self, event: dict[str, Any]) -> None:
        """Takes one event; raises LedgerError where it contradicts those before it."""
        kind = event.get("event")
        if kind == "submit":
            self._submit(event)
        elif kind == "tokens":
            self._tokens(self._find(event["id"], kind), event)
        elif kind == "observation":
            self._observation(self._find(event["id"], kind), event["tokens"])
        elif kind == "monitor":
            self._find(event["id"], kind)
            self.monitored[f"{event['action']}/{event['rule']}"] += 1
        elif kind == "end":
            self._end(self._find(event["id"], kind), event["ending"])
        elif kind == "reward":
            self._reward(self._find(event["id"], kind), event)
        elif kind == "fate":
            self._fate(event)
        else:
            raise LedgerError(f"the ledger knows no event {kind!r}")

    def audit(self) -> None:
        """Raises LedgerError unless submitted = sum of fates + in flight."""
        settled = sum(self.fates.values())
        if self.submitted != settled + len(self.live):
            fates = ", ".join(f"{fate} {self.fates[fate]}" for fate in FATES)
            raise LedgerError(
                f"{self.submitted} rollouts were submitted, but {settled} have a fate ({fates}) and {len(self.live)} "
                f"are in flight: {self.submitted - settled - len(self.live)} are not accounted for."
            )

    def _find(self, id: int, kind: str) -> Rollout:
        if id in self.live:
            return self.live[id]
        state = "has its fate already" if 0 <= id < self.submitted else "was never submitted"
        raise LedgerError(f"event {kind!r} for rollout {id}, which {state}")

    def _submit(self, event: dict[str, Any]) -> None:
        if event["id"] != self.submitted:
            raise LedgerError(f"rollout {event['id']} was submitted where id {self.submitted} is next")
        if event["purpose"] not in PURPOSES:
            raise LedgerError(f"rollout {event['id']} has purpose {event['purpose']!r}, which is none of {PURPOSES}")
        names = ("id", "task", "group", "family", "purpose")
        rollout = Rollout(**{name: event[name] for name in names}, prompt=array("i", event["prompt"]))
        self.live[rollout.id] = rollout
        self.submitted += 1

    def _tokens(self, rollout: Rollout, event: dict[str, Any]) -> None:
        if rollout.ending is not None:
            raise LedgerError(f"rollout {rollout.id} got tokens after it had ended with {rollout.ending!r}")
        if len(event["tokens"]) != len(event["logp"]):
            raise LedgerError(f"rollout {rollout.id} got {len(event['tokens'])} tokens, {len(event['logp'])} log-probs")
        if rollout.version and event["version"] < rollout.version[-1]:
            raise LedgerError(f"rollout {rollout.id} got version {event['version']} after {rollout.version[-1]}")
        rollout.tokens.extend(event["tokens"])
        rollout.logp.extend(event["logp"])
        rollout.version.extend([event["version"]] * len(event["tokens"]))
        rollout.sampled.extend([1] * len(event["tokens"]))
        self.tokens += len(event["tokens"])

    def _observation(self, rollout: Rollout, tokens: Sequence[int]) -> None:
        if rollout.ending is not None or not rollout.sampled or not rollout.sampled[-1]:
            raise LedgerError(f"rollout {rollout.id} got an observation, and made no call that it could be of")
        rollout.tokens.extend(tokens)
        rollout.logp.extend([0.0] * len(tokens))
        rollout.version.extend([rollout.version[-1]] * len(tokens))
        rollout.sampled.extend([0] * len(tokens))
        rollout.observations += 1

    def _end(self, rollout: Rollout, ending: str) -> None:
        if rollout.ending is not None or ending not in ENDINGS:
            raise LedgerError(f"rollout {rollout.id} ended with {ending!r}, after {rollout.ending!r}; known: {ENDINGS}")
        rollout.ending = ending

    def _reward(self, rollout: Rollout, event: dict[str, Any]) -> None:
        if rollout.scored or rollout.ending is None:
            state = "was scored already" if rollout.scored else "has not ended"
            raise LedgerError(f"rollout {rollout.id} got a reward, but it {state}")
        rollout.scored = True
        rollout.reward, rollout.exact, rollout.cause = event["reward"], event["exact"], event["cause"]
        rollout.metrics = event.get("metrics", {})

    def _fate(self, event: dict[str, Any]) -> None:
        fate = event["fate"]
        if fate not in FATES:
            raise LedgerError(f"{fate!r} is no fate; known: {FATES}")
        for id in event["ids"]:
            rollout = self._find(id, f"fate {fate}")
            if fate == TRAINED and not (rollout.ready and rollout.tokens):
                raise LedgerError(f"rollout {id} was trained before it had an ending, a reward and a token")
            del self.live[id]
            self.fates[fate] += 1
            if event.get("cause"):
                self.causes[event["cause"]] += 1


class Ledger:
    """A book that writes every event to its file before anything acts on it."""

    def __init__(self, path: Path, offset: int = 0, kept: bool = True):
        """Goes on from the first `offset` bytes of the file, and cuts the rest; `kept` as of EventFile."""
        self.book = replay(path, offset) if offset else Book()
        self.file = EventFile(path, offset, kept)

    @property
    def live(self) -> dict[int, Rollout]:
        return self.book.live

    def submit(self, task: str, group: int, family: str, purpose: str, prompt: Sequence[int]) -> Rollout:
        """Opens a rollout under the next id."""
        id = self.book.submitted
        names = dict(id=id, task=task, group=group, family=family, purpose=purpose)
        self._record({"event": "submit", **names, "prompt": list(prompt)})
        return self.book.live[id]

    def tokens(self, id: int, tokens: Sequence[int], logp: Sequence[float], version: int) -> None:
        """Adds sampled tokens. Python's floats hold the float32 log-probs exactly, and so does their decimal form."""
        self._record({"event": "tokens", "id": id, "tokens": list(tokens), "logp": list(logp), "version": version})

    def observation(self, id: int, tokens: Sequence[int]) -> None:
        """Adds what came back of the tool call that the rollout's last tokens are."""
        self._record({"event": "observation", "id": id, "tokens": list(tokens)})

    def monitor(self, id: int, action: str, rule: str) -> None:
        """Notes what the monitor did about the call that the rollout's last tokens are."""
        self._record({"event": "monitor", "id": id, "action": action, "rule": rule})

    def end(self, id: int, ending: str) -> None:
        self._record({"event": "end", "id": id, "ending": ending})

    def reward(
        self,
        id: int,
        reward: float | None,
        exact: bool | None,
        cause: str | None = None,
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Adds the reward, or with None the cause why there is none, and what else the reward function told."""
        if reward is not None and not math.isfinite(reward):
            raise LedgerError(f"rollout {id} got the reward {reward}; a reward that is not finite has a cause instead")
        event = {"event": "reward", "id": id, "reward": reward, "exact": exact, "cause": cause}
        self._record(event | ({"metrics": dict(metrics)} if metrics else {}))

    def settle(self, ids: Iterable[int], fate: str, *, cause: str | None = None, version: int | None = None) -> None:
        """Gives rollouts their fate, and drops them from memory. `version` is that of the weights being trained."""
        event: dict[str, Any] = {"event": "fate", "ids": list(ids), "fate": fate}
        event |= {name: value for name, value in (("cause", cause), ("version", version)) if value is not None}
        if event["ids"]:
            self._record(event)

    def audit(self) -> None:
        self.book.audit()

    def _record(self, event: dict[str, Any]) -> None:
        self.book.apply(event)
        self.file.append(event)


def replay(path: Path, offset: int | None = None) -> Book:
    """The state that the file's events up to `offset` amount to (None: all that are whole)."""
    book = Book()
    for event in read_events(path, offset):
        book.apply(event)
    book.audit()
    return book
