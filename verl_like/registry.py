"""Objects that a configuration names: entries of a registry, or the user's code.

    POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")

    @POLICY_LOSSES.register("vanilla")
    def compute_policy_loss_vanilla(...): ...

    POLICY_LOSSES.look_up("vanilla")                    # registered
    POLICY_LOSSES.look_up("my_package.losses.my_loss")  # your own, imported
    POLICY_LOSSES.look_up("losses/mine.py:my_loss")     # your own, in a file

With `Registry(kind, check)`, an entry that does not fit its call is rejected at once.

`load_object` reads the three forms of a path: `package.module.name`, `package.module:name` and
`folder/file.py:name`. `load_attribute` loads a name from a file or a module. Nothing here imports
torch, because the processes that run reward functions start with this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl_like.errors import ConfigError, nearest
from verl_like.signatures import Check

T = TypeVar("T")


_by_kind: dict[str, Registry[Any]] = {}


def get_registry(kind: str) -> Registry[Any]:
    """Return the registry of that kind; its module must have been imported.

    A configuration's schema names a kind, and therefore does not import the entries.
    """
    assert kind in _by_kind, f"no imported module defines a registry of {kind!r}; import it first"
    return _by_kind[kind]


class Registry(Mapping[str, T]):
    """Objects by name, in the order in which they were registered."""

    def __init__(self, kind: str, check: Check | None = None) -> None:
        """`kind` names the entries in messages, such as "policy loss".

        `check` rejects objects that do not fit (`verl_like.signatures`).
        """
        self.kind = kind
        self.__doc__ = f"Each {kind} by name. The decorator `register(name)` adds your own."
        self._check = check
        self._entries: dict[str, T] = {}
        self.aliases: set[str] = set()
        """Second names of entries, which errors do not list."""
        _by_kind[kind] = self

    def register(self, name: str, *aliases: str) -> Callable[[T], T]:
        """Return a decorator that registers an object under its name and aliases."""

        def enter(entry: T) -> T:
            self._reject_unfit(entry, name)
            for key in (name, *aliases):
                if key in self._entries:
                    raise ConfigError(
                        f"{self.kind} {key!r} is already registered, as {self._entries[key]!r}. "
                        f"Use another name for {entry!r}."
                    )
                self._entries[key] = entry
            self.aliases.update(aliases)
            return entry

        return enter

    def look_up(self, name: str) -> T:
        """Return the entry of that name, or the user's object at that path."""
        if name in self._entries:
            return self._entries[name]
        if "." not in name and ":" not in name:
            known = ", ".join(sorted(self._entries.keys() - self.aliases))
            raise ConfigError(
                f"unknown {self.kind} {name!r}.{nearest(name, self._entries)} Known: {known}. For "
                "your own, use module.name or file.py:name."
            )
        loaded: T = _imported(name, f"{self.kind} {name!r}")
        self._reject_unfit(loaded, name)
        return loaded

    def _reject_unfit(self, entry: T, name: str) -> None:
        is_built_in_elsewhere = entry == name  # another module defines the entry of this name
        if self._check is not None and not is_built_in_elsewhere:
            self._check(entry, f"{self.kind} {name!r}")

    def __getitem__(self, name: str) -> T:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self._entries)})"


def load_object(path: str, setting: str) -> Any:
    """Return the object at a path of one of the three forms above; errors name `setting`."""
    return _imported(path, f"{setting}={path}")


def load_attribute(path: str, name: str, path_key: str, name_key: str) -> Any:
    """Return the object `name` of a Python file (`folder/file.py`) or module (`package.module`).

    `path_key` and `name_key` are the keys that set `path` and `name`, for errors.
    """
    return _named(path, name, f"{path_key}={path}", f"{name_key}={name!r}")


def _named(path: str, name: str, path_subject: str, name_subject: str) -> Any:
    """Return the object of that name in a file or module; errors begin with one of the subjects."""
    if path.endswith(".py"):
        module = _module_of_file(Path(path), path_subject)
    else:
        way_out = "Use a file that ends in .py, or a module that can be imported on every node."
        module = _module(path, path_subject, way_out)
    if not hasattr(module, name):
        public = {n: value for n, value in sorted(vars(module).items()) if not n.startswith("_")}
        defined = [n for n in public if getattr(public[n], "__module__", "") == module.__name__]
        names = [*getattr(module, "__all__", defined)] or [*public]
        raise ConfigError(
            f"{name_subject}: {path} has no {name!r}. It has "
            f"{', '.join(names) or 'no public names'}.{nearest(name, names)}"
        )
    return getattr(module, name)


def _imported(path: str, subject: str) -> Any:
    """Return the object at a path; errors begin with `subject`."""
    if ":" in path:
        place, _, name = path.rpartition(":")
        return _named(place, name, subject, subject)
    module_name, _, name = path.rpartition(".")
    if not module_name or name == "py":
        raise ConfigError(
            f"{subject} is not the path of an object, such as my_module.MyClass or file.py:MyClass."
        )
    way_out = "Check that its folder is on PYTHONPATH and its imports are installed on every node."
    module = _module(module_name, subject, way_out)
    if not hasattr(module, name):
        raise ConfigError(
            f"{subject} cannot be imported (module {module_name!r} has no {name!r})."
            f"{nearest(name, dir(module))}"
        )
    return getattr(module, name)


def _module(name: str, subject: str, way_out: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise ConfigError(_syntax_error(subject, error)) from error
    except SystemExit as error:
        raise ConfigError(_exit_error(subject, error)) from error
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{subject} cannot be imported ({type(error).__name__}: {error}). {way_out}"
        ) from error


def check_file(path: Path, subject: str) -> None:
    """Raise ConfigError if a file does not exist; the message begins with `subject`."""
    if not path.is_file():
        raise ConfigError(f"{subject}: there is no such file (looked for {path.resolve()}).")


def _module_of_file(path: Path, subject: str) -> ModuleType:
    """Import a user's file; return the loaded module if the file has not changed since."""
    check_file(path, subject)
    name, path = f"user_code_{path.stem}", path.resolve()
    state = str(path), path.stat().st_mtime_ns
    loaded = sys.modules.get(name)
    if loaded is not None and vars(loaded).get("_loaded_from") == state:
        return loaded  # its classes stay the same however often they are named
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py always has a loader"
    assert spec.loader is not None, "a path that ends in .py always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, because its dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(_syntax_error(subject, error)) from error
    except SystemExit as error:
        raise ConfigError(_exit_error(subject, error)) from error
    except ImportError as error:
        raise ConfigError(
            f"{subject} cannot be imported ({type(error).__name__}: {error}). Install its "
            "imports on every node, or add their folder to PYTHONPATH."
        ) from error
    vars(module)["_loaded_from"] = state
    return module


def module_of_file(value: Any) -> ModuleType | None:
    """Return the module of a class if it was loaded from a file's path, otherwise None."""
    module = sys.modules.get(getattr(value, "__module__", ""))
    return module if module is not None and "_loaded_from" in vars(module) else None


def _syntax_error(subject: str, error: SyntaxError) -> str:
    """Describe a syntax error in a user's file in one line."""
    text = (error.text or "").strip()
    return f"{subject}: {error.filename}, line {error.lineno}: {error.msg}: {text}"


def _exit_error(subject: str, error: SystemExit) -> str:
    return (
        f"{subject} cannot be imported: it ends the process, with sys.exit({error.code!r}). Put "
        'such code under `if __name__ == "__main__":`.'
    )
