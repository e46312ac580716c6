"""Kinds of published cases, and what the planner says of each.

    rows = KINDS[published["kind"]](published, folders)

    placements   which of the placements that were tried was the fastest
    steps        seconds and peak memory of a training step of one model
    fits         the fewest cards, beside those on which a run went
    runs         seconds of the stages of a step of reinforcement learning, on given pools

A row says of a case what was published and predicted, and their ratio or whether they agree. What a
constant was fitted to is `fitted` and no evidence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from trainer.cli.plan import job_of
from trainer.planner.cost import Cards, Model, Rows, pass_seconds
from trainer.planner.devices import Device, Rates, device_of
from trainer.planner.job import sizes_of
from trainer.planner.layouts import PPOJob
from trainer.planner.search import Placement
from workers.config.model import FSDPConfig, ModelConfig, ParallelConfig
from workers.memory import GIB, HeldModel, LargestPass, memory_of
from workers.parallel.dims import ParallelDims
from workers.parallel.pipeline import num_chunks

Case = dict[str, Any]


@dataclass(frozen=True)
class Folders:
    """Folders of models that are described and have no weights."""

    root: Path

    def of(self, published: Case, name: str) -> Path:
        """The folder of one of the file's models."""
        folder = self.root / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(published["models"][name]))
        return folder


def numbers(case: Case, of: str, published: float, predicted: float | None) -> Case:
    """The row of a quantity."""
    ratio = predicted and round(predicted / published, 3)
    row = {"case": case["name"], "of": of, "published": published, "ratio": ratio}
    row["predicted"] = predicted and round(predicted, 2)
    return row | _why(case, of)


def _why(case: Case, of: str) -> Case:
    """What is known to differ from ours, of this quantity."""
    return {"why": case["why"][of]} if of in case.get("why", ()) else {}


# --------------------------------------------------------------------------- placements

POLICY, VALUES = ("actor", "rollout"), ("critic", "reward_model")
PLACEMENTS: dict[str, set[frozenset[str]]] = {
    "colocate": {frozenset((*POLICY, "ref", *VALUES))},
    "split": {frozenset((*POLICY, "ref")), frozenset(VALUES)},
    "standalone": {frozenset(POLICY), *(frozenset([role]) for role in ("ref", *VALUES))},
    "critic alone": {frozenset((*POLICY, "ref", "reward_model")), frozenset(["critic"])},
}
"""Name -> who shares a pool."""


def placements(published: Case, folders: Folders) -> list[Case]:
    """Under each reading of the network, the fastest of the same placements."""
    rows = []
    for (reading, rate), case in product(published["networks"].items(), published["cases"]):
        settings = [*_settings(published, case, folders), f"plan.network={rate}"]
        found = fastest(settings, case["gpus"], case.get("tried") or published["tried"])
        ours = min(found, key=found.__getitem__)
        ratio = found[case["placement"]] / found[ours] if case["placement"] in found else None
        values = f" and {case['values']}" if "values" in case else ""
        row = {"case": f"{case['model']}{values} on {case['gpus']}", "of": f"placement, {reading}"}
        row |= {"published": case["placement"], "predicted": ours}
        row["agrees"] = ours == case["placement"]
        rows.append({**row, "seconds of published / predicted": ratio and round(ratio, 3)})
    return rows


def fastest(settings: Sequence[str], gpus: int, tried: Sequence[str]) -> dict[str, float]:
    """Name of a placement -> predicted seconds of a step, of those tried that fit."""
    found: dict[str, float] = {}
    for placement in job_of(settings).search.best(sizes_of(gpus, 8), gpus, 1):
        shares = {frozenset(pool.roles) for pool in placement.pools}
        for name in tried:
            if PLACEMENTS[name] == shares:
                found.setdefault(name, placement.step)
    return found


def _settings(published: Case, case: Case, folders: Folders) -> list[str]:
    """Keys of the plan; critic and reward model are `values`, if they are another model."""
    paths = {"actor_rollout_ref": folders.of(published, case.get("model") or published["model"])}
    if "reward_model.enable=true" in published["settings"]:
        paths["reward_model"] = paths["actor_rollout_ref"]
    if "values" in case:
        paths["critic"] = paths["reward_model"] = folders.of(published, case["values"])
    return [
        f"plan.gpus={case['gpus']}",
        f"plan.device={case.get('device') or published['device']}",
        *(f"{key}.model.path={path}" for key, path in paths.items()),
        *published["settings"],
        *case.get("settings", ()),
    ]


# --------------------------------------------------------------------------- steps of one model


def steps(published: Case, folders: Folders) -> list[Case]:
    """Seconds by two constants of each family, and memory by none."""
    trained = [Step.of(published, case, folders) for case in published["cases"]]
    families: dict[str, list[Step]] = {}
    for step in trained:
        if "fits" in step.case:
            families.setdefault(step.case["family"], []).append(step)
    rates = {name: fitted_rates(of) for name, of in families.items()}
    rows = []
    for step in trained:
        case, own = step.case, rates[step.case["family"]]
        row = numbers(case, "seconds", round(step.measured, 3), step.seconds(own))
        row["rates"] = [round(own.flops, 3), round(own.call, 2)]
        rows.append(row | ({"fitted": True} if "fits" in case else {}))
        if "GiB" in case:
            rows.append(numbers(case, "GiB", case["GiB"], step.gib))
    return rows


@dataclass(frozen=True)
class Step:
    """A step of AdamW after `passes` passes of as many rows of one length on every data rank."""

    case: Case
    held: HeldModel
    device: Device
    dims: ParallelDims

    @classmethod
    def of(cls, published: Case, case: Case, folders: Folders) -> Step:
        """Of a file's case, with what all its cases share."""
        case = published.get("of_all", {}) | case
        axes = {name: case.get(name, 1) for name in ("sp", "tp", "pp")}
        schedule = "interleaved" if case.get("interleaved") else "1f1b"
        model = ModelConfig(
            path=str(folders.of(published, case["model"])),
            enable_gradient_checkpointing=case["recomputes"],
            use_fused_kernels=not case.get("whole_logits", False),
            lora_rank=case.get("lora_rank", 0),
        )
        held = HeldModel(
            "model.path",
            model,
            FSDPConfig(param_offload=False, optimizer_offload=False),
            parallel=ParallelConfig(**axes, pp_schedule=schedule),
            trains=True,
        )
        own = published.get("devices", {}).get(case["device"], {})
        shard = case["gpus"] // (axes["sp"] * axes["tp"] * axes["pp"])
        dims = ParallelDims(shard=shard, **axes)
        return cls(case, held, device_of(case["device"], own), dims)

    @property
    def measured(self) -> float:
        """Seconds, published as such or as tokens a second of a card."""
        if "seconds" in self.case:
            return float(self.case["seconds"])
        tokens = self.samples * self.case["tokens"] / self.case["gpus"]
        return float(tokens / self.case["tokens_per_second"])

    @property
    def samples(self) -> int:
        """Rows of all ranks."""
        return int(self.case["passes"] * self.case["rows"] * self.dims.data_size)

    @property
    def tokens_per_pass(self) -> int:
        """Of a rank."""
        return int(self.case["rows"] * self.case["tokens"] // self.dims.sp)

    def seconds(self, rates: Rates) -> float:
        """Predicted, on a device of these rates."""
        half = self.case["tokens"] // 2
        rows = Rows(self.samples, self.samples, half, [half])
        cards = Cards(replace(self.device, rates=rates), self.case["gpus"], 8)
        num_stages = num_chunks(self.held.sharding.pp_schedule)
        how = {"trains": True, "recomputes": self.case["recomputes"], "num_stages": num_stages}
        model = Model.of(self.held)
        return pass_seconds(model, rows, self.dims, self.tokens_per_pass, cards, **how)

    @property
    def gib(self) -> float:
        """Predicted, of the fullest card."""
        largest = LargestPass(self.tokens_per_pass, self.tokens_per_pass)
        memory = memory_of(self.held, "model", "all", self.case["gpus"], "cuda", largest)
        return (memory.kept + memory.call) / GIB


def fitted_rates(measured: Sequence[Step]) -> Rates:
    """The share of operations that is reached and, of two steps, the seconds beside them."""
    at_all, at_half = (
        np.array([step.seconds(Rates(flops=share, call=0.0)) for step in measured])
        for share in (1.0, 0.5)
    )
    operations = at_half - at_all
    goal = np.array([step.measured for step in measured]) - (at_all - operations)
    if len(measured) == 1:
        rates = Rates()
        return replace(rates, flops=float(operations[0] / (goal[0] - rates.call)))
    columns = np.stack([operations, np.ones(len(measured))], axis=1)
    inverse, call = map(float, np.linalg.lstsq(columns, goal, rcond=None)[0])
    return Rates(flops=1 / inverse, call=call)


# --------------------------------------------------------------------------- fewest cards


def fits(published: Case, folders: Folders) -> list[Case]:
    """The fewest cards that the planner finds enough, beside those of a run that went."""
    rows = []
    for case in published["cases"]:
        tried = sizes_of(2 * case["gpus"], 8)
        least = next((n for n in tried if _fits(published, case, n, folders)), None)
        row = {"case": case["name"], "of": "cards", "published": case["gpus"], "predicted": least}
        row["agrees"] = least is not None and least <= case["gpus"]
        rows.append(row | _why(case, "cards"))
    return rows


def _fits(published: Case, case: Case, gpus: int, folders: Folders) -> bool:
    job = job_of(_settings(published, {**case, "gpus": gpus}, folders))
    return bool(job.search.best(sizes_of(gpus, 8), gpus, 1))


# --------------------------------------------------------------------------- steps of a run


def runs(published: Case, folders: Folders) -> list[Case]:
    """Seconds of stages where roles are placed as they were, with rates as they are assumed."""
    rows = []
    for case in published["cases"]:
        job = job_of(_settings(published, case, folders))
        placement = placed(job, case.get("pools"))
        predicted = _stages(placement, case.get("overlaps", False)) if placement else {}
        for stage, seconds in case["seconds"].items():
            row = numbers(case, f"seconds of {stage}", seconds, predicted.get(stage))
            rows.append(row | ({"fitted": True} if stage in case.get("fitted", ()) else {}))
        if case.get("compare") and placement:
            best = job.search.best(sizes_of(job.num_cards, 8), job.num_cards, 1)[0]
            rows[-1] |= {"our best": best.in_words, "its seconds": round(best.step, 2)}
    return rows


def placed(job: PPOJob, pools: Sequence[tuple[Sequence[str], int]] | None) -> Placement | None:
    """The fastest layouts on these pools, by default one of all cards; None where none fits."""
    search = job.search
    pools = pools or [(job.roles, job.num_cards)]
    choices = [
        search.pools(tuple(role for role in job.roles if role in roles), cards)
        for roles, cards in pools
    ]
    found = map(Placement, product(*choices))
    return min(found, key=lambda placement: placement.step, default=None)


def _stages(placement: Placement, overlaps: bool) -> dict[str, float]:
    """Of a step; one that overlaps makes new samples while it learns from those it has."""
    found = dict(zip(PPOJob.stages, placement.seconds, strict=True))
    longest = max(found["gen"], found["update"]) + found["update_weights"]
    return {**found, "step": longest if overlaps else placement.step}


KINDS: dict[str, Callable[[Case, Folders], list[Case]]] = {
    "placements": placements,
    "steps": steps,
    "fits": fits,
    "runs": runs,
}
