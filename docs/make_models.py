"""Write the table of `docs/models.md`: `python docs/make_models.py` (some ten minutes).

Every causal LM of transformers walks through training, native decoding and export on a tiny
configuration (`tests/workers/models/walk.py`). `python docs/make_models.py RESULTS.json` keeps what
came out there, and writes the page from it where the file is there already.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.workers.models.architectures import NotBuilt, cases
from tests.workers.models.test_walk import UNKNOWN
from tests.workers.models.walk import outcome, walk

PAGE = Path(__file__).resolve().parent / "models.md"
BEGIN, END = "<!-- begin models -->", "<!-- end models -->"


def walk_all() -> dict[str, dict[str, str]]:
    """Case -> part -> result."""
    found: dict[str, dict[str, str]] = {}
    for case in cases():
        if case in UNKNOWN:
            found[case] = {"not built": UNKNOWN[case]}
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[case] = walk(case, Path(folder))
            except NotBuilt as reason:
                found[case] = {"not built": str(reason)}
        print(case, found[case], flush=True)
    return found


def table(results: dict[str, dict[str, str]]) -> str:
    """The cases that transformers builds, by what came out, and the names of the others."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for case, parts in results.items():
        if "training" in parts:
            groups.setdefault(outcome(parts), []).append(f"`{case}`")

    lines = ["| training | gradient checkpointing | native | export | model types |"]
    lines.append("|---|---|---|---|---|")
    for parts, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines.append(f"| {' | '.join([*parts, ', '.join(names)])} |")
    others = ", ".join(case for case, parts in results.items() if "training" not in parts)
    return "\n".join([*lines, "", f"Not built from a configuration alone, so not tried: {others}."])


def main() -> None:
    """Walk, or read what a walk found, and write the page."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if file is not None and file.is_file():
        results = json.loads(file.read_text(encoding="utf-8"))
    else:
        results = walk_all()
        if file is not None:
            file.write_text(json.dumps(results, indent=1), encoding="utf-8")

    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
