"""The command of a recipe: settings and a few options around `trainer.launch.run`.

    run_command(SFT, ["data.train_files=x", ...])       # verl-like sft data.train_files=x ...

Every recipe has `--cfg job`, `--multirun` and `--config-dir` for the user's own YAML. `verl-like
eval` also passes settings that the user has not set.

If a run fails, its command prints the message of a known error, or the traceback of any other error
(`exit_on_error`). Hydra, which would wrap every error in its own message, does not see these
errors. A job of `--multirun` that fails does not end the other jobs.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hydra

from trainer.config.compose import known_settings, load_config, register
from trainer.config.devices import run_devices
from trainer.config.schema import Recipe, RunConfig
from trainer.config.settings import sweep_jobs, unknown_key
from trainer.run_folder.signals import EXIT_OF_CTRL_C, STOP_EXITS, RunInterrupted
from verl_like.config_key import replace_keys
from verl_like.errors import CallbackError, ConfigError, VerlLikeError
from verl_like.files import is_remote
from verl_like.masking import mask_text
from verl_like.process.info import OWN_PROCESS
from verl_like.terminal import draw_table, exit_on_broken_pipe, printable, survive_broken_pipes
from workers.cpu.allocator import keep_freed_memory

if TYPE_CHECKING:
    from trainer.run_folder.result import RunResult

C = TypeVar("C", bound=RunConfig)
Start = Callable[[Any, Recipe[Any], Sequence[str]], "RunResult"]
"""Starts a run with its configuration, its recipe and its settings."""
COMPLETION = "(install|uninstall|query)=(bash|fish|zsh)"
"""Valid arguments of Hydra's completion, which has a plugin for each of these shells."""
COMPLETION_USAGE = "install=SHELL, uninstall=SHELL or query=SHELL, with bash, fish or zsh"


def run_command(
    recipe: Recipe[Any],
    arguments: Sequence[str],
    defaults: Sequence[str] = (),
    start: Start | None = None,
) -> None:
    """Run with the settings among the arguments, once per job for a sweep, or print the keys.

    `defaults` are settings of lower priority, which get no notice if this run does not read them.
    `start` replaces `trainer.launch.run`, and also gets the recipe and the settings.
    """
    if {"-sc", "--shell-completion"} & set(arguments):
        if not any(re.fullmatch(COMPLETION, argument) for argument in arguments):
            sys.exit(
                f"error: -sc needs {COMPLETION_USAGE}. To have tab completion in bash: "
                'eval "$(verl-like -sc install=bash)"'
            )
        register(recipe, recipe.schema)
        hydra.main(str(recipe.config_dir), recipe.config_name, version_base="1.3")(print)()
        return
    arguments = [argument for argument in arguments if argument.strip()]
    settings = [argument for argument in arguments if is_setting(argument)]
    try:
        options = _options([argument for argument in arguments if argument not in settings], recipe)
        if options.config_dir:
            recipe = recipe.with_files_of(options.config_dir, options.config_name)
        elif options.config_name or options.config_path:
            settings = [*_settings_of_configuration(recipe, options), *settings]
        if options.cfg:
            exit_on_broken_pipe()
            from trainer.config.show import composed_yaml

            known = known_settings([*defaults, *settings], recipe)
            print(composed_yaml(known, recipe, options.resolve, options.cfg == "all"), end="")
            return
        survive_broken_pipes()
        jobs = sweep_jobs(settings) if options.multirun else []
        for job in jobs:
            known_settings(job, recipe)  # rejects a mistyped key before the first job
    except ConfigError as err:
        sys.exit(f"error: {printable(str(err))}")

    if options.multirun:
        run_jobs(recipe, jobs, defaults, start)
    else:
        run_or_exit(load_or_exit(recipe, settings, defaults), recipe, settings, start)


def is_setting(argument: str) -> bool:
    """Return whether the argument sets, adds or deletes (`~key`) a key, and is not an option."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def _options(arguments: Sequence[str], recipe: Recipe[Any]) -> argparse.Namespace:
    """Parse the options; reject other words, such as `--epochs 3`."""
    parser = argparse.ArgumentParser(f"verl-like {recipe.name}", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("--cfg", "-c", choices=("job", "all"), help="print the keys that the run reads, or all")
    add("--resolve", action="store_true", help="with --cfg: print values instead of references")
    add("--multirun", "-m", action="store_true", help="start a run for every choice of key=a,b")
    add("--config-dir", "-cd", type=Path, help="a folder with your YAML files")
    add("--config-name", "-cn", help="the file in this folder to start from")
    add("--config-path", "-cp", help="the folder of a YAML with verl's keys")
    options, unknown = parser.parse_known_args(arguments)
    if options.cfg and options.multirun:
        raise ConfigError(
            "--cfg shows one configuration, but --multirun makes several. Leave out --multirun, or "
            "--cfg to start the runs."
        )
    if unknown:
        word = unknown[0]
        if not word.startswith("-") and not unknown_key(word, recipe):
            value = next((other for other in unknown[1:] if not other.startswith("-")), "VALUE")
            raise ConfigError(f"{word} needs a value: {word}={value}")
        raise ConfigError(
            f"{word} is not a setting. Settings are written key=value, without dashes or "
            f"spaces, as in trainer.seed=2. All keys: verl-like {recipe.name} --cfg all"
        )
    return options


def _settings_of_configuration(recipe: Recipe[Any], options: argparse.Namespace) -> Sequence[str]:
    """Return the settings in the YAML of another system's command."""
    if recipe.settings_of_configuration is None:
        raise ConfigError(
            f"verl-like {recipe.name} starts from your YAML only with --config-dir=FOLDER and "
            "--config-name=NAME. Add --config-dir, the folder that contains the file."
        )
    if not options.config_name:
        raise ConfigError("--config-path needs --config-name=NAME, the file in that folder.")
    return recipe.settings_of_configuration(options.config_name, options.config_path or "")


def load_or_exit(recipe: Recipe[C], settings: Sequence[str], defaults: Sequence[str]) -> C:
    """Return the configuration; an invalid one ends the process with its error."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("trainer").setLevel(logging.INFO)
    with exit_on_error():
        return load_config(settings, recipe, defaults)


def run_or_exit(
    config: RunConfig, recipe: Recipe[Any], settings: Sequence[str], start: Start | None = None
) -> RunResult:
    """Run to the end, or call `start`; an error ends the process with its message."""
    os.environ.setdefault(OWN_PROCESS, "1")
    with exit_on_error(config.trainer.default_local_dir):
        from trainer.launch import run

        if run_devices(config.trainer).type == "cpu":
            keep_freed_memory()  # the driver reuses memory for its batches
        return start(config, recipe, settings) if start else run(config)


GOES_ON = (
    "the same command resumes from the last checkpoint, if there is one and trainer.resume_mode is "
    "not disable"
)


@contextmanager
def exit_on_error(folder: str | Path = "") -> Iterator[None]:
    """End the process by SystemExit if the block raises; a full disk's error names `folder`."""
    try:
        yield
    except RunInterrupted as stopped:
        print(f"{stopped}; {GOES_ON}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        print(f"stopped; {GOES_ON}", file=sys.stderr)
        sys.exit(EXIT_OF_CTRL_C)
    except VerlLikeError as err:
        if isinstance(err, CallbackError):
            _show(err.__cause__ or err)  # shows the line in the user's code
        # notes say why there was no retry, and name other failures
        notes = [note.strip().partition("\n")[0] for note in getattr(err, "__notes__", [])]
        text = "\n  ".join([str(err), *notes])
        sys.exit(f"error: {printable(mask_text(text))}")
    except Exception as err:  # noqa: BLE001 - the process edge
        if isinstance(err, OSError) and err.errno == errno.ENOSPC:
            sys.exit(f"error: no space for the run in {folder}: {err}. Free some space; {GOES_ON}.")
        _show(err)
        sys.exit(1)


def _show(err: BaseException) -> None:
    print(mask_text("".join(traceback.format_exception(err))), end="", file=sys.stderr)


def run_jobs(
    recipe: Recipe[Any], jobs: Sequence[Sequence[str]], defaults: Sequence[str], start: Start | None
) -> None:
    """Load and run the settings of each job, each in its own folder below the run folder.

    A job that fails does not end the others; a signal to stop ends all jobs. At the end, print the
    outcomes if a job failed, and compare the jobs that trained. Exit with 1 if a job failed.
    """
    folders, failures = [], []
    for number, job in enumerate(jobs):
        failure = ""
        try:
            config = load_or_exit(recipe, job, defaults)
            url = f"{config.trainer.default_local_dir.rstrip('/')}/{number}"
            folders.append(Path(url))
            if is_remote(url):
                from trainer.run_folder.remote import local_copy_of

                folders[-1] = local_copy_of(url)
            config = replace_keys(config, {"trainer.default_local_dir": url})
            run_or_exit(config, recipe, job, start)
        except SystemExit as ended:
            if ended.code in STOP_EXITS:
                raise
            failure = str(ended.code) if ended.code else ""
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
            elif failure:
                failure = "its traceback is above"
        failures.append(failure)

    num_failed = sum(map(bool, failures))
    if num_failed:
        shared = set(jobs[0]).intersection(*jobs)
        rows = [["job", "outcome"]]
        for job, failure in zip(jobs, failures, strict=True):
            settings = " ".join(setting for setting in job if setting not in shared)
            rows.append([settings, failure or "no failure"])
        print("", *draw_table(rows), sep="\n")

    trained = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
    if len(trained) > 1:
        from trainer.tools.report.ends import table_of_runs

        print("", *draw_table(table_of_runs(trained), flush_right=True), sep="\n", flush=True)
    if num_failed:
        sys.exit(f"error: {num_failed} of {len(jobs)} jobs failed")
