"""Write the objects that a call passes to the run folder: models, rows, prompts and rewards.

A resumed run, the report and the command line then find them there. You can pass a function that
returns the model; it is called once, before the configuration is checked. Pass several models of
one run by role:

    PPO(model=make_policy, ...)                                    # def make_policy(): return ...
    PPO(model={"actor": policy, "critic": value_model}, ...)
    PPO(model=make_all, ...)                                       # which returns such a dict

Reward functions, environments and tools run in other processes, which do not have the user's
session and must not start the user's script. A function or class that can be imported there is
named by its file or module. Any other (of a script or notebook, a closure, a lambda) is pickled
into the run folder, next to a Python file that loads it.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, get_type_hints

import cloudpickle
import torch

from trainer.data.files import DATA_SOURCE, ground_truth_of
from verl_like.errors import ConfigError, nearest
from verl_like.files import json_line, write_atomic
from workers.images import as_png, is_picture
from workers.rewards.call import RewardCall

Row = dict[str, Any]
FILE_ENDINGS = (".parquet", ".csv", ".jsonl", ".json", ".gz")
"""A list of texts names files if all have one of these endings; any other list is data."""


def models_by_role(model: Any, roles: Sequence[str]) -> dict[str, Any]:
    """Return role -> model; a single model belongs to the first of `roles`."""
    is_function = callable(model) and not isinstance(model, torch.nn.Module | Mapping)
    models = _called(model, roles) if is_function else model
    if isinstance(models, tuple | list):
        expected = ", ".join(f'"{role}": ...' for role in roles)
        raise ConfigError(
            f"model is a {type(models).__name__} of {len(models)} items. Pass a dict from role to "
            f"model: {{{expected}}}."
        )
    if not isinstance(models, Mapping):
        return {roles[0]: models}

    for role, item in models.items():
        if role not in roles:
            raise ConfigError(
                f"model has an unknown role {role!r}. Roles with a model: "
                f"{', '.join(roles)}.{nearest(str(role), roles)}"
            )
        if item is None:
            raise ConfigError(
                f"model has None for the role {role}. Pass its model, or leave the role out."
            )
    if roles[0] not in models:
        raise ConfigError(
            f"model has no {roles[0]}; it has {', '.join(models) or 'no roles'}. "
            f"Pass the {roles[0]}'s model, too."
        )
    return dict(models)


def _called(function: Any, roles: Sequence[str]) -> Any:
    """Call a function without arguments and return its model, or its dict of models by role."""
    name = getattr(function, "__name__", repr(function))
    expected = f"the {roles[0]}'s model, or a dict of {', '.join(roles)}"
    if len(roles) == 1:
        expected = "the model"
    advice = f"Pass a function that returns {expected}."
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(
            f"model={name} must be callable without arguments: {error}. {advice}"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    result = function()
    if result is None:
        raise ConfigError(f"model={name} returned None. {advice}")
    return result


def model_path(model: Any, tokenizer: Any, folder: Path) -> str:
    """Return the path of a model; a model in memory is first written to `folder`."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"tokenizer={tokenizer!r:.60}: the tokenizer of model={str(model)!r} is the one "
                "in its folder. Drop tokenizer, or pass the model itself."
            )
        return str(model)

    if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
        raise ConfigError(
            f"model has the type {type(model).__name__}: pass a folder, a name on the hub, or "
            "a model of transformers. If a module wraps a model, pass the inner model. Other "
            "processes can load a custom module only if AutoConfig.register and "
            "AutoModelForCausalLM.register have added its class to transformers."
        )
    if hasattr(model, "merge_and_unload"):
        raise ConfigError(
            f"model has the type {type(model).__name__}: its folder would have only adapters. Pass "
            "model.merge_and_unload(), and train LoRA with the keys lora_rank and lora_alpha."
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"model is an object in memory ({type(model).__name__}), and tokenizer="
            f"{tokenizer!r:.60}. Pass the model's tokenizer, too."
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def model_settings(
    model: Any, tokenizer: Any, sections: Mapping[str, str], folder: Path
) -> dict[str, Any]:
    """Return key -> path for every model; a reward model is also enabled.

    Models in memory share the tokenizer, and are written below `folder`. `sections` maps a role to
    its section of the configuration; a single model belongs to the first role.
    """
    models = models_by_role(model, list(sections))
    are_all_paths = all(isinstance(item, str | Path) for item in models.values())
    settings: dict[str, Any] = {}
    for role, item in models.items():
        is_path = isinstance(item, str | Path)
        its_folder = folder / (role if len(models) > 1 else "model")
        its_tokenizer = None if is_path and not are_all_paths else tokenizer
        settings[f"{sections[role]}.path"] = model_path(item, its_tokenizer, its_folder)
        if role == "reward_model":
            settings["reward.model.enable"] = True
    return settings


def is_file_name(data: Any) -> bool:
    """Return whether `data` is a file name or a list of file names, not rows."""
    if isinstance(data, str | Path):
        return True
    if not isinstance(data, list | tuple) or not data:
        return False
    return all(isinstance(x, str | Path) and str(x).endswith(FILE_ENDINGS) for x in data)


def file_names(data: Any) -> Any:
    """Return one file name, or a list of them, as strings for the configuration."""
    if isinstance(data, str | Path):
        return str(data)
    return [str(item) for item in data]


def rows_in_memory(data: Any, subject: str) -> list[Any]:
    """Return the items of any iterable, such as a list or a `datasets.Dataset`.

    Errors call the data `subject`.
    """
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        keys = f" with the keys {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
        raise ConfigError(
            f"{subject} has the type {type(data).__name__}{keys}: pass a list, a datasets."
            "Dataset (one split of a DatasetDict), or file names."
        )
    items = list(data)
    if not items:
        raise ConfigError(f"{subject} is empty. Pass at least one row.")
    return items


def write_rows(rows: Iterable[Row], subject: str, path: Path, may_differ: bool = True) -> str:
    """Write one JSON object per line; name the row of a value that JSON cannot represent.

    Images of PIL are written to the folder `images` next to the file. Raise if the file already has
    other rows, unless rows `may_differ`.
    """
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json_line(row, partial(_plain, folder=path.parent)))
        except TypeError as err:
            raise ConfigError(
                f"{subject}, row {number}: {err}. Drop the column, or pass a parquet file."
            ) from err
        except ValueError as err:
            raise ConfigError(f"{subject}, row {number}: {err}.") from err
    text = "".join(lines)
    if not may_differ and path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{subject}: the checkpoints in {path.parents[1]} are of a run on different rows "
            f"({path}). Pass the same rows, or choose another folder."
        )
    write_atomic(path, text)
    return str(path)


def _plain(value: Any, folder: Path) -> Any:
    """Return a value that JSON can represent: for an image, its path below the `folder`."""
    if hasattr(value, "tolist"):  # a NumPy or torch value
        return value.tolist()
    if is_picture(value):
        data = as_png(value)
        path = folder / "images" / f"{hashlib.sha256(data).hexdigest()}.png"
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, data)
        return str(path.relative_to(folder))
    raise TypeError(f"JSON cannot represent {value!r:.60}, of type {type(value).__name__}")


def prompt_row(item: Any, prompt_key: str) -> Row:
    """Return a row in verl's schema for a text, a chat, or a dict.

    A dict keeps its columns, but if it lacks `reward_model`, its `ground_truth` moves there. A dict
    without a prompt is returned as it is, for the error text.
    """
    row = dict(item) if isinstance(item, Mapping) else {prompt_key: item}
    if row.get(prompt_key) is None:
        return row
    row.setdefault("data_source", DATA_SOURCE)
    if "reward_model" not in row:
        row["reward_model"] = {"ground_truth": ground_truth_of(row)}
        row.pop("ground_truth", None)
    return row


def text_row(item: Any) -> Row:
    """Return a row for a text, a chat, or a dict with columns."""
    if isinstance(item, Mapping):
        return dict(item)
    return {"text" if isinstance(item, str) else "messages": item}


LOADER = '''"""Code from a Python session: its pickle is next to this file."""

import pickle
from pathlib import Path

NAME = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def reward_list(
    rewards: Sequence[Any], folder: Path, columns: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Return items of `reward.list` for functions, or for dicts as in the configuration.

    A dict's `function` may be a function, too. If the rows' `columns` are known, a function
    parameter that nothing fills is rejected. A reward model in memory is written to `folder`;
    any other torch module is used as its `forward` function.
    """
    items: list[dict[str, Any]] = []
    for reward in rewards:
        item = dict(reward) if isinstance(reward, Mapping) else {"function": reward}
        function = item.get("function")
        if not isinstance(reward, Mapping) and not callable(reward):
            raise ConfigError(
                f"reward={reward!r:.60}: pass the function itself, or a dict such as "
                "{'name': 'style', 'kind': 'model', 'path': 'models/style'}."
            )
        if callable(function):
            taken = [other["name"] for other in items if "name" in other]
            item.setdefault("name", _free_name(function, taken))
            if hasattr(function, "save_pretrained"):
                del item["function"]
                place = model_folder_of(function, folder / item["name"])
                items.append({**item, "kind": "model", "path": place})
                continue
            if hasattr(function, "forward"):  # a module: its __call__ does not show the parameters
                function = function.forward
            if columns is not None:
                RewardCall.of(function, dict(item.get("kwargs", {})), columns)
            item["path"], item["function"] = place_of_code(
                function, folder / item["name"], "compute_score"
            )
        items.append(item)
    return items


def model_folder_of(model: Any, path: Path) -> str:
    """Write a reward model in memory to a folder for its role, and return the folder."""
    if getattr(model.config, "num_labels", None) != 1 or not hasattr(model, "score"):
        raise ConfigError(
            f"a reward has the type {type(model).__name__}: a model of transformers can be a "
            "reward if it is a sequence classifier with one label, such as verl_like."
            "RewardModelTraining makes. To score with another model, pass a function that calls it."
        )
    model.save_pretrained(path)
    return str(path)


def environment_code(key: str, value: Any, folder: Path) -> Any:
    """Return a setting of environments and tools with paths instead of functions and classes."""
    if isinstance(value, list | tuple):
        return [environment_code(f"{key}-{n}", item, folder) for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = environment_code(key, list(value.values()), folder)
        return dict(zip(value, items, strict=True))
    if not callable(value):
        return value
    name = getattr(value, "__name__", "")
    name = name if name.isidentifier() else "code"
    return ":".join(place_of_code(value, folder / key.rpartition(".")[2], name))


def place_of_code(code: Callable[..., Any], path: Path, name: str) -> tuple[str, str]:
    """Return (file or module, name) by which another process can load a function or class.

    Code that cannot be imported gets the `name` in a file at `path`.
    """
    importable = _importable(code)
    if importable is not None:
        return importable

    pickled = BytesIO()
    try:
        _Pickler(pickled).dump(code)
    except Exception as err:
        raise ConfigError(
            f"{code!r:.80} cannot be sent to the process that runs it ({type(err).__name__}: "
            f"{err}). Everything that it uses must be picklable; open files, locks and "
            "connections are not."
        ) from err
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path.with_suffix(".pkl"), pickled.getvalue())
    write_atomic(path.with_suffix(".py"), LOADER.replace("NAME", name))
    return str(path.with_suffix(".py")), name


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, but keep its file name, which newer versions replace."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(
        code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that keeps functions' file names and types.

    Errors then name the user's line. With `from __future__ import annotations`, types are text,
    and names that only such text uses would be missing where the function is loaded.
    """

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object; of a function, evaluate the annotations."""
        reduced = super().reducer_override(obj)
        if isinstance(obj, FunctionType) and isinstance(reduced, tuple):
            # a name that exists only for type checkers stays text
            with suppress(AttributeError, NameError, SyntaxError, TypeError):
                reduced[2][1]["__annotations__"] = get_type_hints(obj, include_extras=True)
        return reduced


def _importable(code: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the file or module that code can be imported from, and its name; else None."""
    name = getattr(code, "__qualname__", "")
    module = sys.modules.get(getattr(code, "__module__", None) or "__main__")
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not code:
        return None

    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None) or ""
    if spec is None or not file.endswith(".py"):
        return None
    return (module.__name__ if "." in module.__name__ else file), name


def _free_name(function: Callable[..., Any], taken: Sequence[str]) -> str:
    """Return a unique name for the function's metrics."""
    name = getattr(function, "__name__", type(function).__name__)
    name = name if name.isidentifier() else "reward"
    names = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 2))]
    return next(candidate for candidate in names if candidate not in taken)
