"""What whole PPO steps cost the driver, for 64 to 4,096 ranks that stand in this process.

    python benchmarks/bench_scale.py [--ranks 64 256 1024 4096] [--tp 8] [--recipe async]
    python benchmarks/bench_scale.py --ranks 1024 4096 --samples 1
    python benchmarks/bench_scale.py --ranks 1024 --profile
    python benchmarks/bench_scale.py --ranks 1024 --folder FOLDER     # leaves its run folder

The loop, the step, its dataflow, placement, groups, futures, balancing, the watch over ranks, the
run folder and the checkpoint after the last step are those of a run. Workers are simulated
(`simulated_roles.py`): nodes of eight devices, half of them with actor, rollout and reference, half
with critic and reward model. A batch has `--samples` for each rank (4), of up to 512 + 512 tokens:
4,096 at 1,024 ranks. With `--tp 8` eight ranks share a model, and the batch is as large. With
`--recipe async` half of the nodes are a generator each, with buffer, ledger and deliveries of
weights.

Every number of ranks has a process of its own. `driver s` are the driver's CPU seconds of a step,
the median of those after the first; `... s` below those of its stages. Batches are pickled and read
as they travel; what Ray spends beside that is not in it. `checkpoint s`: CPU seconds to write and
commit it, of a small file for each role and rank. `MiB`: the most that the process has held, less
what it had before the run. `MB`: what goes to the ranks and comes from them in a step. `files` and
`threads` are the most that were open in a step, without the far ends of connections. Exits with 1
where 1,024 ranks take the driver more than 5 % of a step of a minute.
"""

from __future__ import annotations

import argparse
import sys

from sides import HERE, ask

LIMIT_S = 3.0
"""CPU seconds of the driver in a step at 1,024 ranks: 5 % of a minute."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 1024, 4096])
    parser.add_argument("--recipe", default="ppo", choices=("ppo", "async"))
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", default="")
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    results = {}
    for num_ranks in chosen.ranks:
        sizes = map(str, (num_ranks, chosen.tp, chosen.samples, chosen.steps))
        rest = chosen.recipe, *sizes, chosen.folder, str(chosen.profile)
        side = ask(sys.executable, str(HERE / "scale_side.py"), *rest)
        if chosen.profile:
            print(side.pop("profile"))
        results[num_ranks] = side

    print(f"{chosen.recipe}, tp={chosen.tp}, {chosen.samples} samples a rank")
    print(f"{'ranks':<18}" + "".join(f"{num:>10,}" for num in results))
    for name in next(iter(results.values())):
        print(f"{name:<18}" + "".join(f"{side[name]:>10,.4g}" for side in results.values()))
    if 1024 in results:
        driver_s = results[1024]["driver s"]
        print(f"driver at 1,024 ranks: {driver_s:.2f} s a step, limit {LIMIT_S:g}")
        sys.exit(driver_s > LIMIT_S)


if __name__ == "__main__":
    main()
