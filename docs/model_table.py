"""The lists of `docs/models.md`, from `data/models.json`, which `make_models.py` writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "data" / "models.json"
FAMILIES = {
    "A.X K": "axk1 axk2",
    "AFMoE": "afmoe",
    "Apertus": "apertus",
    "Arcee": "arcee",
    "Aria": "aria_text",
    "Bamba": "bamba",
    "BioGPT": "biogpt",
    "BitNet": "bitnet",
    "BLOOM": "bloom",
    "CodeGen": "codegen",
    "Cohere": "cohere cohere2 cohere2_moe",
    "CPM-Ant": "cpmant",
    "CTRL": "ctrl",
    "CWM": "cwm",
    "DBRX": "dbrx",
    "DeepSeek": "deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4",
    "DiffLlama": "diffllama",
    "Doge": "doge",
    "dots": "dots1",
    "Emu3": "emu3",
    "ERNIE 4.5": "ernie4_5 ernie4_5_moe",
    "EXAONE": "exaone4 exaone_moe",
    "Falcon": "falcon falcon_h1 falcon_mamba",
    "Fuyu": "fuyu",
    "Gemma": (
        "gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4 gemma4_text gemma4_unified "
        "gemma4_unified_text recurrent_gemma vaultgemma"
    ),
    "GLM": "glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa",
    "GOT-OCR": "got_ocr2",
    "GPT": "gpt2 gpt-sw3 gpt_bigcode gpt_neox gpt_neox_japanese gptj gpt_neo openai-gpt",
    "gpt-oss": "gpt_oss",
    "Granite": ("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared"),
    "Helium": "helium",
    "HRM": "hrm_text",
    "Hunyuan": "hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4",
    "HyperCLOVA X": "hyperclovax",
    "Inkling": "inkling_text",
    "Jais": "jais2",
    "Jamba": "jamba",
    "JetMoe": "jetmoe",
    "Kimi": "kimi_linear",
    "Laguna": "laguna",
    "LFM2": "lfm2 lfm2_moe",
    "Llama": "llama llama4 llama4_text mllama",
    "LongCat": "longcat_flash",
    "Mamba": "mamba mamba2",
    "Mellum": "mellum",
    "MiMo": "mimo_v2_flash",
    "MiniCPM": "minicpm3",
    "MiniMax": "minimax minimax_m2 minimax_m3_vl_text",
    "Mistral": "mistral ministral ministral3 mixtral",
    "ModernBERT": "modernbert-decoder",
    "MPT": "mpt",
    "nanochat": "nanochat",
    "Nemotron": "nemotron nemotron_h",
    "OLMo": "olmo olmo2 olmo3 olmo_hybrid olmoe flex_olmo",
    "OPT": "opt",
    "Persimmon": "persimmon",
    "Phi": "phi phi3 phi4_multimodal phimoe",
    "Qwen": (
        "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe "
        "qwen3_5_moe_text qwen4_exp_text"
    ),
    "Reformer": "reformer",
    "RWKV": "rwkv",
    "Seed-OSS": "seed_oss",
    "SmolLM": "smollm3",
    "Solar": "solar_open",
    "StableLM": "stablelm",
    "StarCoder": "starcoder2",
    "XGLM": "xglm",
    "xLSTM": "xlstm",
    "Youtu": "youtu",
    "Zamba": "zamba zamba2",
    "Zaya": "zaya",
}
"""Family -> its model types."""
NOT_CHAT_MODELS = (
    "bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert "
    "data2vec-text electra ernie git marian mbart megatron-bert moshi mvp pegasus plbart "
    "prophetnet rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm "
    "xlm-roberta xlm-roberta-xl xlnet xmod"
)
"""Encoders, and decoders for translation, speech or images; the page has no rows for them."""
Outcome = Sequence[str]
"""Rows, gradient checkpointing, native decoding and export: the columns of `walk.outcome`."""


def read_results() -> dict[str, Outcome | None]:
    """Return case -> its outcome, or None if transformers cannot build it from a configuration.

    A case is a model type, perhaps with "+" and the name of a variant of its configuration.
    """
    results: dict[str, Outcome | None] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


HEADS = {
    ("packed", "yes"): "Packed, `native`",
    ("packed", "hf"): "Packed, not `native`",
    ("padded", "yes"): "Padded, `native`",
    ("padded", "hf"): "Padded, not `native`",
    ("rejected", ""): "Rejected",
}
"""Rows and native decoding -> the words before the model types."""


def model_lists() -> str:
    """Return a list of model types for each outcome, and the exceptions."""
    results = read_results()
    tested = {case: outcome for case, outcome in results.items() if outcome and "+" not in case}
    lists: dict[tuple[str, str], list[str]] = {head: [] for head in HEADS}
    for family in sorted(FAMILIES, key=str.lower):
        for name in FAMILIES[family].split():
            rows, _, native, _ = tested[name]
            lists[rows, native if rows != "rejected" else ""].append(f"`{name}`")
    lines = [f"- **{HEADS[head]}:** {', '.join(names)}." for head, names in lists.items()]
    return "\n".join([*lines, "", _exceptions(tested), "", _not_tested(results)])


def _exceptions(tested: Mapping[str, Outcome]) -> str:
    """Name the models that a checkpointed pass or an export rejects."""
    shown = [name for names in FAMILIES.values() for name in names.split()]
    accepted = [name for name in shown if tested[name][0] != "rejected"]
    assert all(tested[name][3] == "yes" for name in accepted), "the page says so"
    without = [f"`{name}`" for name in accepted if tested[name][1] != "yes"]
    return f"Gradient checkpointing is rejected for {', '.join(sorted(without))}."


def _not_tested(results: Mapping[str, Outcome | None]) -> str:
    names = [f"`{case}`" for case, outcome in results.items() if outcome is None]
    return (
        "Not tested, because transformers does not build them from a configuration alone: "
        f"{', '.join(names)}."
    )
