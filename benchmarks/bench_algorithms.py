"""Time every estimator and loss, and the rollout correction, on 4096 rows of 2048 tokens.

    python benchmarks/bench_algorithms.py           # --small: a few rows, to see that all run

One thread is used. For each function, the script prints the CPU seconds (best of three calls) and
the extra copies: the peak memory of a call beyond its inputs and results, in columns of the batch.
Values above 0.2 s or 2 copies are marked. The first line is a reference for the machine: a column
is copied into new memory.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from live_bytes import peak_bytes
from torch import Tensor

import workers.losses  # noqa: F401
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from workers.config import RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection
from workers.losses.mismatch import MismatchGauge
from workers.losses.registry import POLICY_LOSSES, traits_of
from workers.losses.value import compute_value_loss

LIMITS = {"seconds": 0.2, "copies": 2.0}
SAMPLES_OF_A_PROMPT = 8
ROUNDS = 3


def make_columns(rows: int, width: int) -> dict[str, Any]:
    """Return the inputs of estimators and losses: float32 columns and ragged responses."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(rows, width, generator=generator)

    lengths = torch.randint(width // 4, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).to(torch.int64)
    chances = torch.rand(rows, width, generator=generator).mul_(0.8).add_(0.1)
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths[:, 0] - 1] = torch.rand(rows, generator=generator)
    old = chances.log()

    return {
        "response_mask": mask,
        "token_level_rewards": rewards,
        "token_level_scores": rewards,
        "step_ends": rewards != 0,
        "values": normal(),
        "old_log_probs": old,
        "sum_pi_squared": chances.square(),
        "reward_baselines": torch.rand(rows, generator=generator),
        "named_rewards": torch.rand(rows, 3, generator=generator),
        "index": np.arange(rows) // SAMPLES_OF_A_PROMPT,
        "gamma": 1.0,
        "lam": 0.95,
        "old_log_prob": old,
        "log_prob": old + 0.1 * normal(),
        "advantages": normal() * mask,
        "vpreds": normal(),
        "returns": normal(),
        "cliprange_value": 0.5,
    }


def arguments_of(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that are parameters of the function."""
    names = inspect.signature(function).parameters
    return {name: columns[name] for name in names if name in columns}


def calls_of(columns: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return a call for each name; the call returns the function's results."""
    calls: dict[str, Callable[[], Any]] = {"a copy": columns["values"].clone}
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        arguments = arguments_of(estimator, columns)
        calls[f"estimator {name}"] = lambda f=estimator, columns=arguments: f(**columns)

    for name, loss in POLICY_LOSSES.items():
        arguments = arguments_of(loss, columns)
        choose = traits_of(loss).choose_tokens
        if choose is not None:
            wanted = arguments_of(choose, columns)
            calls[f"choice {name}"] = lambda f=choose, columns=wanted: f(**columns)
            arguments["chosen_tokens"] = choose(**wanted)
        calls[f"loss {name}"] = lambda f=loss, columns=arguments: f(**columns)
        calls[f"loss {name}, with gradient"] = lambda f=loss, columns=arguments: gradient_of(
            f, columns, "log_prob"
        )
    of_values = arguments_of(compute_value_loss, columns)
    calls["value loss"] = lambda: compute_value_loss(**of_values)
    calls["value loss, with gradient"] = lambda: gradient_of(
        compute_value_loss, of_values, "vpreds"
    )
    return calls | calls_of_correction(columns)


def calls_of_correction(columns: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return calls of the rollout correction with its metrics, and of the mismatch gauge."""
    new, old, mask = columns["log_prob"], columns["old_log_prob"], columns["response_mask"]
    settings = {
        "token weights": RolloutCorrectionConfig(rollout_is="token"),
        "all": RolloutCorrectionConfig(
            rollout_is="token",
            rollout_is_threshold="0.5_2.0",
            rollout_rs="token_k3,seq_mean_k1",
            rollout_rs_threshold="0.1,0.66_1.4",
            rollout_token_veto_threshold=1e-4,
        ),
    }

    def correct(correction: RolloutCorrection) -> list[Tensor]:
        weights, remaining = correction(new, old, mask, correction.gauge())
        return [remaining] if weights is None else [weights, remaining]

    def measure() -> list[Tensor]:
        gauge = MismatchGauge(mask.shape[1])
        gauge.add(old, new, mask)
        return []

    calls: dict[str, Callable[[], Any]] = {"mismatch gauge": measure}
    for name, section in settings.items():
        chosen = RolloutCorrection.of(section)
        calls[f"rollout correction, {name}"] = lambda chosen=chosen: correct(chosen)
    return calls


def gradient_of(loss: Callable[..., Any], arguments: dict[str, Any], leaf: str) -> Any:
    """Return the loss, its metrics, and the gradient of its leaf."""
    predicted = arguments[leaf].detach().requires_grad_()
    total, beside = loss(**{**arguments, leaf: predicted})
    total.backward()
    return total.detach(), beside, predicted.grad


def seconds_of(call: Callable[[], Any]) -> float:
    """Return CPU seconds, the best of a few calls."""
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return min(times)


def extra_bytes(call: Callable[[], Any]) -> int:
    """Return the peak bytes of a call, without those of its results."""
    results, most = peak_bytes(call)
    return most - sum(storage.nbytes() for storage in storages_of(results).values())


def storages_of(results: Any) -> dict[int, Any]:
    """Return the storages of the tensors in a result, each once."""
    if isinstance(results, Tensor):
        storage = results.untyped_storage()
        return {storage.data_ptr(): storage}
    storages: dict[int, Any] = {}
    for part in results.values() if isinstance(results, dict) else results:
        storages |= storages_of(part)
    return storages


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="16 rows of 256 tokens")
    parser.add_argument("--only", default="", help="measure names with this part")
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows, width = (16, 256) if options.small else (4096, 2048)
    print(f"{rows} x {width} tokens, torch {torch.__version__}, one thread")
    print(f"{'':44} {'CPU seconds':>12} {'extra copies':>13}")
    for name, call in calls_of(make_columns(rows, width)).items():
        if options.only in name:
            seconds, copies = seconds_of(call), extra_bytes(call) / (4 * rows * width)
            missed = seconds > LIMITS["seconds"] or copies > LIMITS["copies"]
            print(f"{name:44} {seconds:12.3f} {copies:13.2f} {'<- beyond' * missed}", flush=True)


if __name__ == "__main__":
    main()
