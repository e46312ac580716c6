"""Tiny models and a few rows in place of the models and data sets that an example names.

    command = with_stand_ins(translation, folder)      # of `verl-like check RECIPE --rehearse`

A model is a folder that `save_pretrained` of the class of the named model writes, with random
weights. Rows have the columns of the data set, as the preprocessing of the example's repository
writes them.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.workers.models import vision
from tests.workers.models.architectures import build_tiny, tiny_model_config
from trainer.tools.migrate.translation import Translation
from trainer.tools.migrate.trl import ROWS as ROWS_IN_CODE
from verl_like.errors import ConfigError

ROWS = 1056
"""Rows of a file: more than the largest batch of an example."""
POSITIONS = 2**17
MODELS = {
    r"minicpm-o": "minicpmo",
    r"qwen3[-.]vl-.*-a\d+b": "qwen3_vl_moe",
    r"qwen3-vl": "qwen3_vl",
    r"qwen3\.5-.*-a\d+b": "qwen3_5_moe",
    r"qwen3\.5": "qwen3_5",
    r"qwen3-next": "qwen3_next",
    r"qwen3-.*-a\d+b": "qwen3_moe",
    r"qwen3": "qwen3",
    r"qwen2\.5-vl": "qwen2_5_vl",
    r"qwen(1\.5|2|2\.5)-|deepseek-r1-distill-qwen": "qwen2",
    r"glm-4\.1v": "glm4v",
    r"gpt-oss": "gpt_oss",
    r"seed-oss": "seed_oss",
    r"mixtral": "mixtral",
    r"mistral": "mistral+full",
    r"gemma-3": "gemma3",
    r"gemma": "gemma",
    r"smolvlm": "smolvlm",
    r"llava-1\.5": "llava",
    r"nemotron-3": "nemotron_h",
    r"pythia": "gpt_neox",
    r"gpt2": "gpt2",
    r"llama|deepseek-coder": "llama",
}
"""Pattern of a model's name -> its type; the first that matches counts."""
TEMPLATE_VARIABLES = "{% set _ = reasoning_effort, enable_thinking %}"
"""Variables that published templates read, of gpt-oss and Qwen 3."""
REWARD_MODEL = re.compile(r"(?i)reward|[-_]rm[-_]")


def model_type(path: str) -> str:
    """Return the type of the model of that name."""
    for pattern, kind in MODELS.items():
        if re.search(pattern, path, re.IGNORECASE):
            return kind
    raise ConfigError(f"{path}: MODELS has no type for this model. Add a line.")


@cache
def write_model(kind: str, folder: Path, scores: bool = False) -> Path:
    """Write a tiny model of that type; with `scores`, its class for sequences with one label."""
    out = folder / f"{kind}{'_rm' * scores}"
    if kind == "minicpmo":  # its class is code in its folder
        vision.tokenizer_with({}, "").save_pretrained(out)
        classes = {"AutoConfig": "configuration.C", "AutoModel": "modeling.M"}
        text = json.dumps({"model_type": kind, "architectures": ["MiniCPMO"], "auto_map": classes})
        (out / "config.json").write_text(text, encoding="utf-8")
        return out
    family = kind.removesuffix("_moe")
    if family in (*vision.FAMILIES, "glm4v"):
        config, processor = (glm4v if family == "glm4v" else vision.FAMILIES[family])()
        if kind != family:
            config = with_experts(config, kind)
    else:
        config, processor = tiny_model_config(kind), vision.tokenizer_with({}, "")
    text = config.get_text_config()
    text.max_position_embeddings = POSITIONS
    text.pad_token_id, text.eos_token_id, text.bos_token_id = 0, 1, None
    if scores:
        config.num_labels = 1
        torch.manual_seed(0)
        module: Any = AutoModelForSequenceClassification.from_config(config)
    else:
        module = build_tiny(config)
    tokenizer = getattr(processor, "tokenizer", processor)
    tokenizer.chat_template += TEMPLATE_VARIABLES
    module.save_pretrained(out)
    processor.save_pretrained(out)
    return out


def with_experts(config: Any, kind: str) -> Any:
    """Return the config of the same sizes with layers of experts."""
    fields = config.to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16, "decoder_sparse_step": 1}
    fields["text_config"] |= experts
    for section in ("text_config", "vision_config"):
        fields[section].pop("model_type", None)
    fields.pop("model_type")
    return AutoConfig.for_model(kind, **fields)


def glm4v() -> tuple[Any, Any]:
    """Return the config and the processor of a tiny GLM-4.1V."""
    tokens = {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
    }
    tokenizer = vision.tokenizer_with(tokens, "<|begin_of_image|><|image|><|end_of_image|>")
    image_processor = vision._class("glm4v", "Glm4vImageProcessorPil")(
        patch_size=8, merge_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 80 * 80}
    )
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    config = AutoConfig.for_model(
        "glm4v",
        text_config={**vision.SIZES, "rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": 24,
            "out_hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "patch_size": 8,
            "image_size": 80,
        },
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        image_start_token_id=ids["image_start_token"],
        image_end_token_id=ids["image_end_token"],
    )
    return config, vision._processor("Glm4vProcessor", image_processor, tokenizer)


def image(number: int) -> dict[str, Any]:
    """Return an image as `datasets` writes it into Parquet."""
    file = io.BytesIO()
    vision.picture(40 + 8 * (number % 3), 40, number).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def chat(*texts: str) -> list[dict[str, str]]:
    """Return messages of user and assistant in turn."""
    return [
        {"role": ("user", "assistant")[place % 2], "content": text}
        for place, text in enumerate(texts)
    ]


def scored(source: str, number: int, text: str, answer: Any, **more: Any) -> dict[str, Any]:
    """Return a row in verl's schema."""
    return {
        "data_source": source,
        "prompt": chat(text),
        **more,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": "train", "index": number, "question": text},
    }


def rlla(number: int) -> dict[str, Any]:
    call = '{"name": "add", "parameters": {"n": 1}}'
    text = f"<think>\nI call it.\n</think>\n<tool_call>\n{call}\n</tool_call>"
    row = scored("rlla", number, f"Call add with {number}.", text)
    row["extra_info"]["experiment_name"] = "qwen3"  # verl's reward manager gdpo adds it
    return row


def sums(source: str) -> Callable[[int], dict[str, Any]]:
    return lambda n: scored(source, n, f"What is {n} + 1? Answer after ####.", str(n + 1))


def geometry(source: str) -> Callable[[int], dict[str, Any]]:
    return lambda n: scored(source, n, f"<image>Find x + {n}.", str(n), images=[image(n % 16)])


def pair(number: int) -> dict[str, Any]:
    question = f"What is {number} + 1?"
    good, bad = chat(question, str(number + 1)), chat(question, "I do not know.")
    return {"chosen": good, "rejected": bad, "score_chosen": 8.0, "score_rejected": 2.0}


def labelled(number: int) -> dict[str, Any]:
    messages = chat(f"What is {number} + 1?", str(number + number % 2))
    return {"prompt": messages[:1], "completion": messages[1:], "label": number % 2 == 1}


def conversation(number: int) -> dict[str, Any]:
    return {"messages": chat(f"What is {number} + 1?", str(number + 1), "Sure?", "Yes.")}


def question(number: int, **more: Any) -> dict[str, Any]:
    """Return a row for TRL's rewards of mathematics, or of numbers after ####."""
    prompt = [{"role": "system", "content": "Think."}, *chat(f"What is {number} + 1?")]
    answers = {"solution": f"$\\boxed{{{number + 1}}}$", "reference_answer": str(number + 1)}
    return {"prompt": prompt, **answers, **more}


def parts(*contents: str) -> list[dict[str, str | None]]:
    """Return the parts of a content, "IMAGE" for an image, as `datasets` fills their columns."""
    return [
        {"type": "image", "text": None} if text == "IMAGE" else {"type": "text", "text": text}
        for text in contents
    ]


def pictured(number: int) -> dict[str, Any]:
    messages = [
        {"role": "user", "content": parts("What is this?", "IMAGE")},
        {"role": "assistant", "content": parts(f"It is {number}.")},
    ]
    return {"messages": messages, "images": [image(number % 16)]}


def pictured_pair(number: int) -> dict[str, Any]:
    def answer(text: str) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": parts(text)}]

    return {
        "images": [image(number % 16)],
        "prompt": [{"role": "user", "content": parts("IMAGE", "What is this?")}],
        "chosen": answer(f"It is {number}."),
        "rejected": answer("I do not see it."),
    }


def thoughtful(number: int) -> dict[str, Any]:
    messages = [{**message, "thinking": None} for message in chat(f"{number} + 1?", "Yes.")]
    messages[1]["thinking"] = "I add."
    return {"reasoning_language": "French", "messages": messages}


def captioned(number: int) -> dict[str, Any]:
    return {"messages": chat("<image>What is this?", f"{number}"), "images": [image(number % 16)]}


DATA: dict[str, Callable[[int], dict[str, Any]]] = {
    r"gemma3\.py makes|llava-instruct": pictured,
    r"nemotron_3\.py makes": conversation,
    r"_vlm\.py makes": lambda n: question(n, image=image(n % 16)),
    r"\.py makes": question,
    r"rlaif-v": pictured_pair,
    r"multilingual-thinking": thoughtful,
    r"geo3k|geometry3k": geometry("hiyouga/geometry3k"),
    r"openr1mm": geometry("lmms-lab/multimodal-open-r1-8k-verified"),
    r"dapo-math|aime": sums("math_dapo"),
    r"rlla": rlla,
    r"pokemon": captioned,
    r"gsm8k": sums("openai/gsm8k"),
    r"multiturn|capybara": conversation,
    r"full_hh_rlhf": sums("Dahoaas/full-hh-rlhf"),
    r"math": sums("DigitalLearningGmbH/MATH-lighteval"),
    r"kto-mix": labelled,
    r"ultrafeedback|preference|hh-rlhf-helpful": pair,
    r"imdb": lambda n: {"text": f"A film of {n} minutes.", "label": n % 2},
    r"prompt-collection": lambda n: {"context_messages": chat(f"What is {n} + 1?")},
    r"openorca": lambda n: {"prompt": f"What is {n} + 1?", "response": str(n + 1)},
    r".": sums("openai/gsm8k"),
}
"""Pattern of a data set's name -> the row with a number; the first that matches counts."""


@cache
def write_data(name: str, folder: Path, for_sft: bool) -> Path:
    """Write rows in the columns of the data set of that name."""
    pattern = next(pattern for pattern in DATA if re.search(pattern, name, re.IGNORECASE))
    make = conversation if for_sft and pattern == "gsm8k" else DATA[pattern]
    out = folder / f"{'sft' if for_sft else 'rows'}{re.sub('[^a-z0-9]+', '_', name)[:100]}.parquet"
    pq.write_table(pa.Table.from_pylist([make(number) for number in range(ROWS)]), out)
    return out


def write_reward(folder: Path) -> Path:
    """Write a function in place of OpenRLHF's, which its user has to rename and install."""
    out = folder / "reward_of_user.py"
    text = (
        "def compute_score(solution_strs):\n    return [len(text) % 3 for text in solution_strs]\n"
    )
    out.write_text(text, encoding="utf-8")
    return out


def with_stand_ins(done: Translation, folder: Path) -> list[str]:
    """Return the arguments of `verl-like check` that rehearse the translation on stand-ins."""
    settings = dict(done.settings)
    for key, value in done.settings.items():
        if key.endswith(("model.path", "model_path")):
            scores = bool(REWARD_MODEL.search(value)) or key.startswith("reward.")
            settings[key] = str(write_model(model_type(value), folder, scores))
        elif key in ("data.train_files", "data.val_files"):
            names = done.incomplete if value == ROWS_IN_CODE else re.split(r"[\[\]'\", ]+", value)
            for_sft = done.program == "sft"
            files = [str(write_data(name, folder, for_sft)) for name in names if name]
            settings[key] = f"[{','.join(files)}]"
        elif key == "reward.function.path" and "reward_func" in "".join(done.incomplete):
            settings[key] = str(write_reward(folder))
        elif key == "reward.function.path":
            settings[key] = os.path.abspath(value)
        elif "$" in value:
            settings.pop(key)
    settings["trainer.default_local_dir"] = str(folder / "run")
    return [done.program, *(f"{key}={value}" for key, value in settings.items())]
