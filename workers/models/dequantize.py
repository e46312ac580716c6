"""Write a model that was published quantized as a plain folder, once per node.

GGUF files, and folders whose `config.json` has a `quantization_config`, cannot be trained as they
are. transformers dequantizes most formats; the result is kept in the cache, as `save_pretrained`
writes it, so every role, rank and engine reads an ordinary folder.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from verl_like.errors import ConfigError
from verl_like.files import atomic_folder, cache_folder, read_json_object
from workers.models.classes import meta_class, model_class
from workers.models.tensor_files import write_model_file

logger = logging.getLogger(__name__)

PLAIN = "an unquantized folder of the model (bfloat16 or float32, as save_pretrained writes it)"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf")


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized model on this machine: a folder, and the name of a GGUF file in it or None."""

    folder: Path
    gguf: str | None
    method: str
    """The name of the format, such as `fp8` or `gguf`."""

    @property
    def source(self) -> Path:
        """The path that errors and notes show."""
        return self.folder / self.gguf if self.gguf else self.folder

    @property
    def plain(self) -> Path:
        """The folder in the cache; its name changes with any file of the model."""
        import transformers

        files = [self.source] if self.gguf else sorted(self.folder.iterdir())
        stats = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files
        ]
        text = repr((transformers.__version__, stats))
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return cache_folder("dequantized") / f"{self.source.stem}-{digest}"

    def load_small(self) -> tuple[Any, Any]:
        """Return the configuration without quantization, and the tokenizer or None."""
        from transformers import AutoConfig, AutoTokenizer

        safe = {"local_files_only": True, "trust_remote_code": False, **self._gguf_argument()}
        config = AutoConfig.from_pretrained(self.folder, **safe)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = self.dtype_of(config)
        tokenizer = AutoTokenizer.from_pretrained(self.folder, **safe) if self.gguf else None
        return config, tokenizer

    def dtype_of(self, config: Any) -> torch.dtype:
        """Return the dtype that the plain folder has: float32 for GGUF, otherwise the config's."""
        if self.gguf:
            return torch.float32
        if self.method in BLOCKS_OF_FP8:
            return torch.bfloat16
        named = getattr(config, "dtype", None) or config.get_text_config().dtype
        return named if isinstance(named, torch.dtype) else torch.bfloat16

    def load_weights(self, config: Any) -> dict[str, torch.Tensor]:
        """Return the dequantized weights in host memory."""
        from transformers.quantizers.auto import AutoQuantizationConfig

        arguments = self._gguf_argument()
        if not self.gguf:
            described = read_json_object(self.folder / "config.json")["quantization_config"]
            arguments["quantization_config"] = AutoQuantizationConfig.from_dict(
                {**described, "dequantize": True}
            )
        model = model_class(config).from_pretrained(
            self.folder,
            dtype=self.dtype_of(config),
            local_files_only=True,
            trust_remote_code=False,
            **arguments,
        )
        weights: dict[str, torch.Tensor] = model.state_dict()
        return weights

    def _gguf_argument(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf} if self.gguf else {}


def quantized_model(path: Path) -> QuantizedModel | None:
    """Return the quantized model at a path, or None; raise for a format that cannot be read."""
    if path.is_file() and path.suffix == ".gguf":
        return QuantizedModel(path.parent, path.name, "gguf")
    config = path / "config.json"
    if config.is_file():
        described = read_json_object(config).get("quantization_config")
        if not isinstance(described, dict):
            return None
        _check_can_dequantize(path, described)
        return QuantizedModel(path, None, str(described["quant_method"]))
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{path} holds {len(files)} GGUF files: {names}. Set the path of one.")
    return QuantizedModel(path, files[0].name, "gguf") if files else None


def _check_can_dequantize(path: Path, described: dict[str, Any]) -> None:
    """Raise unless transformers can dequantize this format."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING as CONFIGS

    def can_dequantize(method: str) -> bool:
        return "dequantize" in inspect.signature(CONFIGS[method]).parameters

    method = described.get("quant_method")
    if method in CONFIGS and can_dequantize(method):
        return
    formats = ", ".join(sorted(filter(can_dequantize, CONFIGS)))
    raise ConfigError(
        f"{path} is quantized with {method} (quantization_config in its config.json), which "
        f"transformers cannot dequantize for training. Use {PLAIN}, or one of the formats that it "
        f"can dequantize: {formats}."
    )


def plain_folder(path: Path, weights: bool) -> Path:
    """Return the path, or for a quantized model its plain folder in the cache.

    Without `weights`, only the small files are sure to be there.
    """
    model = quantized_model(path)
    if model is None:
        return path
    folder = model.plain
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not folder.is_dir():
                with atomic_folder(folder) as draft:
                    write_small_files(model, draft)
            is_whole = any(folder.glob("*.safetensors"))
            if not is_whole:
                say_so(model, folder)
            if weights and not is_whole:
                with atomic_folder(folder) as draft:
                    write_model(model, draft)
        except ImportError as error:
            raise ConfigError(
                f"{model.source} is quantized ({model.method}), and a package to dequantize it is "
                f"missing: {' '.join(str(error).split())} Install what reads such models: "
                'pip install "verl-like[dequantize]".'
            ) from error
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            RuntimeError,
            NotImplementedError,
        ) as error:
            raise ConfigError(
                f"{model.source} is quantized ({model.method}), and transformers could not "
                f"dequantize it: {' '.join(str(error).split())[:300]} Use {PLAIN}."
            ) from error
    return folder


@functools.cache
def say_so(model: QuantizedModel, folder: Path) -> None:
    """Log, once per process, where the plain weights will be, and their size."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    num_weights = sum(weight.numel() for weight in meta_class(config).parameters())
    size = num_weights * model.dtype_of(config).itemsize / 1e9
    takes = "GB of disk" if model.method in BLOCKS_OF_FP8 else "GB of memory and disk"
    dtype = str(model.dtype_of(config)).removeprefix("torch.")
    logger.warning(
        f"{model.source} is quantized ({model.method}): it is dequantized once to {dtype}, which "
        f"takes {size:.2g} {takes}, in {folder}."
    )


def write_small_files(model: QuantizedModel, folder: Path) -> Any:
    """Write the configuration, the tokenizer and the template; return the configuration."""
    config, tokenizer = model.load_small()
    if tokenizer is None:
        for file in model.folder.iterdir():
            if file.is_file() and not any(file.match(pattern) for pattern in WEIGHTS):
                shutil.copyfile(file, folder / file.name)
    else:
        tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    return config


def write_model(model: QuantizedModel, folder: Path) -> None:
    """Write the whole plain folder."""
    config = write_small_files(model, folder)
    if model.method in BLOCKS_OF_FP8:
        write_from_fp8(model.folder, folder)
        return
    # transformers refuses to save the model that it dequantized, or quantizes it again
    plain = meta_class(config)
    weights = model.load_weights(config)
    # compressed-tensors leaves its scales next to the dequantized weights
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()}, assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)


BLOCKS_OF_FP8 = ("fp8", "mxfp8")
"""Formats with a scale per block, in a tensor `<weight>_scale_inv`.

transformers derives the size of a block from the number of scales. This is wrong where the last
block is smaller, as in DeepSeek-V3, where 576 rows have 5 scales. So these are dequantized here,
one file at a time.
"""
SCALE = "_scale_inv"
NOT_WEIGHTS = (SCALE, ".activation_scale")
"""Suffixes of the tensors that only a quantized model has."""


def write_from_fp8(source: Path, folder: Path) -> None:
    """Write the files of a folder with dequantized weights, one after the other."""
    config = read_json_object(source / "config.json")
    block = config["quantization_config"].get("weight_block_size")
    index_file = source / "model.safetensors.index.json"
    files: dict[str, str]
    if index_file.is_file():
        files = read_json_object(index_file)["weight_map"]
    else:
        with safe_open(source / "model.safetensors", framework="pt") as opened:
            files = dict.fromkeys(opened.keys(), "model.safetensors")

    def read(name: str) -> torch.Tensor:
        with safe_open(source / files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor

    weights = {name: file for name, file in files.items() if not name.endswith(NOT_WEIGHTS)}
    for file in sorted(set(weights.values())):
        tensors = {}
        for name in (name for name in weights if weights[name] == file):
            tensors[name] = read(name)
            if name + SCALE in files:
                tensors[name] = dequantized(tensors[name], read(name + SCALE), block)
        write_model_file(tensors, folder / file)
    if index_file.is_file():
        (folder / index_file.name).write_text(json.dumps({"weight_map": weights}))


def dequantized(
    weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int] | None
) -> torch.Tensor:
    """Return the weight in bfloat16, multiplied with the scales of its blocks.

    Args:
        weight: float8 [..., rows, columns].
        scales: a single scale, or one per block: [..., blocks of rows, blocks of columns].
        block: rows and columns of a block; the last blocks may be smaller.
    """
    if weight.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"a weight with scales is {weight.dtype}, not float8.")
    # exponents of powers of two may be stored as bytes
    factors = scales.to(torch.float32)
    if scales.dtype == torch.uint8:
        factors = (factors - 127).exp2()
    if scales.numel() > 1:
        for dim, size in zip((-2, -1), block or (1, 1), strict=True):
            length, num_blocks = weight.shape[dim], scales.shape[dim]
            if num_blocks != -(-length // size):
                size, rest = divmod(length, num_blocks)
                if rest:
                    raise ValueError(f"{num_blocks} scales do not divide {length} rows or columns.")
            factors = factors.repeat_interleave(size, dim).narrow(dim, 0, length)
    return (weight.to(torch.float32) * factors).bfloat16()
