"""Measure the driver's cost of whole PPO steps, for 64 to 4,096 ranks simulated in this process.

    python benchmarks/bench_scale.py [--ranks 64 256 1024 4096] [--tp 8]
    python benchmarks/bench_scale.py --ranks 1024 4096 --samples 1
    python benchmarks/bench_scale.py --ranks 1024 --folder FOLDER     # keeps the run folder

The loop, the step, its dataflow, placement, groups, futures, balancing, process monitoring, the run
folder and the checkpoint after the last step are the real ones. Workers are simulated
(`simulated.py`). Nodes have eight devices; half of the nodes have actor, rollout and
reference, the others critic and reward model. A batch has `--samples` (4) per rank, with up to 512
+ 512 tokens, so 4,096 samples at 1,024 ranks. With `--tp 8`, eight ranks share a model, and the
batch has the same size.

Every number of ranks runs in a separate process. The table has these rows:

- `driver s`: the driver's CPU seconds per step, the median without the first step. The rows `... s`
  below have those of its stages. Batches are pickled and unpickled as in a real run; Ray's own
  costs are not included.
- `checkpoint s`: CPU seconds to write and commit a checkpoint with a small file per role and rank
- `MiB`: the growth of the process's memory to its peak
- `MB`: data sent to the ranks and back per step
- `files`, `threads`: the largest numbers in a step, without the workers' ends of connections

The script exits with 1 if 1,024 ranks take the driver more than 5 % of a step of one minute.
"""

from __future__ import annotations

import argparse
import sys

from sides import HERE, ask

LIMIT_S = 3.0
"""Limit for the driver's CPU seconds per step at 1,024 ranks: 5 % of a minute."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", default="")
    chosen = parser.parse_args()
    results = {}
    for num_ranks in chosen.ranks:
        sizes = map(str, (num_ranks, chosen.tp, chosen.samples, chosen.steps))
        rest = *sizes, chosen.folder
        results[num_ranks] = ask(sys.executable, str(HERE / "scale_side.py"), *rest)

    print(f"ppo, tp={chosen.tp}, {chosen.samples} samples per rank")
    print(f"{'ranks':<18}" + "".join(f"{num:>10,}" for num in results))
    for name in next(iter(results.values())):
        print(f"{name:<18}" + "".join(f"{side[name]:>10,.4g}" for side in results.values()))
    if 1024 in results:
        driver_s = results[1024]["driver s"]
        print(f"driver at 1,024 ranks: {driver_s:.2f} s per step, limit {LIMIT_S:g}")
        sys.exit(driver_s > LIMIT_S)


if __name__ == "__main__":
    main()
