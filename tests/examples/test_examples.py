"""Every folder of examples/ runs in its small mode, as a reader would run it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.conftest import load
from trainer import load_config
from trainer.launch import nominal_placement
from trainer.ppo.preflight import check_rollout

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
COVERED = {
    "quickstart": "here",
    "split_placement": "here",
    "tiny": "tests/conftest.py makes it for every test",
    "data": "tests/examples/test_prepare_gsm8k.py",
    "remote_reward": "here",
    "rlhf_pipeline": "here",
    "detached": "here",
    "custom_role": "tests/workers/roles/test_custom_role.py",
}
TINY_KEYS = [
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.name",
    "critic.model.path",
    "critic.ppo_micro_batch_size_per_gpu",
    "trainer.n_gpus_per_node",
    "trainer.device",
    "trainer.total_epochs",
    "trainer.default_local_dir",
    "trainer.logger",
]
SPLIT = EXAMPLES / "split_placement" / "run_deepseek7b_llm.sh"
PIPELINE = EXAMPLES / "rlhf_pipeline" / "run.sh"
REMOTE = EXAMPLES / "remote_reward" / "run.sh"


def bash(script: Path, *arguments: str, **environment: object) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {key: str(value) for key, value in environment.items()}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def settings_of(script: Path) -> list[str]:
    """The entries of the script's `settings` array, without quotes."""
    body = re.search(r"^settings=\(\n(.*?)^\)", script.read_text(), re.S | re.M)
    return [line.strip().replace('"', "").replace("$", "") for line in body[1].splitlines()]


def test_every_example_is_run_by_a_test() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(COVERED)


def interrupted_in_a_terminal(
    script: Path, columns: int, ready: Path, **environment: object
) -> tuple[int, str]:
    """Run the script in a terminal and press Ctrl-C once `ready` is there.

    Gives the exit code and what was shown.

    None of the processes that it had started is left.
    """
    descendants = load("examples/quickstart/watch.py").descendants
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(
            "bash",
            ["bash", str(script)],
            {**os.environ, **{name: str(v) for name, v in environment.items()}},
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown, seen, deadline = b"", set(), time.monotonic() + 300
    while time.monotonic() < deadline:
        if not seen and ready.exists():
            seen = set(descendants(pid))
            os.write(terminal, b"\x03")
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the script has ended
                break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert [other for other in seen if Path(f"/proc/{other}").exists()] == []
    return code, shown.decode()


@pytest.mark.ray
def test_the_quickstart_is_stopped_goes_on_learns_its_task_and_reports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    committed = folder / "global_step_10" / "commit.json"
    code, shown = interrupted_in_a_terminal(
        EXAMPLES / "quickstart" / "run.sh", 40, committed, RUN_DIR=folder
    )
    assert code == 130, shown
    assert "Traceback" not in shown
    assert "Stopped by SIGINT after step" in shown
    bars = re.findall(r"\d+/60 \|[^\r\n]*", shown)
    assert bars
    assert max(map(len, bars)) <= 40 + len("^C")
    assert "Stopped by SIGINT after step" in (folder / "report.html").read_text()
    assert list(folder.glob("global_step_*/commit.json")), "the newest two stay"
    done = bash(EXAMPLES / "quickstart" / "run.sh", RUN_DIR=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on from its last checkpoint" in done.stderr
    scores = [line["critic/score/mean"] for line in lines(folder)]
    assert scores[0] < 0.2
    assert scores[-1] >= 0.8
    assert re.search(r"peak memory of all \d+ processes together: \d\.\d\d GB", done.stdout)
    assert f"report: {folder}/report.html" in done.stdout
    assert "data-figure" in (folder / "report.html").read_text()
    again = bash(EXAMPLES / "quickstart" / "run.sh", RUN_DIR=folder)
    assert again.returncode == 0
    assert "holds a run that has reached 0.8" in again.stderr


@pytest.mark.ray
def test_the_tiny_split_example_overlaps_its_updates(tmp_path: Path) -> None:
    done = bash(SPLIT, "trainer.total_training_steps=3", TINY=1, RUN_DIR=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^  (\S+): \S+ -> \S+$", done.stdout, re.M) == TINY_KEYS
    assert re.search(r"^update phase, split over two pools +\d", done.stdout, re.M)
    assert re.search(r"^perf/overlap_ratio +\d", done.stdout, re.M)

    steps = [line for line in lines(tmp_path / "split") if "timing_s/step" in line]
    assert all(line["perf/overlap_ratio_update"] > 1.2 for line in steps)


def test_the_7b_command_composes_with_half_of_the_cards_for_the_critic() -> None:
    config = load_config(settings_of(SPLIT))
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [4], "critic_pool": [4]}
    assert config.role_mapping["critic"] == "critic_pool"
    assert config.role_mapping["ref"] == "actor_rollout_ref_pool"
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4


README_COMMANDS = re.findall(
    r"^    bash run_deepseek7b_llm.sh (.*[^#\n])$",
    (SPLIT.parent / "README.md").read_text().replace("\\\n", ""),
    re.M,
)


@pytest.mark.parametrize("command", [c for c in README_COMMANDS if not c.lstrip().startswith("#")])
def test_settings_that_the_split_page_names_compose_and_have_room(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.ppo.preflight.check_version", lambda _: None)  # vLLM's
    config = load_config([*settings_of(SPLIT), *shlex.split(command)])
    nominal_placement(config)
    check_rollout(config)


PYTHON_THAT_WRITES_DOWN = """#!/bin/sh
printf '%s\\n' "$*" >> {calls}
"""


def test_the_tiny_split_example_compares_the_folders_that_its_runs_wrote(tmp_path: Path) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(PYTHON_THAT_WRITES_DOWN.format(calls=calls))
    python.chmod(0o755)
    folder, pools = tmp_path / "mine", ("trainer.n_gpus_per_node=3", "role_mapping.ref=critic_pool")
    settings = (f"trainer.default_local_dir={folder}", *pools, "trainer.seed=7")
    done = bash(SPLIT, *settings, TINY=1, RUN_DIR=tmp_path / "tiny", PYTHON=python)
    assert done.returncode == 0, done.stderr

    split, colocate, compare = calls.read_text().splitlines()[-3:]
    last = [dict(o.split("=", 1) for o in call.split() if "=" in o) for call in (split, colocate)]
    where = ["trainer.default_local_dir", "placement", "trainer.n_gpus_per_node", "trainer.seed"]
    assert [last[0][key] for key in where] == [str(folder), "split", "3", "7"]
    assert [last[1][key] for key in where] == [f"{folder}-colocate", "colocate", "2", "7"]
    assert "role_mapping.ref" not in last[1]
    assert compare.split()[1:] == [str(folder), f"{folder}-colocate"]


def test_what_the_7b_run_lacks_is_named_with_the_small_way(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\ncase "$*" in *"$LACKS"*|*model_folder*) exit 1 ;; esac\n')
    bare.chmod(0o755)
    given = {"HOME": tmp_path, "PATH": "/usr/bin:/bin", "PYTHON": bare}
    assert "set PYTHON=" in bash(SPLIT, **given, LACKS="trainer", TINY=1).stderr
    done = bash(SPLIT, **given, LACKS="vllm", MODEL=tmp_path / "model", DATA=tmp_path / "data")
    assert done.returncode == 1
    for what in (
        "8 GPUs: this machine has",
        "-m pip install 'vllm>=0.32,<0.33'",
        "is neither a folder with a config.json nor",
        "no " + str(tmp_path / "data" / "train.parquet"),
        "TINY=1 bash",
    ):
        assert what in done.stderr


def test_the_split_example_edits_no_code() -> None:
    """Its only Python file reads two run folders."""
    (script,) = SPLIT.parent.glob("*.py")
    imported = set(re.findall(r"^(?:import|from) (\w+)", script.read_text(), re.M))
    assert imported.isdisjoint({"trainer", "workers", "verl_like"})


@pytest.fixture(scope="module")
def remote_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the example with a reward server; its tiny model is made once."""
    return tmp_path_factory.mktemp("remote")


def server_has_ended(shown: str) -> bool:
    process = re.search(r"answers at http\S+ \(process (\d+)\)", shown)[1]
    return not Path(f"/proc/{process}").exists()


@pytest.mark.example
def test_a_reward_server_gives_the_numbers_of_the_function_in_process(remote_dir: Path) -> None:
    done = bash(REMOTE, "trainer.total_training_steps=2", RUN_DIR=remote_dir, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same texts and numbers in all 128 samples of 2 steps" in done.stdout
    assert server_has_ended(done.stdout)

    remote, in_process = lines(remote_dir / "remote"), lines(remote_dir / "in_process")
    for name in ("critic/score/mean", "reward/num_characters/mean", "actor/grad_norm"):
        assert [step[name] for step in remote] == [step[name] for step in in_process]
        assert all(step[name] > 0 for step in remote), name

    samples = remote_dir / "in_process" / "rollouts" / "2.jsonl"
    text = samples.read_text()
    samples.write_text(text.replace('"judge_score": 0.', '"judge_score": 0.5', 1))
    compare = [sys.executable, str(REMOTE.parent / "compare.py")]
    folders = [str(remote_dir / "remote"), str(remote_dir / "in_process")]
    found = subprocess.run([*compare, *folders], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "the samples of the two runs differ" in found.stderr


@pytest.mark.example
def test_a_reward_server_ends_with_the_run_that_fails(remote_dir: Path) -> None:
    done = bash(REMOTE, "trainer.no_such_key=1", RUN_DIR=remote_dir, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "no_such_key" in done.stderr
    assert server_has_ended(done.stdout)


def ledger_of(shown: str) -> dict[str, list[int]]:
    """Made, trained, queued, dropped and in flight of every maker, as the run has ended with."""
    rows = re.findall(r"^(maker \d)((?: +\d+){5})$", shown, re.M)
    return {maker: [int(number) for number in numbers.split()] for maker, numbers in rows}


@pytest.mark.parametrize(
    ("topology", "backend"),
    [
        pytest.param("1m1t", "ray", marks=pytest.mark.ray),
        pytest.param("2m1t", "local", marks=pytest.mark.example),
        pytest.param("1m2t", "local", marks=pytest.mark.example),
        pytest.param("2m2t", "local", marks=pytest.mark.example),
    ],
)
def test_trainers_learn_from_all_that_makers_made(
    topology: str, backend: str, tmp_path: Path, tiny_dir: Path
) -> None:
    if topology != "1m1t":  # which makes its own
        (tmp_path / "tiny").symlink_to(tiny_dir)
    script, two_steps = EXAMPLES / "detached" / f"{topology}.sh", "trainer.total_training_steps=2"
    done = bash(script, two_steps, RUN_DIR=tmp_path, PYTHON=sys.executable, BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr

    num_makers, num_trainers, num_samples = int(topology[0]), int(topology[2]), 2 * 16 * 4
    kept = ledger_of(done.stdout)
    assert set(kept) <= {f"maker {maker}" for maker in range(num_makers)}
    assert sum(made for made, *_ in kept.values()) == num_samples
    assert all(row == [row[0], row[0], 0, 0, 0] for row in kept.values())

    found = json.loads((tmp_path / "detached.json").read_text())["ledger"]["trainers"]
    share = num_samples // num_trainers
    assert found == {str(rank): share for rank in range(num_trainers)}
    if topology == "2m2t":
        assert kept == {"maker 0": [share, share, 0, 0, 0], "maker 1": [share, share, 0, 0, 0]}


def cells(report: str, first: str) -> list[float]:
    """The numbers of the row of a Markdown table that begins with `first`."""
    (row,) = re.findall(rf"^\| {first} \|(.*%.*)\|$", report, re.M)
    return [float(cell.strip().rstrip("%")) for cell in row.split("|")]


@pytest.mark.example
def test_each_step_of_the_pipeline_improves_what_it_is_for(tmp_path: Path) -> None:
    small = ("trainer.total_training_steps=10", "trainer.test_freq=-1")
    done = bash(PIPELINE, *small, RUN_DIR=tmp_path, PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr

    loss = [line["val/loss"] for line in lines(tmp_path / "sft") if "val/loss" in line]
    assert loss[-1] < 0.1 * loss[0]
    accuracy = "val-core/rm/accuracy"
    found = [line[accuracy] for line in lines(tmp_path / "reward_model") if accuracy in line]
    assert found[0] == 0.5
    assert found[-1] > 0.75
    steps = [line for line in lines(tmp_path / "ppo") if "actor/ptx_loss" in line]
    assert len(steps) == 10

    report = (tmp_path / "report.md").read_text()
    (_, _, base), sft, ppo = (cells(report, name) for name in ("base", "SFT", "PPO"))
    assert sft[0] > 70, "share of sentences"
    assert ppo[1] > sft[1] + 0.15, "kindness, which nothing was trained with"
    assert base < sft[2] < ppo[2], "score of the reward model"
    assert len(re.findall(r"^\| (?:say|tell|write) of a \w+ \|", report, re.M)) == 6, "texts"

    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\n")
    idle.chmod(0o755)
    again = bash(PIPELINE, RUN_DIR=tmp_path, PYTHON=idle)
    assert again.stdout.count("done before") == 3, again.stdout + again.stderr
