"""Compute all rewards of a run: start them together, add them up by weight, and log each one.

    rewards = make_rewards(config, tokenizer, prompts)
    future = rewards.launch(batch, call_model)      # returns immediately
    scores, metrics = future.get()                  # token_level_scores, reward_extra/*

Each function or server has a `RewardManager`; for a reward model, `call_model` calls its role.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, RewardError
from verl_like.process.sandbox import Sandbox, check_can_confine_programs
from verl_like.tensor_ops import last_places
from workers.columns import format_like, read_columns
from workers.config import (
    OverlongPenaltyConfig,
    RewardConfig,
    ScoringConfig,
    ScoringSections,
    reward_configs,
)
from workers.rewards.manager import RewardManager, TermScores
from workers.rewards.outcome import FailureLog
from workers.rewards.scorer import BATCH_SHARES, FunctionSpec, Scorer, trust_kwargs

if TYPE_CHECKING:
    from workers.rewards.environment import EnvironmentScores
    from workers.rewards.remote import RemoteScorer

logger = logging.getLogger(__name__)
SKIPPED = "reward_extra/skipped"
"""Column that is 1 if a sample is excluded from the update because a reward failed; else 0."""
COUNTS = ("reward/num_failed", "reward/num_timed_out")
"""Metrics that are sums over all rewards."""
MAX_NAMED = 3
"""Maximum number of samples that an error names."""
SMALLEST_SPREAD = 1e-6
FIRST_MESSAGE_S = 10.0
"""Seconds after which the run says that it waits for a reward."""
CHECK_S = 1.0
"""Seconds between checks for lost workers while a function or server is scoring."""


class ScoredRows(Protocol):
    """Facts about a run's prompts that rewards need."""

    @property
    def data_sources(self) -> set[str]:
        """Data sources of the rows; without a function, they select rules."""

    @property
    def columns(self) -> list[str]:
        """Columns that a function may read, besides the data source and the ground truth."""

    @property
    def has_truth(self) -> bool:
        """True if a row has a ground truth."""

    @property
    def has_open_asserts(self) -> bool:
        """True if a row has asserts whose expected side cannot be hidden from a program."""


def make_rewards(run: ScoringSections, tokenizer: Any, rows: ScoredRows) -> Rewards:
    """Create the configured rewards of a run.

    Raise for a function that cannot be loaded or has a parameter without a column, for data without
    a rule, for a server that does not reply, and for asserts that need trusted programs.
    """
    parts: list[RewardTerm] = []
    overlong = run.reward.overlong_penalty
    rewards = Rewards(parts, overlong if overlong.enable else None)
    try:
        for number, config in enumerate(_with_rules_for(rows, reward_configs(run))):
            manager: RewardManager | EnvironmentScores | None = None
            limits: Any = run.reward
            if config.kind == "environment":
                from workers.rewards.environment import EnvironmentScores

                manager, limits = EnvironmentScores(), run.environment
            elif config.kind != "model":
                section = f"reward.list[{number}]" if run.reward.list else None
                scorer = _scorer(config, section, rows, run.reward)
                manager = RewardManager(tokenizer, scorer, config.score_on_failure)
            parts.append(RewardTerm(config, manager, limits.max_failed_fraction))
    except BaseException:
        rewards.close()
        raise
    return rewards


def _with_rules_for(rows: ScoredRows, rewards: list[RewardConfig]) -> list[RewardConfig]:
    """Remove the built-in rules if there is a reward model and no row's data source has a rule."""
    has_model = any(reward.kind == "model" for reward in rewards)
    if not has_model:
        return rewards
    from workers.rewards.functions import REWARDS

    if not REWARDS.keys().isdisjoint(rows.data_sources):
        return rewards
    listed = [reward for reward in rewards if reward.kind != "function" or reward.path]
    if listed != rewards:
        print("note: no row's data_source has a rule, so rules do not score", flush=True)
    return listed


def _scorer(
    config: RewardConfig, section: str | None, rows: ScoredRows, settings: ScoringConfig
) -> Scorer | RemoteScorer:
    """Create a reward's scorer; `section` is its configuration key (None: `reward.function`)."""
    deadline = BATCH_SHARES * config.timeout_s
    if config.kind == "remote":
        from workers.rewards.remote import RemoteScorer

        return RemoteScorer(config, deadline)

    if config.path:
        trust = trust_kwargs(config.path, config.function, settings.trust_programs)
        runs_programs = bool(trust)
        spec = FunctionSpec(
            config.path,
            config.function,
            config.kwargs | trust,
            config.timeout_s,
            rows.columns,
            rows.has_truth,
            Sandbox.from_limits(settings.sandbox),
        )
        if section is not None:
            spec = replace(spec, path_key=f"{section}.path", name_key=f"{section}.function")
    else:
        from workers.rewards.functions import REWARDS, check_rules, code

        check_rules(rows.data_sources)
        runs_programs = any(REWARDS[source] is code for source in rows.data_sources)
        spec = FunctionSpec(deadline=config.timeout_s)
        spec = replace(spec, kwargs=trust_kwargs(spec.path, spec.name, settings.trust_programs))
    if runs_programs:
        check_can_confine_programs()
    if runs_programs and rows.has_open_asserts and not settings.trust_programs:
        from workers.rewards.code import NOT_TRUSTED

        way = "reward.trust_programs=true"
        raise ConfigError(f"a row's ground_truth has an assert: {NOT_TRUSTED.format(way=way)}")
    return Scorer(spec, deadline)


@dataclass(frozen=True)
class RewardTerm:
    """One reward; a reward model has no manager, because its role scores."""

    config: RewardConfig
    manager: RewardManager | EnvironmentScores | None
    max_failed_fraction: float = 1.0
    """Fraction of failed samples in a batch above which the run ends."""


class Rewards:
    """All rewards of a run."""

    def __init__(self, parts: list[RewardTerm], overlong: OverlongPenaltyConfig | None = None):
        """`overlong` has the settings of the penalty on long responses, if there is one."""
        self.parts, self.overlong = parts, overlong
        self.failure_log = FailureLog()
        self._slow: set[str] = set()
        """Names of rewards that were logged as slow."""
        self._ignoring: set[str] = set()
        """Names of rewards whose ignored entries were logged."""

    def launch(
        self,
        batch: DataProto,
        call_model: Callable[[RewardConfig], Any],
        normalize: bool = True,
        check: Callable[[str], None] = lambda _: None,
    ) -> WeightedScores:
        """Start every reward on a batch, and return a future of the weighted scores.

        Validation sets `normalize=False`, so that scores are not normalized. Functions and servers
        add the responses as text to the batch. While the future waits for them, it calls `check`
        repeatedly, which may raise, for example because a worker is lost.
        """
        futures = [
            call_model(part.config) if part.manager is None else part.manager.remote(batch)
            for part in self.parts
        ]
        return WeightedScores(self, batch, futures, normalize, check)

    def note_failures(self, part: RewardTerm, term: TermScores) -> None:
        """Log a reward's failures; raise if there are too many, with the first one of each kind."""
        config, most, count = part.config, part.max_failed_fraction, int(term.failed.sum())
        if config.on_failure == "fail" and count:
            rule = ", and its on_failure is fail. Fix the reward, or set on_failure: score or skip."
        elif count > most * len(term.failed):
            section = "environment" if config.kind == "environment" else "reward"
            rule = (
                f", more than {section}.max_failed_fraction={most:g} allows. Fix the reward, or "
                "raise the limit."
            )
        else:
            cost = f"get the score {config.score_on_failure:g}"
            if config.on_failure == "skip":
                cost = "are not used for training"
            self.failure_log.note(config.name, len(term.failed), cost, term.failures)
            return
        text = "".join(f"\n  {failure}" for failure in term.failures.values())
        counts = f"{count} of {len(term.failed)} samples"
        raise RewardError(f"{config.label} failed for {counts}{rule}{text}")

    def note_ignored(self, part: RewardTerm, term: TermScores) -> None:
        """Log once per reward which entries of a result are ignored."""
        if term.note and part.config.name not in self._ignoring:
            self._ignoring.add(part.config.name)
            logger.warning("%s: %s", part.config.label, term.note)

    def columns_read(self, batch: DataProto) -> list[dict[str, Any]]:
        """Return for each row the data's columns that functions of the user read.

        The ground truth and other entries that every sample has are left out.
        """
        managers = [part.manager for part in self.parts if part.config.path]
        reads = [it.reads for it in managers if isinstance(it, RewardManager)]
        names = {name for entries in reads for name in entries or ()}
        columns = batch.non_tensor_batch
        rows = zip(
            columns.get("row_columns", [{}] * len(batch)), columns["extra_info"], strict=True
        )
        return [
            {
                name: value
                for name, value in {**others, "extra_info": info or None}.items()
                if value is not None and (name in names or None in reads)
            }
            for others, info in rows
        ]

    def note_slow(self, part: RewardTerm, work: str) -> None:
        """Log once per reward that the run waits for it; `work` says what it scores."""
        if part.config.name not in self._slow:
            self._slow.add(part.config.name)
            logger.warning(
                "the run has waited %g s for %s, which scores %s (timeout_s=%g per sample)",
                *(FIRST_MESSAGE_S, part.config.label, work, part.config.timeout_s),
            )

    def close(self) -> None:
        """End the processes and connections, and log the totals of failures."""
        for part in self.parts:
            if part.manager is not None:
                part.manager.close()
        self.failure_log.close()


class WeightedScores:
    """A future of the scores of all rewards."""

    def __init__(
        self,
        rewards: Rewards,
        batch: DataProto,
        futures: Sequence[Any],
        normalize: bool,
        check: Callable[[str], None],
    ):
        """`futures` has one entry per reward; for `normalize` and `check` see `Rewards.launch`."""
        self._rewards, self._futures, self._normalize = rewards, futures, normalize
        self._check = check
        self._mask = read_columns(batch, "response_mask")["response_mask"].bool()
        self._mask_format = batch.column("response_mask")
        self._uids = batch.non_tensor_batch.get("uid", np.arange(len(batch)))

    def __str__(self) -> str:
        """Return the names of the rewards, for error messages."""
        return f"rewards ({', '.join(part.config.name for part in self._rewards.parts)})"

    def done(self) -> bool:
        """Return True if `get` returns immediately."""
        return all(future.done() for future in self._futures)

    def get(self, timeout: float | None = None) -> tuple[DataProto, dict[str, float]]:
        """Return the weighted sum, the extra columns of all rewards, and metrics.

        Waits at most `timeout` seconds for each reward.
        """
        total = torch.zeros(self._mask.shape, dtype=torch.float32)
        step_ends = torch.zeros(self._mask.shape, dtype=torch.bool)
        skipped = torch.zeros(len(total), dtype=torch.bool)
        extras: dict[str, Any] = {}
        metrics: dict[str, float] = {}

        parts = self._rewards.parts
        futures = zip(parts, self._futures, strict=True)
        terms = [self._wait_for(part, future, timeout) for part, future in futures]
        for part, term in zip(parts, terms, strict=True):
            if part.config.on_failure == "skip":
                skipped |= term.failed
        for part, term in zip(parts, terms, strict=True):
            self._log(part, term, skipped, extras, metrics)
            if part.config.normalize and self._normalize:
                term = normalized(term, self._mask)
            total += part.config.weight * term.scores
            step_ends |= term.step_ends

        if self._rewards.overlong is not None:
            punishment = overlong_punishment(self._mask, self._rewards.overlong)
            total += place_at_last_token(punishment, self._mask)
            step_ends |= place_at_last_token(punishment != 0, self._mask)
            extras["reward_extra/overlong_reward"] = punishment.double().numpy()
            metrics["reward/overlong_reward/mean"] = punishment.mean().item()
        if any(part.config.on_failure == "skip" for part in parts):
            total = neutralize_skipped(total, self._mask, skipped, self._uids)
            last = place_at_last_token(skipped, self._mask)
            step_ends = torch.where(skipped[:, None], last, step_ends)
            extras[SKIPPED] = skipped.double().numpy()
            metrics["reward/num_skipped"] = float(skipped.sum())
        self._check_finite(total)
        columns = {
            "token_level_scores": format_like(self._mask_format, total),
            "step_ends": format_like(self._mask_format, step_ends),
        }
        return DataProto.from_dict(columns, extras), metrics

    def _check_finite(self, total: Tensor) -> None:
        """Reject sums that are NaN or infinite in float32."""
        wrong = (~total.isfinite().all(dim=-1)).nonzero().flatten().tolist()
        if wrong:
            named = ", ".join(str(self._uids[row]) for row in wrong[:MAX_NAMED])
            raise RewardError(
                f"the scores of {len(wrong)} of {len(total)} samples are NaN or infinite in "
                "float32 after rewards are weighted and added, such as those of uid "
                f"{named}. Make the reward or its weight "
                "smaller. If a reward model outputs NaN, check its weights."
            )

    def _wait_for(self, part: RewardTerm, future: Any, timeout: float | None) -> TermScores:
        """Return the scores of one reward; raise if it failed too often."""
        if part.manager is None:
            scores = read_columns(future.get(timeout), "rm_scores")["rm_scores"]
            return TermScores(scores, scores != 0, torch.zeros(len(scores), dtype=torch.bool))
        began = time.monotonic()
        end = math.inf if timeout is None else began + timeout
        while not future.done() and time.monotonic() < end:
            wait([future], min(end - time.monotonic(), CHECK_S))
            self._check(str(self))  # for lost workers, which no call would detect
            if time.monotonic() - began > FIRST_MESSAGE_S and not future.done():
                self._rewards.note_slow(part, f"{len(self._mask)} samples")
        term: TermScores = future.result(timeout=0)
        self._rewards.note_failures(part, term)
        self._rewards.note_ignored(part, term)
        return term

    def _log(
        self,
        part: RewardTerm,
        term: TermScores,
        skipped: Tensor,
        extras: dict[str, Any],
        metrics: dict[str, float],
    ) -> None:
        """Add the columns of one reward to `extras`, and its metrics to `metrics`.

        The mean score is over the samples that are not skipped.
        """
        name, several = part.config.name, len(self._rewards.parts) > 1
        prefix = f"{name}/" if several and name != "function" else ""
        counts = {
            key: metrics.get(key, 0.0) + term.metrics[key] for key in COUNTS if key in term.metrics
        }
        for key, value in term.metrics.items():
            metrics[key.replace("reward/", f"reward/{prefix}", 1)] = value
        metrics |= counts
        extras |= {f"reward_extra/{prefix}{key}": column for key, column in term.extras.items()}
        if several or name != "function":  # the score of a single function is critic/score/mean
            sums = term.scores.sum(dim=-1)
            extras[f"reward_extra/{name}_score"] = sums.double().numpy()
            if not skipped.all():
                metrics[f"reward/{name}_score/mean"] = sums[~skipped].mean().item()


def normalized(raw: TermScores, mask: Tensor) -> TermScores:
    """Normalize scores: over the rows that did not fail, row sums get mean 0 and std 1.

    The shift of the mean is added at each row's last token. A failed row gets 0, the mean.
    """
    sums = raw.scores.double().sum(dim=-1)
    good = sums[~raw.failed]
    if not len(good):
        return replace(raw, scores=torch.zeros_like(raw.scores))

    spread = good.std(correction=0).clamp(min=SMALLEST_SPREAD)
    shift = place_at_last_token(torch.full_like(sums, -float(good.mean())), mask)
    moved = ((raw.scores + shift) / spread).float().masked_fill(raw.failed[:, None], 0.0)
    last = place_at_last_token(torch.ones(len(sums), dtype=torch.bool), mask)
    return replace(raw, scores=moved, step_ends=raw.step_ends | last)


def neutralize_skipped(scores: Tensor, mask: Tensor, skipped: Tensor, uids: Any) -> Tensor:
    """Give each skipped row the mean score of the rows of its group that are not skipped.

    If all rows of a group are skipped, they get 0.
    """
    sums = scores.sum(dim=-1)
    for uid in {uids[row] for row in skipped.nonzero()[:, 0].tolist()}:
        group = torch.from_numpy(np.asarray(uids == uid))
        good = sums[group & ~skipped]
        sums[group & skipped] = good.mean() if len(good) else 0.0
    return torch.where(skipped[:, None], place_at_last_token(sums, mask), scores)


def place_at_last_token(values: Tensor, mask: Tensor) -> Tensor:
    """Return a tensor [rows, R]: `values` [rows] at each row's last token, zero elsewhere.

    `mask` [rows, R] marks the tokens; a row without any has its value at position 0.

    Example:

        scores = torch.tensor([1.0, 0.5])
        mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        place_at_last_token(scores, mask)           # [[0, 1, 0], [0.5, 0, 0]]
    """
    placed = torch.zeros(mask.shape, dtype=values.dtype)
    placed[torch.arange(len(values)), last_places(mask)] = values
    return placed


def overlong_punishment(mask: Tensor, buffer: OverlongPenaltyConfig) -> Tensor:
    """Return DAPO's soft overlong penalty (arXiv 2503.14476, eq. 13) of every response.

    It is 0 up to `limit - buffer.len` tokens, where `limit` is the width of the mask, and falls
    linearly to `-buffer.penalty_factor` at `limit`.
    """
    excess = (mask.sum(dim=-1) - (mask.shape[-1] - buffer.len)).clamp(min=0)
    return -excess.float() / buffer.len * buffer.penalty_factor
