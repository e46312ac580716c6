"""Play trajectories in a rollout worker: from rows of prompts to rows of trajectories."""

from __future__ import annotations

from collections.abc import Mapping
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
from workers.agents.host import EnvironmentHost, Kind, name_of
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.loop import TurnLoop
from workers.agents.trajectory import Trajectory, TrajectoryStart
from workers.columns import IMAGES, PLAYERS, require, split_player_uid
from workers.rollout.base import RolloutEngine, SamplingParams
from workers.rollout.batches import SeedOf

if TYPE_CHECKING:
    from workers.config import EnvironmentConfig

ROW_COLUMNS = (
    "raw_prompt", "data_source", "reward_model", "extra_info", "row_columns", PLAYERS,
)  # fmt: skip
"""Columns that a trajectory may read, in addition to those that every sample needs."""
OWN_COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info")
"""Columns that every row has for `reset`, in addition to your own columns."""
MOST_OPEN = 1024
"""Maximum number of concurrent environments per rollout process."""
OF_ALL = -1
"""The index of the noise that all samples of a prompt share."""
PROCESSES = 4
"""Number of processes per environment that the sandbox allows on average."""


def spec_of(config: EnvironmentConfig, tokenizer: Any = None) -> EnvironmentSpec:
    """Return the spec of the configured environments; its sandbox allows `MOST_OPEN` at a time.

    Unless `environment.tool_call_parser` is set, the tokenizer's chat template determines the
    format of tool calls.
    """
    template = str(getattr(tokenizer, "chat_template", ""))
    tool_call_parser = [config.tool_call_parser] if config.tool_call_parser else forms_of(template)
    sandbox = Sandbox.of(config.sandbox)
    sandbox = replace(sandbox, max_processes=max(sandbox.max_processes, PROCESSES * MOST_OPEN))
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

    Call `submit`, then `take` until no trajectory is running.
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
        return self._loop.submit(starts, sampling, MOST_OPEN, image_tokens)

    def take(
        self, max_tokens: int | None = None, seconds: float | None = None
    ) -> dict[int, Trajectory]:
        """Play until all trajectories have ended; return those that ended (see `TurnLoop.take`)."""
        return {} if self._loop is None else self._loop.take(max_tokens, seconds)

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
        seeds = seed_of(prompt_uid, OF_ALL), seed_of(prompt_uid, index)
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
