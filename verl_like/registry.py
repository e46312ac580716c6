"""The user's code: objects that a configuration names, and checks of the calls that they accept.

    POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")

    @POLICY_LOSSES.register("vanilla")
    def compute_policy_loss_vanilla(...): ...

    POLICY_LOSSES.look_up("vanilla")                    # registered
    POLICY_LOSSES.look_up("my_package.losses.my_loss")  # your own, imported
    POLICY_LOSSES.look_up("losses/mine.py:my_loss")     # your own, in a file

With `Registry(kind, check)`, an entry that does not fit its call is rejected before anything runs:

    LOSS = CallSignature("old_log_prob", "log_prob", by_name=("advantages", "response_mask"))
    check_call(my_loss, "policy loss 'my_module.my_loss'", LOSS)
    check_methods(MyEngine, RolloutEngine, "rollout.name=my_module.MyEngine")

`load_object` reads the three forms of a path: `package.module.name`, `package.module:name` and
`folder/file.py:name`. `load_attribute` loads a name from a file or a module. Nothing here imports
torch, because the processes that run reward functions start with this module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from verl_like.errors import ConfigError, nearest

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

    def __init__(self, kind: str, check: Check | None = None, entry: str = "") -> None:
        """`kind` names the entries in messages, such as "policy loss".

        `check` rejects objects that do not fit. `entry` shows what one registers, such as "(gap) ->
        losses", in `help()` and on the pages of the Python API.
        """
        self.kind, self.entry = kind, entry
        self.__doc__ = f"Each {kind} by name{entry and f': {entry}'}. `register(name)` adds yours."
        self._check = check
        self._entries: dict[str, T] = {}
        self._paths: dict[str, str] = {}
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

    def register_path(self, name: str, path: str) -> None:
        """Register the object at `module.name`, which is imported when it is looked up."""
        self._paths[name] = path

    def look_up(self, name: str) -> T:
        """Return the entry of that name, or the user's object at that path."""
        if name in self._entries:
            return self._entries[name]
        name = self._paths.get(name, name)
        if "." not in name and ":" not in name:
            known = ", ".join(sorted({*self} - self.aliases))
            raise ConfigError(
                f"unknown {self.kind} {name!r}.{nearest(name, self)} Known: {known}. For "
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
        return self.look_up(name) if name in self._paths else self._entries[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._entries
        yield from self._paths

    def __len__(self) -> int:
        return len(self._entries) + len(self._paths)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"


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
        remedy = "Use a file that ends in .py, or a module that can be imported on every node."
        module = _module(path, path_subject, remedy)
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
    remedy = "Check that its folder is on PYTHONPATH and its imports are installed on every node."
    module = _module(module_name, subject, remedy)
    if not hasattr(module, name):
        raise ConfigError(
            f"{subject} cannot be imported (module {module_name!r} has no {name!r})."
            f"{nearest(name, dir(module))}"
        )
    return getattr(module, name)


def _module(name: str, subject: str, remedy: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except SyntaxError as error:
        raise ConfigError(_syntax_error(subject, error)) from error
    except SystemExit as error:
        raise ConfigError(_exit_error(subject, error)) from error
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{subject} cannot be imported ({type(error).__name__}: {error}). {remedy}"
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


Check = Callable[[Any, str], None]
"""(object, beginning of messages) -> None, or raise a `ConfigError`."""
BOUND_OTHERWISE = (staticmethod, classmethod)


class CallSignature:
    """The arguments of a call: values by position, with names for messages, and others by name."""

    def __init__(self, *by_position: str, by_name: Sequence[str] = ()) -> None:
        self.by_position, self.by_name = by_position, tuple(by_name)

    def __str__(self) -> str:
        """Return the arguments as in code: `(batch, *, seed)`."""
        named = ("*", *self.by_name) if self.by_position and self.by_name else self.by_name
        return f"({', '.join([*self.by_position, *named])})"


def check_call(function: Any, subject: str, call: CallSignature) -> None:
    """Reject an object that is not callable or does not accept this call."""
    if not callable(function):
        raise ConfigError(
            f"{subject} has the type {type(function).__name__}, which cannot be called. Use a "
            "function or a class."
        )
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*call.by_position, **dict.fromkeys(call.by_name))
    except TypeError as error:
        kind = "by name with" if call.by_name and not call.by_position else "with"
        raise ConfigError(
            f"{subject} has the parameters {format_signature(signature)}, but is called {kind} "
            f"{call}: {error}. Let it accept these arguments, and give any other parameter a "
            "default."
        ) from error


def check_by_name(function: Any, subject: str) -> None:
    """Reject an object that is not callable, or that requires a positional-only argument."""
    signature = signature_of(function) if callable(function) else None
    names = signature.parameters.values() if signature else ()
    check_call(
        function,
        subject,
        CallSignature(by_name=[parameter.name for parameter in names if is_required(parameter)]),
    )


def check_methods(
    cls: type, base: type, subject: str, names: Collection[str] | None = None
) -> None:
    """Reject a subclass that lacks a required method or has a method that does not fit.

    A user's method must accept the required arguments of the method of `base`. If `names` is set,
    only these methods are checked.
    """
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"{subject} does not implement {', '.join(missing)}, which its base class requires."
        )
    if names is None:
        names = _methods_beyond(cls, base)
    for name in names:
        ours = inspect.getattr_static(base, name, None)
        if inspect.isfunction(ours) or isinstance(ours, BOUND_OTHERWISE):
            check_method(cls, name, subject, call_of(ours))


def check_method(owner: Any, name: str, subject: str, call: CallSignature) -> None:
    """Reject a method of a class or object that does not accept this call."""
    is_unbound = isinstance(owner, type) and not isinstance(
        inspect.getattr_static(owner, name), BOUND_OTHERWISE
    )
    full = CallSignature("self", *call.by_position, by_name=call.by_name) if is_unbound else call
    check_call(getattr(owner, name), f"{subject}: its {name}", full)


def call_of(method: Any) -> CallSignature:
    """Return the shortest call that a method of this project accepts, without `self`."""
    function = method.__func__ if isinstance(method, BOUND_OTHERWISE) else method
    signature = signature_of(function)
    if signature is None:
        return CallSignature()
    bound = 0 if isinstance(method, staticmethod) else 1
    needed = [parameter for parameter in signature.parameters.values() if is_required(parameter)]
    by_position = [
        parameter.name for parameter in needed if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    by_name = [parameter.name for parameter in needed if parameter.kind is parameter.KEYWORD_ONLY]
    return CallSignature(*by_position[bound:], by_name=by_name)


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of a function, or None if it is not known."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def format_signature(signature: inspect.Signature) -> str:
    """Return the parameters without their types, as in code."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _methods_beyond(cls: type, base: type) -> list[str]:
    """Return the methods that `cls` and its parents below `base` define, except `__x__`."""
    names = []
    for parent in cls.__mro__:
        for name, value in vars(parent).items():
            is_method = inspect.isfunction(value) or isinstance(value, BOUND_OTHERWISE)
            if is_method and parent not in base.__mro__ and not name.startswith("__"):
                names.append(name)
    return names


def is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call must pass this parameter."""
    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_many
