"""The speed guard of CI: six of our times, relative to floors measured in the same run.

    python benchmarks/guard.py                 # print a table; exit with 1 if a ratio is too high
    python benchmarks/guard.py --only update   # or generate, sft, echo, call, start
    python benchmarks/guard.py --record        # write the ratios of this run to guard.json

    ratio   ours                                           floor
    update  the update of a default GRPO step              the matrix products of its layers
    generate  the generation of that step                  the matrix products of its layers
    sft     an SFT step on full rows                       the matrix products of its layers
    echo    sending a batch to two Ray workers and back    the same columns with two bare actors
    call    an empty call of a group of two workers        an empty call of two bare actors
    start   a run up to its first step                     imports of torch and transformers

Our code and the floor alternate, and the shortest time of each counts, so the result depends little
on the machine and its load. A ratio fails if it is above 1.25 times the one in guard.json in each
of three tries. If the floor itself varies by more than a factor of two, the machine is too loaded
for a verdict, which is only a warning.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sides import HERE, actor_worker, ask, full_rows

RECORD = HERE / "guard.json"
TOLERANCE = 1.25
"""Largest allowed ratio, relative to the recorded one."""
LOADED = 2.0
"""Largest spread of a floor's times on a machine that is not too loaded."""
TRIES = 3
PROMPT, RESPONSE, NUM_ROWS = 16, 32, 256
Work = Callable[[], Any]
Times = dict[str, list[float]]
"""`ours` and `floor`, in seconds, with one entry per round."""


def alternate(ours: Work, floor: Work, rounds: int, least_s: float = 0.05) -> Times:
    """Run both alternately; a round repeats each of them for at least `least_s` seconds."""
    ours(), floor()
    times: Times = {"ours": [], "floor": []}
    for _ in range(rounds):
        for name, work in (("ours", ours), ("floor", floor)):
            count, begin = 0, time.perf_counter()
            while count == 0 or time.perf_counter() - begin < least_s:
                work()
                count += 1
            times[name].append((time.perf_counter() - begin) / count)
    return times


# ---------------------------------------------------------------------------------------------
# Training and generation
# ---------------------------------------------------------------------------------------------


def products(module: Any, num_tokens: int, num_reads: int, trains: bool) -> Work:
    """Return the matrix products of a module; the head multiplies `num_reads` tokens."""
    import torch

    looked_up = {id(module.get_input_embeddings().weight)}
    head = module.get_output_embeddings().weight
    weights = [w for w in module.parameters() if w.dim() == 2 and id(w) not in looked_up]
    weights = [w.detach() for w in weights]
    operands = []
    for weight in weights:
        rows = num_reads if weight.data_ptr() == head.data_ptr() else num_tokens
        states, grads = torch.randn(rows, weight.shape[1]), torch.randn(rows, weight.shape[0])
        outputs = torch.empty_like(grads), torch.empty_like(states), torch.empty_like(weight)
        operands.append((weight, states, grads, outputs))

    def multiply() -> None:
        for weight, states, grads, (forward, of_states, of_weight) in operands:
            torch.mm(states, weight.t(), out=forward)
            if trains:
                torch.mm(grads, weight, out=of_states)
                torch.mm(grads.t(), states, out=of_weight)

    return multiply


def grpo(folder: Path) -> tuple[Work, Work, Work, Work]:
    """Return the update of 256 samples, its floor, their generation, and its floor."""
    import torch
    from grpo_side import make

    from verl_like.batch.protocol import DataProto
    from workers.config import ActorRolloutRefConfig, ModelConfig, OptimConfig, RolloutConfig
    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeRolloutEngine
    from workers.rollout.sample import Sample

    make(folder)
    policy = ActorRolloutRefConfig(
        model=ModelConfig(path=str(folder / "fixed")), rollout=RolloutConfig(n=1)
    )
    policy.actor.optim = OptimConfig(lr=1e-3)
    policy.actor.ppo_mini_batch_size = NUM_ROWS
    worker = actor_worker(policy, "cpu", PROMPT, RESPONSE)
    worker.init_model(1000)
    drawn = ("old_log_probs", "advantages")
    data = DataProto.from_dict(full_rows(NUM_ROWS, PROMPT, RESPONSE, range(6, 60), drawn, -4.2))
    data.meta_info["on_policy"] = True

    module = worker.engine.module
    engine = NativeRolloutEngine(module, EngineLimits(PROMPT, RESPONSE), owns_weights=False)
    engine.commit(0)
    prompts = data.batch["prompts"].tolist()
    sampling = SamplingParams(max_tokens=RESPONSE, stop_token_ids=())
    samples = [Sample(prompt, key) for key, prompt in enumerate(prompts)]

    num_tokens, num_reads = NUM_ROWS * (PROMPT + RESPONSE), NUM_ROWS * RESPONSE
    of_update = products(module, num_tokens, num_reads, trains=True)
    of_prompts = products(module, NUM_ROWS * PROMPT, NUM_ROWS, trains=False)
    of_token = products(module, NUM_ROWS, NUM_ROWS, trains=False)

    def generate() -> None:
        with torch.no_grad():
            engine.generate(samples, sampling)

    def products_of_generation() -> None:
        of_prompts()
        for _ in range(RESPONSE - 1):
            of_token()

    return lambda: worker.update_actor(data), of_update, generate, products_of_generation


def update(folder: Path) -> Times:
    """Measure the update of a GRPO step."""
    ours, floor, _, _ = grpo(folder)
    return alternate(ours, floor, rounds=6)


def generate(folder: Path) -> Times:
    """Measure the generation of a GRPO step."""
    _, _, ours, floor = grpo(folder)
    return alternate(ours, floor, rounds=8)


def sft(folder: Path) -> Times:
    """Measure an SFT step on 64 rows of 40 tokens, as in `bench_recipes.py`."""
    from recipes_side import KINDS, make, our_step

    make(folder)
    rows = json.loads((folder / "rows.json").read_text("utf-8"))[KINDS[0]]
    step, module = our_step("sft", folder, rows)
    floor = products(module, 64 * 40, 64 * 32, trains=True)
    return alternate(lambda: step(1), floor, rounds=10)


# ---------------------------------------------------------------------------------------------
# Calls on Ray
# ---------------------------------------------------------------------------------------------


def on_ray() -> tuple[Any, Any]:
    """Return a group of two workers, and two bare actors with the same methods."""
    import ray

    from verl_like import ClassWithInitArgs, DataProto, Dispatch, Worker, register
    from verl_like.backends.ray.group import RayWorkerGroup
    from verl_like.backends.ray.pools import RayResourcePool

    class Role(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
        def echo(self, data: DataProto) -> DataProto:
            return data

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def empty(self) -> None: ...

    class Bare:
        def echo(self, columns: dict[str, Any]) -> dict[str, Any]:
            return columns

        def empty(self) -> None: ...

    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, log_to_driver=False)
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False), ClassWithInitArgs(Role))
    actors = [ray.remote(Bare).remote() for _ in range(2)]
    ray.get([actor.empty.remote() for actor in actors])
    return group, actors


def echo(folder: Path) -> Times:
    """Measure 27 MB of columns that are split over two workers and concatenated again."""
    import numpy as np
    import ray
    import torch

    from verl_like import DataProto

    group, actors = on_ray()
    rows, width = 1024, 512
    tensors = {f"ids_{n}": torch.arange(rows * width).reshape(rows, width) % 997 for n in range(4)}
    tensors |= {f"values_{n}": torch.rand(rows, width) for n in range(5)}
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    batch = DataProto.from_dict(tensors)

    def floor() -> None:
        halves = [
            {name: array[rows] for name, array in arrays.items()}
            for rows in (slice(0, 512), slice(512, 1024))
        ]
        echoed = [actor.echo.remote(half) for actor, half in zip(actors, halves, strict=True)]
        back = ray.get(echoed)
        for name in arrays:
            np.concatenate([half[name] for half in back])

    return alternate(lambda: group.echo(batch), floor, rounds=8, least_s=0.3)


def call(folder: Path) -> Times:
    """Measure an empty call with its results."""
    import ray

    group, actors = on_ray()

    def floor() -> None:
        ray.get([actor.empty.remote() for actor in actors])

    return alternate(group.empty, floor, rounds=8, least_s=0.3)


# ---------------------------------------------------------------------------------------------
# The start of a run
# ---------------------------------------------------------------------------------------------

IMPORTS = "import torch, tensordict, transformers.models.qwen2.modeling_qwen2"


def run_to_first_step(tiny: Path) -> None:
    """Run one step of the tiny model in this folder, and write when it began."""
    from trainer import load_config, run

    class FirstStep:
        def on_step_begin(self, trainer: Any) -> None:
            (tiny / "began").write_text(str(time.time()), encoding="utf-8")

    settings = [
        "trainer.backend=local",
        f"trainer.default_local_dir={tiny}/run",
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/train.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.total_training_steps=1",
        "trainer.save_freq=-1",
        "trainer.logger=[]",
    ]
    run(load_config(settings), callbacks=[FirstStep()])


def start(folder: Path) -> Times:
    """Measure from the start of the process to the first step of a local run of the tiny model."""
    ask(sys.executable, "-P", "-m", "trainer.cli.main", "make-tiny", str(folder))
    times: Times = {"ours": [], "floor": []}
    for number in range(3):
        shutil.rmtree(folder / "run", ignore_errors=True)
        began = time.time()
        ask(sys.executable, __file__, "--first-step", str(folder))
        run_s = float((folder / "began").read_text("utf-8")) - began
        began = time.time()
        ask(sys.executable, "-c", IMPORTS)
        if number > 0:  # the first process reads the files from disk
            times["ours"].append(run_s)
            times["floor"].append(time.time() - began)
    return times


# ---------------------------------------------------------------------------------------------
# The verdict
# ---------------------------------------------------------------------------------------------

MEASURES: dict[str, Callable[[Path], Times]] = {
    "update": update,
    "generate": generate,
    "sft": sft,
    "echo": echo,
    "call": call,
    "start": start,
}


def ratio_of(times: Times) -> float:
    """Return the ratio of our shortest time to the floor's."""
    return min(times["ours"]) / min(times["floor"])


def spread_of(times: Times) -> float:
    """Return how much the floor varies, as a ratio."""
    return max(times["floor"]) / min(times["floor"])


def verdict(ratio: float, spread: float, recorded: float) -> str:
    """Return ok, SLOWER, or LOADED if the machine is too loaded for a verdict."""
    if ratio <= TOLERANCE * recorded:
        return "ok"
    return "LOADED" if spread > LOADED else "SLOWER"


def row_of(name: str, recorded: float, measure: Callable[[str], Times]) -> dict[str, Any]:
    """Measure until the ratio is acceptable, in at most three tries; the best try counts."""
    best: dict[str, Any] = {}
    for number in range(1, TRIES + 1):
        times = measure(name)
        ratio, spread = ratio_of(times), spread_of(times)
        row = {
            "name": name,
            "ours_ms": 1e3 * min(times["ours"]),
            "floor_ms": 1e3 * min(times["floor"]),
            "spread": spread,
            "ratio": ratio,
            "recorded": recorded,
            "verdict": verdict(ratio, spread, recorded),
            "tries": number,
        }
        if not best or ratio < best["ratio"]:
            best = row
        best["tries"] = number
        if best["verdict"] == "ok":
            break
    return best


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(f"{'':10}{'ours ms':>10}{'floor ms':>10}{'ratio':>8}{'limit':>8}{'spread':>8}  verdict")
    for row in rows:
        limit = TOLERANCE * row["recorded"]
        times = f"{row['ours_ms']:>10.1f}{row['floor_ms']:>10.1f}"
        tries = f", {row['tries']} tries" if row["tries"] > 1 else ""
        ratios = f"{row['ratio']:>8.2f}{limit:>8.2f}{row['spread']:>8.2f}"
        print(f"{row['name']:10}{times}{ratios}  {row['verdict']}{tries}", flush=True)


def in_own_process(name: str) -> Times:
    """Return the times of one measurement, from a process with one thread."""
    times: Times = ask(sys.executable, __file__, "--measure", name)
    return times


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=MEASURES)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--first-step", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_step:
        run_to_first_step(options.first_step)
        return
    if options.measure:
        import torch

        torch.set_num_threads(1)
        os.environ.setdefault("VERL_LIKE_PROCESS", "1")
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(MEASURES[options.measure](Path(folder))), flush=True)
        os._exit(0)  # do not wait for Ray's processes

    recorded = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    rows = []
    for name in options.only or MEASURES:
        limit = float("inf") if options.record else recorded[name]
        rows.append(row_of(name, limit, in_own_process))
    show(rows)
    if options.record:
        recorded |= {row["name"]: round(row["ratio"], 3) for row in rows}
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        return
    if loaded := [row["name"] for row in rows if row["verdict"] == "LOADED"]:
        print(f"warning: this machine is too loaded for a verdict on: {', '.join(loaded)}")
    if slower := [row["name"] for row in rows if row["verdict"] == "SLOWER"]:
        sys.exit(f"slower than {TOLERANCE} times the record: {', '.join(slower)}")


if __name__ == "__main__":
    main()
