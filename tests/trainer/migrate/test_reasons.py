"""No reason of `migrate` denies a feature that exists.

A reason either names a key or a command, which must exist, or says that a feature is missing. Then
`REFUTED_BY` has the pattern of a key or a registry entry that would make it untrue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

from trainer.cli.main import COMMANDS
from trainer.config.keys import named_keys
from trainer.migrate.flags import read_table
from trainer.migrate.systems import RECIPES
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl import tables
from verl_like.registry import registry_of

REGISTRIES = ("policy loss", "preference loss", "pairwise loss", "optimizer", "tracker")
OF_SECTIONS = ("openrlhf_rows", "trl", "coati", "verl_sft")
NOT_KEYS = re.compile(r"FILE\.py|MODULE\.NAME|docs/\S+|config\.json|workers\.rewards\.code")
NAMED = re.compile(r"([A-Za-z_][\w.]*)=|\b(\w+(?:\.\w+)+)\b")
KEYS_OF_NO_SCHEMA = ("placement", "role_mapping.reward_model")
"""A preset, and a key that a role's name makes."""

REFUTED_BY = {
    # data
    "rows with ambiguous tokens raise an error": "*mismatch*",
    "rename the column to chosen": "data.chosen_key",
    "rename the column to data_source": "data.*source_key",
    "rename the column to messages": "data.messages_key",
    "rename the column to prompt": "dpo:data.prompt_key",
    "rename the column to rejected": "data.rejected_key",
    "rename the column to text": "data.text_key",
    "columns are set by the recipe": "data.label*",
    "use a file with that many rows": "data.*max_samples",
    "use one file with the mixture": "data.*prob*",
    "rows are read and tokenized once, before the first step": "data.*stream*",
    "rows have the columns text, or prompt and response, or messages": "data.dataset_kwargs*",
    "convert rows to the columns messages, or prompt and response, or text": "*row_cls*",
    "validation files are read in order": "data.validation_shuffle",
    "edit the model's chat template": "sft:*chat_template_kwargs*",
    "edit config.json in the model's folder": "*override_config*",
    "edit config.json in the model's folder, or an engine may reject long rows": ("*max_position*"),
    "apply the template to the prompts in the file": "data.input_template*",
    "apply the template to the prompts in the file, or edit the model's chat template": (
        "data.input_template*"
    ),
    # models and adapters
    "activations are recomputed instead": "*activation_offload*",
    "only plain LoRA is supported": "*lora_type*",
    "only plain LoRA on linear layers is supported": "*lora_*[!ahknpr]",
    "adapters use PEFT's initialization (kaiming)": "*lora*init*",
    "LoRA dropout is not supported": "*dropout*",
    "buffers keep the model's dtype": "*buffer_dtype*",
    "custom model code is not supported; use a model class of transformers": "*remote_code*",
    "NEFTune noise is not supported": "*neftune*",
    "transformers chooses how experts are computed": "*experts_implementation*",
    "use one folder with model, tokenizer and chat template": "*tokenizer*",
    "download the model first, and use its folder": "*model_scope*",
    "GPTQ checkpoints are not supported": "*gptq*",
    "gradients are reduced in float32": "*reduce_dtype*",
    "multi-token prediction is not trained": "*mtp*",
    "merge the adapter into the model first": "*adapter_path*",
    "models are sharded by FSDP": "*megatron*",
    "multimodal models are not supported": "*image*",
    "list the modules to train in target_modules": "*exclude_modules*",
    "4-bit loading is not supported; set --lora_rank to train only adapters": "*4bit*",
    "float16 is not supported; passes compute in bfloat16 or float32": "*fp16*",
    "transformers chooses the tokenizer": "*fast_tokenizer*",
    "the value head is named score": "*value_head*",
    "weights are loaded shard by shard onto the device": "*init_on_gpu*",
    # optimizers and losses
    "margins per pair are not supported": "*margin*",
    "warm-up always starts at 0": "*warmup_init*",
    "structured outputs are not supported": "*structured*",
    "only the KL divergence (reverse_kl) is supported": "*divergence*",
    "smoothed cross-entropy is not supported": "*label_smoothing_factor",
    "the loss covers every token of the response": "*entropy_quantile*",
    "only the log-sigmoid loss is supported": "pairwise loss:sigmoid",
    "only the mean over tokens (nll) is supported": "sft loss:*",
    "the optimizer always gets all trained parameters": "*optim*target*",
    "Muon is not built in": "optimizer:Muon",
    "the reference is always the initial model": "ref.update_every",
    "sampling must match the trained log-probs": "*repetition_penalty*",
    # rewards
    "groups with equal scores are filtered, whatever the score": "*filter_groups.*range*",
    "reward models are not offloaded": "reward_model.*offload*",
    "reward functions get the whole row; rules read its ground_truth": "data.label_key",
    "reward models have no sequence parallelism": "reward_model.*parallel*",
    # rollout
    "responses always end at the first stop token": "*ignore_eos*",
    "oversampling is not supported": "*over_sample*",
    "set by the pool's size": "*rollout.data_parallel*",
    "router choices are stored with the samples, not in a file": "*replay_file*",
    # the run
    "checkpoints always load on any number of ranks": "*universal*",
    "only CUDA GPUs and CPUs are supported": "*npu*",
    "set WANDB_ENTITY": "*entity*",
    "set WANDB_RUN_GROUP": "*wandb_group*",
    "set WANDB_RUN_GROUP, WANDB_ENTITY": "*entity*",
    "chosen by the mean of val-core/, or the loss": "*best_metric*",
    "the best checkpoint by validation is kept": "*best_metric*",
    "the best checkpoint by validation is kept in the run folder": "*best_metric*",
    "the best checkpoint is chosen by all validation scores": "*best_metric*",
    "the best checkpoint by validation is kept; lower losses are better": "*greater_is*",
    "the reference's log-probs are computed once, before the first step": "*precompute_ref*",
    "there is no profiler; the report's timeline shows the time of every call": "*profiler*",
    "times and model FLOPs utilization are always logged": "*perf*",
    "upload the run's model/ folder with `hf upload NAME RUN/model`": "*push_to_hub*",
}
LISTS_VALUES = re.compile(r"supported: |OpenRLHF has|ZeRO has")
"""Says which values there are; a table has each with what it is here."""


@cache
def known() -> frozenset[str]:
    """All keys, alone and as `program:key`, and the entries of registries as `kind:name`."""
    keys = set[str]()
    for program, recipe in RECIPES.items():
        recipe.load_registries()
        names = set(named_keys(recipe.schema))
        keys |= names | {f"{program}:{name}" for name in names}
    return frozenset(keys | {f"{kind}:{name}" for kind in REGISTRIES for name in registry_of(kind)})


def reasons() -> Iterator[str]:
    """Return the tables' texts for flags and keys that have no counterpart."""
    for system in ("openrlhf", *OF_SECTIONS):
        tree = read_table(system)
        for rows in tree.values() if system in OF_SECTIONS else [tree]:
            yield from (
                str(row[kind])
                for row in rows.values()
                if isinstance(row, Mapping)
                for kind in ("absent", "rejected", "otherwise")
                if kind in row
            )
    yield from (str(row["else"]) for row in tables().changes_nothing_at.values())
    yield from tables().not_here.values()


def keys_in(reason: str) -> list[str]:
    return [name or dotted for name, dotted in NAMED.findall(NOT_KEYS.sub("", reason))]


def is_key(name: str) -> bool:
    return name in KEYS_OF_NO_SCHEMA or any(
        f".{name.removesuffix('.vllm')}." in f".{key}." for key in known()
    )


@pytest.mark.parametrize("reason", sorted(set(reasons())))
def test_a_reason_names_what_is_here_or_denies_what_is_not(reason: str) -> None:
    keys, commands = keys_in(reason), re.findall(r"verl-like (\S+?)\b", reason)
    assert [name for name in keys if not is_key(name)] == []
    assert [name for name in commands if name not in ("reward", *COMMANDS)] == []
    if keys or commands or LISTS_VALUES.search(reason) or "_per_gpu" in reason:
        return
    pattern = REFUTED_BY[reason]
    assert [name for name in known() if fnmatchcase(name, pattern)] == []


def test_every_denial_is_one_of_a_table() -> None:
    assert set(REFUTED_BY) - set(reasons()) == set()


@pytest.mark.parametrize("section", ["changes_nothing", "changes_nothing_at", "not_here"])
def test_no_key_of_ours_is_in_verls_table_of_other_keys(section: str) -> None:
    ours = set(named_keys(PPOConfig))
    patterns: Mapping[str, Any] = getattr(tables(), section)
    named = {pattern: [key for key in ours if fnmatchcase(key, pattern)] for pattern in patterns}
    assert {pattern: keys for pattern, keys in named.items() if keys} == {}


@pytest.mark.parametrize(
    ("reason", "pattern"),
    [("training is not tensor parallel", "*parallel.tp"), ("there is no server", "*server_urls")],
)
def test_an_untrue_denial_would_be_found(reason: str, pattern: str) -> None:
    assert any(fnmatchcase(name, pattern) for name in known()), reason
