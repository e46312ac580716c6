"""`faults.jsonl` of a run that was killed while it wrote."""

from pathlib import Path

from trainer.report.accounts import FAULTS_FILE, describe_faults

FAULT = '{"kind": "delay", "step": 3}\n'


def test_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    (tmp_path / FAULTS_FILE).write_text(FAULT * 2 + FAULT[:12])
    assert describe_faults(tmp_path) == ["injected faults: 2 x delay"]
