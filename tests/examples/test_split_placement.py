"""Split placement: the tiny run, and the command for eight GPUs."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import load as load_file
from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines
from trainer import load_config
from trainer.launch import nominal_placement
from trainer.rollouts.preflight import check_rollout

TINY_KEYS = [
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.fsdp_config.param_offload",
    "actor_rollout_ref.rollout.name",
    "critic.model.path",
    "critic.optim.lr",
    "critic.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "trainer.n_gpus_per_node",
    "trainer.device",
    "trainer.total_epochs",
    "trainer.default_local_dir",
    "trainer.logger",
]
SPLIT = EXAMPLES / "split_placement" / "run_deepseek7b_llm.sh"


def settings_of(script: Path) -> list[str]:
    """Return the entries of the script's `settings` array, without quotes."""
    body = re.search(r"^settings=\(\n(.*?)^\)", script.read_text(), re.S | re.M)
    return [line.strip().replace('"', "").replace("$", "") for line in body[1].splitlines()]


@pytest.mark.long
@pytest.mark.ray
def test_the_tiny_split_example_learns_overlaps_and_has_the_numbers_of_one_pool(
    tmp_path: Path, forked_python: Path
) -> None:
    small = (
        *("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=32"),
        *("trainer.total_epochs=1", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    )
    done = bash(SPLIT, *small, TINY=1, RUN_DIR=tmp_path, PYTHON=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^  (\S+): \S+ -> \S+$", done.stdout, re.M) == TINY_KEYS
    assert re.search(r"^update phase, split over two pools +\d", done.stdout, re.M)
    assert re.search(r"^perf/overlap_ratio +\d", done.stdout, re.M)

    steps = [line for line in lines(tmp_path / "split") if "timing_s/step" in line]
    assert all(line["perf/overlap_ratio_update"] > 1.2 for line in steps)
    rewards = [line["critic/score/mean"] for line in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert "split and in turns: the same to the last bit" in done.stdout


def test_the_7b_command_gives_half_of_the_gpus_to_the_critic() -> None:
    config = load_config(settings_of(SPLIT))
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [4], "critic_pool": [4]}
    assert config.role_mapping["critic"] == "critic_pool"
    assert config.role_mapping["ref"] == "actor_rollout_ref_pool"
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 1


README_COMMANDS = re.findall(
    r"^    bash run_deepseek7b_llm.sh (.*[^#\n])$",
    (SPLIT.parent / "README.md").read_text().replace("\\\n", ""),
    re.M,
)


@pytest.mark.parametrize("command", [c for c in README_COMMANDS if not c.lstrip().startswith("#")])
def test_the_settings_in_the_readme_compose_and_fit(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rollout.vllm.setup.check_version", lambda _: None)  # vLLM's
    config = load_config([*settings_of(SPLIT), *shlex.split(command)])
    nominal_placement(config)
    check_rollout(config)


RECORDING_PYTHON = """#!/bin/sh
printf '%s\\n' "$*" >> {calls}
"""


def test_the_tiny_split_example_compares_the_folders_that_its_runs_wrote(tmp_path: Path) -> None:
    python, calls = tmp_path / "python", tmp_path / "calls"
    python.write_text(RECORDING_PYTHON.format(calls=calls))
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


def test_missing_requirements_of_the_7b_run_are_named_with_the_tiny_command(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text('#!/bin/sh\ncase "$*" in *"$LACKS"*|*model_folder*) exit 1 ;; esac\n')
    bare.chmod(0o755)
    environment = {"HOME": tmp_path, "PATH": "/usr/bin:/bin", "PYTHON": bare}
    assert "set PYTHON=" in bash(SPLIT, **environment, LACKS="trainer", TINY=1).stderr
    done = bash(
        SPLIT, **environment, LACKS="vllm", MODEL=tmp_path / "model", DATA=tmp_path / "data"
    )
    assert done.returncode == 1
    for text in (
        "8 GPUs: this machine has",
        "-m pip install 'vllm>=0.32,<0.33'",
        "is neither a folder with a config.json nor",
        "no " + str(tmp_path / "data" / "train.parquet"),
        "TINY=1 bash",
    ):
        assert text in done.stderr


def test_the_split_example_needs_no_code_of_the_framework() -> None:
    """Its only Python file reads two run folders."""
    (script,) = SPLIT.parent.glob("*.py")
    imported = set(re.findall(r"^(?:import|from) (\w+)", script.read_text(), re.M))
    assert imported.isdisjoint({"trainer", "workers", "verl_like"})


def test_the_comparison_counts_the_processes_of_both_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = {f"timing_s/{name}": 1.0 for name in ("step", "update", "update_actor")}
    line = {**timing, "timing_s/update_critic": 1.0, "perf/overlap_ratio": 1.0}
    compare = load_file("examples/split_placement/compare.py")
    line |= dict.fromkeys(compare.NUMBERS, 0.5)
    for name, pools in (("split", "a: [2, 1], b: [2]"), ("colocate", "a: [1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        (tmp_path / name / "config.yaml").write_text(f"resource_pool_spec: {{{pools}}}\n")
    compare.main(str(tmp_path / "split"), str(tmp_path / "colocate"))
    assert "1.000 s on 5 processes, 1.000 s in turns on 1 process\n" in capsys.readouterr().out
