"""Convert the rewards that a call passes as objects to items of `reward.list`.

A function runs in another process, which does not have the user's session and must not start the
user's script. A function that can be imported there is named by its file or module. Any other
function (of a script or notebook, a closure, a lambda) is pickled into the run folder, next to a
Python file that loads it.
"""

from __future__ import annotations

import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import CodeType
from typing import Any

import cloudpickle

from verl_like.errors import ConfigError
from verl_like.files import write_whole
from workers.rewards.call import RewardCall

LOADER = '''"""A reward function from a Python session: its pickle is next to this file."""

import pickle
from pathlib import Path

compute_score = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
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
            item["path"], item["function"] = place_of_function(function, folder / item["name"])
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


def place_of_function(function: Callable[..., Any], path: Path) -> tuple[str, str]:
    """Return (file or module, name) by which a reward process can load the function."""
    importable = _importable(function)
    if importable is not None:
        return importable

    pickled = BytesIO()
    try:
        _Pickler(pickled).dump(function)
    except Exception as err:
        raise ConfigError(
            f"the reward function {function!r:.80} cannot be sent to the process that runs it "
            f"({type(err).__name__}: {err}). Everything that the function uses must be picklable; "
            "open files, locks and connections are not."
        ) from err
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path.with_suffix(".pkl"), pickled.getvalue())
    write_whole(path.with_suffix(".py"), LOADER)
    return str(path.with_suffix(".py")), "compute_score"


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    """Reduce code as cloudpickle does, but keep its file name, which newer versions replace."""
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(
        code.co_filename if argument == "<dynamic-code>" else argument for argument in arguments
    )


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that keeps functions' file names, so that errors name the user's line."""

    dispatch_table = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def _importable(function: Callable[..., Any]) -> tuple[str, str] | None:
    """Return the file or module that a function can be imported from, and its name; else None."""
    name = getattr(function, "__qualname__", "")
    module = sys.modules.get(getattr(function, "__module__", None) or "__main__")
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not function:
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
