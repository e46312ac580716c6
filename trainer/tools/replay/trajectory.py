"""`verl-like replay RUN --trajectory UID/INDEX`: play trajectories of a run again.

They are sampled with the weights of their step, against the observations that the run recorded, or
the live environment. The run must have saved the input batch of `score`. The replay begins at a
checkpoint of an earlier step, or at the beginning of the run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trainer.observers.saved_batches import BATCHES_FOLDER, STAGES, batch_file
from trainer.ppo.stages import PPOTrainer
from trainer.record import Metrics
from trainer.rollouts.samples import repeat_prompts
from trainer.rollouts.turns import TRAJECTORY
from trainer.tools.replay.replay import (
    ReplayRequest,
    announcement,
    make,
    replaying,
    settings_of_replay,
)
from trainer.tools.replay.saved_run import SavedRun
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, nearest
from verl_like.process.sandbox import reject_nested_run
from workers.agents.host import RECORDED
from workers.columns import split_player_uid, token_rows
from workers.config import has_environment

NAMED = 5


@dataclass
class ReplayedTrajectory:
    name: str
    """uid/index."""
    num_turns: int
    num_tokens: int
    difference: str
    """The first difference from the run, or ""."""


@dataclass
class SamplesToReplay:
    """The samples to replay, with their step and the run's record of them."""

    step: int
    recorded: DataProto
    is_live: bool
    differences: list[ReplayedTrajectory] = field(default_factory=list)


def replay_trajectory(
    run_folder: Path,
    name: str,
    *,
    live: bool = False,
    from_start: bool = False,
    backend: str = "local",
) -> list[ReplayedTrajectory]:
    """Play a sample, or all samples of a uid, again, and compare them with the record."""
    reject_nested_run()
    saved = SavedRun.read(run_folder.resolve())
    if not has_environment(saved.config):
        raise ConfigError(
            f"--trajectory: {saved.folder} is a run without an environment. Replay one of its "
            "steps with --step."
        )
    wanted = recorded_samples(saved.folder, name)
    wanted.is_live = live
    start = saved.start_of(wanted.step, from_start)
    request = ReplayRequest(
        saved.folder, wanted.step, instead=lambda trainer: _play(trainer, wanted)
    )
    with tempfile.TemporaryDirectory(prefix="verl-like-replay-") as scratch:
        config = settings_of_replay(saved.config, start, Path(scratch) / "run", backend)
        print(announcement(saved, start, wanted.step, config), flush=True)
        make(config, replaying(saved.trainer_cls, request))
    return wanted.differences


def recorded_samples(folder: Path, name: str) -> SamplesToReplay:
    """Return the samples of that name from the batches that the run saved."""
    uid, _, index = name.partition("/")
    if not uid or (index and not index.isdecimal()):
        raise ConfigError(
            f"--trajectory={name}: write UID or UID/INDEX (`uid` and `sample` "
            "of a line in rollouts/N.jsonl)."
        )
    step_of_uid: dict[str, int] = {}
    paths = (folder / BATCHES_FOLDER).glob(f"*/{STAGES[0]}.safetensors")
    steps_of_paths = [path.parent.name for path in paths if path.parent.name.isdecimal()]
    for step in sorted(map(int, steps_of_paths), reverse=True):
        batch = DataProto.load_from_disk(batch_file(folder, step, STAGES[0]))
        uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
        step_of_uid |= {str(u): step for u in uids}
        pairs = enumerate(zip(uids, indices, strict=True))
        rows = [row for row, (u, i) in pairs if u == uid and str(i) == (index or str(i))]
        if rows:
            return SamplesToReplay(step, batch[rows], is_live=False)
        if uid in step_of_uid:
            numbers = ", ".join(str(i) for u, i in zip(uids, indices, strict=True) if u == uid)
            raise ConfigError(f"--trajectory={name}: uid {uid} has only the samples {numbers}.")
    if not step_of_uid:
        raise ConfigError(
            f"--trajectory: {folder / BATCHES_FOLDER} has no batch. Set "
            "trainer.batch_steps_to_keep=N in a run to keep the tokens and observations of its "
            "newest N steps, or replay a whole step with --step."
        )
    steps = sorted(set(step_of_uid.values()))
    raise ConfigError(
        f"--trajectory={name}: no such uid in the saved batches of steps {steps[0]} to "
        f"{steps[-1]}, which have {', '.join(list(step_of_uid)[:NAMED])}, "
        f"...{nearest(uid, step_of_uid)}"
    )


def _play(trainer: PPOTrainer, wanted: SamplesToReplay) -> Metrics:
    """Sample the wanted rows of the step's prompts, instead of running the step."""
    recorded, config = wanted.recorded, trainer.config
    uid = recorded.non_tensor_batch["uid"][0]
    max_attempts = config.algorithm.filter_groups.max_num_gen_batches
    for attempt, batch in enumerate(islice(trainer.loader, max_attempts)):  # noqa: B007
        prompt_uids = uid, split_player_uid(uid)[0]
        rows = [n for n, u in enumerate(batch.non_tensor_batch["uid"]) if u in prompt_uids]
        if rows:
            break
    else:
        raise ConfigError(
            f"the prompts of step {wanted.step} have no uid {uid}: have the data changed?"
        )
    prompts = repeat_prompts(batch[rows], config.actor_rollout_ref.rollout.n)
    indices = recorded.padded("sample_index").tolist()
    of_uid = [n for n, u in enumerate(prompts.non_tensor_batch["uid"]) if u == uid]
    prompts = prompts[[of_uid[index] for index in indices]]
    if not wanted.is_live:
        answers = [info["answers"] for info in recorded.non_tensor_batch[TRAJECTORY]]
        prompts = prompts.union(DataProto.from_dict({}, {RECORDED: object_rows(answers)}))
    replayed = trainer.rollouts.generate(prompts, attempt=attempt)
    for row, index in enumerate(indices):
        was, now = (_Row.of(samples, row) for samples in (recorded, replayed))
        difference = first_difference(was, now, trainer.rollouts.tokenizer)
        drawn = int(was.is_sampled.sum())
        wanted.differences.append(
            ReplayedTrajectory(f"{uid}/{index}", was.num_turns, drawn, difference)
        )
    return {}


@dataclass(frozen=True)
class _Row:
    """The content of a row without times."""

    prompt: list[int]
    tokens: list[int]
    turns: list[int]
    is_sampled: torch.Tensor
    log_probs: torch.Tensor
    answers: Sequence[Mapping[str, Any]]
    ended: str

    @classmethod
    def of(cls, batch: DataProto, row: int) -> _Row:
        columns = token_rows(
            batch, "prompts", "responses", "turn", "response_mask", "rollout_log_probs"
        )
        prompt, tokens, turns, mask, log_probs = (torch.from_numpy(c[row]) for c in columns)
        info = batch.non_tensor_batch[TRAJECTORY][row]
        mine = prompt.tolist(), tokens.tolist(), turns.tolist(), mask.bool(), log_probs
        return cls(*mine, info["answers"], info["ended"])

    @property
    def num_turns(self) -> int:
        return max(self.turns, default=-1) + 1


def first_difference(was: _Row, now: _Row, tokenizer: Any) -> str:
    """Describe the first difference in the order of turns."""
    differences: list[tuple[int, int, str]] = []
    """(turn, 0 for its response or 1 for the observation after it, words)"""
    answers = enumerate(zip(was.answers, now.answers, strict=False))
    changed = next((n for n, (first, other) in answers if first != other), None)
    if changed is None and len(was.answers) != len(now.answers):
        changed = min(len(was.answers), len(now.answers))
    if changed is not None:
        subject = f"the answer to turn {changed}" if changed else "the first observation"
        pair = [_words(row.answers, changed) for row in (was, now)]
        differences.append((changed - 1, 1, f"{subject}: was {pair[0]}, is {pair[1]}"))

    place = _first_place(was.tokens, now.tokens)
    if place is not None and (place >= len(was.tokens) or bool(was.is_sampled[place])):
        turn = (was.turns + now.turns[len(was.turns) :])[place]
        pair = [_token(row.tokens, place, tokenizer) for row in (was, now)]
        words = f"token {place} of the response, in turn {turn + 1}: was {pair[0]}, is {pair[1]}"
        differences.append((turn, 0, words))
    if differences:
        return min(differences)[2]
    if was.prompt != now.prompt or place is not None:
        return "the observed tokens: has the tokenizer or its chat template changed?"
    drawn = was.is_sampled.nonzero().flatten().tolist()
    other = [n for n in drawn if was.log_probs[n].item() != now.log_probs[n].item()]
    if other:
        pair = [repr(row.log_probs[other[0]].item()) for row in (was, now)]
        return f"the log-prob of token {other[0]} of the response: was {pair[0]}, is {pair[1]}"
    return "" if was.ended == now.ended else f"its end: was {was.ended}, is {now.ended}"


def _first_place(was: Sequence[int], now: Sequence[int]) -> int | None:
    pairs = enumerate(zip(was, now, strict=False))
    place = next((n for n, (first, other) in pairs if first != other), None)
    if place is None and len(was) != len(now):
        return min(len(was), len(now))
    return place


def _words(answers: Sequence[Mapping[str, Any]], place: int) -> str:
    return repr(dict(answers[place])) if place < len(answers) else "none"


def _token(tokens: Sequence[int], place: int, tokenizer: Any) -> str:
    if place >= len(tokens):
        return "none"
    return f"{tokens[place]} ({tokenizer.decode([tokens[place]])!r})"
