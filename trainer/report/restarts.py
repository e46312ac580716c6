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
    sources = ""
    for line in lines:
        if "state_from" in line:
            lost = lost_in_words(line["finished_steps_made_again"])
            sources += f"; in step {line['step']} with the state of {line['state_from']}, {lost}"
    kept = sum(line["samples_kept"] for line in lines if "samples_kept" in line)
    again = sum(line["samples_made_again"] for line in lines if "samples_made_again" in line)
    samples = ""
    if kept + again:
        samples = f"; of the samples that lost groups were making {kept} kept, {again} made again"
    return [f"restarts: {len(steps)}, in step {', '.join(steps)}{sources}{samples}"]


def lost_in_words(num_steps: int) -> str:
    """What a restart has cost of the steps that were finished."""
    if num_steps == 0:
        return "no finished step is lost"
    return f"{num_steps} finished step{'s' * (num_steps > 1)} made again"
