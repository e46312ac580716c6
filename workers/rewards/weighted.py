"""All rewards of a run: launched together, added up by weight, each logged.

    rewards = make_rewards(config, tokenizer, prompts)
    future = rewards.launch(batch, call_model)      # returns at once
    scores, metrics = future.get()                  # token_level_scores, reward_extra/*

Functions and servers are asked by a `RewardManager` each; `call_model` starts a model's role.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, RewardError
from verl_like.process.sandbox import Sandbox
from verl_like.tensor_ops import last_places
from workers.columns import held_as, read_columns
from workers.config import OverlongBufferConfig, RewardConfig, ScoringSections, rewards_of
from workers.rewards.code import NOT_TRUSTED
from workers.rewards.environment import EnvironmentScores
from workers.rewards.failures import Failures, SaidOnce
from workers.rewards.functions import REWARDS, check_rules, code, trust_kwargs
from workers.rewards.manager import FAILURES, RewardManager, Scored
from workers.rewards.process import BATCH_SHARES, FunctionSpec
from workers.rewards.remote import RemoteScorer
from workers.rewards.scorer import Scorer

SKIPPED = "reward_extra/skipped"
"""Column: 1 where a sample is left out of the update, since a reward of it failed."""
COUNTS = ("reward/num_failed", "reward/num_timed_out")
"""Metrics that are sums over all rewards."""
NAMED = 3
"""Samples that an error names."""
SMALLEST_SPREAD = 1e-6
CHECK_S = 1.0
"""Time between two looks at what could end the wait for a function or server."""


class ScoredRows(Protocol):
    """What rewards are asked about: prompts of a run."""

    @property
    def data_sources(self) -> set[str]:
        """Whose rules score, where no function does."""

    @property
    def columns(self) -> list[str]:
        """What a function may read besides."""

    @property
    def has_truth(self) -> bool:
        """Whether a row has a ground truth."""

    @property
    def has_open_asserts(self) -> bool:
        """Whether a row has asserts whose expected side a program could find."""


def make_rewards(run: ScoringSections, tokenizer: Any, rows: ScoredRows) -> Rewards:
    """The rewards that a run's configuration asks for.

    Rejects a function that cannot be loaded or asks for what no row has, data without a rule, a
    server that does not answer, and asserts on programs that are not trusted.
    """
    parts: list[Part] = []
    overlong = run.reward_model.overlong_buffer
    rewards = Rewards(parts, overlong if overlong.enable else None)
    sandbox = Sandbox.of(run.reward.sandbox)
    try:
        for number, config in enumerate(rewards_of(run)):
            manager: RewardManager | EnvironmentScores | None = None
            if config.kind == "environment":
                manager = EnvironmentScores()
            elif config.kind != "model":
                section = f"rewards[{number}]" if run.rewards else None
                trusted = run.reward.trust_programs
                scorer = _scorer(config, section, rows, sandbox, trusted)
                manager = RewardManager(tokenizer, scorer, config.default_score)
            is_environment = config.kind == "environment"
            rules: Any = run.environment if is_environment else run.reward
            parts.append(Part(config, manager, rules.max_failed_share))
    except BaseException:
        rewards.close()
        raise
    return rewards


def _scorer(
    config: RewardConfig,
    section: str | None,
    rows: ScoredRows,
    sandbox: Sandbox,
    trust_programs: bool,
) -> Scorer | RemoteScorer:
    """`section` of the configuration names the function; None: `custom_reward_function` does."""
    deadline = BATCH_SHARES * config.timeout_s
    if config.kind == "remote":
        return RemoteScorer(config, deadline)

    if config.path:
        trust = trust_kwargs(config.path, config.function, trust_programs)
        if trust:
            _check_asserts(rows, trust_programs)
        settings = config.path, config.function, config.kwargs | trust, config.timeout_s
        spec = FunctionSpec(
            *settings, columns=rows.columns, has_truth=rows.has_truth, sandbox=sandbox
        )
        if section is not None:
            spec = replace(spec, path_key=f"{section}.path", name_key=f"{section}.function")
        return Scorer(spec, deadline)
    check_rules(rows.data_sources)
    if any(REWARDS[source] is code for source in rows.data_sources):
        _check_asserts(rows, trust_programs)
    spec = FunctionSpec(deadline=config.timeout_s)
    trust = trust_kwargs(spec.path, spec.name, trust_programs)
    return Scorer(replace(spec, kwargs=trust), deadline)


def _check_asserts(rows: ScoredRows, trust_programs: bool) -> None:
    """Reject tests by which a model's program could forge its score."""
    if not trust_programs and rows.has_open_asserts:
        way = "reward.trust_programs=true"
        raise ConfigError(f"a row's ground_truth has an assert: {NOT_TRUSTED.format(way=way)}")


@dataclass(frozen=True)
class Part:
    """One reward; a model has no manager, its role scores."""

    config: RewardConfig
    manager: RewardManager | EnvironmentScores | None
    max_failed_share: float = 1.0
    """Share of a batch above which its failures end the run."""


@dataclass(frozen=True)
class PartScores:
    """What one reward says of a batch."""

    scores: Tensor
    """[rows, R], at the tokens where a step, or the response, ends."""
    step_ends: Tensor
    """[rows, R], whether a scored step ends there."""
    failed: Tensor
    """[rows], whether there is no score."""


class Rewards:
    """The rewards of a run."""

    def __init__(
        self,
        parts: list[Part],
        overlong: OverlongBufferConfig | None = None,
    ):
        """`overlong` punishes long responses, whatever they score."""
        self.parts, self.overlong = parts, overlong
        self.said = SaidOnce()

    @property
    def may_skip(self) -> bool:
        """Whether a failure may leave a sample out of the update."""
        return any(part.config.on_failure == "skip" for part in self.parts)

    def launch(
        self,
        batch: DataProto,
        call_model: Callable[[RewardConfig], Any],
        normalize: bool = True,
        check: Callable[[str], None] = lambda what: None,
    ) -> WeightedScores:
        """Start every reward; without `normalize` scores stay what they are (validation).

        Functions and servers add the texts of the responses to the batch.
        `check` is asked while functions and servers are waited for, and may end that wait.
        """
        futures = []
        for part in self.parts:
            is_model = part.manager is None
            futures.append(call_model(part.config) if is_model else part.manager.remote(batch))
        return WeightedScores(self, batch, futures, normalize, check)

    def close(self) -> None:
        """End the processes and connections."""
        for part in self.parts:
            if part.manager is not None:
                part.manager.close()
        self.said.close()


class WeightedScores:
    """Scores that are being computed: a future of all parts."""

    def __init__(
        self,
        rewards: Rewards,
        batch: DataProto,
        futures: Sequence[Any],
        normalize: bool,
        check: Callable[[str], None],
    ):
        """`futures` has one for each part; `check` as in `Rewards.launch`."""
        self._rewards, self._futures, self._normalize = rewards, futures, normalize
        self._check = check
        self._mask = read_columns(batch, "response_mask")["response_mask"].bool()
        self._held = batch.column("response_mask")
        self._uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)))

    def __str__(self) -> str:
        """The rewards, for messages about a failure."""
        return f"rewards ({', '.join(part.config.name for part in self._rewards.parts)})"

    def done(self) -> bool:
        """Whether `get` returns at once."""
        return all(future.done() for future in self._futures)

    def get(self, timeout: float | None = None) -> Scored:
        """The weighted sum, the extras of every part, and metrics.

        Waits at most `timeout` seconds for each part.
        """
        total = torch.zeros(self._mask.shape, dtype=torch.float32)
        step_ends = torch.zeros(self._mask.shape, dtype=torch.bool)
        skipped = torch.zeros(len(total), dtype=torch.bool)
        extras: dict[str, Any] = {}
        metrics: dict[str, float] = {}

        for part, future in zip(self._rewards.parts, self._futures, strict=True):
            is_model = part.manager is None
            result = future.get(timeout) if is_model else self._answer(future, timeout)
            found = self._take(part, result, extras, metrics)
            if part.config.normalize and self._normalize:
                found = normalized(found, self._mask)
            total += part.config.weight * found.scores
            step_ends |= found.step_ends
            if part.config.on_failure == "skip":
                skipped |= found.failed

        if self._rewards.overlong is not None:
            punishment = overlong_punishment(self._mask, self._rewards.overlong)
            total += at_last_token(punishment, self._mask)
            step_ends |= at_last_token(punishment != 0, self._mask)
            extras["reward_extra/overlong_reward"] = punishment.double().numpy()
            metrics["reward/overlong_reward/mean"] = punishment.mean().item()
        if self._rewards.may_skip:
            total = without_influence(total, self._mask, skipped, self._uids)
            last = at_last_token(skipped, self._mask)
            step_ends = torch.where(skipped[:, None], last, step_ends)
            extras[SKIPPED] = skipped.double().numpy()
            metrics["reward/num_skipped"] = float(skipped.sum())
        _refuse_infinite(total, self._uids)
        columns = {
            "token_level_scores": held_as(self._held, total),
            "step_ends": held_as(self._held, step_ends),
        }
        return DataProto.from_dict(columns, extras), metrics

    def _answer(self, future: Future[Scored], timeout: float | None) -> Scored:
        """Of a function or server: while it is waited for, no call would notice a lost worker."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not future.done() and (left := end - time.monotonic()) > 0:
            wait([future], min(left, CHECK_S))
            self._check(str(self))
        return future.result(timeout=0)

    def _take(
        self, part: Part, result: Any, extras: dict[str, Any], metrics: dict[str, float]
    ) -> PartScores:
        """What a part says; its extra columns and metrics are added to those of the others."""
        name, several = part.config.name, len(self._rewards.parts) > 1
        if part.manager is None:
            scores = read_columns(result, "rm_scores")["rm_scores"]
            found = PartScores(scores, scores != 0, torch.zeros(len(scores), dtype=torch.bool))
        else:
            result, numbers = result
            columns = read_columns(result, "token_level_scores", "step_ends", "score_failed")
            found = PartScores(*columns.values())
            failures = result.meta_info[FAILURES]
            _refuse(part, found.failed, failures)
            cost = f"get the score {part.config.default_score:g}"
            if part.config.on_failure == "skip":
                cost = "are left out of the update"
            self._rewards.said.note(name, len(found.failed), cost, failures)
            of_all = {count: metrics.get(count, 0.0) + numbers[count] for count in COUNTS}
            metrics |= _named(numbers, "reward/", name, several) | of_all
            extras |= _named(result.non_tensor_batch, "reward_extra/", name, several)

        if several or name != "rule":  # a lone rule's score is critic/score/mean
            sums = found.scores.sum(dim=-1)
            extras[f"reward_extra/{name}_score"] = sums.double().numpy()
            metrics[f"reward/{name}_score/mean"] = sums.mean().item()
        return found


def _named(found: dict[str, Any], prefix: str, name: str, several: bool) -> dict[str, Any]:
    """Of several rewards each has its name before its own words."""
    if not several or name == "rule":
        return found
    return {key.replace(prefix, f"{prefix}{name}/", 1): value for key, value in found.items()}


def _refuse(part: Part, failed: Tensor, failures: Failures) -> None:
    """End the run if failures are too many, with the first of each kind."""
    config, most, count = part.config, part.max_failed_share, int(failed.sum())
    if config.on_failure == "fail" and count:
        rule = "its on_failure is fail. Fix it, or set on_failure=default or skip."
    elif count > most * len(failed):
        section = "environment" if config.kind == "environment" else "reward"
        rule = f"{section}.max_failed_share={most:g} allows fewer. Fix it, or raise the limit."
    else:
        return
    said = "".join(f"\n  {failure}" for failure in failures.values())
    raise RewardError(
        f"the reward {config.name!r} failed for {count} of {len(failed)} samples, and {rule}{said}"
    )


def _refuse_infinite(total: Tensor, uids: Any) -> None:
    """Scores are float32: what is finite for each reward may not be in their sum."""
    wrong = (~total.isfinite().all(dim=-1)).nonzero().flatten().tolist()
    if wrong:
        named = ", ".join(str(uids[row]) for row in wrong[:NAMED])
        raise RewardError(
            f"the scores of {len(wrong)} of {len(total)} samples are NaN or infinite in float32 "
            f"once rewards are weighed and added: {named}{', …' if len(wrong) > NAMED else ''}. "
            "Make the reward or its weight smaller; a model that gives NaN is broken."
        )


def normalized(found: PartScores, mask: Tensor) -> PartScores:
    """Scores whose sums over a row have mean 0 and spread 1 over the rows that did not fail.

    The shift goes to each row's last token; a row that failed gets 0, the mean.
    """
    sums = found.scores.double().sum(dim=-1)
    good = sums[~found.failed]
    if not len(good):
        return replace(found, scores=torch.zeros_like(found.scores))

    spread = good.std(correction=0).clamp(min=SMALLEST_SPREAD)
    shift = at_last_token(torch.full_like(sums, -float(good.mean())), mask)
    moved = ((found.scores + shift) / spread).float().masked_fill(found.failed[:, None], 0.0)
    last = at_last_token(torch.ones(len(sums), dtype=torch.bool), mask)
    return replace(found, scores=moved, step_ends=found.step_ends | last)


def without_influence(scores: Tensor, mask: Tensor, skipped: Tensor, uids: Any) -> Tensor:
    """Skipped rows get the mean of their group's other rows: no baseline moves by them.

    In a group of which every row is skipped it is 0.
    """
    sums = scores.sum(dim=-1)
    for uid in {uids[row] for row in skipped.nonzero()[:, 0].tolist()}:
        group = torch.from_numpy(np.asarray(uids == uid))
        good = sums[group & ~skipped]
        sums[group & skipped] = good.mean() if len(good) else 0.0
    return torch.where(skipped[:, None], at_last_token(sums, mask), scores)


def at_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """[rows] numbers at each row's last token."""
    placed = torch.zeros(mask.shape, dtype=values.dtype)
    placed[torch.arange(len(values)), last_places(mask)] = values
    return placed


def overlong_punishment(mask: Tensor, buffer: OverlongBufferConfig) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) of every response.

    0 up to `limit - buffer.len` tokens, from there falling evenly to `-buffer.penalty_factor` at
    `limit`, the width of the mask.
    """
    excess = (mask.sum(dim=-1) - (mask.shape[-1] - buffer.len)).clamp(min=0)
    return -excess.float() / buffer.len * buffer.penalty_factor
