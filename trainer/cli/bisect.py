"""usage: verl-like bisect A B [--force [--keep DIR]] [--json]

Finds the first number that differs between two runs, and why:

  verl-like bisect runs/a runs/b
  verl-like bisect trl:records/trl runs/ours

A and B are run folders (trainer.record=all, or trainer.batch_steps_to_keep), or
records of any framework: trl:DIR, verl:DIR (trainer.rollout_data_dir of verl),
slime:DIR (--save-debug-rollout-data), tinker:DIR. Settings, then the stages of
each step are compared in order: prompts, samples, mask, log-probs, scores,
rewards, advantages, loss, gradients, learning rate, optimizer. Where a stage
differs, both sides are computed again by verl-like's formulas, and the formula
and setting of each side are named. For two run folders, a table of the settings
that differ and the metrics at the end follows.

  --force  if samples differ, repeat B's steps with A's samples, one after the
           other, and compare them; B is a run folder of verl-like, with as many
           samples per step as A
  --keep DIR
           keep the record of these steps of B in a new folder
  --json   print one JSON object

The exit code is 0 if all is equal up to rounding, 1 if a number differs, and 2
if the records do not tell, for example because one of them ends early.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.run_folder.folder import CONFIG_FILE
from trainer.tools.bisect.causes import causes_of
from trainer.tools.bisect.sides import Side, Step, open_side
from trainer.tools.bisect.walk import Finding, decoded, same_rows, walk
from verl_like.errors import ConfigError, VerlLikeError
from verl_like.record import RecordError
from verl_like.terminal import draw_table, usage_text

CODES = {"equal": 0, "differs": 1, "cannot tell": 2}
MAX_SETTINGS = 10


def main(arguments: Sequence[str]) -> None:
    """Print the finding, and exit with its code."""
    parser = argparse.ArgumentParser("verl-like bisect", usage_text(__doc__))
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        finding = bisect(options.a, options.b, force=options.force, keep=options.keep)
    except (VerlLikeError, RecordError, OSError) as error:
        finding = Finding("cannot tell", str(error))
    if options.json:
        print(json.dumps(asdict(finding), default=str))
    else:
        print(text_of(finding, options.a, options.b), *ends(options.a, options.b), sep="\n")
    sys.exit(CODES[finding.verdict])


def bisect(first: str, other: str, force: bool = False, keep: Path | None = None) -> Finding:
    """Return the first difference between two sides, with its causes.

    If the samples differ, `force` also compares B's steps on A's samples, whose record is copied
    to the folder `keep`.
    """
    if keep is not None and (keep.exists() or not force):
        raise ConfigError(
            f"--keep {keep}: use it with --force, and name a folder that is not there."
        )
    a, b = open_side(first), open_side(other)
    finding, steps = explained(a, b)
    if steps is None or same_rows(*steps) is not None or "responses" not in steps[0].arrays:
        return finding
    if force:
        from trainer.tools.bisect.forced import with_samples_of

        sides = with_samples_of(a, b, Path(other), finding.step, keep)
        finding.forced_steps = sorted(number for number in sides[1].steps if number > 0)
        finding.forced, _ = explained(*sides)
    elif (Path(other) / CONFIG_FILE).is_file():
        finding.notes.append("--force compares the rest, by B's steps on A's samples")
    return finding


def explained(a: Side, b: Side) -> tuple[Finding, tuple[Step, Step] | None]:
    """Return the first difference with its rows as text and its causes, and the steps it is in."""
    finding, steps = walk(a, b, show_progress)
    if steps is not None:
        finding.text = decoded(steps, finding.row, tokenizer_of(a, b))
        finding.causes = causes_of(finding, steps)
    return finding, steps


def ends(*folders: str) -> list[str]:
    """Return a table of the settings and metrics of two run folders, or nothing."""
    if not all((Path(folder) / "metrics.jsonl").is_file() for folder in folders):
        return []
    from trainer.tools.report.ends import table_of_runs

    return ["", *draw_table(table_of_runs(folders), flush_right=True)]


def show_progress(line: str) -> None:
    """Show the step that is compared on a terminal."""
    if sys.stderr.isatty():
        print(f"\r{line}\033[K", end="\r", file=sys.stderr, flush=True)


def tokenizer_of(*sides: Side) -> Any:
    """Return the tokenizer of the first side whose model is here, or None."""
    from transformers import AutoTokenizer

    for side in sides:
        try:
            return AutoTokenizer.from_pretrained(side.model_path, local_files_only=True)
        except (OSError, ValueError, TypeError):
            continue
    return None


def text_of(finding: Finding, a: str, b: str) -> str:
    """Return the finding as text."""
    lines = [f"A: {a}", f"B: {b}"]
    shown = list(finding.settings.items())[:MAX_SETTINGS]
    lines += [f"setting {key}: A {x!r}, B {y!r}" for key, (x, y) in shown]
    if len(finding.settings) > MAX_SETTINGS:
        lines.append(f"... and {len(finding.settings) - MAX_SETTINGS} more settings differ")
    if finding.verdict == "equal":
        lines.append(f"equal in {finding.steps} steps: {', '.join(finding.compared)}")
    elif finding.verdict == "cannot tell":
        lines.append(f"cannot tell: {finding.reason}")
    else:
        lines.append(first_number(finding))
        lines += [f"  {line}" for line in finding.text]
        lines += [f"cause: {cause['sentence']}" for cause in finding.causes]
        if not finding.causes:
            lines.append("cause: no formula or setting explains the difference")
    lines += [f"note: {note}" for note in finding.notes]
    if finding.forced is not None:
        first, last = finding.forced_steps[0], finding.forced_steps[-1]
        number = f"step {first}" if first == last else f"steps {first} to {last}"
        lines += [f"B's {number} on A's samples:", *text_of(finding.forced, a, b).splitlines()[2:]]
    return "\n".join(lines)


def first_number(finding: Finding) -> str:
    """Return the sentence about the first number that differs."""
    where = "" if finding.row is None else f", row {finding.row}"
    place = f", {finding.place}" if finding.place else ""
    words = f"first difference: step {finding.step}, {finding.stage}: {finding.name}{where}{place}"
    words += f": A {finding.a}, B {finding.b}"
    if finding.difference is not None:
        words += f" (differ by {finding.difference:.3g}; rounding allows {finding.allowed:.2g})"
    if finding.num_rows:
        words += f"; {finding.num_differing} of {finding.num_rows} rows differ"
    return words
