"""Fixtures that several test folders share: a tiny model and its data."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import tests.rare_collections  # noqa: F401 - before torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests import ROOT
from tests.fork_server import fork_server, python_of_tests, write_python
from tests.forked import forked_workers  # noqa: F401 - a fixture of every test
from tests.forked_ray import ask_for_forks
from tests.sample_of_cases import (  # noqa: F401 - hooks
    pytest_addoption,
    pytest_collection_modifyitems,
)

# What a user's shell exports must not reach the code under test, which reads it at its import.
for name in (
    *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT"),
    *("RAY_ADDRESS", "HYDRA_FULL_ERROR", "WANDB_MODE", "OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
):
    os.environ.pop(name, None)
# Keep the compiled tests, whatever the environment says: compiling is half of the collection.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
MEMORY_DISK = Path("/dev/shm")
if os.access(MEMORY_DISK, os.W_OK) and shutil.disk_usage(MEMORY_DISK).free > 8 * 2**30:
    # run folders are synced to the disk file by file, some thousand times
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))
# Forked processes have these modules loaded, which saves seconds per process. The first fork
# starts the server, which silently skips a name that it cannot import.
PRELOADED = [
    "tests.rare_collections",
    "peft",  # first, because bitsandbytes, which it loads, changes functions of torch
    "tests.foreign_functions",  # torch, transformers, then ours
    "pytest",
    "tests.integration.runs",
    "trainer.cli.make_tiny",
    "workers.rollout.native.engine",
    "workers.rollout.hf",
    "workers.training.build_model",
    "tests.frozen",
]
multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


def pytest_collection(session: pytest.Session) -> None:
    """Use one thread; the scheduling process of pytest-xdist needs no torch."""
    if session.config.pluginmanager.hasplugin("dsession"):
        return

    import torch

    torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Freeze the modules: the garbage collector need not walk them."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Collect garbage once after the last test; pytest does it five times."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the processes of pytest-xdist; their own forks come from the same server."""
    stack = ExitStack()
    stack.enter_context(fork_server())
    config.add_cleanup(stack.close)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = python_of_tests()


def load(path: str) -> ModuleType:
    """Load a file that is in no package as a module.

    It can import files next to it, as when it is run by hand.
    """
    name = path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, module)  # dataclasses look their module up
        patch.syspath_prepend(str((ROOT / path).parent))
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_tiny() -> ModuleType:
    """The module of `verl-like make-tiny`."""
    from trainer.cli import make_tiny

    return make_tiny


@pytest.fixture(scope="session")
def tiny_dir(make_tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of `verl-like make-tiny DIR`: model/, train.parquet, val.parquet; and few.parquet.

    Read only.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder: Path = make_tiny.make(tmp_path_factory.mktemp("tiny"))
    few = pa.Table.from_pylist(make_tiny.make_rows(64, "train"))
    pq.write_table(few, folder / "few.parquet")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    """The tokenizer of `tiny_dir`, one token per character. Read only."""
    from trainer.data.prompts import load_tokenizer

    return load_tokenizer(str(tiny_dir / "model"))


@pytest.fixture(autouse=True)
def broken_pipes_are_errors() -> Iterator[None]:
    """Commands end when nobody reads their output; the test process must not."""
    yield
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


FIGURES = ("curves", "timeline", "shares", "activity")
"""The functions that draw the figures of a report."""


@pytest.fixture(scope="session", autouse=True)
def drawings() -> Iterator[list[tuple[ModuleType, str, Any]]]:
    """Replace the functions that draw figures, in all tests and fixtures.

    Drawing takes 0.8 s, twice as long as a tiny run, so most reports are written without figures.
    """
    from trainer.tools.report import figures

    originals = [(figures, name, getattr(figures, name)) for name in FIGURES]
    with pytest.MonkeyPatch.context() as patch:
        draw_no_figures(patch)
        yield originals


@pytest.fixture(scope="session", autouse=True)
def frozen_objects() -> Iterator[None]:
    """Do not count the frozen objects in every run, which takes 0.06 s.

    `pytest_collection_finish` has frozen them.
    """
    from trainer import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "ignore_old_objects", nullcontext)
        yield


@pytest.fixture
def figures(drawings: list[tuple[ModuleType, str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Requested by tests that look at the figures of a run's report."""
    draw_figures(drawings, monkeypatch)


def draw_figures(
    drawings: list[tuple[ModuleType, str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, draw in drawings:
        monkeypatch.setattr(module, name, draw)


def draw_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn figures off, also in a process that a test starts."""
    for drawing in FIGURES:
        monkeypatch.setattr(f"trainer.tools.report.figures.{drawing}", lambda *_: "")


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Start the server of `tests/fork_server.py`."""
    with fork_server():
        yield


@pytest.fixture(scope="session")
def forked_python(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable to use as `python`: scripts' processes and their children are forked."""
    return write_python(tmp_path_factory.mktemp("forked"))


@pytest.fixture(scope="session")
def ray_session(forks: None) -> Iterator[None]:
    """The one Ray cluster that all Ray tests share."""
    import ray

    from verl_like.backends.ray import connect

    assert not ray.is_initialized(), "a test before connected without this fixture"
    with pytest.MonkeyPatch.context() as patch:
        ask_for_forks(patch)
        connect(num_cpus=16)
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def classifier(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with random weights for the tiny model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(tiny_dir / "model", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_dir / "model").save_pretrained(folder)
    return folder
