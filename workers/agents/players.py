"""Play trajectories in a rollout worker: from rows of prompts to rows of trajectories.

`TurnLoop` plays many trajectories with one engine, so that a slow one does not delay the others:

    environments --observation--> samples to continue --submit--> engine
         ^                                                          |
         +---------------------- sampled text <--------collect------+

For each turn, the sample is submitted again with a longer response: the sampled tokens, and the
tokens observed since then (with version -1, without log-probs). An engine may reuse the keys and
values of earlier turns. With the engines `native` and `hf`, the results depend neither on this nor
on the order of trajectories: they equal those of a new engine that gets the whole history.

With `environment.history_tokens=retokenized`, the template may render the chat differently than it
was read. Then the whole chat is appended to the response as a new segment, and engine and trainer
read this segment without the tokens before it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import RolloutError
from verl_like.process.sandbox import Sandbox
from workers.agents.calls import forms_of
from workers.agents.chat import TurnRenderer
from workers.agents.host import LATE, EnvironmentHost, Kind, name_of
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.trajectory import Setting, Times, Trajectory, TrajectoryStart, TrajectoryState
from workers.columns import ENVIRONMENT, IMAGES, PLAYERS, require, split_player_uid
from workers.rollout.base import CollectBudget, RolloutEngine, SamplingParams
from workers.rollout.sample import SeedOf

if TYPE_CHECKING:
    from workers.config import EnvironmentConfig


ROW_COLUMNS = (
    "raw_prompt", "data_source", "reward_model", "extra_info", "row_columns", PLAYERS,
)  # fmt: skip
"""Columns that a trajectory may read, in addition to those that every sample needs."""
OWN_COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info")
"""Columns that every row has for `reset`, in addition to your own columns."""
MAX_OPEN = 1024
"""Maximum number of concurrent environments per rollout process."""
SHARED_NOISE_INDEX = -1
"""The index of the noise that all samples of a prompt share."""
PROCESSES = 4
"""Number of processes per environment that the sandbox allows on average."""


def spec_of(config: EnvironmentConfig, tokenizer: Any = None) -> EnvironmentSpec:
    """Return the spec of the configured environments; its sandbox allows `MAX_OPEN` at a time.

    Unless `environment.tool_call_parser` is set, the tokenizer's chat template determines the
    format of tool calls.
    """
    template = str(getattr(tokenizer, "chat_template", ""))
    tool_call_parser = [config.tool_call_parser] if config.tool_call_parser else forms_of(template)
    sandbox = Sandbox.from_limits(config.sandbox)
    sandbox = replace(sandbox, max_processes=max(sandbox.max_processes, PROCESSES * MAX_OPEN))
    path = config.paths or config.path
    return EnvironmentSpec(
        path,
        config.kwargs,
        config.tools,
        sandbox,
        config.endpoint or "",
        config.repeated_requests == "reuse",
        tool_call_parser,
    )


class Players:
    """Plays the trajectories of one rollout worker with its environments.

    Call `submit`, then `collect` until no trajectory is running.
    """

    def __init__(self, config: EnvironmentConfig, tokenizer: Any) -> None:
        """Start nothing yet."""
        self._config, self._tokenizer = config, tokenizer
        self._loop: TurnLoop | None = None

    @cached_property
    def _host(self) -> EnvironmentHost:
        return EnvironmentHost(spec_of(self._config, self._tokenizer), self._config.step_timeout_s)

    @property
    def num_running(self) -> int:
        """Number of trajectories that were submitted and neither taken nor aborted."""
        return 0 if self._loop is None else self._loop.num_running

    def submit(
        self, data: DataProto, engine: RolloutEngine, sampling: SamplingParams, seed_of: SeedOf
    ) -> list[int]:
        """Start a trajectory for every row that is not padding; return their numbers."""
        require(data, "raw_prompt", "sample_index", "uid")
        if self._loop is None or not self.num_running:
            kinds = self._host.kinds
            tools = kinds[""].tools if "" in kinds else []
            chat = TurnRenderer(
                self._tokenizer, tools, sampling.stop_token_ids, self._config.history_reasoning
            )
            self._kinds = kinds
            self._loop = TurnLoop(engine, self._host, chat, self._config)
        starts = _starts(data, seed_of, self._kinds)
        image_tokens = engine.image_reader.stop_ids if IMAGES in data.non_tensor_batch else ()
        return self._loop.submit(starts, sampling, MAX_OPEN, image_tokens)

    def collect(
        self, max_tokens: int | None = None, seconds: float | None = None
    ) -> dict[int, Trajectory]:
        """Play until all trajectories have ended; return them (see `TurnLoop.collect`)."""
        return {} if self._loop is None else self._loop.collect(max_tokens, seconds)

    def abort(self) -> None:
        """Drop all trajectories."""
        if self._loop is not None:
            self._loop.abort()


def _starts(data: DataProto, seed_of: SeedOf, kinds: Mapping[str, Kind]) -> list[TrajectoryStart]:
    """Return the start of each row's trajectory; players of a trajectory share its row."""
    columns = data.non_tensor_batch
    indices = data.padded("sample_index").tolist()
    starts: list[TrajectoryStart] = []
    for number in range(data.num_real_rows):
        uid, index = str(columns["uid"][number]), indices[number]
        key, name = seed_of(uid, index), f"uid {uid} sample {index}"
        prompt_uid, player = split_player_uid(uid) if PLAYERS in columns else (uid, "")
        columns_of_user = columns["row_columns"][number] if "row_columns" in columns else {}
        rule = columns["reward_model"][number] if "reward_model" in columns else {}
        row = {
            **columns_of_user,
            "prompt": columns["raw_prompt"][number],
            "ground_truth": rule.get("ground_truth"),
            "data_source": str(columns["data_source"][number]),
            "extra_info": columns["extra_info"][number],
        }
        kind = name_of(kinds, row)
        players = kinds[kind].players
        place = players.index(player) if players else 0
        if place:  # the environment starts with the first player's row
            if len(starts) < place or starts[-place].environment_key != (prompt_uid, index):
                raise RolloutError(f"rollout: {name} is missing the other players {players}.")
            row = dict(starts[-place].row)
        seeds = seed_of(prompt_uid, SHARED_NOISE_INDEX), seed_of(prompt_uid, index)
        tools = None if kind == "" else kinds[kind].tools
        start = TrajectoryStart(row["prompt"], row, seeds, key, name, tools=tools)
        start = replace(start, environment_key=(prompt_uid, index), player=player * bool(players))
        starts.append(start)
    return starts


def trajectory_columns(batch: DataProto, trajectories: list[Trajectory]) -> DataProto:
    """Return the additional columns of trajectories; `batch` has the columns of their samples."""
    responses = batch.column("response_mask")
    assert isinstance(responses, RaggedTensor), "the rollout makes ragged rows"
    num_pads = len(batch) - len(trajectories)
    turns = torch.tensor(
        [turn for trajectory in trajectories for turn in trajectory.turns], dtype=torch.long
    )
    rewards, begin = torch.zeros(len(turns)), 0
    for trajectory in trajectories:
        for place, reward in trajectory.rewards:
            if place >= 0:
                rewards[begin + place] += reward
        begin += len(trajectory.turns)
    tensors = {
        "turn": responses.with_values(turns),
        "environment_rewards": responses.with_values(rewards),
    }
    infos = [
        {
            "environment": trajectory.environment_name,
            "ended": trajectory.ended,
            "problem": trajectory.problem,
            "is_left_out": trajectory.is_left_out,
            "num_turns": trajectory.num_turns,
            "num_calls": trajectory.num_calls,
            "num_call_errors": trajectory.num_call_errors,
            "num_segments": len(trajectory.sample.segments) + 1,
            "attempts": trajectory.attempts,
            "given_up_tokens": dict(trajectory.given_up),
            "engine_s": sum(times.engine for times in trajectory.times),
            "environment_s": sum(times.environment for times in trajectory.times),
            "waiting_s": sum(times.waiting for times in trajectory.times),
            "answers": trajectory.answers,
            "times": [asdict(times) for times in trajectory.times],
        }
        for trajectory in trajectories
    ]
    ended = [trajectory.ended for trajectory in trajectories] + ["pad"] * num_pads
    objects = {"ended": object_rows(ended), "trajectory": object_rows([*infos, *[{}] * num_pads])}
    return DataProto.from_dict(tensors, objects)


COLLECT_S = 0.05
"""Seconds that the engine may generate between two polls of the environments."""
BATCH_S = 0.005
"""While the engine is idle, answers that arrive within these seconds are handled together."""
RUNNING_PER_NEW = 8
"""New trajectories wait until there is one for this many running ones, or for `MAX_WAITS` polls.

A pass that reads few prompts costs almost as much as a pass that reads many.
"""
MAX_WAITS = 16
OPEN = (
    TrajectoryState.ENVIRONMENT,
    TrajectoryState.OBSERVED,
    TrajectoryState.READY,
    TrajectoryState.ENGINE,
)
"""States of the trajectories whose environments have started and that have not ended."""


class TurnLoop:
    """Plays trajectories with one engine and one host of environments."""

    def __init__(
        self,
        engine: RolloutEngine,
        host: EnvironmentHost,
        chat: TurnRenderer,
        config: EnvironmentConfig,
    ) -> None:
        self._engine, self._host, self._chat, self._config = engine, host, chat, config
        self._numbers = itertools.count()
        self._trajectories: dict[int, Trajectory] = {}
        """The trajectories that `collect` has not returned yet, by number."""
        self._environments: dict[int, range] = {}
        """By id of an environment that has not ended: its trajectories' numbers, one per player."""
        self._num_waits = 0
        self._setting: Setting

    @property
    def num_running(self) -> int:
        """Number of trajectories that were submitted and neither taken nor aborted."""
        return len(self._trajectories)

    def play(
        self, starts: Sequence[TrajectoryStart], sampling: SamplingParams, num_open: int
    ) -> list[Trajectory]:
        """Play all trajectories to the end, at most `num_open` at a time; return them in order."""
        numbers = self.submit(starts, sampling, num_open)
        ended = self.collect()
        return [ended[number] for number in numbers]

    def submit(
        self,
        starts: Sequence[TrajectoryStart],
        sampling: SamplingParams,
        num_open: int,
        image_tokens: Sequence[int] = (),
    ) -> list[int]:
        """Start these trajectories, in addition to running ones; return their numbers.

        `image_tokens` are those at which the model looks for an image, a video or sound, if the
        trajectories may have images.
        """
        if self._trajectories and sampling != self._setting.sampling:
            raise RolloutError(
                f"rollout: {self.num_running} trajectories are running with other sampling "
                "settings. Take or abort them first."
            )
        host, chat, config = self._host, self._chat, self._config
        self._setting = Setting(host, chat, config, sampling, self._engine, image_tokens)
        configs = {name: self._config.of(name) for name in self._config.by_name}
        settings = {name: replace(self._setting, config=configs[name]) for name in configs}
        self._num_open = num_open
        numbers: list[int] = []
        for start in starts:
            number = environment_id = next(self._numbers)
            if start.player and numbers:
                last = self._trajectories[numbers[-1]]
                if last.start.environment_key == start.environment_key:
                    environment_id = last.environment_id
            self._environments[environment_id] = range(environment_id, number + 1)
            setting = settings.get(str(start.row.get(ENVIRONMENT)), self._setting)
            self._trajectories[number] = Trajectory(
                start, setting, number=number, environment_id=environment_id
            )
            numbers.append(number)
        return numbers

    def collect(
        self, max_tokens: int | None = None, seconds: float | None = None
    ) -> dict[int, Trajectory]:
        """Play until all trajectories have ended; return those that ended, by number.

        Return earlier once one trajectory has about `max_tokens` more tokens, or after `seconds`.
        Unfinished trajectories keep their environments and continue in the next call.
        """
        budget = CollectBudget(max_tokens, seconds)
        for trajectory in self._trajectories.values():
            trajectory.num_sampled_in_call = 0
        try:
            while self._environments:
                queued = self._in(TrajectoryState.QUEUED)
                if queued:
                    room = max(0, self._num_open - len(self._in(*OPEN)))
                    for environment_id in sorted({t.environment_id for t in queued[:room]}):
                        for player in self._players(environment_id):
                            player.open()
                has_enough = self._play_on(budget)
                self._end_environments()
                if has_enough or budget.is_over:
                    break
        except BaseException:
            self.abort()
            raise
        trajectories = self._trajectories.values()
        ended = [t.number for t in trajectories if t.environment_id not in self._environments]
        return {number: self._trajectories.pop(number) for number in ended}

    def abort(self) -> None:
        """Drop all trajectories and end their environments."""
        self._engine.abort([running.request_id for running in self._in(TrajectoryState.ENGINE)])
        for environment_id in self._environments:
            self._host.end(environment_id)
        self._trajectories, self._environments = {}, {}

    def _players(self, environment_id: int) -> list[Trajectory]:
        """Return the trajectories of an environment, one per player."""
        return [self._trajectories[number] for number in self._environments.get(environment_id, ())]

    def _end_environments(self) -> None:
        """End the environments whose trajectories have all ended.

        If a trajectory ends without its environment ending it, the trajectories of the other
        players also end.
        """
        ended = {
            t.environment_id for t in self._in(TrajectoryState.ENDED)
        } & self._environments.keys()
        for environment_id in ended:
            players = self._players(environment_id)
            for cut in [t for t in players if t.state is TrajectoryState.ENDED and not t.has_left]:
                for other in players:
                    if other.state is not TrajectoryState.ENDED:
                        self._drop_request(other)
                        other.end(cut.ended, cut.problem)
            if all(t.state is TrajectoryState.ENDED for t in players):
                self._host.end(environment_id)
                del self._environments[environment_id]

    def _in(self, *states: TrajectoryState) -> list[Trajectory]:
        return [t for t in self._trajectories.values() if t.state in states]

    def _play_on(self, budget: CollectBudget) -> bool:
        """Handle the answers of environments, then let the engine generate for a while.

        Return True if a trajectory has as many new tokens as `budget` allows.
        """
        seconds = min(COLLECT_S, budget.seconds_left)
        is_idle = not self._in(TrajectoryState.ENGINE)
        self._receive(seconds if is_idle and not self._in(TrajectoryState.READY) else 0.0)
        for _ in range(MAX_WAITS if is_idle else 0):
            # wait for answers that arrive soon: reading them separately would cost two passes
            if not self._receive(min(BATCH_S, budget.seconds_left)):
                break
        # tokenizing all new observations together is faster than one by one
        observed = self._in(TrajectoryState.OBSERVED)
        all_ids = self._chat.ids_of([trajectory.observation[0] for trajectory in observed])
        for trajectory, ids in zip(observed, all_ids, strict=True):
            trajectory.read(ids)
        self._end_late()
        self._submit_ready()
        running = {t.request_id: t for t in self._in(TrajectoryState.ENGINE)}
        if not running:
            return False
        until = time.monotonic() + seconds
        samples = self._engine.collect(budget.max_tokens, seconds=seconds, until_one=True)
        is_early = time.monotonic() < until
        for request_id, sample in samples.items():
            running[request_id].on_sample(sample)
        if budget.max_tokens is None:
            return False
        most = max(trajectory.num_sampled_in_call for trajectory in self._trajectories.values())
        return most >= budget.max_tokens or (is_early and not samples)

    def _receive(self, seconds: float) -> int:
        """Handle the answers that arrive within `seconds`; return their number."""
        count = 0
        for number, answer in self._host.answers(seconds):
            count += 1
            if "failed" in answer:
                self._on_failure(number, answer)
                continue
            by_player = answer.get("players", {"": answer})
            for player in self._players(number):
                if player.start.player in by_player and player.state is TrajectoryState.ENVIRONMENT:
                    player.note_time(self._host.busy_s(number))
                    player.on_answer(by_player[player.start.player])
        return count

    def _submit_ready(self) -> None:
        """Submit the samples that are ready; first turns may have to wait (`RUNNING_PER_NEW`)."""
        ready = self._in(TrajectoryState.READY)
        if not ready:
            return
        self._num_waits += 1
        num_running = len(self._in(TrajectoryState.ENGINE))
        are_few = len(ready) * RUNNING_PER_NEW < num_running and self._num_waits < MAX_WAITS
        if are_few and not any(trajectory.num_turns for trajectory in ready):
            return
        for trajectory in ready:
            trajectory.times.append(Times(waiting=trajectory.lap()))
        sampling = self._setting.sampling
        segments = [trajectory.sample.last_segment(sampling.max_tokens) for trajectory in ready]
        request_ids = self._engine.submit(segments, sampling)
        for trajectory, request_id in zip(ready, request_ids, strict=True):
            trajectory.state, trajectory.request_id = TrajectoryState.ENGINE, request_id
        self._num_waits = 0

    def _end_late(self) -> None:
        """End the trajectories that exceed `environment.trajectory_timeout_s`."""
        now = time.monotonic()
        for trajectory in self._in(*OPEN):
            most = trajectory.setting.config.trajectory_timeout_s
            if now - trajectory.began <= most:
                continue
            times, seconds = trajectory.times[-1], trajectory.lap()
            if trajectory.state is TrajectoryState.ENGINE:
                times.engine += seconds
            else:
                times.environment += seconds
            self._drop_request(trajectory)
            trajectory.end(LATE, f"it took longer than environment.trajectory_timeout_s={most:g} s")

    def _on_failure(self, environment_id: int, answer: Mapping[str, Any]) -> None:
        """Restart the trajectories with a new environment and the same noise, or end them.

        After a missed deadline, restart only while some unfinished trajectory has not missed one.
        Otherwise the whole call would wait for a second deadline.
        """
        is_late = answer["reason"] == LATE
        players = self._players(environment_id)
        failed = [player for player in players if player.state is not TrajectoryState.ENDED]
        for player in failed:
            player.note_time(self._host.busy_s(environment_id))
            player.answers.append(answer)
            self._drop_request(player)
            player.was_late |= is_late
        unfinished = self._in(TrajectoryState.QUEUED, *OPEN)
        has_time = not is_late or not all(other.was_late for other in unfinished)
        if any(player.attempts > self._config.retries for player in failed) or not has_time:
            for player in failed:
                player.end(answer["reason"], str(answer["failed"]))
            return
        self._host.end(environment_id)
        for player in players:
            again = self._trajectories[player.number] = player.restarted()
            again.open()

    def _drop_request(self, trajectory: Trajectory) -> None:
        """Stop generating this trajectory's sample, if the engine has it."""
        if trajectory.state is TrajectoryState.ENGINE:
            self._engine.abort([trajectory.request_id])
