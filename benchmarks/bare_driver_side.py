"""The driver's cost for Ray alone: the calls of an asynchronous step of 64 samples, without work.

    python benchmarks/bare_driver_side.py [STEPS]

The script prints JSON; `bench_async.py` runs it. A trainer and a generator are plain actors that
sleep as long as a step's methods take. As in a real step, the driver's main thread reads the
samples, calls two concurrent log-prob passes and two concurrent updates on them, and publishes
weights. A second thread makes the generator receive weights and generate samples. Headers and
payloads have the same sizes as verl-like's.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time

import ray

HEADER, BATCH, PROMPTS = 300, 23_000, 3_000
"""Bytes of a call's result header, of a batch of 64 samples, and of their prompts."""
WARM_UP = 5
RECEIVE_S, GENERATE_S, READ_S, UPDATE_S, PUBLISH_S = 0.01, 0.18, 0.02, 0.06, 0.01
"""Durations of the methods: a step takes about 0.2 s, as with two layers."""
SESSION = {
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
}
"""Settings with which `verl_like.backends.ray.cluster` starts Ray."""


class Idle:
    """A worker whose methods only sleep."""

    def small(self, seconds: float) -> bytes:
        """Return a header."""
        time.sleep(seconds)
        return bytes(HEADER)

    @ray.method(num_returns=2)
    def batch(self, seconds: float, rows: bytes) -> tuple[bytes, bytes]:
        """Return a batch and a header."""
        time.sleep(seconds)
        return bytes(BATCH), bytes(HEADER)


def make_samples(
    generator: ray.actor.ActorHandle, samples: queue.Queue[list[ray.ObjectRef]]
) -> None:
    """Run as the generator's thread: receive weights and generate samples until exit."""
    while True:
        ray.get(generator.small.remote(RECEIVE_S))
        payload, header = generator.batch.remote(GENERATE_S, bytes(PROMPTS))
        ray.wait([header], fetch_local=False)
        ray.get(header)
        samples.put([header, payload])


def step(trainer: ray.actor.ActorHandle, samples: queue.Queue[list[ray.ObjectRef]]) -> None:
    """Make the calls of the main thread, and wait for them."""
    ray.get(samples.get())
    rows = bytes(BATCH)
    for seconds in (READ_S, UPDATE_S):
        answers = [trainer.batch.remote(seconds, rows) for _ in range(2)]
        ray.get([reference for answer in answers for reference in answer])
    ray.get(trainer.small.remote(PUBLISH_S))


def main() -> None:
    """Print the driver's CPU milliseconds per step, and its share of one core."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    os.environ.update(SESSION)
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)
    actor = ray.remote(Idle)
    trainer, generator = actor.remote(), actor.remote()
    samples: queue.Queue[list[ray.ObjectRef]] = queue.Queue(1)
    threading.Thread(target=make_samples, args=(generator, samples), daemon=True).start()
    for _ in range(WARM_UP):
        step(trainer, samples)

    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step(trainer, samples)
    wall, used = time.perf_counter() - began, time.process_time() - used
    print(json.dumps({"ms": 1e3 * used / steps, "share": used / wall}), flush=True)


if __name__ == "__main__":
    main()
