"""Score responses with a reward function: decode them in this process, score them in others.

    manager = RewardManager(tokenizer, Scorer(function, batch_deadline))  # loads the function
    future = manager.remote(batch)          # decodes, then returns immediately
    scores = future.result()                # `TermScores`

Instead of a function, a server can score (`workers.rewards.remote`). `workers.rewards.weighted`
adds up several rewards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.tensor_ops import last_places
from workers.columns import IMAGES, count_ones, read_columns, token_rows
from workers.rewards.outcome import LATE, STEPS, VOTE, Failures, Sample, ScoreOutcome, group_by_kind
from workers.rewards.scorer import Scorer
from workers.thoughts import REASONING, ThoughtReader, split_thoughts

if TYPE_CHECKING:
    from workers.rewards.remote import RemoteScorer

RESPONSE_TEXT = "response_text"
"""Column with the responses as text, which several rewards and the sample log read."""


@dataclass(frozen=True)
class TermScores:
    """The result of one reward for a batch."""

    scores: Tensor
    """[rows, R], with scores at the tokens at which a step or the response ends."""
    step_ends: Tensor
    """[rows, R], True at the tokens at which a scored step ends."""
    failed: Tensor
    """[rows], True for samples whose scoring failed."""
    failures: Failures = field(default_factory=dict)
    extras: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """The function's other results, by name: numbers, and the text of `VOTE`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics, among them the counts of failed and of late samples."""
    note: str = ""
    """The entries of a result that are ignored because they are no data."""


class RewardManager:
    """Scores batches with a reward function while the driver continues.

    The function returns a number, or a dict with "score" and optionally "step_scores", pairs
    [token, score]. The score is placed at the last token of the response. Each step score is placed
    at its token, or at the last one if the response is shorter.

    A sample fails if its call raises, returns no finite number, or exceeds its deadline, and all
    remaining samples fail at the batch's deadline. Failed samples get `score_on_failure`. They are
    counted in the metrics, marked in `failed` and named in `failures`.
    `workers.rewards.weighted` decides if they end the run.
    """

    def __init__(
        self, tokenizer: Any, scorer: Scorer | RemoteScorer, score_on_failure: float = 0.0
    ):
        """Start the scorer, which rejects a function that cannot be loaded."""
        self._tokenizer = tokenizer
        self._score_on_failure, self._scorer = score_on_failure, scorer
        scorer.start()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    @property
    def reads(self) -> frozenset[str] | None:
        """Names of the entries of a sample that a function gets; None means all."""
        return self._scorer.reads if isinstance(self._scorer, Scorer) else frozenset()

    def remote(self, batch: DataProto) -> Future[TermScores]:
        """Start scoring a batch, and return a future of the scores.

        The batch needs responses, response_mask and the data loader's columns. It gets the column
        `RESPONSE_TEXT`.
        """
        mask = read_columns(batch, "response_mask")["response_mask"].bool()
        return self._thread.submit(self._score, reward_samples(batch, self._tokenizer), mask)

    def _score(self, samples: list[Sample], mask: Tensor) -> TermScores:
        """Score the samples; return token scores, failures, named numbers and metrics."""
        began = time.perf_counter()
        outcomes = self._scorer.score(samples)
        seconds = time.perf_counter() - began

        failures = group_by_kind(
            (str(sample["uid"]), str(error))
            for sample, (score, _, error) in zip(samples, outcomes, strict=True)
            if score is None
        )
        if_failed = self._score_on_failure
        values = torch.tensor([if_failed if score is None else score for score, _, _ in outcomes])
        failed = torch.tensor([score is None for score, _, _ in outcomes])
        scores, step_ends = _on_tokens(values, outcomes, mask)
        num_late = sum(score is None and error == LATE for score, _, error in outcomes)
        metrics = {
            "reward/num_failed": float(failed.sum()),
            "reward/num_timed_out": float(num_late),
            "timing_s/reward": seconds,
        }
        extras = {}
        for name in sorted({name for _, extra, _ in outcomes for name in extra} - {STEPS}):
            column = [extra.get(name, np.nan) for _, extra, _ in outcomes]
            extras[name] = np.array(column, object if name == VOTE else np.float64)
            if name != VOTE and not np.isnan(extras[name]).all():
                metrics[f"reward/{name}/mean"] = float(np.nanmean(extras[name]))
        notes = [note for score, _, note in outcomes if score is not None and note]
        if notes:
            metrics["reward/num_ignored"] = float(len(notes))
        note = notes[0] if notes else ""
        return TermScores(scores, step_ends, failed, failures, extras, metrics, note)

    def close(self) -> None:
        """End the processes, even if a batch is being scored."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._scorer.give_up()
        self._thread.shutdown()
        self._scorer.stop()


def _on_tokens(values: Tensor, outcomes: list[ScoreOutcome], mask: Tensor) -> tuple[Tensor, Tensor]:
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


def reward_samples(batch: DataProto, tokenizer: Any) -> list[Sample]:
    """Return what a reward function can read of each row."""
    columns = batch.non_tensor_batch
    rows = range(len(batch))
    reader = ThoughtReader.of(tokenizer)
    texts = decode_responses(batch, tokenizer)
    split = [split_thoughts(text, reader.is_open) for text in texts]
    fields = {
        "data_source": columns["data_source"],
        "solution_str": [content for _, content in split] if reader.hides else texts,
        "ground_truth": [rule["ground_truth"] for rule in columns["reward_model"]],
        "extra_info": columns["extra_info"],
        "raw_prompt": columns.get("raw_prompt", [""] * len(batch)),
        "uid": columns.get("uid", rows),
        "num_tokens": count_ones(batch, "response_mask").tolist(),
        IMAGES: columns.get(IMAGES, [()] * len(batch)),
    }
    others: Iterable[Mapping[str, Any]] = columns.get("row_columns", [{}] * len(batch))
    values = zip(*fields.values(), strict=True)
    return [
        {"content": content, REASONING: reasoning, **other, **dict(zip(fields, row, strict=True))}
        for (reasoning, content), other, row in zip(split, others, values, strict=True)
    ]


def decode_responses(batch: DataProto, tokenizer: Any) -> list[str]:
    """Return the text of every response; the first call adds the texts to the batch.

    Example:

        scores = [float("5" in text) for text in decode_responses(batch, tokenizer)]
    """
    if RESPONSE_TEXT in batch.non_tensor_batch:
        return list(batch.non_tensor_batch[RESPONSE_TEXT])
    # rows are numpy arrays, because with tensors this takes 8 times as long
    rows, masks = token_rows(batch, "responses", "response_mask")
    responses = [row[mask != 0].tolist() for row, mask in zip(rows, masks, strict=True)]
    texts = decode_rows(tokenizer, responses)
    batch.non_tensor_batch[RESPONSE_TEXT] = object_rows(texts)
    return texts


def decode_rows(tokenizer: Any, rows: Sequence[list[int]]) -> list[str]:
    """Decode rows of ids, without special tokens except those around reasoning.

    The tokenizer's `batch_decode` inspects every id in Python, which takes twice as long as
    decoding. So fast tokenizers are called directly, with all rows at once.
    """
    from transformers import PreTrainedTokenizerFast

    reader = ThoughtReader.of(tokenizer)
    is_plain = isinstance(tokenizer, PreTrainedTokenizerFast) and (
        type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    )
    decode = tokenizer.batch_decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        decode = tokenizer.backend_tokenizer.decode_batch
    return [reader.cleaned(text) for text in decode(rows, skip_special_tokens=not reader.hides)]
