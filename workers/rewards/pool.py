"""Scores on the driver: responses are decoded here and scored in processes that a deadline can
kill.

`trainer.ppo.step` calls:

    manager = make_reward_manager(custom, rules, tokenizer, sources) # the function is loaded, or refused
    rewards = manager.remote(batch)                                  # decodes, then returns at once
    batch = batch.union(rewards.get())                               # token_level_scores, the function's other numbers

With a reward model, `SummedScores` adds its scores to these.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.process.machine import usable_cores
from workers.columns import read_columns
from workers.config import OverlongBufferConfig, RewardFunctionConfig, RewardModelConfig
from workers.rewards.functions import check_rules
from workers.rewards.process import LATE, VOTE, FunctionSpec, Outcome

logger = logging.getLogger(__name__)
Sample = tuple[str, str, Any, dict[str, Any]]
GRACE_S = 0.5
"""What a sample gets beyond its deadline before its process is killed: coroutines keep the deadline
themselves.
"""
MOST_PROCESSES = 8
"""Processes that score a batch, where the machine has as many cores."""
SLOW_S = 1.0
"""A batch that is not done gets one process more whenever this time has passed."""
MOST_AT_A_TIME = 64
"""Samples that a process is asked for at once."""


def make_reward_manager(
    custom: RewardFunctionConfig,
    rules: RewardModelConfig,
    tokenizer: Any,
    data_sources: Iterable[str],
) -> RewardManager:
    """The manager that these settings ask for; a function that cannot be loaded, or lacks a rule,
    is refused here.
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
    """The scores of the rules, weighted, plus those of the reward model: a future like the two it
    joins.
    """

    def __init__(self, rules: RewardFuture, model: Any, rule_weight: float):
        """`model` is the future of `rm_scores`."""
        self._rules, self._model, self._rule_weight = rules, model, rule_weight

    def get(self, timeout: float | None = None) -> Scored:
        """The sum, with the mean of each part among the metrics; waits at most `timeout` seconds
        for each.
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
        return result, metrics

    def done(self) -> bool:
        """Whether `get` returns at once."""
        return bool(self._rules.done() and self._model.done())


class RewardManager:
    """Scores batches by a function (data_source, solution_str, ground_truth, extra_info) -> float
    or dict with "score".

    A sample whose call raises, returns no finite number, or passes its deadline gets
    `default_score`; so does what is left of a batch after `batch_deadline`. They are counted in the
    metrics and never stop the step.
    """

    def __init__(
        self,
        tokenizer: Any,
        function: FunctionSpec | None = None,
        default_score: float = 0.0,
        batch_deadline: float = 120.0,
        overlong: OverlongBufferConfig | None = None,
    ):
        """A function that cannot be loaded is refused here; without one, rows are scored by their
        data_source.
        """
        self._tokenizer = tokenizer
        self._default_score, self._overlong = default_score, overlong
        function = function or FunctionSpec()
        self._scorer = _Scorer(function, batch_deadline)
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
        """Start scoring; reads responses, mask, data_source, reward_model and extra_info."""
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
        failed = [
            (uid, error)
            for uid, (score, _, error) in zip(uids, outcomes, strict=True)
            if score is None
        ]
        if failed:
            told = "; ".join(f"{uid}: {error}" for uid, error in failed[:3])
            logger.warning(
                "%d of %d samples got the default score %g: %s",
                len(failed),
                len(samples),
                self._default_score,
                told,
            )
        values = torch.tensor(
            [self._default_score if score is None else score for score, _, _ in outcomes]
        )
        names = sorted({name for _, extras, _ in outcomes for name in extras})
        columns = {name: [extras.get(name, np.nan) for _, extras, _ in outcomes] for name in names}
        extras = {
            name: np.array(column, object if name == VOTE else np.float64)
            for name, column in columns.items()
        }
        if self._overlong is not None:
            punishment = overlong_punishment(mask.sum(-1), mask.shape[-1], self._overlong)
            extras["overlong_reward"] = punishment.double().numpy()
            values = values + punishment
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        scores[torch.arange(len(values)), (mask.sum(-1) - 1).clamp(min=0)] = values
        num_late = sum(error == LATE for _, error in failed)
        metrics = {
            "reward/num_failed": float(len(failed) - num_late),
            "reward/num_timed_out": float(num_late),
        }
        metrics["timing_s/reward"] = seconds
        metrics |= {
            f"reward/{name}/mean": float(np.nanmean(column))
            for name, column in extras.items()
            if name != VOTE and not np.isnan(column).all()
        }
        result = DataProto.from_dict(
            tensors={"token_level_scores": scores},
            non_tensors={f"reward_extra/{name}": column for name, column in extras.items()},
        )
        return result, metrics

    def close(self) -> None:
        """End the processes."""
        self._thread.shutdown(cancel_futures=True)
        self._scorer.stop()


def decode_responses(batch: DataProto, tokenizer: Any) -> list[str]:
    """The text of every response, without what stands behind its end."""
    read = read_columns(batch, "responses", "response_mask")
    rows, mask = (
        read["responses"].numpy(),
        read["response_mask"].bool().numpy(),
    )  # tensors would take 8 times as long
    responses = [row[keep].tolist() for row, keep in zip(rows, mask, strict=True)]
    return list(tokenizer.batch_decode(responses, skip_special_tokens=True))


def overlong_punishment(lengths: Tensor, limit: int, buffer: OverlongBufferConfig) -> Tensor:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13) of responses of these lengths.

    0 up to `limit - buffer.len` tokens, from there falling evenly to `-buffer.penalty_factor` at
    `limit`.
    """
    excess = (lengths - (limit - buffer.len)).clamp(min=0)
    return -excess.float() / buffer.len * buffer.penalty_factor


class _Batch:
    """The samples of one batch that nobody has asked for yet, and what has come of the others."""

    def __init__(self, samples: list[Sample], seconds: float):
        self.waiting = deque(enumerate(samples))
        self.outcomes: list[Outcome] = [(None, {}, LATE)] * len(samples)
        self.end = time.monotonic() + seconds
        self._taking = Lock()

    def take(self, shares: int | None) -> dict[int, Sample]:
        """The next samples by their numbers: one of so many shares of the rest; None: all."""
        with self._taking:
            left = len(self.waiting)
            count = left if shares is None else min(MOST_AT_A_TIME, -(-left // shares))
            return dict([self.waiting.popleft() for _ in range(count)])

    def goes_on(self) -> bool:
        """Whether samples wait and there is time left."""
        return bool(self.waiting) and time.monotonic() < self.end


class _Scorer:
    """The processes of a function. Only a batch that takes long starts more than the first."""

    def __init__(self, function: FunctionSpec, batch_deadline: float):
        self._batch_deadline = batch_deadline
        count = min(MOST_PROCESSES, usable_cores())
        self._processes = [_Process(function, batch_deadline) for _ in range(count)]
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="scorer")

    def start(self) -> None:
        """Have the function loaded once; raises what is wrong with it."""
        self._processes[0].start()

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """An outcome for every sample."""
        batch = _Batch(samples, self._batch_deadline)
        running: list[Future[None]] = []
        for process in self._processes:
            if batch.goes_on():
                shares = None if self._processes[0].side_by_side else 2 * len(self._processes)
                running.append(self._threads.submit(process.score, batch, shares))
                wait(running, SLOW_S)
        for future in running:
            future.result()
        return batch.outcomes

    def stop(self) -> None:
        """End all processes."""
        self._threads.shutdown()
        for process in self._processes:
            process.stop()


class _Process:
    """The other end of `workers.rewards.process`: started when it is
    asked, killed when it hangs.
    """

    def __init__(self, function: FunctionSpec, start_deadline: float):
        self._function, self._start_deadline = function, start_deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self.side_by_side = False
        """Whether the function's calls run at the same time; known when it is loaded."""

    def score(self, batch: _Batch, shares: int | None) -> None:
        """Take samples of the batch until none is left; a process that does not start leaves them
        to the others.
        """
        try:
            self.start()
        except (EOFError, OSError) as err:
            self.stop()
            logger.warning(
                "a process of %s does not start: %s", self._function, err or type(err).__name__
            )
            return
        while batch.goes_on():
            self._score(batch.take(shares), batch)

    def _score(self, pending: dict[int, Sample], batch: _Batch) -> None:
        # once the process has died: coroutines run side by side, and any of them may have ended it
        one_by_one = False
        while pending and time.monotonic() < batch.end:
            asked = dict(list(pending.items())[: 1 if one_by_one else None])
            try:
                pipe = self.start()
                pipe.send(list(asked.items()))
                while asked:
                    patience = min(self._function.deadline + GRACE_S, batch.end - time.monotonic())
                    if not pipe.poll(max(0.0, patience)):
                        raise TimeoutError
                    number, outcome = pipe.recv()
                    batch.outcomes[number] = outcome
                    del pending[number], asked[number]
            except TimeoutError:
                self.stop()
                del pending[next(iter(asked))]
            except (EOFError, OSError):
                code = self.stop()
                if one_by_one:
                    (number,) = asked
                    batch.outcomes[number] = (
                        None,
                        {},
                        f"the reward process ended with exit code {code}",
                    )
                    del pending[number]
                one_by_one = True

    def start(self) -> Connection:
        """The pipe to the process, which is started if there is none."""
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            number = theirs.fileno()
            command = [
                sys.executable,
                "-P",
                "-m",
                "workers.rewards.process",
                str(number),
                self._function.to_json(),
            ]
            path = os.pathsep.join(entry for entry in sys.path if entry)
            environment = {**os.environ, "PYTHONPATH": path}
            # a group of its own: Ctrl-C is for the driver, which ends this process
            self._process = subprocess.Popen(
                command, pass_fds=[number], env=environment, process_group=0
            )
            theirs.close()
            if not self._pipe.poll(self._start_deadline):
                raise TimeoutError(f"{self._function} is not loaded yet")
            problem, self.side_by_side = self._pipe.recv()
            if problem is not None:
                self.stop()
                raise ConfigError(problem)
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
