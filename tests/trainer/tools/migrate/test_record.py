"""A script runs in a sandbox, and the commands that it would start are recorded."""

from __future__ import annotations

import json
import os
import resource
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from trainer.tools.migrate import recorder
from trainer.tools.migrate.recorder import record, unset_variables
from trainer.tools.migrate.systems import migrate
from verl_like.errors import ConfigError
from verl_like.process.supervisor import ENDED_WELL

SHELL = """
set -xeuo pipefail
source nowhere.sh
module load cuda
FLAGS=(a.b=1 'c.d=two words')
N=$((3 * 4))
until nvidia-smi > /dev/null 2>&1; do sleep 100; done
rm -rf / && git clone somewhere
python3 -m first "${FLAGS[@]}" n=$N q=${Q:-5} home=$HOME/y here=$PWD root=$ROOT/data | tee log.txt
for lr in 1e-5 1e-6; do SEED=3 torchrun -m second --lr $lr; done
"""


def recorded(text: str, *arguments: str) -> list[list[str]]:
    recording = record(text, arguments)
    assert recording.ending == ENDED_WELL, recording.printed
    return [command.words for command in recording.commands]


def test_the_shell_expands_variables_arrays_and_loops() -> None:
    recording = record(SHELL)
    assert recording.ending == ENDED_WELL, recording.printed
    runs = [
        command for command in recording.commands if command.words[0] in ("python3", "torchrun")
    ]
    assert [command.words for command in runs] == [
        [
            *("python3", "-m", "first", "a.b=1", "c.d=two words", "n=12", "q=5"),
            *(f"home={os.environ['HOME']}/y", f"here={os.getcwd()}", "root=$ROOT/data"),
        ],
        ["torchrun", "-m", "second", "--lr", "1e-5"],
        ["torchrun", "-m", "second", "--lr", "1e-6"],
    ]
    assert runs[1].environment == {"SEED": "3"}
    assert recording.variables == ["ROOT"]


STARTS = [
    "read -r -d '' words <<EOF || true\n-m train \\\n  --x 1\nEOF\npython $words",
    "cat > run.sh <<'EOF'\npython -m train --x 1\nEOF\nbash run.sh",
    "printf 'exec python -m train --x 1' > run.sh; sh run.sh",
    "bash -c 'exec /opt/x/python -m train --x 1' || python -m train --x 1",
    "ray job submit --address=a --runtime-env-json='{\"a\": 1}' -- python -m train --x 1",
    'srun -N 1 bash -c "cd /; python -m train --x 1"',
    "sbatch <<EOF\n#!/bin/bash\npython -m train --x 1\nEOF",
    "nohup python -m train --x 1 > out.log 2>&1 &",
    'run() { python -m train "$@"; }; run --x 1',
    "env A=1 timeout 5 python -m train --x 1",
    'eval "python -m train --x 1"',
    "python -m train \\ # what it does\n  --x 1 \\ # how",
    "python -m train \\  \n  --x 1",
]


def test_a_command_is_recorded_however_it_is_started() -> None:
    lines = [line.replace("--x 1", f"--x {number}") for number, line in enumerate(STARTS)]
    commands = recorded("\n\n".join(lines))
    trained = [["python", "-m", "train", "--x", str(number)] for number in range(len(STARTS))]
    assert [words for words in trained if words not in commands] == []


def test_a_script_that_asks_for_an_npu_gets_none() -> None:
    probe = "python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu"
    commands = recorded(f"set -e\nDEVICE=${{DEVICE:-$({probe})}}\npython3 -m first device=$DEVICE")
    assert commands[-1] == ["python3", "-m", "first", "device=gpu"]


def test_a_file_runs_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = tmp_path / "project" / "scripts"
    scripts.mkdir(parents=True)
    (scripts / "env.sh").write_text("MODEL=tiny\n")
    lines = 'here=$(cd "$(dirname "$0")" && pwd); source "$here/env.sh"; mkdir -p logs\n'
    lines += 'echo started > logs/a.txt; python -m train $MODEL "$here" "$1" > "$here/log.txt"\n'
    (scripts / "run.sh").write_text(lines)
    monkeypatch.chdir(tmp_path / "project")
    words = ["python", "-m", "train", "tiny", str(scripts), "eight"]
    assert recorded("scripts/run.sh", "eight") == [words]
    assert sorted(path.name for path in scripts.iterdir()) == ["env.sh", "run.sh"]
    assert not (tmp_path / "project" / "logs").exists()
    monkeypatch.chdir(tmp_path)
    (scripts / "run.sh").write_text(lines.replace(' > "$here/log.txt"', ""))
    assert recorded(str(scripts / "run.sh"), "eight") == [words]


def test_existing_logs_do_not_stop_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "old.log").write_text("unchanged")
    monkeypatch.chdir(tmp_path)
    text = (
        "set -eo pipefail\npython -m one > logs/old.log\npython -m two | tee logs/old.log nowhere/b"
    )
    assert [words[-1] for words in recorded(text + "\npython -m three")] == ["one", "two", "three"]
    assert (tmp_path / "logs" / "old.log").read_text() == "unchanged"


def test_a_script_writes_no_other_file_and_has_no_network(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("unchanged")
    text = f"""
    echo bad > {victim}; /bin/rm -f {victim}; /usr/bin/touch {tmp_path}/new
    builtin kill -9 {os.getpid()}
    exec 3<> /dev/tcp/127.0.0.1/22 || echo no network
    python -m train
    """
    recording = record(text)
    assert victim.read_text() == "unchanged"
    assert [path.name for path in tmp_path.iterdir()] == ["victim"]
    assert recording.printed.count("Permission denied") + recording.printed.count("denied") >= 3


def test_a_script_limits_no_other_process_and_reaches_no_unix_socket() -> None:
    program = """
import resource, socket, sys
for act in (
    lambda: resource.prlimit(int(sys.argv[1]), resource.RLIMIT_CPU, (1, 1)),
    lambda: socket.socket(socket.AF_UNIX).connect(sys.argv[2]),
):
    try:
        act()
    except OSError as err:
        print(type(err).__name__)
print(sum(b.send(b"x") for b in socket.socketpair()))
"""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/socket")
        server.listen()
        with subprocess.Popen(["sleep", "60"]) as other:
            words = [sys.executable, "-I", "-c", program, str(other.pid), f"{folder}/socket"]
            recording = record(f"{shlex.join(words)}; python -m train")
            limits = resource.prlimit(other.pid, resource.RLIMIT_CPU)
            other.kill()
    assert recording.printed.split() == ["PermissionError", "PermissionError", "2"]
    assert limits == resource.getrlimit(resource.RLIMIT_CPU)


@pytest.mark.long
def test_a_script_without_end_is_stopped() -> None:
    # `run` kills all descendants of its process, so it has a process of its own
    code = """
import json, os
from trainer.tools.migrate import recorder
recorder.DEADLINE_S = 5.0
script = recorder.Script(["-c", "python -m train; while :; do :; done"], os.getcwd(), {})
recording = recorder.run(script)
print(json.dumps([recording.ending, [command.words for command in recording.commands]]))
"""
    begin = time.monotonic()
    child = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=True
    )
    assert time.monotonic() - begin < 50
    assert json.loads(child.stdout) == ["passed its deadline", [["python", "-m", "train"]]]


def test_variables_that_are_only_read_are_unset() -> None:
    script = """
    # $COMMENT
    A=1; B=$A; C=${C:-2}
    [ -z "$D" ] && exit
    for i in 1 2; do echo $i $E ${F}; done
    echo $((G + 1)) ${G} $HOME $PWD $TOKEN
    """
    environment = {"HOME": "/h", "TOKEN": "secret"}
    assert unset_variables(script, environment) == (["E", "F", "TOKEN"], ["D", "G"])


def test_secrets_stay_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    recording = record("export OTHER_TOKEN=abc; python -m train --key $WANDB_API_KEY")
    assert recording.commands[0].words[-1] == "$WANDB_API_KEY"
    text = "export A_TOKEN=abc B=c; python -m verl.trainer.main_ppo data.train_files=x "
    text += "actor_rollout_ref.model.path=y"
    assert migrate("verl", text)[0].environment == ["A_TOKEN=...", "B=c"]


def test_without_a_sandbox_scripts_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    process, pipe = Mock(), Mock()
    process.wait.return_value, pipe.recv.return_value = 0, "no Landlock."
    monkeypatch.setattr("trainer.tools.migrate.recorder.start_child", lambda _: (process, pipe))
    with pytest.raises(ConfigError, match=r"set up: no Landlock\. Pass.*verl-like migrate"):
        record("python -m train")
    words = ["main_ppo", "data.train_files=x", "actor_rollout_ref.model.path=y"]
    assert migrate("verl", words)[0].program == "ppo"


def test_a_truncated_record_is_ignored() -> None:
    for content in ("", "/a", "/a\x003\x00x\x00y", "/a\x00z\x00"):
        assert recorder._read(content, {}, {}) is None


def test_a_script_without_a_training_is_an_error_with_its_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        migrate("verl", "set -e\ncd $CHECKOUT/x\npython -m verl.trainer.main_ppo a.b=1")
    assert "cd: $CHECKOUT/x: No such file" in str(caught.value)
    assert "variables that are never set: CHECKOUT." in str(caught.value)


def test_a_script_that_needs_arguments_says_how_to_give_them(tmp_path: Path) -> None:
    script = tmp_path / "sft.sh"
    script.write_text(
        'if [ "$#" -lt 2 ]; then echo "Usage: sft.sh <processes> <folder>"; exit 1; fi\n'
        ': "${MODEL:?set MODEL}"\npython -m verl.trainer.main_ppo trainer.n_gpus_per_node=$1 '
        "data.train_files=x actor_rollout_ref.model.path=$MODEL trainer.default_local_dir=$2 $@"
    )
    with pytest.raises(ConfigError) as caught:
        migrate("verl", str(script))
    assert "starts no program. The script ended with exit code 1" in str(caught.value)
    assert "Usage: sft.sh <processes> <folder>" in str(caught.value)
    way_out = f"MODEL=... verl-like migrate verl {script} ARGUMENT1 ARGUMENT2"
    assert str(caught.value).endswith(way_out)


def test_a_python_program_is_run_by_the_commands_in_its_docstring(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        '"""\nInstall this first, or nothing below will work at all for you:\n\n'
        "pip install math_verify\n\naccelerate launch \\\\\n    --num_processes 2 \\\\\n"
        '    examples/scripts/gspo.py --model_name_or_path m --dataset_name "a/b"\n"""\n'
        "import shutil\n"
    )
    (command,) = record(str(program)).commands
    assert command.words[5:] == "--model_name_or_path m --dataset_name a/b".split()
    (done,) = migrate("trl", str(program))
    assert done.settings["trainer.n_gpus_per_node"] == "2"
    assert done.notices == []
    program.write_text("import shutil  # without a docstring\n")
    with pytest.raises(ConfigError, match="is a Python program, and its docstring has no command"):
        migrate("trl", str(program))


@pytest.mark.parametrize(
    "line",
    [
        "cd $VERL_LIKE_RECORDER/commands; /usr/bin/mkfifo 0; /usr/bin/ln -s /dev/zero 1; "
        "/usr/bin/head -c 100000000 /dev/zero > 2",
        "cd $VERL_LIKE_RECORDER; /usr/bin/mv commands a; /usr/bin/ln -s / commands",
        'for n in $(seq 1100); do : > "$VERL_LIKE_RECORDER/commands/$n"; done',
    ],
)
def test_false_records_of_a_script_are_read_with_bounds(line: str) -> None:
    began = time.monotonic()
    recording = record(f"{line} || true\npython -m train")
    assert time.monotonic() - began < recorder.DEADLINE_S
    may_be_lost = "seq" in line or "mv" in line
    trained = [command.words for command in recording.commands if "python" in command.words]
    assert trained == [["python", "-m", "train"]] or (may_be_lost and trained == [])


def test_a_script_changes_no_modes_owners_or_devices(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("unchanged")
    mode = victim.stat().st_mode
    tries = (
        f"/bin/chmod 777 {victim}; /bin/chown 1 {victim}; /bin/mknod $TMPDIR/d b 1 3; "
        f"/bin/mknod $TMPDIR/c c 1 3; ls $TMPDIR > listed; cat listed"
    )
    recording = record(tries)
    assert (victim.stat().st_mode, victim.stat().st_uid) == (mode, os.getuid())
    assert not {"d", "c"} & set(recording.printed.split()), recording.printed
