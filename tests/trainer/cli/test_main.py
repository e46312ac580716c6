"""The console command works from any folder, and its help fits a screen."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests.forked import run_program
from tests.integration.runs import overrides
from tests.programs import VERL_LIKE
from trainer import main_ppo
from trainer.cli import main
from verl_like.errors import ConfigError, RewardError


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder with files that must not be imported instead of ours."""
    (tmp_path / "workers").mkdir()
    for name in ("trainer.py", "workers/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('the decoy was imported')", encoding="utf-8")
    return tmp_path


def verl_like(
    folder: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [VERL_LIKE, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def forked(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command's `main` in a fork, for tests that are not about imports."""
    return run_program(main.main, *arguments, folder=folder, **environment)


@pytest.mark.parametrize(
    "arguments", [[], *([command, "--help"] for command in ("ppo", "check", "doctor"))]
)
def test_help_fits_a_screen(decoys: Path, arguments: list[str]) -> None:
    done = verl_like(decoys, *arguments)
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 28
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "verl-like" in done.stdout
    nobody, pipe = os.pipe()
    os.close(nobody)
    cut = subprocess.run(
        [VERL_LIKE, *arguments], cwd=decoys, stdout=pipe, stderr=subprocess.PIPE, check=False
    )
    os.close(pipe)
    assert cut.stderr == b""  # as after `| head`


def test_every_help_text_fits_80_columns() -> None:
    modules = {target.rpartition(".")[0] for target in main.COMMANDS.values()}
    lines = [line for name in modules for line in str(resolve_name(name).__doc__).splitlines()]
    assert [line for line in lines if len(line) > 80] == []


def test_a_missing_argument_shows_the_usage_of_the_help(decoys: Path) -> None:
    done = forked(decoys, "export", "runs/a")
    assert done.stderr.startswith("usage: verl-like export CHECKPOINT OUT [--role ROLE]")
    assert done.stderr.endswith("error: the following arguments are required: out\n")


def test_help_of_ppo_imports_no_large_package() -> None:
    code = (
        "import sys; from trainer.cli.main import main; sys.argv = ['verl-like', 'ppo', '--help']; "
        "main(); print({'torch', 'hydra', 'omegaconf', 'numpy', 'yaml'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["report", "nowhere"],
            "nowhere is not a folder. Use a run folder: the trainer.default_local_dir of a run.",
        ),
        (
            ["ppo", "--cfg", "job", "--multirun", "trainer.seed=1,2"],
            "--cfg shows one configuration, but --multirun makes several. Leave out --multirun, or "
            "--cfg to start the runs.",
        ),
    ],
)
def test_wrong_arguments_are_an_error_of_one_line(
    decoys: Path, arguments: list[str], error: str
) -> None:
    done = forked(decoys, *arguments)
    assert (done.returncode, done.stderr) == (1, f"error: {error}\n")


def test_a_full_check_of_absent_files_prints_only_the_error(decoys: Path) -> None:
    files = ("data.train_files=x.jsonl", "actor_rollout_ref.model.path=y")
    done = forked(decoys, "check", "--full", *files, "trainer.device=cpu")
    assert done.stdout == ""
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert sorted(path.name for path in decoys.iterdir()) == ["trainer.py", "workers"]


def test_a_module_of_the_current_folder_is_imported(decoys: Path, tiny_dir: Path) -> None:
    """tests/integration/test_three_steps.py starts the console command next to decoys."""
    (decoys / "mine.py").write_text(
        "def estimate(token_level_rewards, response_mask):\n"
        "    return token_level_rewards, token_level_rewards\n"
        "def compute_score(solution_str):\n"
        "    return {'score': 1.0, 'from_mine': 2.0}\n"
    )
    settings = (
        *("algorithm.adv_estimator=mine.estimate", "reward.function.path=mine"),
        *("trainer.dry_run=true", "trainer.backend=local", "algorithm.use_kl_in_reward=false"),
    )
    done = forked(decoys, "ppo", *overrides(tiny_dir, decoys / "run", *settings))
    assert done.returncode == 0, done.stderr
    assert "every score is 1; the reward also returns from_mine" in done.stdout


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/x/1.jsonl"),
            "error: no space for the run in runs/x",
            "",
        ),
        (KeyboardInterrupt(), 130, "stopped; the same command resumes from the last checkpoint"),
        (RewardError("no score"), "error: no score", ""),
        (ZeroDivisionError("in the user's code"), 1, "ZeroDivisionError: in the user's code"),
    ],
)
def test_a_failed_run_ends_without_messages_of_hydra(
    error: BaseException,
    code: int | str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def run(config: object) -> None:
        raise error

    monkeypatch.setattr("trainer.launch.run", run)
    needed = [
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        "trainer.default_local_dir=runs/x",
    ]
    monkeypatch.setattr(sys, "argv", ["verl-like", *needed])
    with pytest.raises(SystemExit) as ended:
        main_ppo.main()
    assert str(ended.value.code).startswith(str(code))
    err = capsys.readouterr().err
    assert message in err
    assert "Error executing job" not in err


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("grpo", ["ppo", "algorithm=grpo"]),
        ("kto", ["dpo", "loss=kto"]),
        ("train", ["ppo"]),
        ("explain", ["check", "--full"]),
        ("stf", []),
    ],
)
def test_an_algorithm_or_old_name_is_resolved_to_a_command(word: str, command: list[str]) -> None:
    assert main.resolve_command(word) == command


def test_an_algorithm_is_a_command_and_a_typo_gets_the_nearest(decoys: Path) -> None:
    done = forked(decoys, "grpo", "no_such_key=1")
    assert done.stderr.startswith("note: verl-like grpo runs verl-like ppo algorithm=grpo\n")
    assert "no_such_key" in done.stderr
    assert forked(decoys, "grpo", "--help").stdout == forked(decoys, "ppo", "--help").stdout
    assert "no command 'stf'. Did you mean 'sft'" in forked(decoys, "stf").stderr
    unknown = forked(decoys, "qwertz")
    assert unknown.stderr == (
        "error: there is no command 'qwertz'. verl-like --help lists the commands.\n"
    )


def test_tab_completes_keys(decoys: Path) -> None:
    done = forked(decoys, "-sc", "query=bash", COMP_LINE="verl-like ppo data.tr")
    assert done.stdout.split() == [
        "data.train_batch_size=",
        "data.train_files=",
        "data.truncation=",
    ]


def test_every_command_is_in_the_list() -> None:
    lines = [line[2:32] for line in main.__doc__.splitlines() if line.startswith("  ")]
    listed = {part.split()[0] for line in lines for part in line.split(", ")}
    assert set(main.COMMANDS) <= listed


@pytest.mark.parametrize(
    ("arguments", "handler"),
    [
        (["async", "no_such_key=1"], signal.SIG_IGN),
        (["sft", "no_such_key=1"], signal.SIG_IGN),
        (["watch", "no_such_run", "--port=x"], signal.SIG_IGN),
        (["sft", "--help"], signal.SIG_DFL),
        (["bisect"], signal.SIG_DFL),
    ],
)
def test_a_command_that_starts_processes_ignores_broken_pipes(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], handler: signal.Handlers
) -> None:
    monkeypatch.setattr(sys, "argv", ["verl-like", *arguments])
    with contextlib.suppress(SystemExit):
        main.main()
    assert signal.getsignal(signal.SIGPIPE) is handler


def test_commands_read_runs_in_stores_and_upload_what_they_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory, run = fsspec.filesystem("memory"), "memory://stored/my run/"
    for name in ("config.yaml", "global_step_2/commit.json", "global_step_2/actor/weights"):
        memory.pipe_file(f"/stored/my run/{name}", b"{}")

    def report(arguments: list[str]) -> None:
        assert not (Path(arguments[0]) / "global_step_2/actor/weights").exists()
        (Path(arguments[0]) / "report.html").write_text("a page")

    def export(arguments: list[str]) -> None:
        assert (Path(arguments[0]) / "global_step_2/actor/weights").exists()
        Path(arguments[1]).mkdir()
        (Path(arguments[1]) / "config.json").write_text("{}")

    main.run_with_local_paths("report", report, [run])
    main.run_with_local_paths("export", export, [run, "memory://stored/a model/"])
    assert memory.cat_file("/stored/my run/report.html") == b"a page"
    assert memory.cat_file("/stored/a model/config.json") == b"{}"
    with pytest.raises(ConfigError, match=r"path=s4://x/y: fsspec knows no scheme s4://"):
        main.run_with_local_paths("report", report, ["s4://x/y"])
