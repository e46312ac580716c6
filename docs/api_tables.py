"""Lists of the Python API: keywords; names of `docs/data/api.yaml` with their first sentences."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from cards import preset_leaves

from trainer.api.flat_names import PPO_NAMES, ROW_NAMES, SWITCHES
from trainer.async_training.recipe import ASYNC
from trainer.config.keys import flat_config
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import load_config
from trainer.sft.recipe import SFTConfig
from verl_like import Worker
from verl_like.calls.future import WorkerFuture
from verl_like.config_key import Section
from verl_like.extend import CheckpointMixin, Trainer
from verl_like.lazy import names_by_block
from verl_like.registry import Registry

DATA = Path(__file__).resolve().parent / "data" / "api.yaml"
PAGES: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(DATA.read_text(encoding="utf-8"))
"""Page -> section -> dotted path -> members, as the head of the file explains."""


def name_list(page: str, section: str) -> str:
    """Return the signature and a sentence of each name of a section, and of its listed methods."""
    rows = []
    for path, members in PAGES[page][section].items():
        for name, text in rows_of(path, members):
            rows.append(f"`{name}`  \n{sentence_about(name, text)}")
    return "\n\n".join(rows)


def rows_of(path: str, members: Any) -> Iterator[tuple[str, str]]:
    """Yield a name and its docstring, then its listed methods and properties with theirs."""
    module, _, name = path.rpartition(".")
    target = getattr(importlib.import_module(module), name)
    if isinstance(target, ModuleType):
        if members.get("members", True):
            classes = [value for value in vars(target).values() if inspect.isclass(value)]
            classes = [each for each in classes if each.__module__ == path]
            yield from ((each.__name__, docstring(each)) for each in classes)
        return
    is_documented = inspect.isclass(target) or inspect.isroutine(target)
    text = docstring(target) if is_documented else docstring_of_constant(module, name)
    if isinstance(target, Registry):
        text = f"{first_sentence(text).removesuffix('.')}: `{target.entry}`."
    yield name if members == "docstring" else called(name, target), text
    methods = members if isinstance(members, list) else []
    if isinstance(members, dict):
        methods = members.get("listed", [])
    if isinstance(members, dict) and "filters" in members:
        methods = [name for name in vars(target) if re.search(members["filters"][0], name)]
    for member in methods:
        if not hasattr(target, member):
            sources = [inspect.getsource(each) for each in target.__mro__[:-1]]
            is_set = any(re.search(rf"self\.{member}\b", source) for source in sources)
            assert is_set, f"{path} has no {member}"
            continue
        value = inspect.getattr_static(target, member)
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        yield called(f"{name}.{member}", value), docstring(value)


def called(name: str, target: Any) -> str:
    """Return a name; of a function, a method or a class with its parameters."""
    if not inspect.isfunction(target) and not inspect.isclass(target) or has_no_parameters(target):
        return name
    signature = inspect.signature(target)
    shown = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    line = f"{name}({', '.join(map(described, shown))})"
    if inspect.isfunction(target) and signature.return_annotation not in ("None", "Any", "Self"):
        line += f" -> {signature.return_annotation}"
    return line


def has_no_parameters(target: Any) -> bool:
    """Return whether users do not construct the class, or its parameters are keys of a section."""
    return inspect.isclass(target) and issubclass(
        target,
        BaseException | enum.Enum | Section | Trainer | Worker | WorkerFuture | CheckpointMixin,
    )


def described(parameter: inspect.Parameter) -> str:
    """Return a parameter with its default or, if it is required, with its type."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    text = f"{stars.get(parameter.kind, '')}{parameter.name}"
    if parameter.default is not parameter.empty:
        shown = repr(parameter.default)
        is_plain = type(parameter.default) in (bool, int, float, str, tuple, type(None))
        return f"{text}={shown if is_plain and len(shown) < 30 else '…'}"
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)
    is_known = parameter.kind not in stars and annotation not in ("Any", parameter.empty)
    return f"{text}: {annotation}" if is_known else text


def docstring(target: Any) -> str:
    """Return the docstring of a class, function or property."""
    text = inspect.getdoc(target)
    assert text, f"{target} has no docstring"
    return text


def docstring_of_constant(module: str, name: str) -> str:
    """Return the text below the assignment of a name, in the module that defines it."""
    file = importlib.import_module(module).__file__
    assert file
    (defined_in,) = [block[name] for block in names_by_block(file) if name in block]
    file = importlib.import_module(defined_in).__file__
    assert file
    statements = ast.parse(Path(file).read_text(encoding="utf-8")).body
    for statement, after in zip(statements, statements[1:], strict=False):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if name in names and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            return inspect.cleandoc(str(after.value.value))
    raise AssertionError(f"{name} of {defined_in} has no docstring")


def sentence_about(name: str, text: str) -> str:
    """Return the first sentence of a docstring, without a verb that `-> type` or the page says."""
    sentence = first_sentence(text)
    shorter = sentence.removeprefix("Return " if " -> " in name else "Called ")
    return sentence if shorter == sentence else shorter[0].upper() + shorter[1:]


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, without a colon at its end."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(":")


def keyword_table() -> str:
    """Return the keywords of runs from Python with their keys and defaults."""
    preset, lines = preset_leaves("algorithm", "grpo"), ["Keyword|Key|Default", "---|---|---"]
    defaults, of_rows = flat_config(PPOConfig()), flat_config(SFTConfig())
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    of_async = load_config(needed, ASYNC).trainer.n_gpus_per_node
    for name, key in PPO_NAMES.items():
        is_off = key in SWITCHES and not defaults[SWITCHES[key]]
        default = "off" if is_off else f"`{defaults[key]!r}`"
        of_grpo = f"`{preset[key]!r}`" if key in preset else default
        default += "" if of_grpo == default else f" (`GRPO`: {of_grpo})"
        default += f" (`AsyncPPO`: `{of_async}`)" if name == "devices" else ""
        lines.append(f"`{name}`|`{key}`|{'a new folder' if name == 'save_to' else default}")
    alike = [name for name in ROW_NAMES if name in PPO_NAMES]
    for name in alike:
        assert re.sub(r"^actor_rollout_ref\.(actor\.)?", "", PPO_NAMES[name]) == ROW_NAMES[name]
    further = [f"`{name}` (`{key}`)" for name, key in ROW_NAMES.items() if name not in PPO_NAMES]
    names = ", ".join([*(f"`{name}`" for name in alike), *further])
    table = "\n".join(lines)
    lr, size = (of_rows[ROW_NAMES[name]] for name in ("lr", "batch_size"))
    return (
        f"`PPO`, `GRPO` and `AsyncPPO` have these keywords:\n\n{table}\n\n"
        f"`SFT`, `RewardModelTraining`, `DPO` and `KTO` have {names}. Their keys have no "
        f"`actor_rollout_ref.` or `actor.`: `lr` is `optim.lr`, by default `{lr}`. "
        f"`batch_size` is by default `{size}`."
    )
