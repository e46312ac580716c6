"""An environment: guess a number from 1 to 10 in four turns.

A policy that ignores the hints finds the number in at most 4 of 10 trajectories.
"""

from __future__ import annotations

from typing import Any

from verl_like import Environment, Observation, TrajectoryEnd


class Guess(Environment):
    def reset(self, row: Any, rng: Any) -> None:
        self.secret, self.left = int(rng.integers(1, 11)), 4

    def step(self, text: str) -> Observation | TrajectoryEnd:
        guess, self.left = int(text) if text.isdecimal() else 0, self.left - 1
        if guess == self.secret or not self.left:
            return TrajectoryEnd(reward=float(guess == self.secret))
        return Observation("higher" if guess < self.secret else "lower")
