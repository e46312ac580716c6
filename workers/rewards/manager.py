"""Scores of responses by a reward function: decoded here, scored in other processes.

    manager = make_reward_manager(custom, rules, tokenizer, sources)  # loads the function
    rewards = manager.remote(batch)         # decodes, then returns at once
    scores = rewards.get()                  # token_level_scores, the function's other numbers

With a reward model, `SummedScores` adds its scores to these.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import read_columns
from workers.config import OverlongBufferConfig, RewardFunctionConfig, RewardModelConfig
from workers.rewards.functions import check_rules
from workers.rewards.process import LATE, STEPS, VOTE, FunctionSpec, Outcome
from workers.rewards.scorer import Sample, Scorer

logger = logging.getLogger(__name__)


def make_reward_manager(
    custom: RewardFunctionConfig,
    rules: RewardModelConfig,
    tokenizer: Any,
    data_sources: Iterable[str],
) -> RewardManager:
    """The manager that these settings ask for.

    A function that cannot be loaded, and data without a rule, are refused here.
    """
    spec = FunctionSpec(deadline=rules.sample_timeout_s)
    if custom.path:
        spec = FunctionSpec(custom.path, custom.name, custom.reward_kwargs, rules.sample_timeout_s)
    elif rules.enable and rules.rule_weight == 0:
        spec = FunctionSpec(name="no_rule")
    else:
        check_rules(data_sources)
    overlong = rules.overlong_buffer if rules.overlong_buffer.enable else None
    return RewardManager(
        tokenizer, spec, rules.default_score, 12 * rules.sample_timeout_s, overlong
    )


Scored = tuple[DataProto, dict[str, float]]
"""`token_level_scores` with what the rule returned beside them, and metrics of them."""


class RewardFuture:
    """Scores that are being computed."""

    def __init__(self, future: Future[Scored]):
        """Wraps a thread's future."""
        self._future = future

    def get(self, timeout: float | None = None) -> Scored:
        """The scores and metrics of them; waits at most `timeout` seconds."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether `get` returns at once."""
        return self._future.done()


class SummedScores:
    """The scores of the rules, weighted, plus those of the reward model: a future of both."""

    def __init__(self, rules: RewardFuture, model: Any, rule_weight: float):
        """`model` is the future of `rm_scores`."""
        self._rules, self._model, self._rule_weight = rules, model, rule_weight

    def get(self, timeout: float | None = None) -> Scored:
        """The sum, with the mean of each part among the metrics.

        Waits at most `timeout` seconds for each part.
        """
        result, metrics = self._rules.get(timeout)
        by_rule = read_columns(result, "token_level_scores")["token_level_scores"]
        by_model = read_columns(self._model.get(timeout), "rm_scores")["rm_scores"]
        metrics |= {
            "reward/rule_score/mean": by_rule.sum(-1).mean().item(),
            "reward/model_score/mean": by_model.sum(-1).mean().item(),
        }
        assert result.batch is not None, "the manager has just written the scores"
        result.batch["token_level_scores"] = self._rule_weight * by_rule + by_model
        result.batch["step_ends"] = result.batch["step_ends"] | (by_model != 0)
        for name, scores in (("rule_score", by_rule), ("model_score", by_model)):
            result.non_tensor_batch[f"reward_extra/{name}"] = scores.sum(-1).double().numpy()
        return result, metrics

    def done(self) -> bool:
        """Whether `get` returns at once."""
        return bool(self._rules.done() and self._model.done())


class RewardManager:
    """Scores batches by a reward function, beside what the driver does meanwhile.

    The function is (data_source, solution_str, ground_truth, extra_info) -> float, or dict with
    "score". A dict may have "step_scores" too, pairs [token, score]: each score stands at that
    token of the response (at its last if it is shorter), the score itself always at the last. A
    sample whose call raises, returns no finite number, or passes its deadline gets `default_score`;
    so does what is left of a batch after `batch_deadline`. They are counted in the metrics and
    never stop the step.
    """

    def __init__(
        self,
        tokenizer: Any,
        function: FunctionSpec | None = None,
        default_score: float = 0.0,
        batch_deadline: float = 120.0,
        overlong: OverlongBufferConfig | None = None,
    ):
        """Refuses a function that cannot be loaded; without one, data_source names the rule."""
        self._tokenizer = tokenizer
        self._default_score, self._overlong = default_score, overlong
        function = function or FunctionSpec()
        self._scorer = Scorer(function, batch_deadline)
        try:
            self._scorer.start()
        except (EOFError, OSError, TimeoutError) as err:
            self._scorer.stop()
            raise ConfigError(
                f"The reward function {function} is not loaded within {batch_deadline:g} s; what "
                "its process said is above."
            ) from err
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def remote(self, batch: DataProto) -> RewardFuture:
        """Start scoring: reads responses, response_mask, data_source, reward_model, extra_info."""
        mask = read_columns(batch, "response_mask")["response_mask"].bool()
        columns = batch.non_tensor_batch
        samples: list[Sample] = [
            (source, solution, rule["ground_truth"], extra)
            for source, solution, rule, extra in zip(
                columns["data_source"],
                decode_responses(batch, self._tokenizer),
                columns["reward_model"],
                columns["extra_info"],
                strict=True,
            )
        ]
        uids = list(columns.get("uid", range(len(samples))))
        return RewardFuture(self._thread.submit(self._score, samples, uids, mask))

    def _score(self, samples: list[Sample], uids: list[Any], mask: Tensor) -> Scored:
        began = time.perf_counter()
        outcomes = self._scorer.score(samples)
        seconds = time.perf_counter() - began

        self._warn_of_failures(uids, outcomes)
        default = self._default_score
        values = torch.tensor([default if score is None else score for score, _, _ in outcomes])
        extras = _extra_columns(outcomes)
        if self._overlong is not None:
            punishment = overlong_punishment(mask.sum(-1), mask.shape[-1], self._overlong)
            extras["overlong_reward"] = punishment.double().numpy()
            values = values + punishment

        scores, step_ends = _on_tokens(values, outcomes, mask)
        metrics = _score_metrics(outcomes, extras)
        metrics["timing_s/reward"] = seconds
        result = DataProto.from_dict(
            tensors={"token_level_scores": scores, "step_ends": step_ends},
            non_tensors={f"reward_extra/{name}": column for name, column in extras.items()},
        )
        return result, metrics

    def _warn_of_failures(self, uids: list[Any], outcomes: list[Outcome]) -> None:
        failed = []
        for uid, (score, _, error) in zip(uids, outcomes, strict=True):
            if score is None:
                failed.append(f"{uid}: {error}")
        if failed:
            logger.warning(
                "%d of %d samples got the default score %g: %s",
                len(failed),
                len(outcomes),
                self._default_score,
                "; ".join(failed[:3]),
            )

    def close(self) -> None:
        """End the processes."""
        self._thread.shutdown(cancel_futures=True)
        self._scorer.stop()


def _on_tokens(values: Tensor, outcomes: list[Outcome], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Every row's scores at its tokens, and at which of them a scored step ends.

    A score of zero beside those of steps is no step of its own.
    """
    # The mask may have holes, where a tool's answer stands: its last token, not its count.
    last = (mask * torch.arange(mask.shape[-1])).amax(dim=-1)
    rows = torch.arange(len(values))
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    scores[rows, last] = values
    has_steps = torch.tensor([STEPS in extras for _, extras, _ in outcomes], dtype=torch.bool)
    step_ends = torch.zeros(mask.shape, dtype=torch.bool)
    step_ends[rows, last] = ~has_steps | (values != 0)

    for row in has_steps.nonzero().flatten().tolist():
        tokens = mask[row].nonzero().flatten().tolist() or [0]
        for token, score in outcomes[row][1][STEPS]:
            place = tokens[min(token, len(tokens) - 1)]
            scores[row, place] += score
            step_ends[row, place] = True
    return scores, step_ends


def _extra_columns(outcomes: list[Outcome]) -> dict[str, np.ndarray[Any, Any]]:
    """What the function returned beside the score, by name: numbers, and the text of a vote."""
    columns = {}
    for name in sorted({name for _, extras, _ in outcomes for name in extras} - {STEPS}):
        values = [extras.get(name, np.nan) for _, extras, _ in outcomes]
        columns[name] = np.array(values, object if name == VOTE else np.float64)
    return columns


def _score_metrics(
    outcomes: list[Outcome], extras: dict[str, np.ndarray[Any, Any]]
) -> dict[str, float]:
    """Counts of samples that failed or came late, and the mean of every extra number."""
    num_late = sum(score is None and error == LATE for score, _, error in outcomes)
    num_failed = sum(score is None for score, _, _ in outcomes) - num_late
    metrics = {
        "reward/num_failed": float(num_failed),
        "reward/num_timed_out": float(num_late),
    }
    for name, column in extras.items():
        if name != VOTE and not np.isnan(column).all():
            metrics[f"reward/{name}/mean"] = float(np.nanmean(column))
    return metrics


def decode_responses(batch: DataProto, tokenizer: Any) -> list[str]:
    """The text of every response, up to its end."""
    columns = read_columns(batch, "responses", "response_mask")
    # Rows of arrays: rows of tensors would take 8 times as long.
    rows, mask = columns["responses"].numpy(), columns["response_mask"].bool().numpy()
    responses = [row[keep].tolist() for row, keep in zip(rows, mask, strict=True)]
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))


def overlong_punishment(lengths: Tensor, limit: int, buffer: OverlongBufferConfig) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) of responses of these lengths.

    0 up to `limit - buffer.len` tokens, from there falling evenly to `-buffer.penalty_factor` at
    `limit`.
    """
    excess = (lengths - (limit - buffer.len)).clamp(min=0)
    return -excess.float() / buffer.len * buffer.penalty_factor
