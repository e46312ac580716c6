"""Compare the planner's predictions with published measurements.

    python benchmarks/bench_plan.py [file ...]

Runs only the planner. Prints JSON: for every file in `published/`, or for the named ones, its
source, a summary, and a row per number. A file has one of these kinds:

    placements   which of the tested placements was the fastest
    steps        the peak memory of a training step of one model
    fits         the smallest number of GPUs, compared with one that worked
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from trainer.cli.plan import job_of
from trainer.tools.planner.job import sizes_of
from workers.config.model import FSDPConfig, ModelConfig, ParallelConfig
from workers.memory import GIB, LargestPass, memory_of
from workers.training.role_model_spec import RoleModelSpec

PUBLISHED = Path(__file__).with_name("published")
NEAR = 1.15
"""Largest ratio, in either direction, at which a prediction counts as near."""
POLICY, VALUES = ("actor", "rollout"), ("critic", "reward_model")
PLACEMENTS: dict[str, set[frozenset[str]]] = {
    "colocate": {frozenset((*POLICY, "ref", *VALUES))},
    "split": {frozenset((*POLICY, "ref")), frozenset(VALUES)},
    "standalone": {frozenset(POLICY), *(frozenset([role]) for role in ("ref", *VALUES))},
    "critic alone": {frozenset((*POLICY, "ref", "reward_model")), frozenset(["critic"])},
}
"""Name of a placement -> the sets of roles that share a pool."""
Case = dict[str, Any]


def model_folder(root: Path, published: Case, name: str) -> Path:
    """Write the config.json of one of the file's models, without weights."""
    folder = root / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published["models"][name]))
    return folder


def settings_of(published: Case, case: Case, root: Path) -> list[str]:
    """Return the keys of a plan. `values` is the name of the model for critic and reward model."""
    policy = model_folder(root, published, case.get("model") or published["model"])
    paths = {"actor_rollout_ref": policy}
    if "reward.model.enable=true" in published["settings"]:
        paths["reward_model"] = policy
    if "values" in case:
        paths["critic"] = paths["reward_model"] = model_folder(root, published, case["values"])
    return [
        f"--gpus={case['gpus']}",
        f"--device={case.get('device') or published['device']}",
        *(f"{key}.model.path={path}" for key, path in paths.items()),
        *published["settings"],
        *case.get("settings", ()),
    ]


def placements(published: Case, root: Path) -> list[Case]:
    """Return the fastest of these placements, under each interpretation of the network."""
    rows = []
    for (reading, rate), case in product(published["networks"].items(), published["cases"]):
        job = job_of([*settings_of(published, case, root), f"--network-bandwidth={rate}"])
        seconds: dict[str, float] = {}
        for placement in job.best(case["gpus"]):
            shares = {frozenset(pool.roles) for pool in placement.pools}
            for name in case.get("tried") or published["tried"]:
                if PLACEMENTS[name] == shares:
                    seconds.setdefault(name, placement.step)
        ours = min(seconds, key=seconds.__getitem__)
        ratio = seconds[case["placement"]] / seconds[ours] if case["placement"] in seconds else None
        values = f" and {case['values']}" if "values" in case else ""
        row = {"case": f"{case['model']}{values} on {case['gpus']}", "of": f"placement, {reading}"}
        row |= {"published": case["placement"], "predicted": ours}
        row["agrees"] = ours == case["placement"]
        rows.append({**row, "seconds of published / predicted": ratio and round(ratio, 3)})
    return rows


def steps(published: Case, root: Path) -> list[Case]:
    """Return the peak memory of an AdamW step after `passes` passes."""
    rows = []
    for case in published["cases"]:
        case = published.get("of_all", {}) | case
        axes = {name: case.get(name, 1) for name in ("sp", "tp", "pp")}
        model = ModelConfig(
            path=str(model_folder(root, published, case["model"])),
            enable_gradient_checkpointing=case["recomputes"],
            use_fused_kernels=not case.get("whole_logits", False),
            lora_rank=case.get("lora_rank", 0),
        )
        fsdp, parallel = FSDPConfig(), ParallelConfig(**axes)
        role_model = RoleModelSpec("model.path", model, fsdp, parallel=parallel, trains=True)
        tokens = int(case["rows"] * case["tokens"] // axes["sp"])
        largest = LargestPass(tokens, tokens)
        memory = memory_of(role_model, "model", "all", case["gpus"], "cuda", largest)
        gib = (memory.resident + memory.call) / GIB
        row = {"case": case["name"], "of": "GiB", "published": case["GiB"]}
        row |= {"predicted": round(gib, 2), "ratio": round(gib / case["GiB"], 3)}
        rows.append(row | ({"why": case["why"]["GiB"]} if "GiB" in case.get("why", ()) else {}))
    return rows


def fits(published: Case, root: Path) -> list[Case]:
    """Return the smallest number of GPUs that the planner considers sufficient."""
    rows = []
    for case in published["cases"]:
        tried = sizes_of(2 * case["gpus"], 8)
        jobs = ((n, job_of(settings_of(published, {**case, "gpus": n}, root))) for n in tried)
        least = next((n for n, job in jobs if job.best(n)), None)
        row = {"case": case["name"], "of": "GPUs", "published": case["gpus"], "predicted": least}
        rows.append(row | {"agrees": least is not None and least <= case["gpus"]})
    return rows


KINDS: dict[str, Callable[[Case, Path], list[Case]]] = {
    "placements": placements,
    "steps": steps,
    "fits": fits,
}


def summary(rows: Sequence[Case]) -> dict[str, str]:
    """Return, for every quantity, how many rows agree or are near, and which is the worst."""
    counts = {}
    for quantity in dict.fromkeys(row["of"] for row in rows):
        of_quantity = [row for row in rows if row["of"] == quantity]
        if "agrees" in of_quantity[0]:
            agreeing = sum(row["agrees"] for row in of_quantity)
            counts[quantity] = f"{agreeing} of {len(of_quantity)} agree"
            continue
        alike = [row for row in of_quantity if "why" not in row]
        worst = max(of_quantity, key=lambda row: max(row["ratio"], 1 / row["ratio"]))
        counts[quantity] = (
            f"{_near(of_quantity)} of {len(of_quantity)} within 15 % ({_near(alike)} of "
            f"{len(alike)} where nothing is known to differ), at most x {worst['ratio']} "
            f"({worst['case']})"
        )
    return counts


def _near(rows: Sequence[Case]) -> int:
    return sum(1 / NEAR <= row["ratio"] <= NEAR for row in rows)


def main(names: Sequence[str]) -> None:
    """Compare all published measurements, or those in the named files."""
    torch.set_num_threads(1)
    results = {}
    for file in sorted(PUBLISHED.glob("*.json")):
        if names and file.stem not in names:
            continue
        published = json.loads(file.read_text())
        with tempfile.TemporaryDirectory() as folder:
            rows = KINDS[published["kind"]](published, Path(folder))
        results[file.stem] = {"source": published["source"], "summary": summary(rows), "rows": rows}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
