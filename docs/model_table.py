"""The table of `docs/models.md`, from `data/models.json`, which `make_models.py` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from workers.rollout.vllm.setup import NOT_RUN

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


HEAD = (
    "| Starts | As plain torch | Rows | `native` | vLLM | Images | Model types |\n"
    "|---|---|---|---|---|---|---|"
)
NATIVE = {"yes": "yes", "hf": "no"}


def model_table() -> str:
    """Return a table with a row of model types for each outcome, and the exceptions."""
    results = read_results()
    tested = {case: outcome for case, outcome in results.items() if outcome and "+" not in case}
    shown = {case: tested[case] for case in sorted(tested) if case not in NOT_CHAT_MODELS}
    rows: dict[tuple[str, ...], list[str]] = {}
    for case, outcome in shown.items():
        layout, _, native, export = outcome[:4]
        starts = outcome[4] if len(outcome) > 4 else "not tried"
        if layout == "rejected" or starts == "rejected":
            cells: tuple[str, ...] = ("rejected", "–", "–", "–", "–", "–")
        else:
            assert export == "yes", f"{case}: the page says so"
            images = IMAGES.get(case, "not tried")
            vllm = outcome[5] if len(outcome) > 5 else VLLM[case]
            cells = (starts, "yes", layout, NATIVE[native], vllm, images)
        rows.setdefault(cells, []).append(f"`{case}`")
    order = sorted(rows, key=lambda cells: ("yes not tried rejected".find(cells[0]), cells[1:]))
    lines = [f"| {' | '.join(cells)} | {', '.join(rows[cells])} |" for cells in order]
    return "\n".join(
        [HEAD, *lines, "", _exceptions(shown), "", _not_in_vllm(), "", _not_tested(results)]
    )


def _exceptions(shown: Mapping[str, Outcome]) -> str:
    """Name the models that a checkpointed pass rejects."""
    without = [f"`{c}`" for c, row in shown.items() if row[0] != "rejected" and row[1] != "yes"]
    return f"Gradient checkpointing is rejected for {', '.join(without)}."


def _not_in_vllm() -> str:
    """Say why vLLM does not run small models that start."""
    reasons = [
        f"{difference.reason} ({', '.join(f'`{case}`' for case in cases.split())})"
        for cases, difference in NOT_RUN.items()
    ]
    return f"vLLM 0.32 does not run a model, because {'; or because '.join(reasons)}."


def _not_tested(results: Mapping[str, Outcome | None]) -> str:
    unknown = [case for case, outcome in results.items() if outcome is None]
    names = [f"`{case}`" for case in unknown if case not in NOT_CHAT_MODELS]
    return (
        "Not tested, because transformers does not build them from a small configuration alone, or "
        f"only with `timm` (`fast_vlm`, `gemma3n`, `perception_lm`): {', '.join(names)}."
    )
