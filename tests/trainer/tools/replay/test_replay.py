"""`verl-like replay` reproduces a step or a stage bit for bit, or names the differences.

One run of four steps on the tiny model, with a checkpoint after steps 2 and 4, and the batches of
steps 3 and 4.
"""

from __future__ import annotations

import json
import shutil
import sys
from bdb import BdbQuit
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.integration.runs import lines, overrides
from trainer import load_config, run
from trainer.cli import main
from trainer.cli.replay import settings_of
from trainer.observers.saved_batches import STAGES, batch_file
from trainer.ppo.stages import PPOTrainer
from trainer.preference.recipe import DPO
from trainer.run_state import Metrics
from trainer.sft.step import SFTTrainer
from trainer.tools.replay.replay import (
    ReplayableRun,
    Replayed,
    ReplayRequest,
    announcement,
    counted,
    differing_columns,
    differing_metrics,
    replay,
    replaying,
    settings_of_replay,
)
from verl_like.batch.protocol import DataProto
from verl_like.errors import CheckpointError, ConfigError

SETTINGS = (
    "trainer.backend=local",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=20",
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.max_ckpt_to_keep=null",
    "trainer.batch_steps_to_keep=2",
)


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(load_config(overrides(tiny_dir, folder, *SETTINGS)))
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    """A copy of the run folder, for changes."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def test_a_step_two_after_its_checkpoint_is_replayed_bit_for_bit(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "batches").iterdir()) == ["3", "4"]
    columns = DataProto.load_from_disk(batch_file(whole, 4, "update")).batch.keys()
    assert {"responses", "old_log_probs", "values", "advantages"} <= set(columns)
    before = contents(whole)
    replayed = replay(whole, 4)
    assert not replayed.differences
    assert replayed.start == whole.resolve() / "global_step_2"
    assert replayed.num_metrics > 50
    assert replayed.compared_batches == list(STAGES)
    assert contents(whole) == before, "the run's folder is only read"


def test_a_step_of_a_recipe_on_rows_is_replayed_bit_for_bit(tiny_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {x}", "chosen": x, "rejected": "cd"} for x in "efgh"]
    file, folder = tmp_path / "rows.jsonl", tmp_path / "run"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    of_run = ("backend=local", "total_training_steps=2", "save_freq=1", "logger=[]")
    settings = [f"trainer.{setting}" for setting in (*of_run, f"default_local_dir={folder}")]
    data = [f"data.train_files={file}", "data.train_batch_size=2", "data.max_length=16"]
    run(load_config([f"model.path={tiny_dir}/model", *data, *settings, "optim.lr=1e-3"], DPO))

    replayed = replay(folder, 2)
    assert (replayed.start, replayed.differences) == (folder / "global_step_1", [])
    loss = next(name for name in lines(folder)[1] if name.endswith("loss"))
    assert replayed.num_metrics > 4

    changed = lines(folder)
    changed[1][loss] += 1e-7
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    (difference,) = replay(folder, 2).differences
    assert difference.startswith(f"{loss} was ")


@pytest.mark.parametrize(
    ("stage", "breaks", "compared"), [("score", False, ["estimate"]), ("update", True, [])]
)
def test_a_stage_is_replayed_from_its_saved_batch(
    whole: Path, stage: str, breaks: bool, compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`breaks` stops in the debugger before the stage."""
    stops: list[object] = []

    def no_generation(*_: object) -> None:
        raise AssertionError("samples were generated")

    def stop() -> None:
        names = sys._getframe(1).f_locals
        stops.append((names["request"].stage, len(names["batch"]), names["trainer"].global_step))

    monkeypatch.setattr("trainer.ppo.stages.PPOTrainer.sample", no_generation)
    monkeypatch.setattr(sys, "breakpointhook", stop)
    replayed = replay(whole, 3, stage, breaks=breaks)
    assert not replayed.differences
    assert replayed.num_metrics >= 2
    assert replayed.compared_batches == compared
    assert stops == ([(stage, 8, 3)] if breaks else [])


def test_a_stage_without_a_saved_batch_repeats_the_stages_before_it(copied: Path) -> None:
    shutil.rmtree(copied / "batches")
    replayed = replay(copied, 3, "update")
    assert not replayed.differences
    assert replayed.num_metrics > 5


def test_a_changed_number_and_a_changed_row_are_named(copied: Path) -> None:
    metrics = lines(copied)
    metrics[2]["actor/pg_loss"] += 1e-7
    (copied / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics))
    path = batch_file(copied, 3, "update")
    batch = DataProto.load_from_disk(path)
    batch.batch["advantages"][5, 0] = -0.125
    batch.save_to_disk(path)

    advantages, loss = replay(copied, 3).differences
    assert loss.startswith(f"actor/pg_loss was {metrics[2]['actor/pg_loss']!r}, is ")
    assert advantages == "batch of update: advantages differs in 1 of 8 rows, first in row 5"


def test_a_step_without_an_earlier_checkpoint_needs_from_start(whole: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint of an earlier step \(it has global_step_2, global_step_4\). "
        "Repeat all 2 steps with --from-start",
    ):
        replay(whole, 2)
    assert not replay(whole, 2, "score", from_start=True).differences


def test_an_unknown_step_or_folder_is_rejected(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--step=5: .* it made steps 1 to 4"):
        replay(whole, 5)
    with pytest.raises(ConfigError, match=r"not a run folder: it has no config.yaml"):
        replay(tmp_path, 1)


def test_a_run_of_another_version_is_rejected(copied: Path) -> None:
    marker = copied / "global_step_2" / "commit.json"
    facts = json.loads(marker.read_text())
    facts["versions"]["verl-like"] = "0.0.0"
    marker.write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=r"was written by verl-like 0\.0\.0, and "):
        replay(copied, 3)


PPO_CLASS = "trainer.ppo.PPOTrainer"


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ("critic_warmup:", "warmup_of_critic:", "this version of verl-like: .*warmup_of_critic"),
        (
            PPO_CLASS,
            "trainer.async_training.step.AsyncTrainer",
            "cannot be replayed, only runs of verl-like ppo",
        ),
        (PPO_CLASS, "trainer.sft.step.SFTTrainer", "does not fit this version"),
    ],
)
def test_an_unknown_key_or_another_recipe_is_rejected(
    copied: Path, was: str, now: str, words: str
) -> None:
    config = copied / "config.yaml"
    config.write_text(config.read_text().replace(was, now))
    with pytest.raises(ConfigError, match=words):
        replay(copied, 3)


def test_the_command_prints_what_was_compared(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trainer.cli import replay as command

    results = iter(
        [Replayed(None, 80, ["update"], []), Replayed(None, 80, [], [f"m{n}" for n in range(30)])]
    )
    monkeypatch.setattr(command, "replay", lambda *_, **__: next(results))
    command.main([str(whole), "--step=3"])
    output = capsys.readouterr().out
    assert output == "step 3: all 80 metrics and the batches of update are identical bit for bit\n"
    with pytest.raises(SystemExit, match="1"):
        command.main([str(whole), "--step=3", "--stage=update"])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "update of step 3: of 80 metrics, 30 differ"
    assert shown[-1] == "  and 10 more"


def test_quitting_the_debugger_ends_the_command(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quit_at_once() -> None:
        raise BdbQuit

    monkeypatch.setattr(sys, "breakpointhook", quit_at_once)
    monkeypatch.setattr(sys, "argv", ["verl-like", "replay", str(whole), "--step=3", "--break"])
    with pytest.raises(SystemExit, match="left from the debugger: nothing was compared"):
        main.main()


def test_a_replay_keeps_the_number_of_processes(tmp_path: Path, tiny_dir: Path) -> None:
    several = (
        "trainer.backend=ray",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=2",
        "resource_pool_spec.global_pool=[2,2]",
        "trainer.save_freq=2",
        "trainer.stop_at={critic/score/mean: 1.0}",
    )
    config = load_config(overrides(tiny_dir, tmp_path / "run", *several))
    start, scratch = tmp_path / "global_step_2", tmp_path / "scratch"
    local = settings_of_replay(config, start, scratch, "local")
    assert local.resource_pool_spec == {"global_pool": [4]}
    trainer = local.trainer
    assert (trainer.backend, trainer.nnodes, trainer.n_gpus_per_node) == ("local", 1, 4)
    assert (trainer.save_freq, trainer.stop_at, trainer.logger) == (-1, {}, [])
    assert trainer.total_training_steps == config.trainer.total_training_steps
    assert config.resource_pool_spec == {"global_pool": [2, 2]}, "the run's configuration stays"

    saved = ReplayableRun(tmp_path, config, PPOTrainer)
    words = announcement(saved, start, 3, local)
    assert "in separate processes, as in the run: global_pool;" in words
    same_backend = settings_of_replay(config, start, scratch, "run").trainer
    assert (same_backend.backend, same_backend.nnodes) == ("ray", 2)


def test_only_ppo_s_step_can_be_replayed_by_stages() -> None:
    class OwnStep(PPOTrainer):
        def step(self) -> Metrics:
            return {}

    request = ReplayRequest(Path("run"), 3, "update")
    with pytest.raises(ConfigError, match=r"a step of SFTTrainer has no stages score, estimate"):
        replaying(SFTTrainer, request)
    with pytest.raises(ConfigError, match=r"OwnStep overrides the step"):
        replaying(OwnStep, request)
    assert issubclass(replaying(OwnStep, ReplayRequest(Path("run"), 3)), OwnStep)


def test_columns_are_compared_bit_by_bit(tmp_path: Path) -> None:
    was, now = tmp_path / "was.safetensors", tmp_path / "now.safetensors"
    numbers = torch.tensor([[0.0], [float("nan")], [1.0]], dtype=torch.bfloat16)
    texts = np.array([{"a": 1}, None, "x"], dtype=object)
    DataProto.from_dict({"n": numbers}, {"t": texts}).save_to_disk(was)
    DataProto.from_dict({"n": numbers}, {"t": texts}).save_to_disk(now)
    assert differing_columns(was, now) == []

    numbers[0] = -0.0
    texts[2] = "y"
    DataProto.from_dict({"n": numbers, "m": numbers}, {"t": texts}).save_to_disk(now)
    assert differing_columns(was, now) == [
        "m is new",
        "n differs in 1 of 3 rows, first in row 0",
        "t differs in 1 of 3 rows, first in row 2",
    ]
    DataProto.from_dict({"n": numbers.float()}, {"t": texts}).save_to_disk(now)
    changed = differing_columns(was, now)[0]
    assert changed == "n was (3, 1) of torch.bfloat16, is (3, 1) of torch.float32"


def test_metrics_of_the_clock_are_not_compared() -> None:
    was = {"loss": float("nan"), "timing_s/step": 1.0, "perf/x": 2.0, "gone": 0.5}
    now = {"loss": float("nan"), "timing_s/step": 3.0, "new": 1.0}
    assert differing_metrics(was, now, counted(was.keys() | now.keys())) == [
        "gone was 0.5, is absent",
        "new was absent, is 1.0",
    ]


def test_a_changed_setting_changes_only_the_numbers_that_it_acts_on(whole: Path) -> None:
    changes = settings_of(["actor_rollout_ref.actor.grad_clip=1e-3"])
    assert changes == {"actor_rollout_ref.actor.grad_clip": 1e-3}
    assert not replay(whole, 3, "estimate", changes=changes).differences
    changes = settings_of(["algorithm.lam=0.5"])
    assert "batch of update: advantages" in str(replay(whole, 3, changes=changes).differences)
