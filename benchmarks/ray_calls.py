"""Measure the CPU time that Ray itself takes from the driver per call of an actor.

    python benchmarks/ray_calls.py [--calls 4000]

This is a floor for a driver that calls every rank: bare actors, which do nothing. `simple` calls
send 200 bytes; `with part` also pass a reference to an object in the store; `put` puts a part of
1 MB. The answers of all calls are read by one `ray.get`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

ACTORS = 2


@ray.remote(num_cpus=0)
class Bare:
    """Answers like a rank whose payload stays in the store: a payload and a header."""

    @ray.method(num_returns=2)
    def call(self, message: bytes, *parts: Any) -> tuple[None, bytes]:
        """Return at once."""
        return None, message


def cpu_ms(work: Callable[[], Any], calls: int) -> float:
    """Return the milliseconds of CPU time per call, the least of three rounds."""
    rounds = []
    for _ in range(3):
        before = time.process_time()
        work()
        rounds.append((time.process_time() - before) / calls * 1e3)
    return min(rounds)


def main() -> None:
    """Print one line per kind of call."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=4000)
    calls = parser.parse_args().calls
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors = [Bare.remote() for _ in range(ACTORS)]
    message, part = bytes(200), ray.put(np.zeros(1 << 17))

    def call(*parts: Any) -> None:
        answers = [actors[n % ACTORS].call.remote(message, *parts) for n in range(calls)]
        ray.get([reference for answer in answers for reference in answer])

    call()
    print(f"simple     {cpu_ms(call, calls):.3f} ms")
    print(f"with part  {cpu_ms(lambda: call(part), calls):.3f} ms")
    puts = calls // 10
    put_ms = cpu_ms(lambda: [ray.put(np.zeros(1 << 17)) for _ in range(puts)], puts)
    print(f"put        {put_ms:.3f} ms")


if __name__ == "__main__":
    main()
