"""Runs the parts of `gpu_parts.py` one after the other; ends in a JSON and a table to paste.

    bash benchmarks/gpu.sh                             on one card
    bash benchmarks/gpu_node.sh                        on eight
    bash benchmarks/gpu_node.sh --cards 4              on as many
    bash benchmarks/gpu_node.sh --dry-run H100         no card: every run as on so many of these,
                                                       by the checks of a run
    bash benchmarks/gpu.sh --device cpu --tiny         every command, small, on a CPU

A part that fails or is late does not stop the others. The exit code is 1 if one did.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from gpu_models import write_configs
from gpu_parts import GRACE_S, INSTALL, MODELS, Machine, Outcome, Part, is_installed, parts

from trainer.planner.devices import Device, data_sheet
from verl_like.files import write_whole
from verl_like.masking import mask_text

HERE = Path(__file__).resolve().parent
SHOWN_LINES = 15
"""Of the log of a part that failed."""


def why_skipped(part: Part, machine: Machine, before: list[Outcome]) -> str:
    """Why the part cannot run here; empty where it can."""
    missing = [module for module in part.needs if not is_installed(module)]
    if missing:
        return f"{missing[0]} is not installed: {INSTALL[missing[0]]}"
    if part.on_cards_alone and machine.device == "cpu":
        return "it needs a card"
    no_models = any(each.name == MODELS and each.is_bad for each in before)
    return "there are no models" if part.reads_models and no_models else ""


def run_part(part: Part, folder: Path, card: Device | None) -> Outcome:
    """Run it to its end or its deadline, with its output in `log.txt`, and read its figures."""
    folder.mkdir(parents=True)
    command = [sys.executable, *(word.replace("{part}", str(folder)) for word in part.command)]
    began = time.monotonic()
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
    found = Outcome(part.name, result, time.monotonic() - began, why)
    found.command = mask_text(shlex.join(["python", *command[1:]]))
    try:
        found.figures = part.keep(folder, card)
    except (OSError, ValueError, KeyError) as error:
        if result == "ok":
            found.result, found.why = "FAILED", f"its figures cannot be read: {error}"
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Nothing that the part has started is left: what would end in order has a moment for it."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def stop_in_order() -> None:
    """A signal to end goes through `finally`: it ends the part that runs, too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def report(facts: dict[str, Any], outcomes: list[Outcome]) -> str:
    """The table, in Markdown."""
    rows = [["part", "result", "s", "figures"], ["---", "---", "--:", "---"]]
    for each in outcomes:
        rows.append([each.name, each.result, f"{each.seconds:.0f}", each.said])
    title = ", ".join(f"{name} {value}" for name, value in facts.items())
    return "\n".join([title, "", *(f"| {' | '.join(row)} |" for row in rows), ""])


def describe(machine: Machine) -> dict[str, Any]:
    """What the figures are of; in a process of its own, which alone holds a card meanwhile."""
    command = [sys.executable, str(HERE / "gpu_side.py"), "machine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"this machine cannot be described:\n{done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    names = [facts["processor"]] if machine.device == "cpu" else facts["cards"]
    if machine.device == "cuda" and len(names) < machine.num_cards:
        sys.exit(
            f"{machine.num_cards} card(s) are asked for, and this machine has {len(names)}. "
            "--cards <number> takes fewer, --device cpu --tiny tries it on a CPU."
        )
    return facts | {"device": names[0]}


def dry_run(part: Part, machine: Machine, card: str) -> str:
    """What a dry run says of a part's run on so many of these cards; refusals are raised."""
    from trainer.cli.main import RECIPES
    from trainer.config.compose import load_config
    from trainer.launch import run
    from verl_like.registry import load_object

    assert part.run is not None, f"{part.name} is no run"
    recipe = load_object(RECIPES[part.run.recipe], part.run.recipe)
    pretend = f"trainer.pretend={machine.num_cards}x{card}"
    said = io.StringIO()
    with redirect_stdout(said):
        run(load_config([*part.run.keys(machine), pretend], recipe))
    return said.getvalue()


def show_parts(machine: Machine, folder: Path, card: str) -> None:
    """Every part with its deadline; runs by the checks of a run."""
    write_configs(folder / "models", machine.is_tiny)
    for part in parts(machine, folder):
        checked = dry_run(part, machine, card).splitlines()[-1] if part.run else ""
        print(f"{part.name}: at most {part.limit_s} s. {checked}", flush=True)


def run_parts(machine: Machine, folder: Path, only: list[str], patience: float) -> list[Outcome]:
    """All of them; what is known is written after each."""
    facts = describe(machine)
    card = data_sheet(facts["device"]) if machine.device == "cuda" else None
    title = {"commit": facts["commit"], "on": f"{machine.num_cards} x {facts['device']}"}
    title |= facts["versions"] | {"backend": machine.backend, "engine": machine.engine}
    outcomes: list[Outcome] = []
    try:
        for part in parts(machine, folder):
            if only and part.name not in (*only, MODELS):
                continue
            part = replace(part, limit_s=round(part.limit_s * patience))
            why = why_skipped(part, machine, outcomes)
            print(f"== {part.name}: {'' if why else f'at most {part.limit_s} s'}", flush=True)
            own = folder / "parts" / re.sub(r"\W+", "_", part.name)
            found = Outcome(part.name, "skipped", why=why) if why else run_part(part, own, card)
            outcomes.append(found)
            if found.is_bad:
                log = (own / "log.txt").read_text("utf-8", errors="replace")
                print(*log.splitlines()[-SHOWN_LINES:], f"all of it: {own}/log.txt", sep="\n")
            print(f"-- {found.result}, {found.seconds:.0f} s: {found.said}", flush=True)
            record = {"title": title, "machine": facts, "parts": [vars(each) for each in outcomes]}
            write_whole(folder / "gpu.json", json.dumps(record, indent=1) + "\n")
    finally:
        shutil.rmtree(folder / "models", ignore_errors=True)  # 20 GB of them
    write_whole(folder / "gpu.md", report(title, outcomes))
    return outcomes


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--cards", type=int, default=1, help="8 by gpu_node.sh")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="sizes of a trial")
    add("--backend", choices=("ray", "local"), help="ray for several cards where it is installed")
    add("--only", action="append", default=[], metavar="PART", help="a part, by its name")
    add("--patience", type=float, default=1, help="deadlines times this, on a machine that is busy")
    add("--dry-run", metavar="CARD", help="check every run as on cards of this name, and stop")
    add("--out", type=Path, help="a new folder; runs/gpu/<time> by default")
    chosen = parser.parse_args()
    if chosen.cards < 1 or (chosen.cards > 1 and chosen.cards % 2):
        parser.error(f"--cards {chosen.cards}: one, or an even number, of which halves are made")
    machine = Machine.of(chosen)
    folder = (chosen.out or Path(f"runs/gpu/{datetime.now():%Y%m%d-%H%M%S}")).resolve()
    if chosen.dry_run:
        with tempfile.TemporaryDirectory() as empty:
            show_parts(machine, Path(empty), chosen.dry_run)
        return
    stop_in_order()
    outcomes = run_parts(machine, folder, chosen.only, chosen.patience)
    print(
        "",
        (folder / "gpu.md").read_text("utf-8"),
        f"paste it; all of it: {folder}/gpu.json",
        sep="\n",
    )
    if machine.device == "cpu":
        print(
            "no GPU was used: these figures are of the CPU"
            + ", of a trial's sizes" * machine.is_tiny
        )
    sys.exit(any(each.is_bad for each in outcomes))


if __name__ == "__main__":
    main()
