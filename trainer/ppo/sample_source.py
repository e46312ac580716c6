"""Where a step's samples come from: a bounded queue between their makers and the trainer.

`PPOTrainer.step` takes one batch a step and does not know who made it:

    source = SynchronousSource(loader, trainer.generate, trainer.make_samples)
    for step in range(num_steps):
        batch, metrics = source.take()    # every row with the `policy_version` that made it

In the synchronous loop nothing is made ahead, so every sample is of the current policy. A source
with makers of its own bounds what may wait, and makers wait while it is full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from verl_like.batch.protocol import DataProto

Samples = tuple[DataProto, dict[str, float]]
"""A batch, and metrics of how it was made."""
Draw = Callable[[int], DataProto]
"""The number of a draw within its step -> samples of as many prompts as a step has."""


class SampleSource(ABC):
    """What `PPOTrainer` asks for the samples of a step."""

    @abstractmethod
    def take(self) -> Samples:
        """The samples of the next step; waits for them, and raises what their making raised."""

    @abstractmethod
    def close(self) -> None:
        """End the making of samples. Safe to call twice."""


class SynchronousSource(SampleSource):
    """A batch is made when it is asked for, by the weights of that moment."""

    def __init__(
        self,
        prompts: Iterable[DataProto],
        generate: Callable[[DataProto, int], DataProto],
        make: Callable[[Draw], Samples],
    ) -> None:
        """`make` draws as often as it needs to for the samples of one step."""
        self._prompts = iter(prompts)
        self._generate = generate
        self._make = make

    def take(self) -> Samples:
        """Make the next batch now."""
        return self._make(lambda attempt: self._generate(next(self._prompts), attempt))

    def close(self) -> None:
        """Nothing is ever under way between two calls."""
