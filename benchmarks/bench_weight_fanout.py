"""Measure the time to send a version of the weights to 1, 2 and 4 generators at once.

    python benchmarks/bench_weight_fanout.py [--rounds 9] [--small]

A trainer with LoRA adapters in this process publishes weights; generators in other processes
receive, verify and load them. It sends all weights (`full`) or only the LoRA factors (`changed`).
Every round measures each number of generators once. `--small` is for tests. Prints JSON with
medians over the rounds: the seconds until the last generator has its weights, their ratio to those
of one generator, and the MiB sent to each generator.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
from torch import Tensor, nn

from verl_like import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.group import create_colocated_worker_cls
from verl_like.process.worker import Worker
from workers.config import ModelConfig
from workers.models.lora import add_adapter, is_adapter, merged_tensors, split_tensors
from workers.weights.checksum import NamedTensors, checksum_of
from workers.weights.host_copy import HostCopy
from workers.weights.module_writer import ModuleWriter
from workers.weights.receiver import WeightReceiver
from workers.weights.sender import WeightSender
from workers.weights.sync import deliver_weights, publish_weights

NUMBERS_OF_GENERATORS = (1, 2, 4)
SIZES = {"whole": (25, 1024), "small": (3, 64)}
"""Number of layers and their width: 25 weights of 4 MiB."""


def layers(size: str) -> nn.Sequential:
    """Return linear layers with random weights."""
    number, width = SIZES[size]
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(number)))


class Engine:
    """Replaces a training engine."""

    def __init__(self, size: str) -> None:
        self.module = self.whole_module = layers(size)
        config = ModelConfig(path="", lora_rank=4, target_modules=[str(i) for i in range(99)])
        add_adapter(self.module, config)

    def named_full_tensors(
        self, on_all_ranks: bool = True, dtype: Any = None, merged: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as the training engine does."""
        arranged = merged_tensors if merged else split_tensors
        yield from arranged(self.module, self.module.named_parameters())


class Trainer(WeightSender, Worker):
    """Changes its adapters and publishes them."""

    def __init__(self, size: str) -> None:
        super().__init__()
        self.engine = Engine(size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin(self, sync: str) -> None:
        """Use this kind of sync from now on."""
        self.sends_changed = sync == "changed"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Return a checksum that is comparable with a generator's."""
        return checksum_of(self.engine.named_full_tensors())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self) -> None:
        """Update the adapters."""
        with torch.no_grad():
            for name, parameter in self.engine.module.named_parameters():
                if is_adapter(name):
                    parameter += 0.01 * torch.randn_like(parameter)


class Rollout:
    """Replaces a rollout engine."""

    def __init__(self, size: str) -> None:
        self.module, self.version = layers(size), -1

    def load_weights(self, tensors: NamedTensors) -> None:
        """Load the tensors into the module."""
        writer = ModuleWriter(self.module)
        for name, tensor in tensors:
            writer.write_tensor(name, tensor)
        writer.verify("engine")

    def commit(self, version: int) -> None:
        """Called when all ranks have loaded the version."""
        self.version = version


class Generator(WeightReceiver, Worker):
    """Receives weights."""

    def __init__(self, size: str) -> None:
        super().__init__()
        self.engine = Rollout(size)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin(self, sync: str) -> None:
        """Use this kind of sync from now on."""
        self.copy = HostCopy() if sync == "changed" else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Return a checksum that is comparable with that of the published weights."""
        return checksum_of(self.engine.module.named_parameters())


def measure(size: str, rounds: int) -> dict[str, Any]:
    """Return the results of both kinds of sync, by number of generators."""
    with ExitStack() as stack:

        def group(role: str, cls: type, own_processes: bool) -> Any:
            recipe = create_colocated_worker_cls({role: ClassWithInitArgs(cls, size)})
            group = LocalWorkerGroup(ResourcePool([1]), recipe, own_processes=own_processes)
            stack.callback(group.shutdown)
            return group.spawn([role])[role]

        trainer = group("trainer", Trainer, own_processes=False)
        numbers = range(max(NUMBERS_OF_GENERATORS))
        generators = [
            group(f"generator_{number}", Generator, own_processes=True) for number in numbers
        ]
        results = {}
        for sync in ("full", "changed"):
            for worker in (trainer, *generators):
                worker.begin(sync)
            results[sync] = figures_of(trainer, generators, rounds)
    return results


def figures_of(trainer: Any, generators: list[Any], rounds: int) -> dict[str, Any]:
    """Return results by number of generators; check their weights against the trainer's."""
    seconds: dict[int, list[float]] = {number: [] for number in NUMBERS_OF_GENERATORS}
    publish_s, sent_mb = [], {}
    with ThreadPoolExecutor(len(generators)) as threads:

        def deliver(receiving: list[Any]) -> list[dict[str, float]]:
            return list(
                threads.map(lambda generator: deliver_weights(trainer, generator), receiving)
            )

        publish_weights(trainer, 0)
        deliver(generators)  # the first sync sends all weights, and connects
        turns = [number for _ in range(rounds) for number in NUMBERS_OF_GENERATORS]
        for version, number in enumerate(turns, 1):
            trainer.learn()
            publish_s.append(publish_weights(trainer, version)["timing_s/publish_weights"])
            began = time.perf_counter()
            figures = deliver(generators[:number])
            seconds[number].append(time.perf_counter() - began)
            sent_mb[number] = max(figure["perf/weight_sync_mib"] for figure in figures)
            published = trainer.weights_checksum()
            assert all(
                generator.weights_checksum() == published for generator in generators[:number]
            )

    results: dict[str, Any] = {"publish_s": statistics.median(publish_s)}
    medians = {number: statistics.median(values) for number, values in seconds.items()}
    for number, median in medians.items():
        results[f"{number} generators"] = {
            "seconds": median,
            "ratio_to_one": median / medians[1],
            "mib_each": sent_mb[number],
        }
    return results


def main() -> None:
    """Measure both kinds of sync."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    size = "small" if arguments.small else "whole"
    print(json.dumps(measure(size, arguments.rounds), indent=1))


if __name__ == "__main__":
    main()
