"""Searching the docs for a key, a metric or a word of the field finds its page.

The index and the ranking are those of the site: lunr, an entry per heading, titles before text.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from lunr import lunr

from tests import ROOT

DOCS = ROOT / "docs"


def separator() -> str:
    """Return the pattern at which the site's search splits words."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    setting = re.search(r"separator: ('.*')", text)
    assert setting
    return str(yaml.safe_load(setting[1]))


def entries(page: Path) -> list[dict[str, str]]:
    """Return an entry for the page's beginning, and one for each heading below its title."""
    text = re.sub(r"<!--.*?-->|\]\([^)]*\)|[`*\[|]", " ", page.read_text(encoding="utf-8"))
    title, *sections = re.split(r"^#+ +", text, flags=re.M)[1:]
    parts = [(page.name, title), *((f"{page.name}#{n}", text) for n, text in enumerate(sections))]
    return [
        {"location": place, "title": head, "text": body}
        for place, (head, _, body) in ((place, text.partition("\n")) for place, text in parts)
    ]


@cache
def index() -> Any:
    """Return lunr's index of all pages."""
    documents = [
        {name: text if name == "location" else split(text) for name, text in entry.items()}
        for page in sorted(DOCS.glob("*.md"))
        for entry in entries(page)
    ]
    fields = [{"field_name": "title", "boost": 1000}, {"field_name": "text", "boost": 1}]
    return lunr(ref="location", fields=fields, documents=documents)


@cache
def split(text: str) -> str:
    """Return the words, separated by blanks."""
    return re.sub(separator(), " ", text).strip()


def search(words: str) -> list[str]:
    """Return the first three pages, as the site ranks them."""
    terms = split(words)
    scores: dict[str, float] = {}
    for hit in index().search(terms):
        matches_all = len(hit["match_data"].metadata) >= len(set(terms.split()))
        weight = ("#" not in hit["ref"]) + matches_all
        page = hit["ref"].partition("#")[0].removesuffix(".md")
        scores[page] = max(scores.get(page, 0.0), hit["score"] * (1 + weight**2))
    return sorted(scores, key=lambda page: -scores[page])[:3]


PAGES = {
    "parallel": "tensor parallel, pipeline parallel, sequence parallel, context parallel, "
    "expert parallel, DeepSpeed, MoE",
    "agents": "multi-turn, tool calling, function calling",
    "cluster": "multi-node, Kubernetes, Slurm, several machines",
    "checkpoints": "resume, continue a run, continue a stopped run, continue training, "
    "early stopping, trainer.resume_mode, trainer.stop_at",
    "configuration": "sweep, hyperparameter search",
    "performance": "mixed precision, quantization, gradient checkpointing, flash attention, "
    "prefix caching",
    "export": "deploy, upload to the hub",
    "weight_sync": "actor/weights_changed_fraction",
    "updates": "gradient accumulation, learning rate schedule, weight decay",
    "algorithms": "importance sampling, KL penalty, off-policy",
    "data": "curriculum, data mixture, data.train_files",
    "evaluate": "pass@k, evaluate",
    "install": "Windows, macOS",
    "rewards": "process reward, format reward, LLM judge, reward hacking, reward.function.path",
    "reading_the_report": "profiling, profile a step",
    "models": "custom model, vision language model, my own nn.Module as policy",
    "placement": "critic on other GPUs, rollout on other GPUs",
    "troubleshooting": "out of memory, flat reward",
    "lora": "LoRA, QLoRA, merge lora",
    "logging": "wandb, tensorboard",
    "notebook": "Jupyter",
    "multi_gpu": "two GPUs, trainer.n_gpus_per_node",
    "async": "staleness, asynchronous",
    "keys_algorithm": "algorithm.adv_estimator, algorithm.gamma, algorithm.kl_ctrl.kl_coef",
    "keys_data": "data.max_prompt_length, data.train_batch_size",
    "keys_models": "actor_rollout_ref.actor.use_kl_loss, actor_rollout_ref.actor.optim.lr, "
    "actor_rollout_ref.actor.clip_ratio_high, actor_rollout_ref.actor.entropy_coeff, "
    "actor_rollout_ref.model.lora_rank, critic.optim.lr, actor_rollout_ref.actor.loss_agg_mode",
    "keys_rollout": "actor_rollout_ref.rollout.n, actor_rollout_ref.rollout.temperature, "
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "keys_run": "trainer.save_freq, trainer.total_epochs, trainer.test_freq, trainer.logger",
    "metrics": "actor/pg_clipfrac, actor/pg_loss, actor/ppo_kl, actor/entropy, actor/grad_norm, "
    "actor/kl_loss, actor/lr, critic/vf_loss, critic/vf_explained_var, critic/score/mean, "
    "critic/rewards/mean, critic/advantages/mean, response_length/mean, prompt_length/mean, "
    "response_length/clip_ratio, perf/throughput, perf/mfu, timing_s/step, "
    "training/rollout_probs_diff_mean, overlap_ratio",
}


@pytest.mark.parametrize(
    ("words", "page"),
    [(words, page) for page, listed in PAGES.items() for words in listed.split(", ")],
)
def test_words_of_the_field_find_their_page(words: str, page: str) -> None:
    assert page in search(words)
