"""What `verl-like plan` says of placements whose ranking others have published.

    python benchmarks/bench_plan.py

Nothing is run but the planner. For every case of `published/*.json`: the placement that was the
fastest of those tried, the one that the planner calls the fastest among the same ones, and how many
times the seconds of its choice it predicts for the published one: 1 where both agree. Prints JSON.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainer.cli.plan import job_of, sizes_of
from trainer.planner.search import Placement, Search

PUBLISHED = Path(__file__).with_name("published")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
POLICY, VALUES = ("actor", "rollout"), ("critic", "reward_model")
PLACEMENTS: dict[str, set[frozenset[str]]] = {
    "colocate": {frozenset((*POLICY, "ref", *VALUES))},
    "split": {frozenset((*POLICY, "ref")), frozenset(VALUES)},
    "standalone": {frozenset(POLICY), *(frozenset([role]) for role in ("ref", *VALUES))},
}
"""Name -> who shares a pool."""


def name_of(placement: Placement) -> str | None:
    """Of a placement that was tried."""
    shares = {frozenset(pool.roles) for pool in placement.pools}
    return next((name for name, pools in PLACEMENTS.items() if pools == shares), None)


def fastest(settings: list[str], gpus: int) -> dict[str, float]:
    """Name of a placement -> predicted seconds of a step, of those that fit."""
    job = job_of(settings)
    search = Search(job.roles, job.options, job.device.bytes)
    found: dict[str, float] = {}
    for placement in search.best(sizes_of(gpus, 8), gpus, 1):
        name = name_of(placement)
        if name is not None:
            found.setdefault(name, placement.step)
    return found


def compared(published: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The cases of a file."""
    rows = []
    for case in published["best"]:
        model = folder / case["model"]
        model.mkdir(exist_ok=True)
        sizes = LLAMA | published["models"][case["model"]]
        (model / "config.json").write_text(json.dumps(sizes))
        paths = [f"{key}.model.path={model}" for key in ("actor_rollout_ref", "reward_model")]
        cards = [f"plan.gpus={case['gpus']}", f"plan.device={published['device']}"]
        found = fastest([*cards, *paths, *published["settings"]], case["gpus"])
        ours = min(found, key=found.__getitem__)
        ratio = found[case["placement"]] / found[ours] if case["placement"] in found else None
        rows.append({**case, "ours": ours, "published / ours": ratio and round(ratio, 3)})
    return rows


def main() -> None:
    """Compare all that is published."""
    torch.set_num_threads(1)
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(PUBLISHED.glob("*.json")):
            published = json.loads(file.read_text())
            rows = compared(published, Path(folder))
            agree = sum(row["ours"] == row["placement"] for row in rows)
            of = f"{agree} of {len(rows)}"
            result[file.stem] = {"source": published["source"], "agree": of, "cases": rows}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
