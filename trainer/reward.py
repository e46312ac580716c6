"""Rule rewards on the driver: responses are decoded here and scored in one process, which a deadline can kill.

rewards = manager.remote(batch)     # decodes, then returns at once
batch = batch.union(rewards.get())  # token_level_scores, the function's other numbers
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from trainer.batch_columns import read_columns
from trainer.reward_process import Outcome
from verl_like.errors import ConfigError
from verl_like.protocol import DataProto

logger = logging.getLogger(__name__)
Sample = tuple[str, str, Any, dict[str, Any]]


class RewardFuture:
    """Scores that are being computed."""

    def __init__(self, future: Future[DataProto]):
        """Wraps a thread's future."""
        self._future = future

    def get(self, timeout: float | None = None) -> DataProto:
        """The scores; waits at most `timeout` seconds."""
        return self._future.result(timeout)

    def done(self) -> bool:
        """Whether `get` returns at once."""
        return self._future.done()


class RewardManager:
    """Scores batches by a function (data_source, solution_str, ground_truth, extra_info) -> float or dict with "score".

    A sample that raises, or takes longer than `sample_deadline` seconds, gets `default_score`; so does what is left of
    a batch after `batch_deadline`. Both are counted in `meta_info["reward_metrics"]` and never stop the step.
    """

    def __init__(
        self,
        tokenizer: Any,
        compute_score: str = "workers.reward_functions.default_compute_score",
        default_score: float = 0.0,
        sample_deadline: float = 10.0,
        batch_deadline: float = 120.0,
    ):
        """`compute_score` is the function's dotted path; one that cannot be imported is refused here."""
        self._tokenizer = tokenizer
        self._default_score = default_score
        self._scorer = _Scorer(compute_score, sample_deadline, batch_deadline)
        try:
            self._scorer.start()
        except (EOFError, OSError, TimeoutError) as err:
            self._scorer.stop()
            raise ConfigError(
                f"The reward function {compute_score!r} cannot be loaded within {batch_deadline:g} s; what its process "
                "said is above. Give a dotted path, module.function, that Python finds."
            ) from err
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")

    def remote(self, batch: DataProto) -> RewardFuture:
        """Start scoring `batch` (responses, response_mask, data_source, reward_model, extra_info)."""
        read = read_columns(batch, "responses", "response_mask")
        mask = read["response_mask"].bool()
        responses = [row[keep].tolist() for row, keep in zip(read["responses"], mask, strict=True)]
        solutions = self._tokenizer.batch_decode(responses, skip_special_tokens=True)
        columns = batch.non_tensor_batch
        samples: list[Sample] = [
            (source, solution, rule["ground_truth"], extra)
            for source, solution, rule, extra in zip(
                columns["data_source"], solutions, columns["reward_model"], columns["extra_info"], strict=True
            )
        ]
        uids = list(columns.get("uid", range(len(samples))))
        return RewardFuture(self._thread.submit(self._score, samples, uids, mask))

    def _score(self, samples: list[Sample], uids: list[Any], mask: torch.Tensor) -> DataProto:
        outcomes = self._scorer.score(samples)
        failed = [(uid, error) for uid, (score, _, error) in zip(uids, outcomes, strict=True) if score is None]
        if failed:
            logger.warning(
                "%d of %d samples got the default score; first: %s: %s", len(failed), len(samples), *failed[0]
            )
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        last = (mask.sum(-1) - 1).clamp(min=0)
        values = [self._default_score if score is None else score for score, _, _ in outcomes]
        scores[torch.arange(len(values)), last] = torch.tensor(values, dtype=torch.float32)
        names = sorted({name for _, extras, _ in outcomes for name in extras})
        extras = {
            f"reward_extra/{name}": np.array([extras.get(name, np.nan) for _, extras, _ in outcomes], dtype=np.float64)
            for name in names
        }
        num_late = sum(error == LATE for _, error in failed)
        metrics = {"reward/num_failed": float(len(failed) - num_late), "reward/num_timed_out": float(num_late)}
        return DataProto.from_dict(
            tensors={"token_level_scores": scores}, non_tensors=extras, meta_info={"reward_metrics": metrics}
        )

    def close(self) -> None:
        """End the process."""
        self._thread.shutdown(cancel_futures=True)
        self._scorer.stop()


LATE = "passed its deadline"


class _Scorer:
    """The other end of `trainer.reward_process`."""

    def __init__(self, compute_score: str, sample_deadline: float, batch_deadline: float):
        self._compute_score = compute_score
        self._sample_deadline, self._batch_deadline = sample_deadline, batch_deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """An outcome for every sample."""
        outcomes: list[Outcome] = []
        end = time.monotonic() + self._batch_deadline
        while len(outcomes) < len(samples) and time.monotonic() < end:
            try:
                pipe = self.start()
                pipe.send(samples[len(outcomes) :])
                while len(outcomes) < len(samples):
                    if not pipe.poll(max(0.0, min(self._sample_deadline, end - time.monotonic()))):
                        raise TimeoutError
                    outcomes.append(pipe.recv())
            except TimeoutError:
                self.stop()
                outcomes.append((None, {}, LATE))
            except (EOFError, OSError):
                code = self.stop()
                outcomes.append((None, {}, f"the reward process ended with exit code {code}"))
        return outcomes + [(None, {}, LATE)] * (len(samples) - len(outcomes))

    def start(self) -> Connection:
        """The pipe to the process, which is started if there is none."""
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", "trainer.reward_process", str(number), self._compute_score]
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(command, pass_fds=[number], env={**os.environ, "PYTHONPATH": path})
            theirs.close()
            if not self._pipe.poll(self._batch_deadline):
                raise TimeoutError(f"{self._compute_score} is not imported yet")
            self._pipe.recv()
        return self._pipe

    def stop(self) -> int | None:
        """Kill the process, if there is one; its exit code."""
        if self._process is None or self._pipe is None:
            return None
        self._pipe.close()
        self._process.kill()
        code = self._process.wait()
        self._process = self._pipe = None
        return code
