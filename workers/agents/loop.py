"""Turns of many trajectories beside one engine: no turn waits for another trajectory's.

    environments --observation--> samples that go on --submit--> engine
         ^                                                          |
         +------------------------ what was said <------take--------+

A turn is one more request with a longer response: what was drawn, what was observed since (of
version -1, without log-probs), and room for more. It is read in one pass, so a trajectory has the
bits of a fresh engine that reads its history, whoever waits for whom meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from verl_like.errors import RolloutError
from workers.agents.chat import Message, TurnRenderer, with_observation
from workers.agents.host import LATE, EnvironmentHost
from workers.rollout.base import RolloutEngine, SamplingParams
from workers.rollout.sample import CUT_BY_LENGTH, Sample

if TYPE_CHECKING:
    from workers.config import EnvironmentConfig

TERMINATED, MAX_TURNS = "terminated", "max_turns"
OBSERVED = -1
"""The version of a token that was observed."""
TAKE_S = 0.05
"""Longest time between two looks at the environments while the engine draws."""
GATHER = 8
"""Trajectories go on together once they are one in so many of those that run ..."""
MOST_WAITS = 16
"""... or after so many looks: a pass that reads few histories costs as much as one of many."""


@dataclass(frozen=True)
class Start:
    """A trajectory that is to be played."""

    prompt: Any
    """The row's: a text, or a chat."""
    row: Mapping[str, Any]
    """The row's columns, for `reset`."""
    seeds: tuple[int, int]
    key: int
    """Of the noise that it is drawn with."""
    name: str


@dataclass
class Trajectory:
    """A trajectory so far: its sample, with a turn's number for each token, and its rewards."""

    start: Start
    sample: Sample = field(default_factory=lambda: Sample([]))
    turns: list[int] = field(default_factory=list)
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(place of a turn's last drawn token, reward)."""
    ended: str = ""
    problem: str = ""
    """Why it failed, where it did."""
    attempts: int = 1
    num_turns: int = 0
    num_calls: int = 0
    num_call_errors: int = 0
    engine_s: float = 0.0
    environment_s: float = 0.0
    since: float = 0.0
    began: float = 0.0

    def note_wait(self, kind: str) -> None:
        """Add the time since the last change to what it was spent on."""
        now = time.monotonic()
        setattr(self, kind, getattr(self, kind) + now - self.since)
        self.since = now


class TurnLoop:
    """Plays trajectories with one engine and one host of environments."""

    def __init__(
        self,
        engine: RolloutEngine,
        host: EnvironmentHost,
        chat: TurnRenderer,
        config: EnvironmentConfig,
        decode: Callable[[list[int]], str],
    ) -> None:
        """`decode` makes what an environment is told of drawn ids."""
        self._engine, self._host, self._chat = engine, host, chat
        self._config, self._decode = config, decode
        self._played: list[Trajectory] = []
        self._open: set[int] = set()
        self._running: dict[int, int] = {}
        """The engine's number of a sample -> that of its trajectory."""
        self._ready: list[int] = []
        self._num_waits = 0

    def play(
        self, starts: Sequence[Start], sampling: SamplingParams, num_open: int
    ) -> list[Trajectory]:
        """All of them to their ends, in their order; at most `num_open` at the same time."""
        self._sampling = sampling
        self._played = [Trajectory(start) for start in starts]
        unopened = deque(range(len(starts)))
        try:
            while unopened or self._open:
                while unopened and len(self._open) < num_open:
                    self._begin(unopened.popleft())
                self._turn()
        finally:
            self._engine.abort(self._running)
            for number in self._open:
                self._host.end(number)
        return self._played

    def _turn(self) -> None:
        """One look at the environments, and some steps of the engine."""
        is_idle = not self._running and not self._ready
        for number, answer in self._host.answers(TAKE_S if is_idle else 0.0):
            self._heard(number, answer)
        self._submit_ready()
        if self._running:
            for asked, sample in self._engine.take(seconds=TAKE_S, until_one=True).items():
                self._said(self._running.pop(asked), sample)

    def _begin(self, number: int) -> None:
        one = self._played[number]
        one.since = one.began = time.monotonic()
        self._open.add(number)
        self._host.open(number, one.start.seeds, one.start.row)

    def _submit_ready(self) -> None:
        """Have those go on that may, several at once."""
        if not self._ready:
            return
        self._num_waits += 1
        few = len(self._ready) * GATHER < len(self._running) and self._num_waits < MOST_WAITS
        if few:
            return
        samples = [self._played[number].sample for number in self._ready]
        asked = self._engine.submit(samples, self._sampling)
        self._running |= dict(zip(asked, self._ready, strict=True))
        self._ready, self._num_waits = [], 0

    def _heard(self, number: int, answer: Mapping[str, Any]) -> None:
        """An environment's answer: the first observation, the next, the end, or a failure."""
        one = self._played[number]
        one.note_wait("environment_s")
        if "failed" in answer:
            self._failed(number, answer)
        elif not one.num_turns and not one.sample.prompt:
            self._observed_first(number, answer["text"])
        elif answer.get("end"):
            one.rewards.append((_last_drawn(one), answer["reward"]))
            self._end(number, TERMINATED)
        else:
            one.rewards.append((_last_drawn(one), answer["reward"]))
            one.num_calls += answer.get("calls", 0)
            one.num_call_errors += answer.get("errors", 0)
            self._observed(number, answer["messages"])

    def _observed_first(self, number: int, text: str | None) -> None:
        one, width = self._played[number], self._engine.limits.prompt_width
        prompt = self._chat.prompt(with_observation(one.start.prompt, text))
        if len(prompt) > width:
            raise RolloutError(
                f"rollout: {one.start.name} begins with {len(prompt)} tokens of prompt and first "
                f"observation, and data.max_prompt_length is {width}. Raise it."
            )
        sample = Sample(prompt, one.start.key, one.start.name, end_at=self._end_of_turn(0))
        one.sample = sample
        self._ready.append(number)

    def _observed(self, number: int, messages: Sequence[Message]) -> None:
        one, width = self._played[number], self._sampling.max_tokens
        if one.num_turns == self._config.max_turns:
            self._end(number, MAX_TURNS)
            return
        tokens = one.sample.tokens
        last = int(tokens[-1]) if one.sample.finish_reason == "stop" else None
        observed = torch.tensor(self._chat.between(last, messages), dtype=torch.long)
        length = len(tokens) + len(observed)
        if length >= width:
            self._end(number, CUT_BY_LENGTH)
            return
        unknown = torch.full((len(observed),), torch.nan)
        truncated = one.sample.truncated_log_probs
        one.sample = replace(
            one.sample,
            tokens=torch.cat([tokens, observed]),
            log_probs=torch.cat([one.sample.log_probs, unknown]),
            versions=torch.cat(
                [one.sample.versions, torch.full_like(observed, OBSERVED, dtype=torch.int32)]
            ),
            truncated_log_probs=None if truncated is None else torch.cat([truncated, unknown]),
            finish_reason="abort",
            end_at=self._end_of_turn(length),
        )
        one.turns += [one.num_turns - 1] * len(observed)
        self._ready.append(number)

    def _end_of_turn(self, length: int) -> int | None:
        most = self._config.max_tokens_per_turn
        return None if most is None else length + most

    def _said(self, number: int, sample: Sample) -> None:
        """The engine has drawn a turn."""
        one = self._played[number]
        one.note_wait("engine_s")
        drawn = sample.tokens[len(one.turns) :].tolist()
        one.sample = sample
        one.turns += [one.num_turns] * len(drawn)
        one.num_turns += 1
        if (
            sample.finish_reason == CUT_BY_LENGTH
            and len(sample.tokens) == self._sampling.max_tokens
        ):
            self._end(number, CUT_BY_LENGTH)
            return
        if time.monotonic() - one.began > self._config.episode_s:
            self._end(
                number, LATE, f"it took over environment.episode_s={self._config.episode_s:g} s"
            )
            return
        said = drawn[:-1] if sample.finish_reason == "stop" else drawn
        self._host.say(number, self._decode(said))

    def _failed(self, number: int, answer: Mapping[str, Any]) -> None:
        """Again with a fresh environment and the same noise, or left as it is and marked."""
        one = self._played[number]
        if one.attempts <= self._config.retries:
            self._played[number] = Trajectory(one.start, attempts=one.attempts + 1)
            self._begin(number)
            return
        self._end(number, answer["reason"], str(answer["failed"]))

    def _end(self, number: int, ended: str, problem: str = "") -> None:
        one = self._played[number]
        one.ended, one.problem = ended, problem
        is_cut = ended in (CUT_BY_LENGTH, MAX_TURNS)
        one.sample = replace(one.sample, finish_reason=CUT_BY_LENGTH if is_cut else "stop")
        if not one.sample.prompt:  # it failed before it had said anything
            prompt = self._chat.prompt(with_observation(one.start.prompt, None))
            one.sample = replace(one.sample, prompt=prompt)
        self._open.discard(number)
        self._host.end(number)


def _last_drawn(one: Trajectory) -> int:
    return len(one.sample.tokens) - 1
