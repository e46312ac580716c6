"""Turns of a trajectory that its process had finished when it was lost, and from which it goes on.

What was drawn in them is said to a fresh environment, which has to answer as the lost one did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.rollout.sample import Sample

BEGUN = "begun"
"""Column: the finished turns of each row's trajectory, None where it has none."""


@dataclass(frozen=True)
class Begun:
    """The finished turns of a trajectory that has not ended."""

    sample: Sample
    """To the token that was drawn last."""
    turns: Sequence[int]
    """Of each token."""
    reasons: Sequence[str]
    """Why each turn has ended: a `finish_reason`."""
    answers: Sequence[Mapping[str, Any]]
    """The environment's before the last turn, that of `reset` first."""
    attempts: int
    given_up: Counter[str]
    """Reason -> tokens that were drawn before it was begun anew."""
    faults: Counter[str]

    @property
    def num_turns(self) -> int:
        """Those that are drawn."""
        return len(self.reasons)

    @property
    def num_drawn(self) -> int:
        """Tokens that are drawn."""
        return int((self.sample.versions >= 0).sum())

    def follows(self, answers: Sequence[Mapping[str, Any]]) -> bool:
        """Whether an environment has given its last answer in the lost one's words."""
        place = len(answers) - 1
        return place >= len(self.answers) or answers[place] == self.answers[place]

    def drawn_after(self, sample: Sample, turn: int) -> Sample | None:
        """A sample with what was drawn in this turn; None: then something else was read before."""
        length, mine = len(sample.tokens), self.sample
        if mine.prompt != sample.prompt or not mine.tokens[:length].equal(sample.tokens):
            return None
        drawn = (mine.versions >= 0) & (torch.tensor(self.turns) == turn)
        end = int(drawn.nonzero()[-1]) + 1
        truncated, routed = mine.truncated_log_probs, mine.routed_experts
        return replace(
            sample,
            tokens=mine.tokens[:end],
            log_probs=mine.log_probs[:end],
            versions=mine.versions[:end],
            truncated_log_probs=None if truncated is None else truncated[:end],
            routed_experts=None if routed is None else routed[: len(mine.prompt) + end],
            finish_reason=self.reasons[turn],
        )
