"""Write `docs/data/models.json`: `python docs/make_models.py [CASE ...]` (about half an hour).

Every causal LM and every image-text-to-text model in transformers is tested on a folder that
`save_pretrained` of its published class writes from a tiny configuration: training, native decoding
and export (`tests/workers/models/walk.py`), and GRPO, resume, SFT and export as runs
(`tests/integration/published.py`). With arguments, only these cases are tested again.
`docs/make_tables.py` then writes the page.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
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


def main(names: Sequence[str]) -> None:
    """Test the cases, and write the results in lines that a diff can show."""
    results = read_results() if names else {}
    for case in names or cases():
        results[case] = outcome_of(case)
        print(case, results[case], flush=True)
    lines = [f" {json.dumps(case)}: {json.dumps(row)}" for case, row in sorted(results.items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
