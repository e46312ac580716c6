"""The table of `docs/models.md`, from `data/models.json`, which `make_models.py` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "data" / "models.json"
NOT_CHAT_MODELS = (
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert "
    "data2vec-text electra ernie git marian mbart megatron-bert moshi mvp pegasus plbart "
    "pi0 prophetnet rembert roberta roberta-prelayernorm roc_bert roformer shieldgemma2 trocr "
    "vision-encoder-decoder whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod"
).split()
"""Encoders, and decoders for translation, speech or images; the page does not list them."""
IMAGES = {
    **dict.fromkeys(
        "idefics3 internvl llava mistral3 qwen2_5_vl qwen2_vl qwen3_vl smolvlm".split(), "packed"
    ),
    **dict.fromkeys(("gemma3", "llama4", "qwen3_5"), "padded"),
    "gemma4": "packed or padded",
}
"""Families of `tests/workers/models/vision.py` -> the layout of their rows with images."""
VLLM = dict.fromkeys(("gemma4", "llama4"), "yes")
"""Other models that vLLM's tests run, in `tests/workers/rollout/vllm/test_images.py`."""
Outcome = Sequence[str]
"""Rows, gradient checkpointing, native decoding, export, whether runs start, and vLLM.

The first four are the columns of `walk.outcome`; the others are missing if they were not tried.
"""


def read_results() -> dict[str, Outcome | None]:
    """Return case -> its outcome, or None if transformers cannot build it from a configuration.

    A case is a model type, perhaps with "+" and the name of a variant of its configuration.
    """
    results: dict[str, Outcome | None] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


HEAD = "Rows|`native`|vLLM|Model types\n---|---|---|---"
NATIVE = {"yes": "yes", "hf": "no"}


def model_table() -> str:
    """Return a table with a row of model types for each outcome, and the exceptions."""
    results = read_results().items()
    tested = {case: outcome for case, outcome in results if outcome and "+" not in case}
    shown = {case: tested[case] for case in sorted(tested) if case not in NOT_CHAT_MODELS}
    rows: dict[tuple[str, ...], list[str]] = {}
    rejected = []
    for case, (layout, _, native, export, starts, *vllm) in shown.items():
        if layout == "rejected" or starts == "rejected":
            rejected.append(case)
        else:
            assert (export, starts) == ("yes", "yes"), f"{case}: the page says so"
            cells = (layout, NATIVE[native], vllm[0] if vllm else VLLM[case])
            rows.setdefault(cells, []).append(case)
    lines = [f"{'|'.join(cells)}|{_names(rows[cells])}" for cells in sorted(rows)]
    images: dict[str, list[str]] = {}
    for case, layout in IMAGES.items():
        images.setdefault(layout, []).append(case)
    layouts = [f"{_names(sorted(cases))} ({layout})" for layout, cases in images.items()]
    unchecked = [c for c in shown if c not in rejected and shown[c][1] != "yes"]
    return "\n\n".join(
        [
            "\n".join([HEAD, *lines]),
            f"**Rejected** by `verl-like check`: {_names(rejected)}.",
            f"**Rows with images** were tested for {', '.join(layouts)}.",
            f"**Gradient checkpointing** is rejected for {_names(unchecked)}.",
            "**Not tested:** all other types, such as `gemma3n`, which needs the package `timm`.",
        ]
    )


def _names(cases: Iterable[str]) -> str:
    return ", ".join(f"`{case}`" for case in cases)
