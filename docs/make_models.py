"""Write `docs/data/models.json`: `python docs/make_models.py` (about ten minutes).

Every causal LM in transformers is tested on a tiny configuration: training, native decoding and
export (`tests/workers/models/walk.py`). `docs/make_tables.py` then writes the page.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from model_table import RESULTS, Outcome

from tests.workers.models.architectures import NotBuilt, cases
from tests.workers.models.test_walk import UNKNOWN
from tests.workers.models.walk import outcome, walk


def walk_all() -> dict[str, Outcome | None]:
    """Return case -> outcome, or None if transformers builds no such model."""
    results: dict[str, Outcome | None] = {}
    for case in cases():
        results[case] = None
        if case not in UNKNOWN:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    results[case] = outcome(walk(case, Path(folder)))
                except NotBuilt as reason:
                    print(case, reason)
        print(case, results[case], flush=True)
    return results


def main() -> None:
    """Test every model, and write the results in lines that a diff can show."""
    lines = [f" {json.dumps(case)}: {json.dumps(row)}" for case, row in sorted(walk_all().items())]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
