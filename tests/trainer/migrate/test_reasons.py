"""No reason of `migrate` denies a feature that exists.

A reason either names a key or a command, which exists, or it says that something is not here. Then
`REFUTED_BY` has the pattern of the key, or of the entry of a registry, that would make it untrue.
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
    "a row whose tokens are ambiguous is an error": "*mismatch*",
    "rename the column to chosen": "data.chosen_key",
    "rename the column to data_source": "data.*source_key",
    "rename the column to messages": "data.messages_key",
    "rename the column to prompt": "dpo:data.prompt_key",
    "rename the column to rejected": "data.rejected_key",
    "rename the column to text": "data.text_key",
    "columns are those of the recipe's rows": "data.label*",
    "give a file with that many rows": "data.*max_samples",
    "give one file with the mixture": "data.*prob*",
    "rows are read and tokenized once, before the first step": "data.*stream*",
    "rows are read by their columns: text, prompt and response, messages": "data.dataset_kwargs*",
    "rows have the columns messages, prompt and response, or text: write them so": "*row_cls*",
    "validation goes through its files in order": "data.validation_shuffle",
    "write it into the model's chat template": "sft:*chat_template_kwargs*",
    "write it into the config.json of the model's folder": "*override_config*",
    "write it into the config.json of the model's folder, or an engine may reject long rows": (
        "*max_position*"
    ),
    "write the template into the prompts": "data.input_template*",
    "write the template into the prompts or the model's chat template": ("data.input_template*"),
    # models and adapters
    "activations are recomputed": "*activation_offload*",
    "adapters are plain LoRA": "*lora_type*",
    "adapters are plain LoRA on linear layers": "*lora_*[!ahknpr]",
    "adapters start as in PEFT (kaiming)": "*lora*init*",
    "adapters have no dropout": "*dropout*",
    "buffers stay as the model has them": "*buffer_dtype*",
    "code in model folders is not run: use a model class of transformers": "*remote_code*",
    "embeddings get no noise": "*neftune*",
    "transformers chooses how experts are computed": "*experts_implementation*",
    "give a folder that has all: model, tokenizer, chat template": "*tokenizer*",
    "give the folder of a model that was fetched before": "*model_scope*",
    "give the folder of that revision": "*revision*",
    "GPTQ checkpoints are not read": "*gptq*",
    "gradients are reduced in float32": "*reduce_dtype*",
    "heads for several tokens are not trained": "*mtp*",
    "merge the adapter into its model first": "*adapter_path*",
    "models are sharded by FSDP": "*megatron*",
    "models with images are not trained here": "*image*",
    "name those to train: target_modules": "*exclude_modules*",
    "no model is loaded in 4 bits; --lora_rank trains only adapters": "*4bit*",
    "passes compute in bfloat16 or float32": "*fp16*",
    "transformers chooses the tokenizer": "*fast_tokenizer*",
    "the value head is called score": "*value_head*",
    "weights are loaded shard by shard onto the device": "*init_on_gpu*",
    # optimizers and losses
    "a pair has no margin of its own": "*margin*",
    "a warm-up begins at 0": "*warmup_init*",
    "responses are drawn freely": "*structured*",
    "the divergence is the KL": "*divergence*",
    "the loss is not smoothed": "*label_smoothing_factor",
    "the loss is over every token of the response": "*entropy_quantile*",
    "the loss is the log-sigmoid of the margin": "pairwise loss:sigmoid",
    "the loss is the mean over tokens (nll)": "sft loss:*",
    "the optimizer has all trained parameters": "*optim*target*",
    "the optimizer is AdamW": "optimizer:Muon",
    "the reference is the model before training": "ref.update_every",
    "tokens are drawn from the policy itself, whose log-probs are trained": "*repetition_penalty*",
    # rewards
    "groups that score alike are filtered, whatever the score": "*filter_groups.*range*",
    "the reward model stays on its device": "reward_model.*offload*",
    "a reward function sees the whole row, rules its ground_truth": "data.label_key",
    "a reward model's rows are whole on each device": "reward_model.*parallel*",
    # rollout
    "a response ends at its first stop id": "*ignore_eos*",
    "every prompt gets its samples": "*over_sample*",
    "take tensor parallelism": "*rollout.*_parallel_size[!_]*",
    "the pool's size says how many": "*rollout.data_parallel*",
    "what the rollout's routers chose travels with its samples, in no file": "*replay_file*",
    # the run
    "checkpoints load on any number of ranks anyway": "*universal*",
    "devices are CUDA's, or CPUs": "*npu*",
    "set WANDB_ENTITY": "*entity*",
    "set WANDB_RUN_GROUP": "*wandb_group*",
    "set WANDB_RUN_GROUP, WANDB_ENTITY": "*entity*",
    "the best is by the mean of val-core/, or by the loss": "*best_metric*",
    "the checkpoint of the best validation stays": "*best_metric*",
    "the checkpoint of the best validation stays in the run folder": "*best_metric*",
    "the checkpoint of the best validation stays, of all its metrics": "*best_metric*",
    "the checkpoint of the best validation stays; a loss is better if lower": "*greater_is*",
    "the reference's log-probs are computed once, before the first step": "*precompute_ref*",
    "the report's timeline has the time of every call; there is no profiler": "*profiler*",
    "times and model FLOP utilization are always in the metrics": "*perf*",
    "upload the model/ folder of the run: hf upload NAME RUN/model": "*push_to_hub*",
}
LISTS_VALUES = re.compile(r"there (is|are) |OpenRLHF has|ZeRO has")
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
