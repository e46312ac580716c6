"""Models that were published quantized are read as plain folders, with the right numbers."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Qwen2Config,
)

from verl_like.errors import ConfigError
from workers.models.classes import build_class
from workers.models.folder import model_folder

BLOCK = 32
Change = Callable[[str, Tensor], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def deepseek_v3() -> DeepseekV3Config:
    """A DeepSeek-V3 of which some weights are not whole multiples of a block, as published."""
    return DeepseekV3Config(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=160,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        v_head_dim=24,
        qk_nope_head_dim=16,
        first_k_dense_replace=1,
    )


def publish(
    folder: Path, config: Any, settings: dict[str, Any], change: Change
) -> dict[str, Tensor]:
    """Write a quantized folder; return the tensors of the model that was quantized."""
    torch.manual_seed(0)
    build_class(config).save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        stored |= change(name, tensor) or {name: tensor.bfloat16()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    described = json.loads(file.read_text())
    described |= {"quantization_config": settings, "dtype": "bfloat16"}
    file.write_text(json.dumps(described))
    return plain


def is_linear(name: str, tensor: Tensor) -> bool:
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")
    return tensor.dim() == 2 and not any(word in name for word in kept)


def to_fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Quantize blocks of [32, 32], of which the last ones are smaller."""
    if not is_linear(name, tensor):
        return {}
    stored, scales = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn), []
    for top in range(0, tensor.shape[0], BLOCK):
        for left in range(0, tensor.shape[1], BLOCK):
            where = slice(top, top + BLOCK), slice(left, left + BLOCK)
            scales.append(tensor[where].abs().max() / 448)
            stored[where] = (tensor[where] / scales[-1]).to(stored.dtype)
    grid = torch.stack(scales).view(-(-tensor.shape[0] // BLOCK), -1)
    return {name: stored, f"{name}_scale_inv": grid}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}


def relative_error(tensor: Tensor, expected: Tensor) -> float:
    return float((tensor.float() - expected.float()).abs().max() / expected.abs().max())


def test_fp8_with_smaller_last_blocks_is_dequantized_by_its_blocks(tmp_path: Path) -> None:
    plain = publish(tmp_path / "model", deepseek_v3(), FP8, to_fp8)
    folder = model_folder(str(tmp_path / "model"))
    read = load_file(folder / "model.safetensors")
    assert read.keys() == plain.keys()
    # float8 has 3 bits after the leading one
    assert max(relative_error(read[name], plain[name]) for name in plain) < 2**-4
    assert {tensor.dtype for tensor in read.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.arange(7)[None])


def test_fp8_in_several_files_keeps_its_index(tmp_path: Path) -> None:
    plain = publish(tmp_path / "model", deepseek_v3(), FP8, to_fp8)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "model.safetensors").unlink()
    names = sorted(stored)
    files = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: stored[n] for n in names if files[n] == file}, tmp_path / "model" / file)
    index = json.dumps({"metadata": {}, "weight_map": files})
    (tmp_path / "model" / "model.safetensors.index.json").write_text(index)
    folder = model_folder(str(tmp_path / "model"))
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == plain.keys()
    read = load_file(folder / weight_map["model.norm.weight"])
    assert torch.equal(read["model.norm.weight"].float(), plain["model.norm.weight"])


def test_one_scale_per_weight_multiplies_the_weight(tmp_path: Path) -> None:
    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, tensor):
            return {}
        scale = tensor.abs().max() / 448
        stored = {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        return stored | {name.replace("weight", "activation_scale"): torch.ones(())}

    settings = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    plain = publish(tmp_path / "model", deepseek_v3(), settings, change)
    read = load_file(model_folder(str(tmp_path / "model")) / "model.safetensors")
    assert read.keys() == plain.keys()
    assert max(relative_error(read[name], plain[name]) for name in plain) < 2**-4


def test_mxfp4_is_dequantized_exactly(tmp_path: Path) -> None:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    expected = {}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {}
        num_experts, width_in, width_out = tensor.shape
        shape = (num_experts, width_out, width_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        scales = torch.randint(115, 122, shape, dtype=torch.uint8)
        numbers = torch.stack([values[blocks.long() & 15], values[blocks.long() >> 4]], -1)
        numbers = numbers.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        expected[name] = numbers.flatten(-2).transpose(1, 2)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    config = GptOssConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=64,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        layer_types=["sliding_attention", "full_attention"],
    )
    plain = publish(tmp_path / "model", config, {"quant_method": "mxfp4"}, change)
    read = load_file(model_folder(str(tmp_path / "model")) / "model.safetensors")
    assert read.keys() == plain.keys()
    assert len(expected) == 4
    for name, numbers in expected.items():
        assert torch.equal(read[name].float(), numbers)


def small_llama() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_compressed_tensors_are_dequantized(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, tensor):
            return {}
        scale = (tensor.abs().amax(1, keepdim=True) / 448).bfloat16()
        return {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}

    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    settings = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    plain = publish(tmp_path / "model", small_llama(), settings, change)
    read = load_file(model_folder(str(tmp_path / "model")) / "model.safetensors")
    assert read.keys() == plain.keys()
    assert max(relative_error(read[name], plain[name]) for name in plain) < 2**-4


TOKENS = ["<pad>", "<bos>", "<eos>", "a", "b", "ab"]


def write_gguf(file: Path) -> dict[str, Tensor]:
    """Write a Qwen2 of random weights as a GGUF file; return its tensors in transformers' names."""
    gguf = pytest.importorskip("gguf")
    config = Qwen2Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    weights = build_class(config).state_dict()
    writer = gguf.GGUFWriter(str(file), "qwen2")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(TOKENS))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    for name, tensor in weights.items():
        stem, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return dict(weights)


@pytest.mark.parametrize("path", ["", "model.gguf"])
def test_a_gguf_file_is_a_plain_folder_with_weights_and_tokenizer(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").mkdir()
    weights = write_gguf(tmp_path / "model" / "model.gguf")
    with caplog.at_level(logging.WARNING):
        small = model_folder(str(tmp_path / "model" / path), weights=False)
        folder = model_folder(str(tmp_path / "model" / path))
    assert small == folder
    read = load_file(folder / "model.safetensors")
    tied = {"lm_head.weight"} - read.keys()
    assert read.keys() == weights.keys() - tied
    assert all(torch.equal(read[name], weights[name]) for name in read)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 2
    (line,) = [message for message in caplog.messages if "is quantized (gguf)" in message]
    assert "dequantized once to float32, which takes" in line


def test_other_formats_are_rejected_with_those_that_work(tmp_path: Path) -> None:
    publish(tmp_path / "model", small_llama(), {"quant_method": "awq", "bits": 4}, lambda *_: {})
    with pytest.raises(ConfigError, match=r"quantized with awq .*Use an unquantized folder.*fp8"):
        model_folder(str(tmp_path / "model"), weights=False)


def test_a_folder_with_two_gguf_files_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files: a.gguf, b.gguf. Set the path"):
        model_folder(str(tmp_path))


def test_a_damaged_gguf_file_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ConfigError, match=r"a\.gguf is quantized .*could not dequantize it"):
        model_folder(str(tmp_path / "a.gguf"))
