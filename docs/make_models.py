"""Write `docs/data/models.json`: `python docs/make_models.py [CASE ...]` (about half an hour).

Every causal LM and every image-text-to-text model in transformers is tested on a folder that
`save_pretrained` of its published class writes from a tiny configuration: training, native decoding
and export (`tests/workers/models/walk.py`), and GRPO, resume, SFT and export as runs
(`tests/integration/published.py`). With arguments, only these cases are tested again; `CASE...`
continues an interrupted run at that case. `docs/make_tables.py` then writes the page.

In the environment of `tests/run_vllm.sh`, `.venv-vllm/bin/python docs/make_models.py --vllm [CASE
...]` fills the column of vLLM (`tests/workers/rollout/vllm/table.py`), one process per case, in
about half an hour, too.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from model_table import NOT_CHAT_MODELS, RESULTS, Outcome, read_results

from tests.integration.published import crash_of
from tests.workers.models.architectures import NotBuilt, cases
from tests.workers.models.test_walk import UNKNOWN
from tests.workers.models.walk import outcome, walk
from tests.workers.rollout.vllm.table import try_vllm
from trainer.cli.make_tiny import make

LONGEST_S = 600.0
"""Time limit of a case in vLLM."""
FORK = multiprocessing.get_context("fork")


def outcome_of(case: str) -> Outcome | None:
    """Return the outcome of a case, or None if transformers builds no such model."""
    if case in UNKNOWN:
        return None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            parts = outcome(walk(case, folder / "walk"))
        except NotBuilt as reason:
            print(case, reason)
            return None
        if case in NOT_CHAT_MODELS:
            return parts
        with contextlib.redirect_stdout(io.StringIO()):
            starts = crash_of(case, make(folder / "tiny"), folder / "runs")
    if starts.partition(":")[0] not in ("yes", "rejected"):
        raise AssertionError(f"{case}: {starts}")
    return (*parts, starts.partition(":")[0])


def vllm_of(case: str) -> str | None:
    """Return the outcome of a case in vLLM, or None if the small model does not run there.

    The case runs in a fork of this process, which has imported vLLM.
    """
    receiver, sender = FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        child = FORK.Process(target=_send_vllm_of, args=(case, folder, sender))
        child.start()
        sender.close()
        try:
            outcome: str | None = receiver.recv() if receiver.poll(LONGEST_S) else None
        except EOFError:  # it failed
            outcome = None
        child.kill()
        child.join()
    return outcome


def _send_vllm_of(case: str, folder: str, sender: Connection) -> None:
    sender.send(try_vllm(case, Path(folder)).partition(":")[0])


def add_vllm(names: Sequence[str]) -> None:
    """Test the cases that start in vLLM, and write the results."""
    for module in ("vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)
    results = read_results()
    for case in chosen(names, list(results)):
        row = results[case]
        if row is not None and len(row) > 4 and row[4] == "yes":
            start, outcome = time.monotonic(), vllm_of(case)
            results[case] = [*row[:5], *([outcome] if outcome else [])]
            print(case, outcome, f"({time.monotonic() - start:.0f} s)", flush=True)
            write(results)


def main(names: Sequence[str]) -> None:
    """Test the cases; keep the outcomes in vLLM."""
    before, every = read_results(), cases()
    results = {case: before[case] for case in every if case in before}
    for case in chosen(names, every):
        start, outcome = time.monotonic(), outcome_of(case)
        results[case] = outcome and [*outcome, *(before.get(case) or ())[5:]]
        print(case, results[case], f"({time.monotonic() - start:.0f} s)", flush=True)
        write(results)


def chosen(names: Sequence[str], every: Sequence[str]) -> Sequence[str]:
    """Return the named cases, or all of them; for `CASE...`, those from that case on."""
    if len(names) == 1 and names[0].endswith("..."):
        return every[every.index(names[0].removesuffix("...")) :]
    if unknown := set(names) - set(every):
        raise SystemExit(f"{', '.join(sorted(unknown))}: no model type or variant.")
    return names or every


def write(results: Mapping[str, Outcome | None]) -> None:
    """Write the results in lines that a diff can show."""
    lines = [f" {json.dumps(case)}: {json.dumps(row)}" for case, row in sorted(results.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--vllm"]:
        add_vllm(sys.argv[2:])
    else:
        main(sys.argv[1:])
