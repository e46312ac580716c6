"""The parts of `gpu.sh` and `gpu_node.sh`, in the order in which they run.

    for part in parts(Machine(num_gpus=8), folder):
        part.name, part.limit_s, part.command

One GPU runs the measurements of `gpu_side.py` and three whole runs without Ray; several GPUs run
every placement. The most informative parts per second come first.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from gpu_models import decoded_bytes

if TYPE_CHECKING:
    from trainer.planner.cost import Device

HERE = Path(__file__).resolve().parent
GRACE_S = 5
"""Seconds from the deadline of a part until its processes are killed."""
INSTALL = {
    "vllm": "pip install 'verl-like[vllm]'",
    "peft": "pip install 'verl-like[lora]'",
    "ray": "pip install ray",
}
"""Module that a part may need -> how to install it."""
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
GRPO = ("algorithm=grpo",)
PPO = ("algorithm=ppo", "critic.model.enable_gradient_checkpointing=true")
EAGER = f"{MODEL}.compile=off"
Figures = Mapping[str, float | str]


def is_installed(module: str) -> bool:
    """True if this interpreter can import the module."""
    return find_spec(module) is not None


@dataclass(frozen=True)
class Machine:
    """The machine and the settings of all parts."""

    num_gpus: int
    device: str = "cuda"
    is_tiny: bool = False
    """True for small models and rows, for a trial on a CPU."""
    backend: str = "local"
    engine: str = "native"
    """The rollout engine in runs that do not test an engine."""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Machine:
        """Use Ray for several GPUs, and vLLM on GPUs, if they are installed."""
        has_vllm = options.device == "cuda" and (options.dry_run or is_installed("vllm"))
        has_ray = options.gpus > 1 and is_installed("ray")
        backend = options.backend or ("ray" if has_ray else "local")
        engine = "vllm" if has_vllm and options.gpus > 1 else "native"
        return cls(options.gpus, options.device, options.tiny, backend, engine)


@dataclass(frozen=True)
class Run:
    """A run of three steps."""

    recipe: str
    model: Path
    settings: tuple[str, ...]
    prompts: int
    samples: int
    generating_gpus: int
    engine: str
    gpus_per_engine: int = 1
    prompt: int = 512
    response: int = 512
    reads_weights: bool = True
    """False: the weights are random, and only the model's configuration is read."""

    @property
    def rows_per_engine(self) -> int:
        """Samples that one engine generates per step."""
        return self.prompts * self.samples * self.gpus_per_engine // self.generating_gpus

    def keys(self, machine: Machine) -> list[str]:
        """Return the settings of the run's command."""
        tokens = self.prompt + self.response if machine.is_tiny else 16384
        of_vllm = (
            f"{ROLLOUT}.gpu_memory_utilization=0.4",
            f"{ROLLOUT}.tensor_model_parallel_size={self.gpus_per_engine}",
        )
        return [
            f"{MODEL}.path={self.model}",
            *([] if self.reads_weights else [f"{MODEL}.random_init_seed=0"]),
            f"{MODEL}.enable_gradient_checkpointing=true",
            f"data.train_files={self.model.parent}/prompts_{self.prompt}.parquet",
            f"data.max_prompt_length={self.prompt}",
            f"data.max_response_length={self.response}",
            f"data.train_batch_size={self.prompts}",
            f"reward.function.path={HERE / 'gpu_reward.py'}",
            "reward.function.name=last_digit",
            *self.settings,
            f"{ACTOR}.ppo_mini_batch_size={self.prompts}",
            f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
            f"{ROLLOUT}.n={self.samples}",
            f"{ROLLOUT}.name={self.engine}",
            *(of_vllm if self.engine == "vllm" else ()),
            f"trainer.device={machine.device}",
            f"trainer.backend={machine.backend}",
            f"trainer.n_gpus_per_node={machine.num_gpus}",
            "trainer.total_training_steps=3",
            "trainer.save_final=false",
            "trainer.save_every_minutes=null",
            "trainer.max_restarts=0",
            "trainer.logger=[console]",
        ]


@dataclass(frozen=True)
class Part:
    """A command in its own process."""

    name: str
    limit_s: int
    command: tuple[str, ...]
    """Arguments of Python; {part} is replaced by the part's folder."""
    figures: Callable[..., Figures]
    """(folder, GPU) -> results."""
    needs: tuple[str, ...] = ()
    """Modules without which the part is skipped."""
    needs_gpu: bool = False
    needs_models: bool = False
    """True if the part reads weights from the folders that the part "models" writes."""
    run: Run | None = None


@dataclass
class Outcome:
    """The outcome of a part."""

    name: str
    result: str
    """ok, FAILED, LATE or skipped."""
    seconds: float = 0.0
    why: str = ""
    figures: Figures = field(default_factory=dict)
    command: str = ""

    @property
    def is_bad(self) -> bool:
        """True if the exit code of the runner must be 1."""
        return self.result in ("FAILED", "LATE")

    @property
    def text(self) -> str:
        """Return the reason for missing results, and the results."""
        figures = [f"{name} {short(value)}" for name, value in self.figures.items()]
        return "; ".join(filter(None, [self.why, ", ".join(figures)]))


def short(value: float | str) -> str:
    """Return a number with three digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ---------------------------------------------------------------------------------------------
# Results, read from the files that a part has written
# ---------------------------------------------------------------------------------------------


def no_figures(folder: Path, gpu: Device | None) -> Figures:
    """Return nothing: the exit code is the result."""
    return {}


def written_figures(folder: Path, gpu: Device | None) -> Figures:
    """Return the JSON that `gpu_side.py` wrote."""
    figures: Figures = json.loads((folder / "figures.json").read_text("utf-8"))
    return figures


def test_figures(folder: Path, gpu: Device | None) -> Figures:
    """Return the counts in pytest's report."""
    suite = ElementTree.parse(folder / "tests.xml").getroot().find("testsuite")
    assert suite is not None, "pytest writes one suite"
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return {"passed": passed, "failed": failed, "skipped": counts["skipped"]}


def doctor_figures(folder: Path, gpu: Device | None) -> Figures:
    """Return the checks of `verl-like doctor` that failed."""
    lines = (folder / "log.txt").read_text("utf-8", errors="replace").splitlines()
    failed = [re.split(r" {2,}", line)[1] for line in lines if line.startswith("FAIL  ")]
    num_ok = sum(line.startswith("ok    ") for line in lines)
    return {"ok": num_ok, "failing": ", ".join(failed) or "nothing"}


METRICS = {
    "s per step": "timing_s/step",
    "update s": "timing_s/update_actor",
    "critic's update s": "timing_s/update_critic",
    "tokens/s per GPU": "perf/throughput",
    "MFU": "perf/mfu/actor",
    "critic's MFU": "perf/mfu/critic",
    "peak GiB": "perf/max_memory_allocated_gb",
}
"""Result -> metric."""
SYNCHRONOUS = {
    "generation s": "timing_s/gen",
    "sync s": "timing_s/update_weights",
    "sync MB": "perf/weight_sync_mib",
}
ASYNCHRONOUS = {
    "wait for samples s": "timing_s/gen",
    "sync s": "timing_s/deliver_weights",
    "sync MB": "perf/published_mib",
}


def run_figures(run: Run, folder: Path, gpu: Device | None) -> Figures:
    """Return medians over all steps except the first, and ratios to the GPU's data sheet."""
    text = (folder / "run" / "metrics.jsonl").read_text("utf-8")
    first, *steps = [json.loads(line) for line in text.splitlines()]
    figures: dict[str, float | str] = {"first step s": first["timing_s/step"]}
    for name, metric in (
        METRICS | (ASYNCHRONOUS if run.recipe == "async" else SYNCHRONOUS)
    ).items():
        if values := [step[metric] for step in steps if metric in step]:
            figures[name] = statistics.median(values)
    if not steps:
        raise ValueError("the run has no step after its first one")
    if gpu is None:
        return figures
    if seconds := figures.get("generation s"):
        read = decoded_bytes(run.model, run.rows_per_engine, run.prompt * 3 // 4, run.response)
        per_gpu = read / run.gpus_per_engine / float(seconds)
        figures["share of bandwidth"] = per_gpu / gpu.memory_bandwidth
    if (sent := figures.get("sync MB")) and (seconds := figures.get("sync s")):
        figures["sync, times the link's own time"] = (
            float(seconds) * gpu.link_bandwidth / (float(sent) * 2**20)
        )
    return figures


# ---------------------------------------------------------------------------------------------
# The lists
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Makes:
    """Builds all kinds of parts for this machine."""

    machine: Machine
    models: Path

    def side(self, name: str, limit_s: int, part: str, **fields: Any) -> Part:
        """Return a part of `gpu_side.py`."""
        command = (
            str(HERE / "gpu_side.py"), part, "--device", self.machine.device,
            *(["--tiny"] if self.machine.is_tiny else []), "--out", "{part}/figures.json",
        )  # fmt: skip
        return Part(name, limit_s, command, written_figures, **fields)

    def tests(self, limit_s: int) -> Part:
        """Return a part with the tests that have the marker `gpu` and need no Ray."""
        command = (
            "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/workers/training",
            "--junitxml={part}/tests.xml",
        )  # fmt: skip
        return Part("gpu tests", limit_s, command, test_figures, needs_gpu=True)

    def weights(self, *sizes: str) -> Part:
        """Return a part that writes the weights of these models."""
        command = (
            str(HERE / "gpu_models.py"), str(self.models), *sizes,
            "--device", self.machine.device, *(["--tiny"] if self.machine.is_tiny else []),
        )  # fmt: skip
        return Part(MODELS, 20 * len(sizes), command, no_figures)

    def run(
        self, name: str, limit_s: int, size: str, settings: tuple[str, ...], **fields: Any
    ) -> Part:
        """Return a run of `verl-like ppo`, or of another recipe."""
        of_part = {key: fields.pop(key) for key in ("needs", "needs_gpu") if key in fields}
        of_part["needs_models"] = fields.get("reads_weights", True)
        of_run = {
            "recipe": "ppo",
            "prompts": 64,
            "samples": 8,
            "generating_gpus": self.machine.num_gpus,
            "engine": self.machine.engine,
            "model": self.models / size,
            "settings": settings,
        }
        run = Run(**of_run | fields)
        if self.machine.is_tiny:
            run = replace(run, prompts=8, samples=2, prompt=16, response=8)
        folder = "trainer.default_local_dir={part}/run"
        command = ("-P", "-m", "trainer.cli.main", run.recipe, *run.keys(self.machine), folder)
        return Part(name, limit_s, command, partial(run_figures, run), run=run, **of_part)


def parts(machine: Machine, folder: Path) -> list[Part]:
    """Return the parts for one GPU or for several; models are written into `folder`."""
    makes = Makes(machine, folder / "models")
    return [*(of_one_gpu(makes) if machine.num_gpus == 1 else of_several(makes))]


MODELS = "models"
"""Name of the part that writes weights."""


def of_one_gpu(makes: Makes) -> Iterator[Part]:
    """Yield parts without Ray and vLLM, the most informative per second first."""
    yield makes.side("machine", 20, "machine")
    yield makes.side("LOCAL_RANK trap", 15, "trap", needs_gpu=True)
    yield makes.side("LOCAL_RANK fixed", 20, "fixed")
    yield makes.tests(60)
    yield makes.side("FSDP2 on a mesh of one", 65, "fsdp")
    yield makes.side("memory", 55, "memory")
    yield makes.side("MFU, eager", 50, "mfu")
    yield makes.side("profile of an update", 75, "profile")
    yield makes.side("shared prefixes", 50, "prefixes")
    yield makes.side("GPU that is full", 35, "full", needs_gpu=True)
    yield makes.side("hash, sampling, copies", 25, "micro")
    yield makes.side("decode", 45, "decode")
    seeded = {"samples": 4, "reads_weights": False}
    yield makes.run("GRPO 0.5B", 90, "0.5b", GRPO, **seeded)
    yield makes.side("MFU, compiled", 115, "compiled", needs_gpu=True)
    yield makes.weights("0.5b")
    yield makes.run("PPO 0.5B", 80, "0.5b", (*PPO, EAGER), samples=4, prompts=32, response=256)


def of_several(makes: Makes) -> Iterator[Part]:
    """Yield parts with FSDP2 over all GPUs, and every placement."""
    half = makes.machine.num_gpus // 2
    doctor = ("-P", "-m", "trainer.cli.main", "doctor")
    yield Part("doctor", 90, doctor, doctor_figures, needs=("ray",))
    yield makes.weights("0.5b", "1.5b", "7b")
    yield makes.tests(90)
    yield makes.side("MFU, eager, one GPU", 60, "mfu")
    yield makes.run("GRPO 7B, FSDP2 over all", 150, "7b", GRPO)
    yield makes.run(
        "PPO 7B, critic apart", 145, "7b", (*PPO, "placement=split"), generating_gpus=half
    )
    apart = (
        "role_mapping.rollout=rollout_pool",
        f"resource_pool_spec.rollout_pool=[{half}]",
    )
    yield makes.run(
        "GRPO 7B, rollout apart: NCCL sync", 125, "7b", (*GRPO, *apart), generating_gpus=half
    )
    yield makes.run(
        "GRPO 1.5B, vLLM with tp 2", 110, "1.5b", GRPO,
        engine="vllm", gpus_per_engine=2, needs=("vllm",),
    )  # fmt: skip
    offload = f"{ACTOR}.strategy=fsdp+offload"
    yield makes.run("GRPO 7B, offloaded", 130, "7b", (*GRPO, offload), needs_gpu=True)
    asynchronous = (
        *GRPO,
        "async_training.generators=1",
        f"async_training.trainers={half}",
        f"resource_pool_spec.generator_0_pool=[{half}]",
    )
    yield makes.run(
        f"asynchronous 7B, {half} + {half}", 140, "7b", asynchronous,
        recipe="async", generating_gpus=half,
    )  # fmt: skip
