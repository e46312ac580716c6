"""What a run lost and went on without, from its `restarts.jsonl` (`trainer.restarts`)."""

from __future__ import annotations

from pathlib import Path

from verl_like.files import json_objects

RESTARTS_FILE = "restarts.jsonl"


def restarts_in_words(folder: Path) -> list[str]:
    """A line about the restarts, and about samples that were being made; none without any."""
    lines, _ = json_objects(folder / RESTARTS_FILE)
    steps = [str(line.get("step")) for line in lines if "lost" in line]
    if not steps:
        return []
    kept = sum(line["samples_kept"] for line in lines if "samples_kept" in line)
    again = sum(line["samples_made_again"] for line in lines if "samples_made_again" in line)
    samples = ""
    if kept + again:
        samples = f"; of the samples that lost groups were making {kept} kept, {again} made again"
    return [f"restarts: {len(steps)}, in step {', '.join(steps)}{samples}"]
