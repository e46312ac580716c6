"""Measure the driver's cost of a call, for 64 to 4,096 ranks that are simulated in this process.

    python benchmarks/bench_dispatch.py                 # microseconds per rank and call
    python benchmarks/bench_dispatch.py --ranks 1024 --profile nd8

Real worker groups split, submit and collect. Workers are simulated: they only return results, so
the benchmark measures the driver's own work. A batch has 4 rows per data rank, and its token
columns are too large to be sent inside a call. The calls are:

- `one_to_all` sends a number
- `update` splits a batch and gets metrics, with as many data ranks as ranks (`nd1`) or an eighth of
  them (`nd8`)
- `score` gets a column back
- `passed` passes the future of a batch to another group
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from simulated import Answer, Simulated, batch_answer

from verl_like import DataProto, Dispatch, Worker, WorkerGroup, register
from verl_like import make_nd_compute_dataproto_dispatch_fn as nd
from verl_like.batch.ragged import RaggedTensor
from verl_like.calls import result as form
from verl_like.calls.result import CallMetrics
from verl_like.calls.wire import Call
from verl_like.process.info import ProcessInfo

COLUMNS = ("input_ids", "position_ids", "responses", "response_mask")
WIDTH = 1024
ROWS_OF_A_RANK = 4
LIMIT_US = 25.0
"""Limit per rank and call, at 1,024 ranks, eight of which share a model."""
METRICS = {"actor/pg_loss": 0.1, "actor/grad_norm": 1.0, "actor/lr": 1e-6, "perf/mfu/actor": 0.4}


class Trained(Worker):
    """A role whose model each rank has alone, or shares with seven others."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def one_to_all(self, number: int) -> None: ...

    @register(dispatch_mode=nd("nd1"))
    def update_nd1(self, data: DataProto) -> CallMetrics: ...

    @register(dispatch_mode=nd("nd8"))
    def update_nd8(self, data: DataProto) -> CallMetrics: ...

    @register(dispatch_mode=nd("nd8"))
    def score_nd8(self, data: DataProto) -> DataProto: ...

    @register(dispatch_mode=nd("nd1"))
    def score_nd1(self, data: DataProto) -> DataProto: ...


class Answering(Simulated):
    """Every rank returns its result immediately."""

    def __init__(self, num_ranks: int) -> None:
        facts = [ProcessInfo("trained", rank, num_ranks, rank) for rank in range(num_ranks)]
        super().__init__(facts, [{"trained": _meshes(rank)} for rank in range(num_ranks)])
        self.scores = torch.zeros(ROWS_OF_A_RANK, WIDTH)

    def answer(self, rank: int, call: Call, parts: Sequence[Any]) -> Answer:
        if call.method.startswith("update"):
            return None, {"metrics": METRICS, "returned": form.METRICS}
        if call.method.startswith("score"):
            batch, payload = parts[0], DataProto.from_dict({"values": self.scores})
            return batch_answer(payload, batch, form.BATCH)
        return None, {}


def _meshes(rank: int) -> dict[str, tuple[int, bool]]:
    return {"nd1": (rank, True), "nd8": (rank // 8, rank % 8 == 0)}


def make_batch(num_rows: int) -> DataProto:
    """Return a batch with ragged columns of full rows, and with strings."""
    rows = [torch.arange(WIDTH)] * num_rows
    columns: dict[str, Any] = {name: RaggedTensor.from_rows(rows, WIDTH) for name in COLUMNS}
    uids = [f"{row}-0" for row in range(num_rows)]
    return DataProto.from_dict(columns, non_tensors={"uid": uids})


def calls_of(num_ranks: int) -> dict[str, Callable[[], Any]]:
    """Return the measured calls by name."""

    def group() -> WorkerGroup:
        return WorkerGroup(Answering(num_ranks), {"trained": Trained}, prefixed=())

    first, second = group(), group()
    whole, eighth = (make_batch(ROWS_OF_A_RANK * n) for n in (num_ranks, num_ranks // 8))
    return {
        "one_to_all": lambda: first.one_to_all(1),
        "update nd1": lambda: first.update_nd1(whole),
        "update nd8": lambda: first.update_nd8(eighth),
        "score nd8": lambda: first.score_nd8(eighth),
        "passed nd1": lambda: second.update_nd1(first.score_nd1.remote(whole)),
    }


def seconds_of(call: Callable[[], Any], rounds: int) -> float:
    """Return the median CPU seconds of some calls; other processes may use the cores meanwhile."""
    call()
    results = []
    for _ in range(rounds):
        began = time.process_time()
        call()
        results.append(time.process_time() - began)
    return statistics.median(results)


def main() -> None:
    """Print the table, and whether the limit at 1,024 ranks holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", help="a call; print its profile")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, list[float]] = {}
    for num_ranks in chosen.ranks:
        calls = calls_of(num_ranks)
        if chosen.profile:
            call = next(call for name, call in calls.items() if chosen.profile in name)
            call()
            with cProfile.Profile() as profile:
                call()
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            continue
        for name, call in calls.items():
            driver_us = seconds_of(call, chosen.rounds) / num_ranks * 1e6
            results.setdefault(name, []).append(driver_us)
    if chosen.profile:
        return
    print("microseconds per rank and call, driver alone")
    print(f"{'ranks':<12}" + "".join(f"{num:>9}" for num in chosen.ranks))
    for name, row in results.items():
        print(f"{name:<12}" + "".join(f"{number:>9.1f}" for number in row))
    if 1024 in chosen.ranks:
        driver_us = results["update nd8"][chosen.ranks.index(1024)]
        print(f"update nd8 at 1024 ranks: {driver_us:.1f}, limit {LIMIT_US:g}")


if __name__ == "__main__":
    main()
