"""Turns of many trajectories beside one engine: no turn waits for another trajectory's.

    environments --observation--> samples that go on --submit--> engine
         ^                                                          |
         +------------------------ what was said <------take--------+

A turn is one more request with a longer response: what was drawn, what was observed since (of
version -1, without log-probs), and room for more. An engine that can keeps what it has computed of
a sample for its next turn. Whether it does, and whoever waits for whom, the bits are those of a
fresh engine that is given the history.

With `environment.history=as_template`, a chat that the template writes otherwise than it was read
stands in the response once more, as a segment: the engine reads it and nothing before, and so does
the trainer.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from verl_like.errors import ConfigError, RolloutError
from workers.agents.chat import Message, TurnRenderer, with_observation
from workers.agents.faults import DELAY, KILL, KINDS, NO_FAULTS, Faults
from workers.agents.gateway import Refused
from workers.agents.host import BROKEN, LATE, EnvironmentHost
from workers.agents.recorded import RecordedHost
from workers.agents.requests import TOO_LONG, check_sampling, ids_to_read, last_stop, segment_of
from workers.rollout.base import Budget, RolloutEngine, SamplingParams
from workers.rollout.sample import CUT_BY_LENGTH, KeptStates, Sample
from workers.rollout.sampling import noise_key

if TYPE_CHECKING:
    from workers.config import EnvironmentConfig

TERMINATED, MAX_TURNS = "terminated", "max_turns"
OBSERVED = -1
"""The version of a token that was observed."""
GIVEN_UP = "in an environment that failed"
"""Why tokens of a trajectory that started over are not trained on."""
TAKE_S = 0.05
"""Longest time between two looks at the environments while the engine draws."""
BESIDE_S = 0.005
"""While the engine has nothing to draw, answers that come within so long are taken together."""
GATHER = 8
"""Trajectories begin together once they are one in so many of those that run ..."""
MOST_WAITS = 16
"""... or after so many looks: a pass that reads few prompts costs as much as one of many."""


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
    faults: Faults = NO_FAULTS
    """Of its environment, on purpose."""


@dataclass
class Times:
    """Seconds of a turn, from its first token on; the first of a trajectory's are those of `reset`.

    What an answer took beside the work of the environment's process is waiting.
    """

    waiting: float = 0.0
    engine: float = 0.0
    environment: float = 0.0
    asked: float = 0.0
    """When the environment was asked, by the clock of the day."""
    heard: float = 0.0
    """When its answer was taken."""


@dataclass
class Trajectory:
    """A trajectory so far: its sample, with a turn's number for each token, and its rewards."""

    start: Start
    sample: Sample = field(default_factory=lambda: Sample([]))
    turns: list[int] = field(default_factory=list)
    chat: list[Message] = field(default_factory=list)
    """What the template wrote, as messages, where turns read as it writes."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """(place of a turn's last drawn token, reward)."""
    ended: str = ""
    problem: str = ""
    """Why it failed, where it did."""
    is_left_out: bool = False
    """Of the update and the baseline, as one that failed without a reward for that."""
    request: Mapping[str, Any] | None = None
    """An agent's last one."""
    cut: str = ""
    """Why an agent is drawn nothing more; it may yet end with a reward."""
    attempts: int = 1
    was_late: bool = False
    """Whether an environment of an attempt gave no answer in its time."""
    num_turns: int = 0
    num_calls: int = 0
    num_call_errors: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    """Reason -> tokens that were drawn before it was begun anew."""
    faults: Counter[str] = field(default_factory=Counter)
    """Faults on purpose that it has had, by their key."""
    answers: list[Mapping[str, Any]] = field(default_factory=list)
    """The environment's, in their order, that of `reset` first."""
    times: list[Times] = field(default_factory=lambda: [Times()])
    since: float = 0.0
    began: float = 0.0

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        since, self.since = self.since, now
        return now - since

    @property
    def engine_s(self) -> float:
        """Seconds of all turns in the engine."""
        return sum(one.engine for one in self.times)

    @property
    def environment_s(self) -> float:
        """Seconds in which its environment worked."""
        return sum(one.environment for one in self.times)

    @property
    def waiting_s(self) -> float:
        """Seconds in which neither did."""
        return sum(one.waiting for one in self.times)


class TurnLoop:
    """Plays trajectories with one engine and one host of environments."""

    def __init__(
        self,
        engine: RolloutEngine,
        host: EnvironmentHost | RecordedHost,
        chat: TurnRenderer,
        config: EnvironmentConfig,
        decode: Callable[[list[int]], str],
    ) -> None:
        """`decode` makes what an environment is told of drawn ids."""
        self._engine, self._host, self._chat = engine, host, chat
        self._config, self._decode = config, decode
        self._numbers = itertools.count()
        self._played: dict[int, Trajectory] = {}
        """By number, those that are not taken."""
        self._unopened: deque[int] = deque()
        self._open: dict[int, None] = {}
        """Those that have environments, in the order in which they have begun."""
        self._running: dict[int, int] = {}
        """The engine's number of a sample -> that of its trajectory."""
        self._unread: dict[int, tuple[str, bool]] = {}
        """What trajectories are to read next, and whether it is all that they read."""
        self._ready: list[int] = []
        self._ended: list[int] = []
        self._num_waits = 0

    @property
    def num_running(self) -> int:
        """Trajectories that were submitted and neither taken nor aborted."""
        return len(self._played)

    def play(
        self, starts: Sequence[Start], sampling: SamplingParams, num_open: int
    ) -> list[Trajectory]:
        """All of them to their ends, in their order; at most `num_open` at the same time."""
        numbers = self.submit(starts, sampling, num_open)
        played = self.take()
        return [played[number] for number in numbers]

    def submit(self, starts: Sequence[Start], sampling: SamplingParams, num_open: int) -> list[int]:
        """Begin these trajectories beside those that are played; gives a number for each."""
        if self._played and sampling != self._sampling:
            raise RolloutError(
                f"rollout: {self.num_running} trajectories are played with other sampling "
                "settings; take or abort them first."
            )
        self._sampling, self._num_open = sampling, num_open
        added = {next(self._numbers): Trajectory(start) for start in starts}
        self._played |= added
        self._unopened.extend(added)
        return list(added)

    def take(
        self, max_tokens: int | None = None, seconds: float | None = None
    ) -> dict[int, Trajectory]:
        """Play until all have ended; those that have, by number.

        With `max_tokens` until one has drawn about so many more, with `seconds` no longer than
        that; the others stay as they are, with their environments, for the next call.
        """
        budget, self._num_drawn = Budget(max_tokens, seconds), Counter[int]()
        try:
            while self._unopened or self._open:
                while self._unopened and len(self._open) < self._num_open:
                    self._begin(self._unopened.popleft())
                if self._turn(budget) or budget.is_over:
                    break
        except BaseException:
            self.abort()
            raise
        ended, self._ended = self._ended, []
        return {number: self._played.pop(number) for number in ended}

    def abort(self) -> None:
        """Let go of all of them and of their environments."""
        self._engine.abort(self._running)
        for number in self._open:
            self._host.end(number)
        own = (self._played, self._unopened, self._open, self._running, self._unread, self._ready)
        for those in own:
            those.clear()
        self._ended = []

    def _turn(self, budget: Budget) -> bool:
        """One look at the environments, and some steps of the engine.

        Whether a trajectory has drawn as many tokens as it may: `take` counts those of one turn.
        """
        seconds = min(TAKE_S, budget.seconds_left)
        is_idle = not self._running and not self._ready
        self._hear(seconds if is_idle else 0.0)
        for _ in range(MOST_WAITS):  # a pass of a few, then one of the rest, cost as much as two
            if self._running or not self._hear(min(BESIDE_S, budget.seconds_left)):
                break
        self._read_texts()
        self._end_late()
        self._submit_ready()
        if not self._running:
            return False
        until = time.monotonic() + seconds
        said = self._engine.take(budget.max_tokens, seconds=seconds, until_one=True)
        is_early = time.monotonic() < until
        for asked, sample in said.items():
            self._said(self._running.pop(asked), sample)
        if budget.max_tokens is None:
            return False
        most = max(self._num_drawn.values(), default=0)
        return most >= budget.max_tokens or (is_early and not said)

    def _begin(self, number: int) -> None:
        one = self._played[number]
        one.since = one.began = time.monotonic()
        one.times[-1].asked = time.time()
        self._open.pop(number, None)
        self._open[number] = None
        self._host.open(number, one.start.seeds, one.start.row)

    def _submit_ready(self) -> None:
        """Have those go on that may; those that begin do so several at once."""
        if not self._ready:
            return
        self._num_waits += 1
        few = len(self._ready) * GATHER < len(self._running) and self._num_waits < MOST_WAITS
        if few and not any(self._played[number].num_turns for number in self._ready):
            return
        for number in self._ready:
            one = self._played[number]
            one.times.append(Times(waiting=one.lap()))
        longest = self._sampling.max_tokens
        samples = [_asked(self._played[number].sample, longest) for number in self._ready]
        asked = self._engine.submit(samples, self._sampling)
        self._running |= dict(zip(asked, self._ready, strict=True))
        self._ready, self._num_waits = [], 0

    def _hear(self, seconds: float) -> int:
        """How many answers have come by now, or within `seconds`."""
        count = 0
        for count, (number, answer) in enumerate(self._host.answers(seconds), start=1):  # noqa: B007
            self._heard(number, answer)
        return count

    def _heard(self, number: int, answer: Mapping[str, Any]) -> None:
        """An environment's answer: the first observation, the next, the end, or a failure."""
        one = self._played[number]
        self._note_answer(number, answer)
        if "request" in answer:
            self._requested(number, answer["request"], answer["messages"])
        elif "failed" in answer:
            self._failed(number, answer)
        elif not one.num_turns and not one.sample.prompt:
            self._observed_first(number, answer["text"])
        elif answer.get("end"):
            one.rewards.append((_last_drawn(one), answer["reward"]))
            one.rewards += [(_end_of(one, turn), more) for turn, more in answer.get("rewards", ())]
            cut = one.cut or answer.get("cut")
            self._end(number, cut or (MAX_TURNS if answer.get("truncated") else TERMINATED))
        else:
            one.rewards.append((_last_drawn(one), answer["reward"]))
            self._observed(number, answer["messages"])

    def _note_answer(self, number: int, answer: Mapping[str, Any]) -> None:
        one = self._played[number]
        seconds, times = one.lap(), one.times[-1]
        busy = min(self._host.busy_s(number), seconds)
        times.environment += busy
        times.waiting += seconds - busy
        times.heard = time.time()
        one.answers.append(self._noted(answer, one.cut))
        one.num_calls += answer.get("calls", 0)
        one.num_call_errors += answer.get("errors", 0)

    def _noted(self, answer: Mapping[str, Any], cut: str) -> Mapping[str, Any]:
        """What is kept of an answer: all by which a trajectory is played again."""
        request = answer.get("request")
        if request is None:
            return {**answer, "cut": cut} if answer.get("end") and cut else answer
        if request["extends"] and self._config.history == "as_drawn":
            request = {**request, "chat": []}  # the messages are read alone
        return {**answer, "request": request}

    def _observed_first(self, number: int, text: str | None) -> None:
        one = self._played[number]
        safe = None if text is None else self._chat.escaped(text)
        one.chat = with_observation(one.start.prompt, safe)
        self._unread[number] = self._chat.written(one.chat), True

    def _read_texts(self) -> None:
        """Have those go on that have observed something since the last look."""
        unread, self._unread = self._unread, {}
        all_ids = self._chat.ids_of([text for text, _ in unread.values()])
        for (number, (_, is_whole)), ids in zip(unread.items(), all_ids, strict=True):
            one = self._played[number]
            if one.num_turns:
                self._read_next(number, ids, is_whole)
            elif len(ids) > (width := self._engine.limits.prompt_width):
                words = f"it begins with {len(ids)} tokens of prompt and first observation"
                problem = f"{words}, and data.max_prompt_length is {width}: raise it"
                self._end(number, BROKEN, problem)
            else:
                self._read_first(number, ids, self._end_of_turn(0))

    def _read_first(self, number: int, prompt: list[int], end_at: int | None) -> None:
        one = self._played[number]
        key, name = one.start.key, one.start.name
        one.sample = Sample(prompt, key, name, end_at=end_at, kept=KeptStates())
        self._ready.append(number)

    def _observed(self, number: int, messages: Sequence[Message]) -> None:
        one = self._played[number]
        if one.num_turns == self._config.max_turns:
            self._end(number, MAX_TURNS)
            return
        try:
            self._unread[number] = self._next_text(one, messages)
        except ConfigError as error:  # the template refuses what was said or observed
            self._end(number, BROKEN, str(error))

    def _next_text(self, one: Trajectory, messages: Sequence[Message]) -> tuple[str, bool]:
        """What the next turn reads after the last one, or as the whole chat."""
        last = last_stop(one.sample)
        if self._config.history == "as_template":
            drawn = one.sample.tokens[one.turns.index(one.num_turns - 1) :].tolist()
            turn = self._chat.turn(drawn, last, messages)
            rewritten = self._chat.rewritten(one.chat, turn, last)
            one.chat += turn
            if rewritten is not None:
                return rewritten, True
        return self._chat.text_between(last, messages), False

    def _read_next(self, number: int, ids: Sequence[int], is_whole: bool) -> None:
        length = len(self._played[number].sample.tokens) + len(ids)
        if length >= self._sampling.max_tokens:
            self._end(number, CUT_BY_LENGTH)
        else:
            self._read(number, ids, is_whole, self._end_of_turn(length))

    def _read(self, number: int, ids: Sequence[int], is_whole: bool, end_at: int | None) -> None:
        """Have a trajectory go on after these ids, which are observed; if whole, they are all."""
        one = self._played[number]
        more = (0, len(ids))
        truncated = one.sample.truncated_log_probs
        one.sample = replace(
            one.sample,
            tokens=torch.cat([one.sample.tokens, torch.tensor(ids, dtype=torch.long)]),
            log_probs=pad(one.sample.log_probs, more, value=torch.nan),
            versions=pad(one.sample.versions, more, value=OBSERVED),
            truncated_log_probs=None
            if truncated is None
            else pad(truncated, more, value=torch.nan),
            finish_reason="abort",
            end_at=end_at,
            segments=(*one.sample.segments, *([len(one.sample.tokens)] if is_whole else [])),
        )
        one.turns += [one.num_turns - 1] * len(ids)
        self._ready.append(number)

    def _requested(
        self, number: int, request: Mapping[str, Any], messages: Sequence[Message]
    ) -> None:
        """An agent's request: a turn, or refused; the agent may end or ask for something else."""
        one, limits = self._played[number], self._engine.limits
        one.request = request
        try:
            check_sampling(request["sampling"], self._sampling)
            chat = self._chat.with_tools(request["tools"])
            as_drawn = self._config.history == "as_drawn"
            ids, is_whole = ids_to_read(one.sample, request, messages, chat, as_drawn)
            if ids and not 0 <= min(ids) <= max(ids) < self._engine.vocab_size:
                raise Refused(f"not all ids are below {self._engine.vocab_size}", "token_ids")
            if not one.sample.prompt:
                if len(ids) > limits.prompt_width:
                    what = f"{len(ids)} tokens, and data.max_prompt_length is {limits.prompt_width}"
                    raise Refused(f"the first request has {what}", "messages", TOO_LONG)
                self._read_first(number, ids, self._end_of_turn(0, request["max_tokens"]))
                return
            if one.num_turns == self._config.max_turns:
                one.cut = MAX_TURNS
                raise Refused(f"all environment.max_turns={one.num_turns} requests are used up")
            length = len(one.sample.tokens) + len(ids)
            if length >= self._sampling.max_tokens:
                one.cut = CUT_BY_LENGTH
                what = f"{length} tokens after the first request's, and data.max_response_length is"
                raise Refused(f"{what} {self._sampling.max_tokens}", "messages", TOO_LONG)
            self._read(number, ids, is_whole, self._end_of_turn(length, request["max_tokens"]))
        except ConfigError as problem:
            self._refuse(number, Refused(str(problem)))
        except Refused as problem:
            self._refuse(number, problem)

    def _refuse(self, number: int, problem: Refused) -> None:
        one = self._played[number]
        one.answers.pop()  # it is no turn
        self._host.say(number, "", refused=problem.facts, is_cut=bool(one.cut))

    def _end_of_turn(self, length: int, asked: int | None = None) -> int | None:
        """Where a turn of so many tokens at most ends; `asked`: by an agent."""
        bounds = [most for most in (self._config.max_tokens_per_turn, asked) if most is not None]
        return length + min(bounds) if bounds else None

    def _said(self, number: int, sample: Sample) -> None:
        """The engine has drawn a turn."""
        one = self._played[number]
        one.times[-1].engine += one.lap()
        one.sample = sample = _joined(one.sample, sample)
        drawn = sample.tokens[len(one.turns) :].tolist()
        one.turns += [one.num_turns] * len(drawn)
        one.num_turns += 1
        self._num_drawn[number] += len(drawn)
        if (
            sample.finish_reason == CUT_BY_LENGTH
            and len(sample.tokens) == self._sampling.max_tokens
        ):
            one.cut = CUT_BY_LENGTH
            if one.request is None:
                self._end(number, CUT_BY_LENGTH)
                return
        self._say(number, drawn)

    def _say(self, number: int, drawn: list[int]) -> None:
        """To the environment, which faults on purpose may strike the first time."""
        one, delay_s = self._played[number], 0.0
        one.times[-1].asked = time.time()
        if one.attempts == 1:
            faults = one.start.faults
            struck = [kind for kind in KINDS if faults.strike(kind, one.start.key, one.num_turns)]
            one.faults.update(struck)
            if KILL in struck:
                self._host.kill(number)
                return
            delay_s = faults.delay_s if DELAY in struck else 0.0
        said = drawn[:-1] if drawn[-1] in self._sampling.stop_token_ids else drawn
        if one.request is None:
            self._host.say(number, self._decode(said), delay_s)
            return
        text = self._chat.with_tools(one.request["tools"]).text_of(said)
        self._host.say(number, text, delay_s, **_facts(one, len(drawn)))

    def _end_late(self) -> None:
        """Those that have taken too long, wherever they are."""
        most, now = self._config.episode_s, time.monotonic()
        for number in list(self._open):
            one = self._played[number]
            if now - one.began <= most:
                break
            if number in self._running.values():
                one.times[-1].engine += one.lap()
            else:
                one.times[-1].environment += one.lap()
            self._forget(number)
            self._end(number, LATE, f"it took over environment.episode_s={most:g} s")

    def _failed(self, number: int, answer: Mapping[str, Any]) -> None:
        """Again with a fresh environment and the same noise, or left as it is and marked.

        After a deadline only while others play that had none, so that nobody waits for a second.
        """
        one = self._played[number]
        self._forget(number)
        is_late = answer["reason"] == LATE
        one.was_late |= is_late
        has_time = not is_late or any(
            not self._played[other].was_late for other in (*self._open, *self._unopened)
        )
        if one.attempts <= self._config.retries and has_time:
            one.attempts += 1
            self._start_over(number)
            return
        self._end(number, answer["reason"], str(answer["failed"]))

    def _start_over(self, number: int) -> None:
        """Play the trajectory from its start; its tokens so far are counted as given up."""
        one = self._played[number]
        given_up = int((one.sample.versions >= 0).sum())
        self._played[number] = Trajectory(
            one.start,
            attempts=one.attempts,
            was_late=one.was_late,
            given_up=+(one.given_up + Counter({GIVEN_UP: given_up})),
            faults=one.faults,
        )
        self._host.end(number)
        self._begin(number)

    def _forget(self, number: int) -> None:
        """Draw no more of it: its process may end while the engine has it."""
        self._unread.pop(number, None)
        if number in self._ready:
            self._ready.remove(number)
        asked = [asked for asked, its in self._running.items() if its == number]
        if asked:
            self._engine.abort(asked)
            del self._running[asked[0]]

    def _end(self, number: int, ended: str, problem: str = "") -> None:
        one = self._played[number]
        one.ended, one.problem = ended, problem
        if problem and one.num_turns and self._config.failed_reward is not None:
            one.rewards.append((_end_of(one, one.num_turns - 1), self._config.failed_reward))
        else:
            one.is_left_out = bool(problem)
        is_cut = ended in (CUT_BY_LENGTH, MAX_TURNS)
        reason = CUT_BY_LENGTH if is_cut else "stop"
        one.sample = replace(one.sample, finish_reason=reason, kept=None)
        if not one.sample.prompt:  # it failed before it had said anything
            prompt = self._chat.prompt(with_observation(one.start.prompt, None))
            one.sample = replace(one.sample, prompt=prompt)
        del self._open[number]
        self._ended.append(number)
        self._host.end(number)


def _last_drawn(one: Trajectory) -> int:
    return len(one.sample.tokens) - 1


def _asked(sample: Sample, longest: int) -> Sample:
    """What the engine is asked to go on with: the last segment, as a sample of its own."""
    if not sample.segments:
        return sample
    begin = sample.segments[-1]
    rest = slice(begin + 1, None)
    truncated, routed = sample.truncated_log_probs, sample.routed_experts
    return replace(
        sample,
        prompt=sample.tokens[begin : begin + 1].tolist(),
        key=noise_key(sample.key, "segment", len(sample.segments)),  # places count from 0 again
        tokens=sample.tokens[rest],
        log_probs=sample.log_probs[rest],
        versions=sample.versions[rest],
        truncated_log_probs=None if truncated is None else truncated[rest],
        routed_experts=None if routed is None else routed[len(sample.prompt) + begin :],
        end_at=sample.longest(longest) - begin - 1,
        segments=(),
    )


def _joined(whole: Sample, drawn: Sample) -> Sample:
    """The sample with what the engine has drawn of its last segment."""
    if not whole.segments:
        return drawn
    before = slice(whole.segments[-1] + 1)
    truncated, more = whole.truncated_log_probs, drawn.truncated_log_probs
    return replace(
        whole,
        tokens=torch.cat([whole.tokens[before], drawn.tokens]),
        log_probs=torch.cat([whole.log_probs[before], drawn.log_probs]),
        versions=torch.cat([whole.versions[before], drawn.versions]),
        truncated_log_probs=(
            None if truncated is None or more is None else torch.cat([truncated[before], more])
        ),
        routed_experts=_joined_choices(whole, drawn),
        finish_reason=drawn.finish_reason,
        kept=drawn.kept,
    )


def _joined_choices(whole: Sample, drawn: Sample) -> torch.Tensor | None:
    """Experts of all segments; the last tokens of those before, which nobody read, have zeros."""
    before, more = whole.routed_experts, drawn.routed_experts
    if before is None or more is None:
        return None
    begin = len(whole.prompt) + whole.segments[-1]
    unread = before.new_zeros(max(begin - len(before), 0), *before.shape[1:])
    return torch.cat([before[:begin], unread, more])


def _end_of(one: Trajectory, turn: int) -> int:
    """The place of a turn's last drawn token."""
    drawn = (one.sample.versions != OBSERVED) & (torch.tensor(one.turns) == turn)
    return int(drawn.nonzero()[-1])


def _facts(one: Trajectory, num_drawn: int) -> dict[str, Any]:
    """What an agent is told of a turn beside its text."""
    sample = one.sample
    facts = {
        "finish_reason": sample.finish_reason,
        "num_read": len(segment_of(sample)) - num_drawn,
        "num_drawn": num_drawn,
    }
    if one.request is None or one.request["ids"] is None:
        return facts
    drawn = {"ids": sample.tokens[-num_drawn:], "log_probs": sample.log_probs[-num_drawn:]}
    return facts | {name: values.tolist() for name, values in drawn.items()}
