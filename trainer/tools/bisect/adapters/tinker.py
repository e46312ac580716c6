"""Record the loop of a Tinker client, which has its samples, rewards and advantages as lists.

recorder = TinkerRecorder("records/tinker", {"learning_rate": 1e-4})
recorder.step(1, prompts, responses, log_probs, rewards, advantages, group, lr=1e-4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainer.tools.bisect.adapters.slime import padded
from verl_like.record import Recorder


class TinkerRecorder:
    """Writes the steps of a client's loop."""

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self.recorder = Recorder(folder, "tinker", config)

    def step(
        self,
        number: int,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]] | None = None,
        rewards: Sequence[float] | None = None,
        advantages: Sequence[float] | None = None,
        group: Sequence[int] | None = None,
        **numbers: Any,
    ) -> None:
        """Write a step; a row is a sample, and `numbers` are `loss`, `lr` and others."""
        ids = [[np.asarray(row, dtype=np.int64) for row in rows] for rows in (prompts, responses)]
        arrays: dict[str, Any] = {
            "prompts": padded(ids[0]),
            "prompt_mask": padded([np.ones(len(row)) for row in ids[0]]) != 0,
            "responses": padded(ids[1]),
            "response_mask": padded([np.ones(len(row)) for row in ids[1]]),
            "response_lengths": np.array([len(row) for row in ids[1]]),
        }
        if log_probs is not None:
            arrays["rollout_log_probs"] = padded(
                [np.asarray(row, dtype=float) for row in log_probs]
            )
        for name, values in (("scores", rewards), ("advantages", advantages), ("group", group)):
            if values is not None:
                arrays[name] = np.asarray(values)
        self.recorder.step(number, arrays, **numbers)
