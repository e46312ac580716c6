"""One trajectory: a state machine between its environment and the engine.

    QUEUED -open-> ENVIRONMENT -on_answer-> OBSERVED -read-> READY -submitted-> ENGINE
                        ^                                                         |
                        +------------------------on_sample------------------------+

`end` leads from every state to ENDED. An agent's request skips OBSERVED, because it is tokenized
when it arrives. `workers.agents.players` plays many trajectories with one engine.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from verl_like.errors import ConfigError
from workers.agents.calls import forms_of
from workers.agents.chat import Message, TurnRenderer, with_observation, with_refs
from workers.agents.host import BROKEN, EnvironmentHost
from workers.agents.requests import RejectedRequest, overridden_settings, stop_strings
from workers.chats import images_of
from workers.columns import ENVIRONMENT
from workers.models.attention import warn_once
from workers.rollout.base import RolloutEngine, SamplingParams
from workers.rollout.sample import LENGTH_LIMIT, CachedStates, Sample

if TYPE_CHECKING:
    from workers.config import EnvironmentConfig

TERMINATED, MAX_TURNS = "terminated", "max_turns"
GIVEN_UP = "in an environment that failed"
"""The reason under which the sampled tokens of a restarted trajectory are counted as dropped."""
READ = {"text", "messages"}
"""Keys of an answer with contents that the policy reads."""
TOO_LONG = "context_length_exceeded"
"""OpenAI's error code for a request with too many tokens."""


class TrajectoryState(Enum):
    """A trajectory's state; the value says what the trajectory waits for."""

    QUEUED = "a place among the open trajectories"
    ENVIRONMENT = "the answer of its environment"
    OBSERVED = "its observation to be tokenized"
    READY = "its sample to be submitted to the engine"
    ENGINE = "the sample of the engine"
    ENDED = "nothing"


@dataclass(frozen=True)
class TrajectoryStart:
    """The inputs of a trajectory."""

    prompt: Any
    """The row's prompt: a text or a chat."""
    row: Mapping[str, Any]
    """The row's columns, from which `reset` gets its arguments."""
    seeds: tuple[int, int]
    """The prompt's seed, for all of its samples, and this sample's."""
    key: int
    """The sample's seed (`workers.rollout.sample.sample_seed`)."""
    name: str
    environment_key: Any = None
    """Equal for the players of one environment, whose starts must be consecutive."""
    player: str = ""
    """Name of its player, if the environment has several."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools of its environment, if a run has several environments."""


@dataclass(frozen=True)
class Setting:
    """Settings and objects that all trajectories of a loop share."""

    host: EnvironmentHost
    chat: TurnRenderer
    config: EnvironmentConfig
    sampling: SamplingParams
    engine: RolloutEngine
    image_tokens: Sequence[int] = ()
    """Tokens at which the model looks for an image, a video or sound; empty if rows have none."""

    @property
    def reads_sampled(self) -> bool:
        """True if later turns read the earlier turns as they were sampled."""
        return self.config.history_tokens == "sampled"


@dataclass
class Times:
    """Seconds of one turn: its sampling, then the environment's answer.

    A trajectory's first entry is for `reset`. `environment` counts only seconds in which the
    environment's process worked; the rest of the time until its answer counts as `waiting`.
    """

    waiting: float = 0.0
    engine: float = 0.0
    environment: float = 0.0
    asked: float = 0.0
    """Wall-clock time when the message to the environment was sent."""
    heard: float = 0.0
    """Wall-clock time when its answer was received."""


@dataclass
class Trajectory:
    """A trajectory: its sample, the turn of each token (`turns`), and its rewards."""

    start: TrajectoryStart
    setting: Setting
    sample: Sample = field(default_factory=lambda: Sample([]))
    turns: list[int] = field(default_factory=list)
    number: int = 0
    environment_id: int = 0
    """The number of its environment, which all of the environment's players share."""
    state: TrajectoryState = TrajectoryState.QUEUED
    request_id: int = -1
    """The sample's number in the engine, while the engine generates."""
    observation: tuple[str, bool] = "", False
    """The text to read next, and True if it replaces everything that was read before."""
    observed_images: Sequence[Any] = ()
    """Path and hash of each image in the observation."""
    num_sampled_in_call: int = 0
    """Tokens that the loop's current `collect` has sampled."""
    chat: list[Message] = field(default_factory=list)
    """The messages so far; with `history_tokens=sampled`, only until the first turn."""
    rewards: list[tuple[int, float]] = field(default_factory=list)
    """The position of a turn's last sampled token, and the reward there."""
    ended: str = ""
    problem: str = ""
    """The reason why it failed, or ""."""
    is_left_out: bool = False
    """True if the trajectory is in no loss and no baseline.

    The reason is a failure without a reward, or that no turn was sampled.
    """
    request: Mapping[str, Any] | None = None
    """The agent's last request."""
    has_left: bool = False
    """True if the environment ended this player's trajectory; the others may continue."""
    cut: str = ""
    """The reason why an agent gets no more tokens, or ""; it may still end with a reward."""
    attempts: int = 1
    was_late: bool = False
    """True if an environment of any attempt missed its deadline."""
    num_turns: int = 0
    num_calls: int = 0
    num_call_errors: int = 0
    given_up: Counter[str] = field(default_factory=Counter)
    """By reason: the number of sampled tokens of earlier attempts."""
    answers: list[Mapping[str, Any]] = field(default_factory=list)
    """The environment's answers in order; the first is that of `reset`."""
    times: list[Times] = field(default_factory=lambda: [Times()])
    since: float = 0.0
    began: float = 0.0

    def lap(self) -> float:
        """Return the seconds since the last call."""
        now = time.monotonic()
        since, self.since = self.since, now
        return now - since

    def restarted(self) -> Trajectory:
        """Return the next attempt, which starts at the prompt; earlier tokens count as dropped."""
        tokens = Counter({GIVEN_UP: int(self.sample.is_sampled.sum())})
        return Trajectory(
            self.start,
            self.setting,
            number=self.number,
            environment_id=self.environment_id,
            attempts=self.attempts + 1,
            was_late=self.was_late,
            given_up=+(self.given_up + tokens),
        )

    def open(self) -> None:
        """Wait for the environment's first answer; the first player also starts the environment."""
        self.state = TrajectoryState.ENVIRONMENT
        self.since = self.began = time.monotonic()
        self.times[-1].asked = time.time()
        if self.number == self.environment_id:
            seeds, row = self.start.seeds, self.start.row
            settings = self.setting.config.by_name.get(self.environment_name, {})
            step_timeout_s = settings.get("step_timeout_s")
            self.setting.host.open(self.environment_id, seeds, row, step_timeout_s)

    @property
    def environment_name(self) -> str:
        """The name of its environment, or "" if there is only one."""
        return str(self.start.row.get(ENVIRONMENT)) if self.setting.config.paths else ""

    @property
    def renderer(self) -> TurnRenderer:
        """The renderer for chats with its environment's tools."""
        tools = self.start.tools
        return self.setting.chat if tools is None else self.setting.chat.with_tools(tools)

    def on_answer(self, answer: Mapping[str, Any]) -> None:
        """Handle an answer of the environment: an observation, an agent's request, or the end."""
        self.num_calls += answer.get("calls", 0)
        self.num_call_errors += answer.get("errors", 0)
        part = answer.get("call_like")
        if part:
            template = self.setting.chat.template.text
            forms = (
                self.setting.config.tool_call_parser or ", ".join(forms_of(template)) or "any known"
            )
            warn_once(
                f"environment: a text with {part!r:.80} looks like a call of a tool, but does not "
                f"have the expected format ({forms}), so it counts as an answer. If it is a call, "
                "set environment.tool_call_parser to its format."
            )
        if "request" in answer:
            self._on_request(answer)
            return
        try:
            answer = {**answer, **{name: with_refs(answer[name]) for name in READ & {*answer}}}
        except ValueError as error:
            self.end(BROKEN, str(error))
            return
        is_cut = "end" in answer and self.cut
        self.answers.append({**answer, "cut": self.cut} if is_cut else answer)
        if "text" in answer:
            text = answer["text"]
            chat = self.renderer
            self.chat = with_observation(
                self.start.prompt, None if text is None else chat.template.escaped(text)
            )
            self._observe(chat.template.written(self.chat), self.chat, True)
            return
        self.rewards.append((len(self.sample.tokens) - 1, answer["reward"]))
        if answer.get("end"):
            self.has_left = True
            self.rewards += [
                (self._last_place(turn), reward) for turn, reward in answer.get("rewards", ())
            ]
            by_environment = MAX_TURNS if answer.get("truncated") else TERMINATED
            self.end(self.cut or answer.get("cut") or by_environment)
        elif self.num_turns == self.setting.config.max_turns or self._ends_with_image_token:
            self.end(MAX_TURNS)
        else:
            try:
                observed = self._next_text(answer["messages"])
            except ConfigError as error:  # the template rejects a sampled or observed message
                self.end(BROKEN, str(error))
            else:
                self._observe(*observed)

    def _note_images(self, images: Sequence[Any]) -> None:
        """Keep the images of an observation; reject them if this run or its model reads none."""
        self.observed_images = images
        if not images:
            return
        where = f"environment {self.environment_name}".strip()
        where += f", turn {self.num_turns + 1} of {self.start.name}: it has images, but"
        try:
            _ = self.setting.engine.image_reader
        except ConfigError as error:
            raise ConfigError(f"{where} {error}") from error
        if not self.setting.image_tokens:
            raise ConfigError(
                f"{where} the rows of this run have none, so its rollout may not read them. Set "
                "environment.images=true."
            )

    def _observe(self, text: str, messages: Sequence[Message], is_whole: bool) -> None:
        """Wait until this text is tokenized; it is rendered from the messages."""
        self._note_images(images_of(messages))
        try:
            text = self.renderer.with_images(text, messages)
        except ValueError as error:  # the template writes no places for images
            raise ConfigError(
                f"environment: the text that the chat template writes for an observation: {error}. "
                "Use a template that writes a place for each image."
            ) from error
        self.state, self.observation = TrajectoryState.OBSERVED, (text, is_whole)

    @property
    def _ends_with_image_token(self) -> bool:
        """True if the policy has sampled the token of an image, after which no turn can follow.

        The model would look for the image (or the video or sound) of this token.
        """
        return self.num_turns > 0 and self.sample.stop_token in self.setting.image_tokens

    def note_time(self, busy_s: float) -> None:
        """Record that an answer has arrived, on which the environment worked for `busy_s`."""
        seconds, times = self.lap(), self.times[-1]
        busy_s = min(busy_s, seconds)
        times.environment += busy_s
        times.waiting += seconds - busy_s
        times.heard = time.time()

    def read(self, ids: list[int]) -> None:
        """Append the observation's ids, so that the next turn can start; end if they do not fit."""
        width = self.setting.engine.limits.prompt_width
        if self.num_turns:
            length = len(self.sample.tokens) + len(ids)
            most, begins_segment = self.setting.sampling.max_tokens, self.observation[1]
            if length >= most or self._left_in_segment(ids, begins_segment) <= 0:
                self.end(LENGTH_LIMIT)
            else:
                self._append(ids, begins_segment)
        elif len(ids) > width:
            words = f"it begins with {len(ids)} tokens of prompt and first observation"
            problem = (
                f"{words}, but data.max_prompt_length is {width}. Raise data.max_prompt_length."
            )
            self.end(BROKEN, problem)
        else:
            self._append(ids)

    def on_sample(self, sample: Sample) -> None:
        """Add a turn that the engine has finished, and send it to the environment."""
        self.times[-1].engine += self.lap()
        self.sample = self.sample.with_last_segment(sample)
        sampled_ids = self.sample.tokens[len(self.turns) :].tolist()
        self.turns += [self.num_turns] * len(sampled_ids)
        self.num_turns += 1
        self.num_sampled_in_call += len(sampled_ids)
        is_full = len(self.sample.tokens) == self.setting.sampling.max_tokens
        is_full |= self._left_in_segment([]) == 0
        if sample.finish_reason == LENGTH_LIMIT and is_full:
            self.cut = LENGTH_LIMIT
            if self.request is None:
                self.end(LENGTH_LIMIT)
                return
        self._tell(sampled_ids)

    def end(self, ended: str, problem: str = "") -> None:
        """End for the reason `ended`; a problem adds `environment.reward_on_failure`, if set."""
        self.state, self.ended, self.problem = TrajectoryState.ENDED, ended, problem
        if problem and self.num_turns and self.setting.config.reward_on_failure is not None:
            place = self._last_place(self.num_turns - 1)
            self.rewards.append((place, self.setting.config.reward_on_failure))
        else:
            self.is_left_out = bool(problem) or not self.num_turns
        reason = LENGTH_LIMIT if ended in (LENGTH_LIMIT, MAX_TURNS) else "stop"
        self.sample = replace(self.sample, finish_reason=reason, cached=None)
        if not self.sample.prompt:  # the trajectory failed before its first observation
            prompt = self.renderer.prompt(with_observation(self.start.prompt, None))
            self.sample = replace(self.sample, prompt=prompt)

    def _next_text(self, messages: Sequence[Message]) -> tuple[str, Sequence[Message], bool]:
        """Return the text to read before the next turn, its messages, and True if they are all."""
        chat, stop = self.renderer, self.sample.stop_token
        if not self.setting.reads_sampled:
            sampled_ids = self.sample.tokens[self.turns.index(self.num_turns - 1) :].tolist()
            turn = chat.turn(sampled_ids, stop, messages)
            rewritten = chat.rewritten(self.chat, turn, stop)
            self.chat += turn
            if rewritten is not None:
                return rewritten, self.chat, True
        return chat.text_between(stop, messages), messages, False

    def _left_in_segment(self, ids: Sequence[int], begins_segment: bool = False) -> float:
        """Return the number of tokens that the segment may have after these ids."""
        most = self.setting.config.max_tokens_per_segment
        if most is None:
            return math.inf
        before = [] if begins_segment else self.sample.visible_ids
        return most - len(before) - len(ids)

    def _append(self, ids: list[int], begins_segment: bool = False) -> None:
        """Append ids that the policy reads, so that a turn can start; the first are the prompt."""
        of_agent = None if self.request is None else self.request["max_tokens"]
        bounds = [n for n in (self.setting.config.max_tokens_per_turn, of_agent) if n is not None]
        left = self._left_in_segment(ids, begins_segment)
        if left < math.inf:
            bounds.append(int(left))
        length = len(self.sample.tokens) + len(ids) if self.num_turns else 0
        end_at = length + min(bounds) if bounds else None
        images = tuple(self.observed_images)
        if self.num_turns:
            self.sample = self.sample.with_observed(ids, begins_segment, end_at, images)
            self.turns += [self.num_turns - 1] * len(ids)
        else:
            key, name = self.start.key, self.start.name
            cached = CachedStates()
            self.sample = Sample(ids, key, name, end_at=end_at, cached=cached, images=images)
        self.state = TrajectoryState.READY

    def _on_request(self, answer: Mapping[str, Any]) -> None:
        """Handle an agent's request: start a turn, or return an error that the agent can handle."""
        request, messages = answer["request"], answer["messages"]
        if request["extends"] and self.setting.reads_sampled:
            request = {**request, "chat": []}  # only the new messages are read
        self.request = request
        try:
            messages, request = with_refs(messages), with_refs(request)
            self._start_turn(request, messages)
        except Exception as error:  # noqa: BLE001 - it is this request's error
            words = str(error) if isinstance(error, ValueError) else f"it fails: {error!r:.200}"
            problem = error if isinstance(error, RejectedRequest) else RejectedRequest(words)
            refusal: dict[str, Any] = {"rejected": problem.fields, "is_cut": bool(self.cut)}
            self.setting.host.say(self.environment_id, "", self.start.player, **refusal)
            return
        self.answers.append({**answer, "messages": messages, "request": request})

    def _start_turn(self, request: Mapping[str, Any], messages: Sequence[Message]) -> None:
        """Append the request's new ids, so that a turn can start; reject it if they do not fit."""
        engine, max_tokens = self.setting.engine, self.setting.sampling.max_tokens
        served = self._served(request["sampling"])
        chat = self.setting.chat.with_tools(request["tools"])
        ids, is_whole = ids_to_read(
            self.sample, request, messages, chat, self.setting.reads_sampled
        )
        read = messages if request["extends"] and self.setting.reads_sampled else request["chat"]
        # if earlier messages are among them, their images are known
        is_part = read is not messages and not is_whole
        num_read = len(self.sample.images) - self.sample.first_image if is_part else 0
        self._note_images(images_of(read)[num_read:])
        if ids and not 0 <= min(ids) <= max(ids) < engine.vocab_size:
            words = f"a token id is {engine.vocab_size} or more, or negative"
            raise RejectedRequest(words, "token_ids")
        length = len(self.sample.tokens) + len(ids)
        if not self.num_turns:
            width = engine.limits.prompt_width
            if len(ids) > width:
                words = f"{len(ids)} tokens, but data.max_prompt_length is {width}"
                raise RejectedRequest(f"the first request has {words}", "messages", TOO_LONG)
            self._append(ids)
        elif self._ends_with_image_token:
            self.cut = MAX_TURNS
            raise RejectedRequest("the last response ends with an image token, without an image")
        elif self.num_turns == self.setting.config.max_turns:
            self.cut = MAX_TURNS
            raise RejectedRequest(f"all environment.max_turns={self.num_turns} turns are used up")
        elif length >= max_tokens:
            self.cut = LENGTH_LIMIT
            words = f"{length} tokens since the first request, but data.max_response_length is"
            raise RejectedRequest(f"there are {words} {max_tokens}", "messages", TOO_LONG)
        elif (left := self._left_in_segment(ids, is_whole)) <= 0:
            self.cut, most = LENGTH_LIMIT, self.setting.config.max_tokens_per_segment or 0
            words = f"{int(most - left)} tokens, but environment.max_tokens_per_segment is {most}"
            raise RejectedRequest(f"the conversation has {words}", "messages", TOO_LONG)
        else:
            self._append(ids, is_whole)
        self.cut = ""  # of an earlier segment
        self.sample = replace(self.sample, stop_strings=stop_strings(served))
        self.request = {**request, "sampling": served}

    def _served(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a request that take effect; warn once about overridden ones."""
        can_stop = self.setting.engine.decode is not None
        of_run, mode = self.setting.sampling, self.setting.config.request_settings
        names = overridden_settings(settings, of_run, mode, can_stop)
        if names:
            warn_once(
                f"environment: an agent's requests set {', '.join(sorted(names))}, which the run "
                "overrides, so that all samples are drawn in the same way. Set "
                "environment.request_settings=reject to make this an error."
            )
        return {name: value for name, value in settings.items() if name not in names}

    def _tell(self, sampled_ids: list[int]) -> None:
        """Send a turn to the environment."""
        self.state = TrajectoryState.ENVIRONMENT
        self.times[-1].asked = time.time()
        is_stopped = sampled_ids[-1] in self.setting.sampling.stop_token_ids
        ids = sampled_ids[:-1] if is_stopped else sampled_ids
        details: dict[str, Any] = {}
        if self.request is None:
            renderer = self.renderer
        else:
            renderer = self.setting.chat.with_tools(self.request["tools"])
            details = self._details(self.request, len(sampled_ids))
        details |= renderer.thoughts.details
        text, player = renderer.text_of(ids), self.start.player
        self.setting.host.say(self.environment_id, text, player, **details)

    def _details(self, request: Mapping[str, Any], num_sampled: int) -> dict[str, Any]:
        """Return the details that an agent's response needs in addition to the text."""
        sample, served = self.sample, request["sampling"]
        details = {
            "finish_reason": sample.finish_reason,
            "num_read": len(sample.visible_ids) - num_sampled,
            "num_sampled": num_sampled,
            "served": served,
        }
        if request["ids"] is None and not served.get("logprobs"):
            return details
        ids = sample.tokens[-num_sampled:].tolist()
        texts = [self.setting.chat.text_of([token]) for token in ids]
        log_probs = sample.log_probs[-num_sampled:].tolist()
        return details | {"ids": ids, "texts": texts, "log_probs": log_probs}

    def _last_place(self, turn: int) -> int:
        """Return the position of the last sampled token of a turn."""
        of_turn = self.sample.is_sampled & (torch.tensor(self.turns) == turn)
        return int(of_turn.nonzero()[-1])


def ids_to_read(
    sample: Sample,
    request: Mapping[str, Any],
    messages: Sequence[Message],
    chat: TurnRenderer,
    reads_sampled: bool,
) -> tuple[list[int], bool]:
    """Return the ids that a request adds to the earlier ids and False, or all its ids and True.

    If older turns stay as they were sampled, only the new messages are rendered. If a request does
    not begin with the earlier ids, all of its ids are read, as a new segment.
    """
    if request["extends"] and reads_sampled:
        return chat.between(sample.stop_token, messages), False
    before, ids = sample.visible_ids, request["ids"]
    if ids is None:
        images, earlier = images_of(request["chat"]), sample.images[sample.first_image :]
        # other images of the same size have the same tokens
        if [sha for _, sha, *_ in images[: len(earlier)]] != [ref[1] for ref in earlier]:
            return chat.after([], request["chat"])[0], True
        return chat.after(before, request["chat"])
    if ids[: len(before)] == before:
        return ids[len(before) :], False
    return ids, True
