"""Score responses with a reward function: decode them in this process, score them in others.

    manager = RewardManager(tokenizer, Scorer(function, batch_deadline))  # loads the function
    future = manager.remote(batch)          # decodes, then returns immediately
    scores, metrics = future.result()       # columns (token_level_scores, ...), and metrics

Instead of a function, a server can score (`workers.rewards.remote`). `workers.rewards.weighted`
adds up several rewards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.tensor_ops import last_places
from workers.columns import count_ones, read_columns, token_rows
from workers.rewards.call import Sample
from workers.rewards.failures import group_by_kind
from workers.rewards.outcome import LATE, STEPS, VOTE, Outcome
from workers.rewards.remote import RemoteScorer
from workers.rewards.scorer import Scorer

RESPONSE_TEXT = "response_text"
"""Column with the responses as text, which several rewards and the sample log read."""
FAILURES = "reward_failures"
"""Key in the meta_info of scores for the failures by kind (`workers.rewards.failures`)."""
Scored = tuple[DataProto, dict[str, float]]
"""A batch with `token_level_scores` and the function's other results, and metrics."""


class RewardManager:
    """Scores batches with a reward function while the driver continues.

    The function returns a number, or a dict with "score" and optionally "step_scores", pairs
    [token, score]. The score is placed at the last token of the response. Each step score is placed
    at its token, or at the last one if the response is shorter.

    A sample fails if its call raises, returns no finite number, or exceeds its deadline, and all
    remaining samples fail at the batch's deadline. Failed samples get `score_on_failure`. They are
    counted in the metrics, marked in `score_failed` and named in the meta_info `FAILURES`.
    `workers.rewards.weighted` decides if they end the run.
    """

    def __init__(
        self,
        tokenizer: Any,
        scorer: Scorer | RemoteScorer,
        score_on_failure: float = 0.0,
    ):
        """Start the scorer, which rejects a function that cannot be loaded."""
        self._tokenizer = tokenizer
        self._score_on_failure, self._scorer = score_on_failure, scorer
        scorer.start()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def remote(self, batch: DataProto) -> Future[Scored]:
        """Start scoring a batch, and return a future of the scores.

        The batch needs responses, response_mask and the data loader's columns. It gets the column
        `RESPONSE_TEXT`.
        """
        mask = read_columns(batch, "response_mask")["response_mask"].bool()
        samples = samples_of(batch, self._tokenizer)
        uids = [sample["uid"] for sample in samples]
        return self._thread.submit(self._score, samples, uids, mask)

    def _score(self, samples: list[Sample], uids: list[Any], mask: Tensor) -> Scored:
        began = time.perf_counter()
        outcomes = self._scorer.score(samples)
        seconds = time.perf_counter() - began

        failures = group_by_kind(
            (str(uid), str(error))
            for uid, (score, _, error) in zip(uids, outcomes, strict=True)
            if score is None
        )
        if_failed = self._score_on_failure
        values = torch.tensor([if_failed if score is None else score for score, _, _ in outcomes])
        failed = torch.tensor([score is None for score, _, _ in outcomes])
        extras = _extra_columns(outcomes)

        scores, step_ends = _on_tokens(values, outcomes, mask)
        metrics = _score_metrics(outcomes, extras)
        metrics["timing_s/reward"] = seconds
        result = DataProto.from_dict(
            tensors={
                "token_level_scores": scores,
                "step_ends": step_ends,
                "score_failed": failed,
            },
            non_tensors={f"reward_extra/{name}": column for name, column in extras.items()},
            meta_info={FAILURES: failures},
        )
        return result, metrics

    def close(self) -> None:
        """End the processes, even if a batch is being scored."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._scorer.give_up()
        self._thread.shutdown()
        self._scorer.stop()


def _on_tokens(values: Tensor, outcomes: list[Outcome], mask: Tensor) -> tuple[Tensor, Tensor]:
    """Place each row's scores at their tokens; return them, and a mask of the ends of scored steps.

    If a row has step scores, a score of zero at the last token does not count as a step.
    """
    last = last_places(mask)
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
    """Return the function's other results, by name: numbers, and the text of `VOTE`."""
    columns = {}
    for name in sorted({name for _, extras, _ in outcomes for name in extras} - {STEPS}):
        values = [extras.get(name, np.nan) for _, extras, _ in outcomes]
        columns[name] = np.array(values, object if name == VOTE else np.float64)
    return columns


def _score_metrics(
    outcomes: list[Outcome], extras: dict[str, np.ndarray[Any, Any]]
) -> dict[str, float]:
    """Count the failed and the late samples, and average all other numbers."""
    num_late = sum(score is None and error == LATE for score, _, error in outcomes)
    num_failed = sum(score is None for score, _, _ in outcomes)
    metrics = {
        "reward/num_failed": float(num_failed),
        "reward/num_timed_out": float(num_late),
    }
    for name, column in extras.items():
        if name != VOTE and not np.isnan(column).all():
            metrics[f"reward/{name}/mean"] = float(np.nanmean(column))
    return metrics


def samples_of(batch: DataProto, tokenizer: Any) -> list[Sample]:
    """Return what a reward function can read of each row."""
    columns = batch.non_tensor_batch
    rows = range(len(batch))
    fields = {
        "data_source": columns["data_source"],
        "solution_str": decode_responses(batch, tokenizer),
        "ground_truth": [rule["ground_truth"] for rule in columns["reward_model"]],
        "extra_info": columns["extra_info"],
        "raw_prompt": columns.get("raw_prompt", [""] * len(batch)),
        "uid": columns.get("uid", rows),
        "num_tokens": count_ones(batch, "response_mask").tolist(),
    }
    others: Iterable[Mapping[str, Any]] = columns.get("row_columns", [{}] * len(batch))
    values = zip(*fields.values(), strict=True)
    return [
        {**other, **dict(zip(fields, row, strict=True))}
        for other, row in zip(others, values, strict=True)
    ]


def decode_responses(batch: DataProto, tokenizer: Any) -> list[str]:
    """Return the text of every response; the first call adds the texts to the batch."""
    if RESPONSE_TEXT in batch.non_tensor_batch:
        return list(batch.non_tensor_batch[RESPONSE_TEXT])
    # rows are numpy arrays, because with tensors this takes 8 times as long
    rows, masks = token_rows(batch, "responses", "response_mask")
    responses = [row[mask != 0].tolist() for row, mask in zip(rows, masks, strict=True)]
    texts = decode_rows(tokenizer, responses)
    batch.non_tensor_batch[RESPONSE_TEXT] = object_rows(texts)
    return texts


def decode_rows(tokenizer: Any, rows: Sequence[list[int]]) -> list[str]:
    """Decode rows of ids, without special tokens.

    The tokenizer's `batch_decode` inspects every id in Python, which takes twice as long as
    decoding. So fast tokenizers are called directly, with all rows at once.
    """
    from transformers import PreTrainedTokenizerFast

    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and (
        type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    )
    if not is_plain or tokenizer.clean_up_tokenization_spaces:
        return list(tokenizer.batch_decode(rows, skip_special_tokens=True))
    return list(tokenizer.backend_tokenizer.decode_batch(rows, skip_special_tokens=True))
