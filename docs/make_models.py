"""Write `docs/data/models.json`: `python docs/make_models.py [CASE ...]` (about half an hour).

Every causal LM and every image-text-to-text model in transformers is tested on a folder that
`save_pretrained` of its published class writes from a tiny configuration: training, native decoding
and export (`tests/workers/models/walk.py`), and GRPO, resume, SFT and export as runs
(`tests/integration/published.py`). With arguments, only these cases are tested again.
`docs/make_tables.py` then writes the page.

In the environment of `tests/run_vllm.sh`, `.venv-vllm/bin/python docs/make_models.py --vllm [CASE
...]` fills the column of vLLM (`tests/workers/rollout/vllm/table.py`), one process per case.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from model_table import RESULTS, Outcome, read_results

from tests.integration.published import crash_of
from tests.workers.models.architectures import NotBuilt, cases
from tests.workers.models.test_walk import UNKNOWN
from tests.workers.models.walk import outcome, walk
from trainer.cli.make_tiny import make


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
        with contextlib.redirect_stdout(io.StringIO()):
            starts = crash_of(case, make(folder / "tiny"), folder / "runs")
    if starts.partition(":")[0] not in ("yes", "rejected"):
        raise AssertionError(f"{case}: {starts}")
    return (*parts, starts.partition(":")[0])


def vllm_of(case: str) -> str | None:
    """Return the outcome of a case in vLLM, or None if the small model does not run there."""
    code = f"from tests.workers.rollout.vllm.table import main; main({case!r})"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=RESULTS.parents[2], capture_output=True, text=True)
    outcomes = [line for line in ended.stdout.splitlines() if line in ("yes", "no", "rejected")]
    if not outcomes:
        print(case, (ended.stderr.splitlines() or [""])[-1])
    return outcomes[-1] if outcomes else None


def add_vllm(names: Sequence[str]) -> None:
    """Test the cases that start in vLLM, and write the results."""
    results = read_results()
    for case in names or results:
        row = results[case]
        if row is not None and len(row) > 4 and row[4] == "yes":
            outcome = vllm_of(case)
            results[case] = [*row[:5], *([outcome] if outcome else [])]
            print(case, outcome, flush=True)
    write(results)


def main(names: Sequence[str]) -> None:
    """Test the cases; keep the outcomes in vLLM."""
    before = read_results()
    results = before if names else {}
    for case in names or cases():
        outcome, old = outcome_of(case), before.get(case)
        results[case] = outcome and [*outcome, *(old or ())[5:]]
        print(case, results[case], flush=True)
    write(results)


def write(results: Mapping[str, Outcome | None]) -> None:
    """Write the results in lines that a diff can show."""
    lines = [f" {json.dumps(case)}: {json.dumps(row)}" for case, row in sorted(results.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--vllm"]:
        add_vllm(sys.argv[2:])
    else:
        main(sys.argv[1:])
