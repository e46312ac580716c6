"""usage: verl-like join RUN_DIR [options of ray start]

Adds this machine to the Ray cluster of an asynchronous run in progress. With
async_training.min_generators, the run starts a generator where there is room
for one, sends it the newest weights, and gives it prompts.

  verl-like join runs/verl_like/async --num-gpus=8

This machine needs the same packages, a RUN_DIR that it shares with the others,
and the cluster's token (RAY_AUTH_TOKEN). The command lasts as long as the node.
After SIGTERM, Ray 2.60 tells the run that the node goes, and waits until the
generator has finished its samples, at most
RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (30) seconds. Others generate the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.groups.cluster import RAY_ADDRESS
from verl_like.errors import ConfigError
from verl_like.process.info import ONE_THREAD


def main(arguments: Sequence[str]) -> None:
    """Become `ray start`."""
    if not arguments:
        sys.exit(__doc__)
    folder, *options = arguments
    try:
        address = (Path(folder) / RAY_ADDRESS).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{folder} has no {RAY_ADDRESS} ({error.strerror}), so it is not the folder of a run "
            "with async_training.min_generators, or this machine does not see it."
        ) from None
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    start = [*ray, "start", f"--address={address}", "--block", *options]
    os.execve(sys.executable, start, {**ONE_THREAD, **os.environ})
