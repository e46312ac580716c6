"""Locate a model's files, in a folder or in the local hub cache, and read its configuration.

`model_folder` resolves a `model.path`. Every node downloads a model from the hub once, so no folder
has to be shared. Models of a run must use the same token ids, and templates get their variables.
"""

from __future__ import annotations

import copy
import functools
import json
import multiprocessing
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.files import is_remote, read_json_object
from verl_like.process.machine import IS_LINUX, limit_new_memory

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
"""Patterns of the files with configurations, tokenizers, templates and code."""
PARSED = (
    *("config.json", "generation_config.json", "special_tokens_map.json"),
    "tokenizer_config.json",
)
UNREADABLE = (TypeError, ValueError, AttributeError, LookupError, RecursionError, ZeroDivisionError)
"""What transformers raises, besides OSError, for files with JSON of a wrong form."""
LARGEST_FILE = 64 * 2**20
"""Maximum size of a small file in bytes; the largest tokenizers have 30 MB."""


def is_on_hub(path: str) -> bool:
    """True if the path looks like `organization/model`, and there is no folder `organization`."""
    return bool(HUB_NAME.fullmatch(path)) and not Path(path).parent.exists()


@functools.cache
def model_folder(path: str, weights: bool = True) -> Path:
    """Return the folder of this path; download a remote one or `organization/model` if needed.

    A GGUF file, or a folder that was published quantized, is dequantized into the cache. Without
    `weights` only the small files are guaranteed to be there.
    """
    if is_remote(path):
        from verl_like.remote_files import local_copy

        def is_small(name: str) -> bool:
            return any(fnmatch(name, pattern) for pattern in SMALL_FILES)

        path = str(local_copy(path, "model.path", (lambda name: True) if weights else is_small))
    if not is_on_hub(path):
        folder = Path(path).expanduser()
        check_small_files(folder)
        return _plain(folder, weights)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    patterns = [*SMALL_FILES, "*.safetensors"] if weights else SMALL_FILES
    try:
        folder_of_hub = Path(snapshot_download(path, allow_patterns=patterns))
        if weights and not any(folder_of_hub.glob("*.safetensors")):
            folder_of_hub = Path(snapshot_download(path, allow_patterns=["*.bin"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"there is no model folder {path!r}, and the Hugging Face hub did not provide a model "
            f"of that name. Without a connection, set a local folder; `verl-like plan` needs "
            "only the model's config.json in it. The hub's message: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error
    return _plain(folder_of_hub, weights)


def _plain(folder: Path, weights: bool) -> Path:
    """Return the folder, or where a quantized model or GGUF file is as a plain folder."""
    config = folder / "config.json"
    if config.is_file() and b'"quantization_config"' not in config.read_bytes():
        return folder
    from workers.models.dequantize import plain_folder

    return plain_folder(folder, weights)


def check_small_files(folder: Path) -> None:
    """Reject small files that are pipes, devices or oversized, and damaged `PARSED` files."""
    for file in (file for pattern in SMALL_FILES for file in folder.glob(pattern)):
        if not file.is_file():
            raise ConfigError(f"{file} is not a regular file. Replace or remove it.")
        if file.stat().st_size > LARGEST_FILE:
            raise ConfigError(
                f"{file} has {file.stat().st_size:,} bytes, but at most {LARGEST_FILE:,} are "
                "read. Replace or remove it."
            )
        try:
            if file.name in PARSED:
                read_json_object(file)
        except ValueError as error:
            raise ConfigError(f"{file} is damaged: {error}. Fix or replace it.") from error


def generation_eos(path: str) -> tuple[int, ...]:
    """Return the end-of-response ids in the folder's `generation_config.json`; empty without one.

    Some chat models end a turn with another token than the eos of their tokenizer: Gemma's
    <end_of_turn>, Llama 3's <|eot_id|>, Phi-3's <|end|>.
    """
    file = model_folder(path, weights=False) / "generation_config.json"
    if not file.is_file():
        return ()
    ids = read_json_object(file).get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
LARGEST_SIZE = 10**8
"""Maximum plausible value of a size in a model's configuration."""


def read_hf_config(folder: str | Path) -> Any:
    """Return the transformers configuration, as a copy that the caller may change.

    Code in the folder is never run. Parsed configurations are cached, because parsing takes longer
    than building a small model, and roles, memory plan and checks usually need the same one.
    """
    return copy.deepcopy(shared_hf_config(folder))


def shared_hf_config(folder: str | Path) -> Any:
    """Return the configuration without a copy; callers must not change it."""
    file = Path(folder, "config.json")
    return _parsed(str(folder), file.read_bytes() if file.is_file() else None)


@lru_cache(maxsize=16)
def _parsed(folder: str, _text: bytes | None) -> Any:
    """Return the model's configuration in transformers; raise if no class describes it."""
    # the text is a parameter so that a changed file is parsed again
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_small_files(Path(folder))
    if _text is not None:
        _check_sizes(json.loads(_text), Path(folder, "config.json"))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (StrictDataclassError, *UNREADABLE) as error:
        if _text is not None and "auto_map" in json.loads(_text):
            raise ConfigError(
                f"{folder}: the model has custom code (`auto_map` in config.json), which is never "
                "run, and the installed transformers has no class of its type. Use a version of "
                "the model in a class of transformers, or upgrade transformers."
            ) from error
        raise ConfigError(f"{folder}/config.json does not describe a model: {error}") from error


def _check_sizes(fields: dict[str, Any], file: Path) -> None:
    """Reject implausible sizes, including those in the configurations of sub-models."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_sizes(value, file)
        elif name in SIZES and isinstance(value, int | float) and not 0 < value <= LARGEST_SIZE:
            raise ConfigError(f"{file} does not describe a model: {name} is {value:,}.")


def factor_border(config: Any) -> int | None:
    """Return the length beyond which a longrope model's rotary factors change, or None.

    With longrope (Phi-3 128k), rotary factors depend on the length of the row. This matters when
    rows are combined into passes, and when generation makes a row longer.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings")
            return original or getattr(text, "original_max_position_embeddings", None)
    return None


def check_same_tokenizer(path: str, policy_path: str, role: str) -> None:
    """Reject a role's model whose token ids are not the policy's.

    A folder without a tokenizer cannot be checked.
    """
    vocabulary, policy = _vocabulary(path), _vocabulary(policy_path)
    if vocabulary is None or policy is None or vocabulary == policy:
        return

    tokens = vocabulary.keys() | policy.keys()
    other = sorted(token for token in tokens if vocabulary.get(token) != policy.get(token))
    raise ConfigError(
        f"the model of role {role!r}, {path!r}, has a different tokenizer from "
        f"actor_rollout_ref.model.path={policy_path!r}: {len(other)} tokens differ, such as "
        f"{', '.join(map(repr, other[:3]))}. Responses are not tokenized again for this model. "
        "Use a model of the actor's family."
    )


def set_template_variables(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Set variables of the chat template, such as `enable_thinking` of Qwen3."""
    template = tokenizer.chat_template or ""
    templates = template if isinstance(template, dict) else {"": template}
    for name in values:
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in templates.values()):
            raise ConfigError(
                f"data.apply_chat_template_kwargs.{name}: the chat template of "
                f"{tokenizer.name_or_path} does not read {name!r}. Leave out the key, or use a "
                f"model folder whose template reads {name}."
            )
    # `+%}` preserves the line break that may follow
    start = "".join(f"{{% set {name} = {value!r} +%}}" for name, value in values.items())
    if start:
        templates = {name: start + text for name, text in templates.items()}
        tokenizer.chat_template = templates if isinstance(template, dict) else templates[""]


def _vocabulary(path: str) -> dict[str, int] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_folder(path, weights=False), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return None
    return dict(tokenizer.get_vocab())


RENDER_TIMEOUT_S = 10.0
"""Time limit for rendering a message of one letter."""
RENDER_MEMORY_BYTES = 2**30
"""Memory limit for rendering a message of one letter, in bytes."""


def check_template(tokenizer: Any) -> None:
    """Render one message in a child process; raise if the template exceeds its limits.

    A chat template is untrusted code. On other systems than Linux, a process with threads cannot
    be forked safely, so templates run without limits.
    """
    if tokenizer.chat_template is None or not IS_LINUX:
        return
    import jinja2.sandbox  # noqa: F401  # before the fork, where another thread may be importing

    problems, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_try, args=(tokenizer, sender))
    child.start()
    sender.close()
    try:
        problem = f"it wrote no chat within {RENDER_TIMEOUT_S:g} s"
        if problems.poll(RENDER_TIMEOUT_S):
            problem = problems.recv()
    except EOFError:
        problem = "its process died"
    finally:
        child.kill()
        child.join()
        problems.close()
    if problem:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the chat template failed on a message of one letter: "
            f"{problem}. Replace the template in the model folder."
        )


def _try(tokenizer: Any, problems: Connection) -> None:
    """Render the message; describe a memory error. Other errors are reported later, per row."""
    limit_new_memory(RENDER_MEMORY_BYTES)
    message = {"role": "user", "content": "a"}
    problem = ""
    try:
        tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    except MemoryError:
        problem = f"it uses more than {RENDER_MEMORY_BYTES // 2**20:,} MiB"
    except Exception:  # noqa: BLE001 - process boundary
        pass
    problems.send(problem)
