"""The table of several runs: settings that differ, and metrics at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from trainer.run_folder.folder import saved_config
from trainer.tools.migrate.systems import migrate
from trainer.tools.replay.replay import ReplayableRun
from trainer.tools.report.ends import table_of_runs
from verl_like.errors import ConfigError

NAMED = {"trainer": {"experiment_name": "x", "seed": 1}, "optim": {"lr": 1e-3}}


def run_of(folder: Path, values: Mapping[str, list[float]], **changed: Any) -> Path:
    """Create a run folder with these metrics, one value per step, and these sections of `NAMED`."""
    folder.mkdir(parents=True)
    config = OmegaConf.merge(NAMED, changed, {"trainer": {"experiment_name": folder.name}})
    OmegaConf.save(config, folder / "config.yaml")
    steps = zip(*values.values(), strict=True)
    lines = [{"step": n, **dict(zip(values, v, strict=True))} for n, v in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_runs_of_several_seeds_share_a_column_and_other_settings_have_their_own(
    tmp_path: Path,
) -> None:
    rise = np.arange(20.0)
    first = run_of(tmp_path / "a", {"critic/score/mean": rise.tolist()})
    values = {"critic/score/mean": (rise + 2).tolist()}
    second = run_of(tmp_path / "b", values, trainer={"seed": 2})
    third = run_of(tmp_path / "c", {"critic/score/mean": [*rise[:19], np.nan]}, optim={"lr": 0.1})
    (third / "failure.txt").write_text("Traceback\n  line\nValueError: too large")
    ends = np.array([18.5, 20.5])
    assert table_of_runs([first, second, third]) == [
        ["", "a, b", "c"],
        ["end", "no failure", "ValueError: too large"],
        ["steps", "20", "20"],
        ["trainer.seed", "1, 2", "1"],
        ["optim.lr", "0.001", "0.1"],
        ["critic/score/mean", f"{ends.mean():.4g} ± {ends.std(ddof=1):.2g}", "17.5"],
    ]


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))


@pytest.mark.long
@pytest.mark.parametrize("text", [BOMB, "a: &a [*a]", "a: " + "[" * 2000])
def test_aliases_that_expand_without_end_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    for read in (saved_config, ReplayableRun.read):
        with pytest.raises(ConfigError, match=r"config\.yaml cannot be read as a run's config"):
            read(tmp_path)
    with pytest.raises(ConfigError, match="the YAML could not be read"):
        migrate("trl", f"trl sft --config {tmp_path}/config.yaml")


def test_a_few_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: &a [1, 2]\nb: {c: *a, d: *a, e: 1e-6}")
    assert saved_config(tmp_path) == {"a": [1, 2], "b.c": [1, 2], "b.d": [1, 2], "b.e": 1e-6}
