"""The use of Ray's object store, after every step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import load_config, run
from trainer.observers import active, object_store
from trainer.observers.object_store import ObjectStore
from trainer.ppo.preparation import PPO_RUN

MIB = 2**20


class Step:
    global_step = 3


def test_a_run_is_warned_once_before_the_store_spills(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usages = iter([(0, 100, 7), (50, 100, 7), (70, 100, 7), (80, 100, 7), (10, 100, 9)])
    monkeypatch.setattr(object_store, "store_usage", lambda: tuple(n * MIB for n in next(usages)))
    watch, metrics = ObjectStore(), dict[str, float]()
    watch.on_train_begin(Step())
    for stage in ("sample", "score", "update"):
        watch.on_stage_end(Step(), stage, None)
    watch.on_step_end(Step(), metrics)
    assert metrics == {"perf/object_store_mib": 80, "perf/object_store_spilled_mib": 2}
    (warning,) = caplog.messages
    assert "70 of 100 MiB in use after the stage score of step 3" in warning
    assert "ray.object_store_gib" in warning


@pytest.mark.ray
def test_the_store_of_a_run_is_in_its_metrics_plan_and_report(
    ray_session: None, tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("trainer.backend=ray", "trainer.total_training_steps=1", *POLICY_ALONE)
    run(load_config(overrides(tiny_dir, tmp_path, *more)))
    (line,) = lines(tmp_path)
    assert line["perf/object_store_mib"] >= 0
    assert line["perf/object_store_spilled_mib"] == 0
    assert (
        "Ray's object store on the driver's node: about 0.073 MiB per step"
        in capsys.readouterr().out
    )
    assert "MiB spilled to disk" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_run_without_grpcio_does_not_watch_the_store(
    monkeypatch: pytest.MonkeyPatch, tiny_dir: Path, tmp_path: Path
) -> None:
    config = load_config(overrides(tiny_dir, tmp_path, "trainer.backend=ray"))
    for spec, count in ((None, 0), (object(), 1)):
        monkeypatch.setattr(active, "find_spec", lambda name, spec=spec: spec)
        observers = active.active_observers(config, PPO_RUN)
        assert sum(isinstance(observer, ObjectStore) for observer in observers) == count
