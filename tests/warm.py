"""Loaded by the server of forked processes (`PRELOADED` in `tests/conftest.py`).

It checks the tiny models of one and two layers, so that its forks need not check them again: how
their rows may be packed, and that both engines decode with them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from tests.integration.runs import overrides
from trainer import load_config
from trainer.cli import make_tiny
from workers.models.support.proof import Support
from workers.rollout.build import build_engine
from workers.rollout.hf import cache_problem
from workers.training.row_proof import prove_rows

LONGEST = 64
"""Tokens of a row."""


def prove_tiny_models() -> None:
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # its thread would not survive a fork
    logging.disable_progress_bar()
    device = torch.device("cpu")
    worker: Any = SimpleNamespace(device=device, rank=0, sibling=lambda role: None)
    for num_layers in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            tiny = make_tiny.make(Path(folder), num_train=1, num_val=1, num_layers=num_layers)
            engine = build_engine(load_config(overrides(tiny, Path(folder))), worker)
        prove_rows(engine.module, Support.of(engine.module.config), may_pack=True)
        assert cache_problem(engine.module.config, LONGEST) == ""
    logging.enable_progress_bar()


prove_tiny_models()
