"""`verl-like doctor --model PATH`: which path each part of a run takes for one model, and why.

Only the folder's `config.json` is read. What a line says was found on a tiny model of the same
class: nothing is believed because of a name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainer.cli.findings import Finding
from verl_like.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from workers.training.row_proof import Kind

WAYS: dict[Kind, str] = {
    "packed": "packed: rows without their padding come out as each row by itself",
    "padded": "padded: packed rows are not right for this class, so padding is computed, too",
    "single": "one row a pass: neither packed nor padded rows are right for this class",
}
BEYOND_EVERY_LIMIT = 2**62
"""Tokens of a row that is longer than any window."""


def model_findings(path: str) -> Iterator[Finding]:
    """Class, attention, rows in training, rollout and state of the model."""
    import torch
    from transformers import AutoModelForCausalLM

    from workers.models.folder import model_folder
    from workers.models.hf_config import read_hf_config

    folder = model_folder(path, weights=False)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"doctor --model {path}: there is no config.json in {folder}.")
    try:
        config = read_hf_config(folder)
    except (ValueError, OSError) as error:
        raise ConfigError(f"doctor --model {path}: {error}") from error

    model_cls: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if model_cls is None:
        detail = f"{config.model_type} has no causal LM in this transformers"
        yield Finding("model", detail, "a model of another type")
        return
    yield Finding("model", f"{config.model_type}, computed by {model_cls.__name__}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield from _of_class(config.get_text_config(), model_cls, device)


def _of_class(config: Any, model_cls: Any, device: torch.device) -> Iterator[Finding]:
    import torch

    from workers.models.attention import resolve_attention
    from workers.models.stand_in import MODEL_ERRORS, stand_in
    from workers.training.row_proof import prove_class

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = resolve_attention("auto", device, dtype, model_cls, config)
    yield Finding("attention", f"{attention} on this machine ({device.type}, {dtype})")

    config._attn_implementation = "eager" if attention == "eager" else "sdpa"
    try:
        small = stand_in(config, config._attn_implementation)
    except MODEL_ERRORS as error:
        detail = f"unknown, no small model of this class can be built: {error}"
        yield Finding("rows", detail, "train a few steps and compare", is_optional=True)
    else:
        kind, reasons = prove_class(config, config._attn_implementation, tuple(WAYS))
        yield Finding("rows", _rows(kind, reasons))
        yield Finding("attention of rows", _attention(small, kind == "packed", device, dtype))
        yield Finding("state", _state(small))
    yield _rollout(config)


def _rows(kind: Kind, reasons: dict[str, str]) -> str:
    why = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
    return f"{WAYS[kind]} ({why})" if why else WAYS[kind]


def _attention(small: Any, packs: bool, device: torch.device, dtype: torch.dtype) -> str:
    """What computes it in training, as a run says at its start."""
    from workers.training.attention import describe
    from workers.training.varlen import find_kernel

    kernel, why_not = find_kernel("auto", device, dtype)
    return describe(small, packs, kernel, why_not).partition(": ")[2]


def _state(small: Any) -> str:
    parameters = {name for name, _ in small.named_parameters()}
    buffers = sorted({name.rpartition(".")[2] for name in small.state_dict().keys() - parameters})
    tied = {name for name in buffers if name == "weight"}
    named = ", ".join(name for name in buffers if name not in tied)
    return f"parameters; persistent buffers: {named or 'none'}"


def _rollout(config: Any) -> Finding:
    from workers.rollout.native.proof import why_not_native

    reason = why_not_native(config, BEYOND_EVERY_LIMIT)
    if not reason:
        return Finding("rollout", "native, hf or vllm: native decoding was compared and is right")
    limits = ("sliding_window", "attention_chunk_size", "window_size")
    known = [f"{name}={value}" for name in limits if (value := getattr(config, name, None))]
    if known and not why_not_native(config, 1):
        return Finding(
            "rollout", f"native for rows of no more tokens than {', '.join(known)}; else hf or vllm"
        )
    return Finding("rollout", f"hf or vllm, not native: {reason}")
