"""Train a reward model: `trainer.rows` on pairs, with accuracy and loss on validation pairs.

`trainer.data.pairs` describes the pairs and their formats.

A PPO sample that is not truncated ends with its first stop token, and its score is read at the last
token. A chat template may write a line break after the stop token, or no stop token at all. So
training sequences are cut to end like PPO's samples (`end_as_samples_do`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer.data.files import row_limit
from trainer.data.lm_rows import stop_tokens, without_blanks
from trainer.data.pairs import PairRow, pair_batch, read_pairs
from trainer.reward_model.recipe import RewardModelRunConfig
from trainer.rows.trainer import ROWS_RUN, RowTrainer, longest_row
from trainer.run_state import Metrics
from workers.columns import read_columns
from workers.losses.preference import compute_reward_loss, get_pairwise_loss, rank_accuracy

logger = logging.getLogger(__name__)


def end_as_samples_do(
    key: str, rows: Sequence[PairRow], tokenizer: Any, path: str, max_length: int
) -> list[PairRow]:
    """Cut whitespace after a side's stop token; warn about sides that end otherwise.

    `key` names the files, `path` the model. Sides of `max_length` tokens are not reported, because
    they may have been cut.
    """
    stops = stop_tokens(tokenizer, path)
    pairs, num_open = [], 0
    for row in rows:
        sides = {name: without_blanks(side, stops, tokenizer) for name, side in row.sides.items()}
        pairs.append(PairRow(**sides, margin=row.margin))
        for side in sides.values():
            num_open += len(side.ids) < max_length and int(side.ids[-1]) not in stops

    if num_open:
        names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(set(stops))))
        text = (
            "%s: %d of %d responses do not end with a stop token (%s), but PPO's samples do, so "
            "their scores would be read at a token that was never trained. Change the chat "
            "template so that it writes the stop token after the assistant's turns, or write "
            "prompt, chosen and rejected as texts."
        )
        logger.warning(text, key, num_open, 2 * len(rows), names)
    return pairs


class RewardModelTrainer(RowTrainer[PairRow]):
    """The trainer of `verl-like reward-model`; `self.groups["reward_model"]` trains the model.

    Example:

        class WithMargin(RewardModelTrainer):
            def validation_metrics(self):
                metrics = super().validation_metrics()
                return metrics | {"val-core/rm/margin": metrics["val-aux/rm/margin"]}
    """

    config: RewardModelRunConfig
    recipe = replace(ROWS_RUN, role="reward_model")
    make_batch = staticmethod(pair_batch)

    @classmethod
    def read_rows(
        cls, config: RewardModelRunConfig, key: str, files: object, tokenizer: object
    ) -> list[PairRow]:
        """Return pairs of responses or of whole dialogues, which end like PPO's samples."""
        longest = longest_row(config)
        on_bad_row, limit = config.data.on_bad_row, row_limit(config)
        rows = read_pairs(key, files, tokenizer, longest, on_bad_row, limit)
        return end_as_samples_do(key, rows, tokenizer, config.model.path, longest)

    def validation_metrics(self) -> Metrics:
        """Return the mean metrics of all validation pairs; equal scores count as half correct."""
        scores_of_batches, margins_of_batches = [], []
        for batch in self.in_order(self.validation, "val"):
            scored = self.groups[self.recipe.role].compute_scores(batch)
            scores_of_batches.append(read_columns(scored, "scores")["scores"].double())
            margins_of_batches.append(read_columns(batch, "margin")["margin"].double())
        scores, margins = torch.cat(scores_of_batches), torch.cat(margins_of_batches)

        loss = get_pairwise_loss(self.config.loss)
        losses = compute_reward_loss(loss, scores, margins, self.config.center_coef)
        chosen, rejected = scores.mean(dim=0).tolist()
        return {
            "val-core/rm/accuracy": float(rank_accuracy(scores).mean()),
            "val-core/rm/loss": float(losses.mean()),
            "val-aux/rm/margin": chosen - rejected,
            "val-aux/rm/chosen_score": chosen,
            "val-aux/rm/rejected_score": rejected,
        }
