"""Run the parts of `gpu_parts.py` one after the other; write gpu.json, gpu.md and gpu.log.

    bash benchmarks/gpu.sh                             on one GPU
    bash benchmarks/gpu.sh --seconds 400               end within 400 s, with fewer parts
    bash benchmarks/gpu.sh --only memory --only decode
    bash benchmarks/gpu_node.sh                        on eight GPUs
    bash benchmarks/gpu_node.sh --gpus 4               on four
    bash benchmarks/gpu_node.sh --dry-run H100         check every run as if on these GPUs
    bash benchmarks/gpu.sh --device cpu --tiny         run every command with small sizes on a CPU

A part that fails or exceeds its limit does not stop the others; its results so far are kept. The
exit code is 1 if a part failed or was late.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from gpu_models import write_configs
from gpu_parts import GRACE_S, INSTALL, MODELS, Machine, Outcome, Part, is_installed, parts, short

from trainer.planner.cost import Device, data_sheet
from verl_like.files import write_whole
from verl_like.masking import mask_text

HERE = Path(__file__).resolve().parent
SHOWN_LINES = 15
"""Lines shown of the log of a part that failed."""
SHORTEST_S = 15
"""Seconds that must be left for a part to begin."""


def why_skipped(part: Part, machine: Machine, before: list[Outcome]) -> str:
    """Return why the part cannot run here; empty if it can."""
    missing = [module for module in part.needs if not is_installed(module)]
    if missing:
        return f"{missing[0]} is not installed: {INSTALL[missing[0]]}"
    if part.needs_gpu and machine.device == "cpu":
        return "it needs a GPU"
    no_models = any(outcome.name == MODELS and outcome.is_bad for outcome in before)
    return "there are no models" if part.needs_models and no_models else ""


def run_part(part: Part, folder: Path, gpu: Device | None) -> Outcome:
    """Run the part to its end or its deadline, with its output in `log.txt`; read its results."""
    folder.mkdir(parents=True)
    command = [sys.executable, *(word.replace("{part}", str(folder)) for word in part.command)]
    begin = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=HERE.parent, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(part.limit_s)
            result, why = ("FAILED", f"exit code {code}") if code else ("ok", "")
        except subprocess.TimeoutExpired:
            result, why = "LATE", f"not done in {part.limit_s} s"
        finally:
            end(process)
    outcome = Outcome(part.name, result, time.monotonic() - begin, why)
    outcome.command = mask_text(shlex.join(["python", *command[1:]]))
    try:
        outcome.figures = part.figures(folder, gpu)
    except (OSError, ValueError, KeyError) as error:
        if result == "ok":
            outcome.result, outcome.why = "FAILED", f"its figures cannot be read: {error}"
    return outcome


def end(process: subprocess.Popen[bytes]) -> None:
    """End the part and all processes that it started, after a moment to clean up."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_parts_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that the running part also ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def report(title: str, outcomes: list[Outcome]) -> str:
    """Return the outcomes as Markdown: a table, and the results of each part that has many."""
    rows = [["part", "result", "s", "figures"], ["---", "---", "--:", "---"]]
    lists: list[str] = []
    for outcome in outcomes:
        is_long = len(outcome.figures) > 8
        text = "; ".join(filter(None, [outcome.why, "below"])) if is_long else outcome.text
        rows.append([outcome.name, outcome.result, f"{outcome.seconds:.0f}", text])
        if is_long:
            lists += ["", f"{outcome.name}:", "", *figure_table(outcome)]
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows), *lists, ""])


def figure_table(outcome: Outcome) -> list[str]:
    """Return results named "row: column" as a table with a row per name, others as a list."""
    cells: dict[str, dict[str, str]] = {}
    for name, value in outcome.figures.items():
        row, _, column = name.rpartition(": ")
        cells.setdefault(row, {})[column] = short(value)
    if set(cells) == {""}:
        return [f"- {name}: {value}" for name, value in cells[""].items()]
    columns = list(dict.fromkeys(column for values in cells.values() for column in values))
    lines = [["", *columns], ["---", *["--:"] * len(columns)]]
    lines += [
        [row, *(values.get(column, "") for column in columns)] for row, values in cells.items()
    ]
    return [f"| {' | '.join(line)} |" for line in lines]


def dry_run(part: Part, machine: Machine, gpu: str) -> str:
    """Return what the checks print for this part on these GPUs; errors are raised."""
    from trainer.cli.main import RECIPES
    from trainer.config.compose import load_config
    from trainer.launch import run
    from verl_like.registry import load_object

    assert part.run is not None, f"{part.name} is no run"
    recipe = load_object(RECIPES[part.run.recipe], part.run.recipe)
    simulate = f"trainer.simulate={machine.num_gpus}x{gpu}"
    output = io.StringIO()
    with redirect_stdout(output):
        run(load_config([*part.run.keys(machine), simulate], recipe))
    return output.getvalue()


def show_parts(machine: Machine, folder: Path, gpu: str) -> None:
    """Print every part with its deadline, and check the runs."""
    write_configs(folder / "models", machine.is_tiny)
    for part in parts(machine, folder):
        checked = dry_run(part, machine, gpu).splitlines()[-1] if part.run else ""
        print(f"{part.name}: at most {part.limit_s} s. {checked}", flush=True)


def device_name(machine: Machine) -> str:
    """Return the GPU's name, read in a separate process so that this one uses no GPU memory."""
    if machine.device == "cpu":
        return "cpu"
    query = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
    done = subprocess.run(
        [sys.executable, "-c", query], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"torch finds no GPU:\n{done.stderr[-2000:]}")
    count, _, name = done.stdout.splitlines()[-1].partition(" ")
    if int(count) < machine.num_gpus:
        sys.exit(
            f"{machine.num_gpus} GPU(s) are needed, and this machine has {count}. "
            "--gpus <number> takes fewer, --device cpu --tiny tries it on a CPU."
        )
    return name


def commit() -> str:
    """Return the commit of this checkout, or "unknown" without git."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    with suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return "unknown"


def run_parts(
    machine: Machine, out: Path, only: list[str], seconds: float, patience: float
) -> list[Outcome]:
    """Run all parts; write the results after each."""
    name = device_name(machine)
    gpu = data_sheet(name) if machine.device == "cuda" else None
    title = f"commit {commit()}, {machine.num_gpus} x {name}, backend {machine.backend}"
    deadline = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.log").write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        write_configs(Path(folder) / "models", machine.is_tiny)
        for part in parts(machine, Path(folder)):
            if only and part.name not in (*only, MODELS):
                continue
            left = deadline - time.monotonic()
            part = replace(part, limit_s=round(min(part.limit_s * patience, left)))
            why = why_skipped(part, machine, outcomes)
            if not why and left < SHORTEST_S:
                why = f"only {max(left, 0):.0f} s were left"
            print(f"== {part.name}: {'' if why else f'at most {part.limit_s} s'}", flush=True)
            part_folder = Path(folder) / "parts" / re.sub(r"\W+", "_", part.name)
            outcome = (
                Outcome(part.name, "skipped", why=why) if why else run_part(part, part_folder, gpu)
            )
            outcomes.append(outcome)
            if not why:
                log = (part_folder / "log.txt").read_text("utf-8", errors="replace")
                with (out / "gpu.log").open("a", encoding="utf-8") as whole:
                    whole.write(f"== {part.name}\n{log}\n")
                if outcome.is_bad:
                    print(*log.splitlines()[-SHOWN_LINES:], sep="\n")
            print(f"-- {outcome.result}, {outcome.seconds:.0f} s: {outcome.text}", flush=True)
            record = {"title": title, "parts": [vars(outcome) for outcome in outcomes]}
            write_whole(out / "gpu.json", json.dumps(record, indent=1) + "\n")
            write_whole(out / "gpu.md", report(title, outcomes))
    return outcomes


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="number of GPUs (gpu_node.sh: 8)")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="small sizes, for a trial")
    add(
        "--backend",
        choices=("ray", "local"),
        help="default: Ray for several GPUs if it is installed",
    )
    add(
        "--only", action="append", default=[], metavar="PART", help="run this part; may be repeated"
    )
    add("--seconds", type=float, help="limit for all parts together (900; several GPUs: 1200)")
    add("--patience", type=float, default=1, help="factor for all deadlines, for a busy machine")
    add("--dry-run", metavar="GPU", help="check every run as on GPUs of this name, and stop")
    add("--out", type=Path, help="a folder; runs/gpu/<time> by default")
    options = parser.parse_args()
    if options.gpus < 1 or (options.gpus > 1 and options.gpus % 2):
        parser.error(f"--gpus {options.gpus}: one, or an even number, since halves are needed")
    machine = Machine.of(options)
    if options.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            show_parts(machine, Path(folder), options.dry_run)
        return
    end_parts_on_sigterm()
    out = (options.out or Path(f"runs/gpu/{datetime.now():%Y%m%d-%H%M%S}")).resolve()
    seconds = options.seconds
    if seconds is None:
        seconds = 900 if options.gpus == 1 else 1200
    outcomes = run_parts(machine, out, options.only, seconds, options.patience)
    print("", (out / "gpu.md").read_text("utf-8"), f"everything: {out}/gpu.json", sep="\n")
    if machine.device == "cpu":
        print(
            "no GPU was used: these are figures of the CPU" + ", of tiny models" * machine.is_tiny
        )
    sys.exit(any(outcome.is_bad for outcome in outcomes))


if __name__ == "__main__":
    main()
