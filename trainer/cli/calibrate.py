"""What this machine's devices do, measured: `verl-like plan --calibrate`.

Small jobs run here, on one device and on two. The rates that predict their calls best are kept in a
file of the device's name, with what tells this machine from others, and `plan.device=NAME` takes
them from there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trainer.cli.job_record import device_name, machine_facts
from trainer.cli.make_tiny import make
from trainer.planner.devices import DEVICES, Device, Rates, data_sheet
from trainer.planner.layouts import PPOJob
from trainer.planner.measured import NOTHING, MeasuredRun, fitted, own_seconds
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from verl_like.process.machine import memory_gb, usable_cores

CPU = "cpu"
"""The name of this machine's cores, a process each."""
STEPS = 4
PROMPTS, LONGEST_PROMPT = 32, 16


@dataclass(frozen=True)
class Case:
    """A job of GRPO's shape with a critic and a reference."""

    hidden_size: int
    num_layers: int
    response: int
    mini_batch: int = PROMPTS
    tokens_per_pass: int = 16384
    ranks: int = 1
    prompts: int = PROMPTS


ON_CPU = (
    Case(64, 2, 32),
    Case(192, 6, 64),
    Case(64, 8, 32, mini_batch=8, tokens_per_pass=1024),
    Case(64, 2, 128, mini_batch=8, prompts=8),
    Case(64, 2, 32, mini_batch=8, ranks=2),
    Case(192, 6, 64, ranks=2),
)
ON_CARDS = (
    Case(1024, 8, 128),
    Case(2048, 16, 512),
    Case(1024, 24, 128, mini_batch=8, tokens_per_pass=2048),
    Case(1024, 8, 512, mini_batch=8, prompts=8),
    Case(1024, 8, 128, mini_batch=8, ranks=2),
    Case(2048, 16, 512, ranks=2),
)
"""Of few and many operations, passes, layers and samples, so that each unknown shows."""


def settings_of(case: Case, folder: Path) -> list[str]:
    """The keys of its run; model and prompts are those of `verl-like make-tiny`."""
    return [
        "placement=colocate",
        f"trainer.n_gpus_per_node={case.ranks}",
        f"actor_rollout_ref.model.path={folder}/model",
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={case.prompts}",
        f"data.max_prompt_length={LONGEST_PROMPT}",
        f"data.max_response_length={case.response}",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={case.mini_batch}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={case.tokens_per_pass}",
        f"critic.ppo_max_token_len_per_gpu={case.tokens_per_pass}",
    ]


def calibrate(job_of: Callable[[Sequence[str], Device], PPOJob], out: Path | None) -> str:
    """Measure, keep the device in `out` or its usual place, and say how well it predicts."""
    began = time.perf_counter()
    device = nominal()
    num = torch.cuda.device_count() if device.type == "cuda" else usable_cores()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(ON_CPU if device.type == CPU else ON_CARDS):
            if case.ranks <= num:
                folder = Path(name) / str(number)
                size = {"hidden_size": case.hidden_size, "num_layers": case.num_layers}
                make(folder, num_train=PROMPTS, **size)
                settings = [*settings_of(case, folder), "trainer.backend=local"]
                measured = run_measured(settings, STEPS, folder / "run")
                asked = [
                    f"plan.gpus={case.ranks}",
                    f"plan.device={device.name}",
                    f"plan.mean_prompt={measured.prompt}",
                    f"plan.mean_response={measured.response}",
                ]
                runs.append((job_of([*settings, *asked], device), measured))
        found = replace(fitted(device, runs), measured=f"{len(runs)} small jobs")
        calls = _compared(found, runs)
    record = {"hardware": machine_facts(), "device": asdict(found), "calls": calls}
    path = out or kept_at(device.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=1) + "\n")
    return _in_words(found, calls, path, time.perf_counter() - began)


def nominal() -> Device:
    """This machine's device before it is measured: its data sheet's, or its cores'."""
    if not torch.cuda.is_available():
        cores = usable_cores()
        gib = (memory_gb("MemTotal:") or 1.0) / cores
        rates = Rates(layer=0.0, decode_layer=0.0, memory=1.0, hides=False)
        return Device(CPU, gib, 1e11, _copy_rate("cpu"), 1e9, 1e9, rates, type=CPU)
    name = device_name("cuda", machine_facts())
    device = data_sheet(name)
    if device is None:
        raise ConfigError(
            f"{name} is no card that is known here ({', '.join(DEVICES)}): give its numbers to "
            "`verl-like plan` by key."
        )
    return replace(device, memory=_copy_rate("cuda"), rates=replace(device.rates, memory=1.0))


def _copy_rate(device: str) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.ones(2**26 if device == "cpu" else 2**30, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds)


def run_measured(settings: Sequence[str], steps: int, folder: Path) -> MeasuredRun:
    """A run of PPO, in a process of its own: what it keeps of memory and threads is not ours."""
    length = [f"trainer.total_training_steps={steps}", f"trainer.total_epochs={steps}"]
    where = ["trainer.logger=[]", "trainer.save_final=false", f"trainer.default_local_dir={folder}"]
    command = [sys.executable, "-m", "trainer.main_ppo", *settings, *length, *where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"a run to measure has failed:\n{done.stderr[-2000:]}")
    return MeasuredRun.of(folder)


def _compared(device: Device, runs: Sequence[tuple[PPOJob, MeasuredRun]]) -> list[dict[str, Any]]:
    """Every call, measured and predicted."""
    calls = []
    for number, (job, run) in enumerate(runs):
        predicted = own_seconds(job, device, run.cards)
        for (role, method), seconds in run.seconds.items():
            if (role, method) in predicted:
                also = {"measured": seconds, "predicted": predicted[role, method]}
                calls.append({"run": number, "call": f"{role}.{method}", **also})
    return calls


def _in_words(device: Device, calls: Sequence[dict[str, Any]], path: Path, seconds: float) -> str:
    errors = [abs(call["predicted"] / call["measured"] - 1) for call in calls]
    near = sum(error <= 0.15 for error in errors)
    rates = device.rates
    is_free = rates.link >= 1 / NOTHING  # the runs have not shown what it costs
    between = "bytes that cost no time" if is_free else f"{device.link * rates.link:.3g} bytes/s"
    return (
        f"{device.name}: {device.flops_reached(trains=True):.3g} operations/s in updates and "
        f"{device.flops_reached(trains=False):.3g} in other passes, {device.memory:.3g} bytes/s of "
        f"memory, {between} between ranks; {rates.call:.2g} s a call, "
        f"{rates.layer:.2g} s a layer and pass, {rates.collective:.2g} s a collective, "
        f"{rates.decode_layer:.2g} s a layer and {rates.decode_row:.2g} s a sample in a step of "
        f"decoding\n{near} of {len(calls)} measured calls are predicted within 15 %, the median "
        f"error is {sorted(errors)[len(errors) // 2]:.0%}\n{path} is kept, after {seconds:.0f} s: "
        f"plan.device={device.name} takes it from there"
    )


# ------------------------------------------------------------------------------------- what is kept


def kept_at(name: str) -> Path:
    """Of a device of this name."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "verl_like" / f"{name}.json"


def calibrated(name: str, path: str | None = None) -> Device | None:
    """The device of this name as it was measured, here or as `path` says; None if it was not."""
    file = Path(path) if path else kept_at(name)
    if not file.is_file():
        if path:
            raise ConfigError(
                f"plan.calibration={path} is no file; `verl-like plan --calibrate` makes it."
            )
        if name == CPU:
            raise ConfigError(
                f"plan.device={CPU} is this machine's cores, which nobody has measured: run "
                "`verl-like plan --calibrate` (some minutes), or give plan.calibration=FILE."
            )
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        numbers = record["device"]
        device = Device(**{**numbers, "rates": Rates(**numbers["rates"])})
        hardware = record["hardware"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is no calibration of this version ({error}): run `verl-like plan --calibrate` "
            "anew."
        ) from error
    if device.name.lower() != name.lower():
        raise ConfigError(
            f"plan.calibration={file} was measured on {device.name}, and plan.device={name}: give "
            "the one of this device, or plan for that one."
        )
    if not path and name == CPU and hardware != (here := machine_facts()):
        raise ConfigError(
            f"{file} was measured on another machine ({_short(hardware)}) than this one "
            f"({_short(here)}): run `verl-like plan --calibrate` here, or name it by "
            "plan.calibration to plan for that machine."
        )
    return device


def _short(hardware: dict[str, Any]) -> str:
    return f"{hardware['cores']} cores of {hardware['processor']}, {hardware['memory_gib']} GiB"
