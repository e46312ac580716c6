"""The tokens of a step: drawn = trained + left out (by reason).

A token counts where the samples reach the driver, and where they are handed to an update, each on
its own: one that is lost on its way shows.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trainer.report.tokens import DRAWN, LEFT_OUT, TRAINED
from verl_like.batch.protocol import DataProto
from verl_like.errors import LedgerError
from workers.columns import count_ones, require

OWN_CODE = "by code of the run's own"


class TokenLedger:
    """Of one step."""

    def __init__(self) -> None:
        self.drawn = 0
        self.left_out: Counter[str] = Counter()

    def draw(self, batch: DataProto) -> None:
        """These samples have come; of trajectories with what was drawn before they began anew."""
        given_up = tokens_given_up(batch)
        for reason, num in given_up.items():
            self.leave(reason, num)
        self.drawn += num_tokens(batch) + given_up.total()

    def leave(self, reason: str, num: int) -> None:
        """So many tokens are not trained on."""
        if num:
            self.left_out[reason] += num

    def reach_update(self, num: int, reason: str | None) -> None:
        """So many have come as far as the update; `reason` has the others, if there may be any.

        A batch that comes again was not drawn in this step, and counts for nothing.
        """
        if not self.drawn:
            return
        astray = self.drawn - self.left_out.total() - num
        if astray and reason is None:
            raise LedgerError(
                f"tokens of a step do not add up: {self.drawn} were drawn, {num} came to the "
                f"update, and only {dict(self.left_out)} were left out."
            )
        self.leave(reason or "", astray)

    def metrics(self, trained: int) -> dict[str, float]:
        """What was drawn, what is trained on, and what is not for which reason."""
        if not self.drawn:
            return {}
        if self.drawn != trained + self.left_out.total():
            raise LedgerError(
                f"tokens of an update do not add up: {self.drawn} were drawn, {trained} are "
                f"trained on, and {dict(self.left_out)} were left out."
            )
        found = {DRAWN: float(self.drawn), TRAINED: float(trained)}
        return found | {LEFT_OUT + reason: float(num) for reason, num in self.left_out.items()}


def tokens_given_up(batch: DataProto | None) -> Counter[str]:
    """Tokens that the trajectories of these rows had drawn before they began anew, by reason."""
    found = Counter[str]()
    for one in () if batch is None else batch.non_tensor_batch.get("episode", ()):
        found.update(one.get("given_up_tokens", {}))  # a pad row has none
    return found


def num_tokens(batch: DataProto, once: bool = False) -> int:
    """Tokens of a batch that are in the losses; `once`: of rows that come twice, of one."""
    counts = count_ones(batch, "response_mask")
    if once:
        require(batch, "uid", "sample_index")
        names = zip(
            batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist(), strict=True
        )
        counts = counts[np.unique([f"{uid} {index}" for uid, index in names], return_index=True)[1]]
    return int(counts.sum())
