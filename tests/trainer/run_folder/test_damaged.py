"""A damaged run folder: a resume falls back, names the damage and gives advice."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import lines as lines_of
from tests.trainer.run_folder.checkpoints import Role, checkpoints, composed, resume_from, saved
from tests.trainer.run_folder.damage import ANY_STATE, NO_OBJECTS
from trainer.run_folder.checkpoint import steps_to_drop
from trainer.run_folder.folder import read_marker, saved_steps
from trainer.run_folder.result import RunResult
from trainer.run_folder.resume import LATEST
from trainer.run_folder.timeline import Timeline
from trainer.run_folder.tracking import JsonLines
from trainer.tools.report.page import write_report
from trainer.tools.report.read import read_run
from verl_like.errors import CheckpointError, DamagedCheckpointError
from verl_like.files import fingerprint
from workers.training.checkpoints.manifest import read_manifest


def roles() -> dict[str, Any]:
    return {"actor": Role(0), "critic": Role(0)}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "a role's file": lambda folder: (folder / "actor" / "number").write_text("5"),
    "a missing file": lambda folder: (folder / "critic" / "number").unlink(),
    "the driver's state": lambda folder: cut(folder / "trainer.json"),
    "the random state": lambda folder: (folder / "random.json").unlink(),
    "the marker": lambda folder: cut(folder / "commit.json"),
    "the manifest of a role": lambda folder: (folder / "actor" / "manifest.json").write_text("{"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_run_resumes_from_the_newest_undamaged_checkpoint(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 2, 4, 6, overrides=("trainer.max_ckpt_to_keep=null",))
    DAMAGE[kind](tmp_path / "global_step_6")
    cut(tmp_path / "global_step_4" / "actor" / "number")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(7)))

    run, loaded = checkpoints(tmp_path), roles()
    assert saved_steps(tmp_path) == [2, 4, 6], "nothing moves before the run begins"
    run.resume.discard_later_steps()
    assert run.resume.load(loaded) == {"global_step": 2}
    assert (loaded["actor"].number, loaded["critic"].number) == (2, -2)
    assert saved_steps(tmp_path) == [2]
    assert (tmp_path / LATEST).read_text() == "2"
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "global_step_6.damaged" / "actor").is_dir()
    notice = "global_step_4/actor/number has 0 bytes, but was written with 1: renamed to"
    assert notice in caplog.text

    saved(tmp_path, 4)  # the run writes the damaged step again
    assert checkpoints(tmp_path).resume.start_step == 4


class DamagedShards(Role):
    """Detects damage only when it loads."""

    def load(self, path: str) -> None:
        super().load(path)
        if self.number == 4:
            raise DamagedCheckpointError(f"{path}/shards/0.safetensors has other bytes")


def test_a_role_can_detect_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 2, 4)
    run, loaded = checkpoints(tmp_path), {"critic": Role(0), "actor": DamagedShards(0)}
    run.resume.discard_later_steps()
    lines = JsonLines(tmp_path)
    for step in range(5):
        lines.write({}, step)
    assert run.resume.load(loaded) == {"global_step": 2}
    assert (loaded["actor"].number, loaded["critic"].number) == (2, -2)
    assert "shards/0.safetensors has other bytes: renamed to" in caplog.text

    lines.write({}, 3)  # into the file that was cut back while it was open
    assert [line["step"] for line in lines_of(tmp_path)] == [0, 1, 2, 3]


def test_if_all_checkpoints_are_damaged_the_error_names_them_all(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    for step in (2, 4):
        cut(tmp_path / f"global_step_{step}" / "actor" / "number")
    with pytest.raises(CheckpointError) as error:
        checkpoints(tmp_path)
    text = str(error.value)
    assert "global_step_2/actor/number has 0 bytes" in text
    assert "global_step_4/actor/number has 0 bytes" in text
    assert "another trainer.default_local_dir, or move global_step_2, global_step_4" in text

    assert checkpoints(tmp_path / "another").resume.start is None
    for step in (2, 4):
        (tmp_path / f"global_step_{step}").rename(tmp_path / f"moved_{step}")
    assert checkpoints(tmp_path).resume.start is None


def test_the_advice_on_a_damaged_checkpoint_works(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 2, 4)
    cut(run / "global_step_4" / "actor" / "number")
    with pytest.raises(CheckpointError, match="Leave out trainer.resume_mode.*global_step_2"):
        checkpoints(run, *resume_from(run / "global_step_4"))
    assert checkpoints(run).resume.start_step == 2

    other, words = tmp_path / "other", "Choose another checkpoint; next to it are global_step_2"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(other, *resume_from(run / "global_step_4"))
    assert checkpoints(other, *resume_from(run / "global_step_2")).resume.start_step == 2


def test_another_configuration_may_resume_before_a_damaged_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    cut(tmp_path / "global_step_4" / "actor" / "number")
    with pytest.raises(CheckpointError, match="resume anyway with (.*)") as error:
        checkpoints(tmp_path, "algorithm.lam=0.9")
    advice = str(error.value).split("resume anyway with ")[1].split()
    run = checkpoints(tmp_path, "algorithm.lam=0.9", *advice)
    assert run.resume.start_step == 2
    run.resume.discard_later_steps()
    assert saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("state", ANY_STATE)
def test_a_damaged_marker_or_manifest_is_named(tmp_path: Path, state: str) -> None:
    saved(tmp_path, 2, 4)
    (tmp_path / "global_step_4" / "commit.json").write_bytes(ANY_STATE[state])
    with pytest.raises(CheckpointError, match=r"commit\.json is damaged: .+"):
        read_marker(tmp_path / "global_step_4")
    run = checkpoints(tmp_path)
    run.resume.discard_later_steps()
    assert run.resume.load(roles()) == {"global_step": 2}

    (tmp_path / "manifest.json").write_bytes(ANY_STATE[state])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: .+"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("name", "state"),
    [("random.json", state) for state in (*NO_OBJECTS, "an empty object")]
    + [("trainer.json", state) for state in NO_OBJECTS],
)
def test_invalid_states_with_right_checksums_raise(tmp_path: Path, name: str, state: str) -> None:
    saved(tmp_path, 2)
    replace_file(tmp_path / "global_step_2", name, ANY_STATE[state])
    with pytest.raises(CheckpointError, match=f"{name} (holds no random state|is damaged): .+"):
        checkpoints(tmp_path).resume.load(roles())


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Replace the contents of a file and its checksum."""
    (folder / name).write_bytes(content)
    marker = json.loads((folder / "commit.json").read_text())
    marker["files"][name] = fingerprint(folder / name)
    (folder / "commit.json").write_text(json.dumps(marker))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ('"global_step": 1' + 30 * "0", "global_step is 1"),
        ('"global_step": 4, "kl_coef": NaN', "kl_coef is nan"),
        ('"global_step": 4, "running_norm": {"a": {"mean": Infinity}}', "mean is inf"),
        ('"global_step": 4, "loader": {"num_taken": -7}', "num_taken is -7, not a count"),
        ('"global_step": 4, "loader": {"num_taken": 1' + 400 * "0" + "}", "num_taken is 100"),
        ('"global_step": 4, "async": {"num_taken": 3.5}', "num_taken is 3.5, not a count"),
    ],
)
def test_a_state_of_impossible_numbers_is_damaged(
    tmp_path: Path, state: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 2, 4)
    replace_file(tmp_path / "global_step_4", "trainer.json", b"{%s}" % state.encode())
    run = checkpoints(tmp_path)
    run.resume.discard_later_steps()
    assert run.resume.load(roles()) == {"global_step": 2}
    assert f"trainer.json is damaged: {words}" in caplog.text


def test_a_marker_of_another_step_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    path = tmp_path / "global_step_4" / "commit.json"
    path.write_text(path.read_text().replace('"step": 4', '"step": 1' + 30 * "0"))
    assert checkpoints(tmp_path).resume.start == tmp_path / "global_step_2"


def test_a_state_that_does_not_load_is_named_and_stays(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    run = checkpoints(tmp_path)
    words = r"global_step_4/trainer.json does not load: TypeError: .*next to it: global_step_2, "
    with pytest.raises(CheckpointError, match=words), run.resume.naming_checkpoint():
        json.loads("[]")["num_taken"]
    assert saved_steps(tmp_path) == [2, 4]


@pytest.mark.parametrize("state", ANY_STATE)
def test_damaged_metrics_and_timelines_are_reported_compared_and_cut_back(
    tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    saved(run, 2)
    content = ANY_STATE[state]
    for name in ("metrics.jsonl", "timeline.json", "starts.jsonl", "async.json"):
        (run / name).write_bytes(content)
    (run / "rollouts").mkdir()
    (run / "rollouts" / "1.jsonl").write_bytes(content)
    assert write_report(run).is_file()
    shutil.copytree(run, tmp_path / "copy")
    assert [list(read_run(folder).calls) for folder in (run, tmp_path / "copy")] == [[], []]

    resumed = checkpoints(run)
    assert all("step" in line for line in RunResult.of(composed(run), "actor").metrics)
    assert steps_to_drop(run, [1, 2], 1) == [1]
    resumed.resume.discard_later_steps()
    with caplog.at_level(logging.WARNING):
        Timeline(run / "timeline.json", resume=True)
    assert "timeline.json is damaged" in caplog.text
    assert (run / "timeline.json.damaged").read_bytes() == content
    JsonLines(run).write({"loss": 1.0}, 3)
    assert (run / "metrics.jsonl").read_text().splitlines()[-1] == '{"step": 3, "loss": 1.0}'
    assert json.loads((run / "timeline.json").read_text())["traceEvents"] == []
