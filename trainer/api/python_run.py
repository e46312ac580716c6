"""The base class of `trainer.api.recipes`: settings, files, `fit`."""

from __future__ import annotations

import functools
import inspect
import logging
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar

from trainer.api.flat_names import ROW_NAMES, settings_of
from trainer.api.inputs import (
    FILE_ENDINGS,
    Row,
    environment_code,
    file_names,
    is_file_name,
    model_settings,
    reward_list,
    rows_in_memory,
    text_row,
    write_rows,
)
from trainer.config.compose import checked_config
from trainer.config.devices import run_devices
from trainer.config.schema import Recipe, RunConfig
from trainer.config.settings import flat_settings, overrides_of
from trainer.config.unused_keys import unused_reason
from trainer.data.files import folders_of, good_rows
from trainer.data.formats import json_rows
from trainer.hooks import check_callbacks
from trainer.launch import run
from trainer.run_folder.folder import read_marker, saved_steps
from trainer.run_folder.result import RunResult
from verl_like.calls.messages import RAISED_IN
from verl_like.errors import ConfigError, VerlLikeError
from verl_like.files import make_private
from verl_like.process.sandbox import reject_nested_run
from verl_like.registry import load_object
from verl_like.terminal import surviving_broken_pipes

logger = logging.getLogger(__name__)
FOLDER_KEY = "trainer.default_local_dir"
PLACES = ("placement", "resource_pool_spec", "role_mapping")
"""The keys that may put roles on separate pools."""
ENDS = ("trainer.total_epochs", "trainer.total_training_steps", "data.total_prompts")
"""The keys that set the length of a run."""


P = ParamSpec("P")
R = TypeVar("R")


def bare_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function's errors for users leave out our own frames, as the command line does."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except VerlLikeError as error:
            cause = error.__cause__  # for example a callback's error
            if isinstance(error, ConfigError):  # its message suffices, also if a worker raised it
                notes: list[str] = getattr(error, "__notes__", [])
                cause, notes[:] = None, [note for note in notes if not note.startswith(RAISED_IN)]
            raise error.with_traceback(None) from cause

    return call


class PythonRun:
    """A run of a recipe: settings, and the files that they name. `fit` starts it."""

    _recipe_path: ClassVar[str]
    """Dotted path of the recipe, which is imported when the first run is created."""
    _example: ClassVar[str]
    """Arguments after the model in an example of a call."""
    _model_sections: ClassVar[Mapping[str, str]] = {"model": "model"}
    """Role of a model -> its section of the configuration; a single model belongs to the first."""
    _flat_names: ClassVar[Mapping[str, str]] = ROW_NAMES
    """Flat name -> the key that it sets."""
    _presets: ClassVar[Mapping[str, str]] = {}
    """Settings of the class, which the call may override."""
    _data_names: ClassVar[Mapping[str, str]] = {
        "data.train_files": "rows",
        "data.val_files": "val_rows",
    }
    """Key of data -> the parameter of the call."""
    _columns: Sequence[str] | None = None
    """The columns of prompts in memory that a reward function may read."""

    def __init_subclass__(cls) -> None:
        """Show the arguments in the docstring of the class, where `help` starts."""
        super().__init_subclass__()
        _, heading, arguments = (inspect.getdoc(cls.__init__) or "").partition("\n\nArgs:\n")
        if cls.__doc__ and heading:
            cls.__doc__ = inspect.cleandoc(cls.__doc__) + heading + arguments

    def __init__(
        self,
        model: Any,
        data: Mapping[str, Any],
        *,
        tokenizer: Any,
        callbacks: Sequence[object],
        keys: Mapping[str, Any],
    ) -> None:
        """`data` maps a key, such as data.train_files, to rows or file names."""
        self._reject_swapped(model, data["data.train_files"])
        reject_nested_run()
        check_callbacks(callbacks)
        self.callbacks = list(callbacks)
        self._printed_notices: set[str] = set()
        """Notices that were shown."""
        self._recipe: Recipe[Any] = load_object(self._recipe_path, type(self).__name__)
        settings = {**self._presets, **settings_of(keys, self._flat_names, self._recipe)}
        self._names = {key: name for name, key in self._flat_names.items() if name in keys}
        named = settings.pop(FOLDER_KEY, None)
        self.folder = _run_folder(named, self._recipe.name)

        is_new = named is None or not self.folder.exists()
        try:
            self._apply_inputs(model, tokenizer, data, settings)
        except BaseException:
            if is_new:  # a rejected run leaves no folder
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _require(self, **arguments: Any) -> None:
        """Raise an error with an example of a call if an argument is None."""
        missing = [name for name, value in arguments.items() if value is None]
        if missing:
            name = type(self).__name__
            example = f'{name}("Qwen/Qwen3-0.6B", {self._example})'
            raise ConfigError(f"{name} needs {' and '.join(missing)}, such as {example}.")

    def _reject_swapped(self, model: Any, rows: Any) -> None:
        """Raise if the first argument is data, or the second a model."""
        is_data = isinstance(model, str | Path) and str(model).endswith(FILE_ENDINGS)
        is_data |= isinstance(model, list) and any(isinstance(x, str | Mapping) for x in model)
        is_data |= hasattr(model, "column_names")  # a dataset
        if is_data or hasattr(rows, "save_pretrained"):
            name, rows_name = type(self).__name__, self._data_names["data.train_files"]
            problem = f"model={model!r:.60} is data" if is_data else f"{rows_name} is a model"
            raise ConfigError(
                f"{problem}: {name} takes the model first, then {rows_name}, as in "
                f'{name}("Qwen/Qwen3-0.6B", {self._example}).'
            )

    def __repr__(self) -> str:
        """Return the class, its model's path and the run folder."""
        model = self.settings.get(f"{next(iter(self._model_sections.values()))}.path")
        return f"{type(self).__name__}(model={str(model)!r}, folder={str(self.folder)!r})"

    def _apply_inputs(
        self, model: Any, tokenizer: Any, data: Mapping[str, Any], settings: dict[str, Any]
    ) -> None:
        """Write objects in memory to files, and check the configuration."""
        make_private(self.folder)
        inputs = self.folder / "inputs"
        inputs.mkdir(parents=True, exist_ok=True)
        derived = model_settings(model, tokenizer, self._model_sections, inputs)
        has_places = any(key.partition(".")[0] in PLACES for key in settings)
        self._defaults: dict[str, Any] = {
            "trainer.backend": "ray" if has_places else "local",
            "trainer.save_freq": 0,  # only after the last step
        }
        for key, rows in data.items():
            if rows is not None:
                derived[key] = self._files(key, rows, settings, inputs)
        for key in derived.keys() & settings.keys():
            raise ConfigError(
                f"{key}={settings[key]!r} is set as a key, but an argument of the call sets it to "
                f"{derived[key]!r}. Leave out the key, or the argument."
            )
        for key in settings:
            if key.partition(".")[0] == "environment":
                settings[key] = environment_code(key, settings[key], inputs / "environments")
        self.settings: dict[str, Any] = {FOLDER_KEY: self.folder, **derived, **settings}
        if "reward.list" in settings:
            rewards = reward_list(settings["reward.list"], inputs / "rewards", self._columns)
            self.settings["reward.list"] = rewards
        config: Any = self.config()
        for key, rows in data.items():
            if rows is not None and not is_file_name(rows) and config.data.on_bad_row == "error":
                written = enumerate(json_rows(Path(derived[key])))
                name = self._data_names[key]
                named = ((f"{name}, row {number}", row) for number, (_, row) in written)
                folders = folders_of([derived[key]])

                def check(_: str, row: Row, folders: Sequence[Path] = folders) -> None:
                    self._check_row(row, config, folders)

                for _ in good_rows(named, check, "error"):
                    pass
        inline_pools = config.resource_pool_spec.keys() - config.child_pools
        on_gpus = run_devices(config.trainer).type == "cuda"
        has_ranks = any(sum(sizes) > 1 for sizes in config.resource_pool_spec.values())
        needs_ray = (has_places and len(inline_pools) > 1) or (on_gpus and has_ranks)
        backend = "ray" if needs_ray else "local"
        if backend != self._defaults["trainer.backend"]:
            self._defaults["trainer.backend"] = backend
            self.config()

    def _files(self, key: str, rows: Any, settings: Mapping[str, Any], inputs: Path) -> Any:
        """Return the value of `key`: the given file names, or a new file with the rows."""
        if is_file_name(rows):
            return file_names(rows)
        name = self._data_names[key]
        items = self._rows_of(key, rows_in_memory(rows, name), settings)
        path = inputs / f"{key.rpartition('.')[2]}.jsonl"
        is_new = key != "data.train_files" or not saved_steps(self.folder)
        return write_rows(items, name, path, may_differ=is_new)

    def _rows_of(self, key: str, items: Sequence[Any], settings: Mapping[str, Any]) -> list[Row]:
        """Convert texts, chats and dicts with columns to rows as in the recipe's files."""
        return [text_row(item) for item in items]

    def _check_row(self, row: Row, config: Any, folders: Sequence[Path]) -> None:
        """Raise a ValueError if the row's columns or their types are not those of the recipe."""
        raise NotImplementedError

    @bare_errors
    def overrides(self, steps: int | None = None) -> list[str]:
        """Return the `key=value` strings of the run that `fit(steps)` would start now."""
        config, settings = self.config(steps), self._settings(self._length(steps))
        unset = {key: value for key, value in self._defaults.items() if key not in settings}
        read = {key: value for key, value in unset.items() if unused_reason(config, key) is None}
        return overrides_of(read | settings)

    @bare_errors
    def config(self, steps: int | None = None) -> RunConfig:
        """Return the whole configuration, checked."""
        return self._config(self._length(steps))

    @bare_errors
    def command(self, steps: int | None = None) -> str:
        """Return the command line of the run that `fit(steps)` would start now."""
        return shlex.join(["verl-like", self._recipe.name, *self.overrides(steps)])

    @bare_errors
    def fit(self, steps: int | None = None) -> RunResult:
        """Run `steps` more steps; without `steps`, run for the length that the keys set.

        The run resumes as `trainer.resume_mode` says: by default, from the newest checkpoint in the
        run folder. By default, it also saves a checkpoint after its last step.
        """
        return self._run_with(self._length(steps))

    def _run_with(self, length: dict[str, int]) -> RunResult:
        """Run until the length in this setting, such as a number of steps, is reached."""
        with surviving_broken_pipes():
            return run(self._config(length), callbacks=self.callbacks)

    def _config(self, length: Mapping[str, int]) -> RunConfig:
        """Return the checked configuration, and log each notice once."""
        defaults = overrides_of(self._defaults)
        try:
            settings = overrides_of(flat_settings(self._recipe.schema, self._settings(length)))
            config, notices = checked_config(settings, self._recipe, defaults)
        except ConfigError as err:
            pairs = self._names.items()
            sets = [f"{name} sets {key}" for key, name in pairs if f"{key}=" in str(err)]
            if not sets:
                raise
            raise ConfigError(f"{err} Here {' and '.join(sets)}.") from err
        for notice in notices:
            if notice not in self._printed_notices:
                logger.warning(notice)
        self._printed_notices |= {*notices}
        checked: RunConfig = config
        return checked

    def _settings(self, length: Mapping[str, int]) -> dict[str, Any]:
        """Return the call's settings; `length` replaces all keys that set the run's length."""
        ends = ENDS if length else ()
        return {key: self.settings[key] for key in self.settings if key not in ends} | dict(length)

    def _length(self, steps: int | None) -> dict[str, int]:
        """Return the setting that makes the run `steps` steps longer."""
        if steps is None:
            return {}
        require_counts(steps=steps)
        return {"trainer.total_training_steps": self._steps_made() + steps}

    def _steps_made(self) -> int:
        """Return the step from which a run with these settings continues."""
        start = self.settings.get("trainer.resume_from_path")
        mode = self.settings.get("trainer.resume_mode", "auto")
        if mode == "resume_path" and start is not None:
            return int(read_marker(Path(start))["step"])
        return max(saved_steps(self.folder), default=0) if mode == "auto" else 0


def require_counts(**counts: int | None) -> dict[str, int]:
    """Return the counts; raise for a count that is not above 0."""
    numbers = {}
    for name, count in counts.items():
        if count is None or count < 1:
            raise ConfigError(f"{name}={count}: pass a number above 0.")
        numbers[name] = count
    return numbers


def _run_folder(named: str | Path | None, recipe: str) -> Path:
    """Return the folder that the call names, or create a new folder."""
    if named is not None:
        return Path(named).expanduser().resolve()

    runs = Path("runs/verl_like").resolve()
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = runs / f"{recipe}-{number}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            return folder
