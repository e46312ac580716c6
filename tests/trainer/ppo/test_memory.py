"""Memory of the roles on a GPU: the 7B example on 8 GPUs, and runs that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from tests.workers.models.test_memory_shapes import DEEPSEEK_7B
from trainer.cli.check import explain
from trainer.config.devices import Devices
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import check_memory, fit_passes, largest_pass, plan_text, role_memories
from trainer.ppo.preparation import check_models
from trainer.ppo.recipe import load_config
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from workers.config import LARGEST_PASS, tokens_per_pass
from workers.memory import GIB, LargestPass, RoleMemory, pool_bytes, usable_bytes

SCRIPT = Path(__file__).parents[3] / "examples/split_placement/run_deepseek7b_llm.sh"
GPU_BYTES = 80 * GIB
GPU = Devices("cuda", 8, gib=80)
NUM_WEIGHTS = 6_910_365_696
TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu={}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shapes of DeepSeek-LLM-7B and an empty weight file."""
    folder = tmp_path_factory.mktemp("deepseek7b")
    DEEPSEEK_7B.save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder


def script_config(model: Path, *more: str) -> PPOConfig:
    """Return the configuration of the example's settings, without running its shell."""
    block = re.search(r"^settings=\(\n(.*?)^\)", SCRIPT.read_text(encoding="utf-8"), re.M | re.S)
    assert block is not None
    settings = [line.strip().replace('"', "") for line in block[1].splitlines()]
    filled = [s.replace("$MODEL", str(model)).replace("$DATA", "/data") for s in settings]
    return load_config([*filled, *more])


def test_the_plan_of_the_7b_example_fits_eight_80_gib_gpus(model: Path) -> None:
    text = explain(script_config(model, "trainer.simulate=8x80GiB"))
    assert "float32 / bfloat16" in text
    usable = re.escape("(74 of 80 GiB usable)")
    peak = r"_pool: \d+ GiB per GPU at peak, in a call of \w+, (.*) "
    verdicts = re.findall(peak + usable, text)
    assert verdicts == ["fits", "fits"]


def memory_by_role(config: PPOConfig, device: str = "cuda") -> dict[str, RoleMemory]:
    return {memory.role: memory for memory in role_memories(config, device, GPU_BYTES)}


def test_averages_in_float32_are_counted_with_the_weights(model: Path) -> None:
    config = script_config(model)
    plain = memory_by_role(config)
    config = replace_keys(config, {"actor_rollout_ref.actor.ema_decay": 0.99})
    config = replace_keys(config, {"actor_rollout_ref.ref.update_every": 1})
    config = replace_keys(config, {"actor_rollout_ref.ref.ema_decay": 0.99})
    averaged = memory_by_role(config)
    for role in ("actor", "ref"):
        assert averaged[role].weights - plain[role].weights == NUM_WEIGHTS * 4 / 4


def test_roles_are_sharded_over_their_own_pool(model: Path) -> None:
    roles = memory_by_role(script_config(model))
    assert roles["actor"].weights == NUM_WEIGHTS * 4 / 4
    assert roles["actor"].gradients == NUM_WEIGHTS * 4 / 4
    assert roles["actor"].moments == 2 * NUM_WEIGHTS * 4 / 4
    assert roles["ref"].weights == roles["ref"].host == NUM_WEIGHTS * 2 / 4
    assert roles["rollout"].weights == NUM_WEIGHTS * 2
    assert roles["rollout"].kv_cache == pytest.approx(0.4 * GPU_BYTES - NUM_WEIGHTS * 2)
    assert roles["critic"].pool != roles["actor"].pool


def test_shard_grad_op_holds_all_weights_in_a_call_and_shards_between_calls(model: Path) -> None:
    fully, by_gradient = (
        memory_by_role(script_config(model, f"actor_rollout_ref.actor.strategy={name}"))["actor"]
        for name in ("fsdp", "shard_grad_op")
    )
    assert by_gradient.resident == fully.resident
    num_layers = 30
    outside = 2 * 102400 * 4096 + 4096
    layer = (NUM_WEIGHTS - outside) / num_layers
    assert by_gradient.gathered - fully.gathered == pytest.approx(2 * (num_layers - 2) * layer)


def test_an_engines_share_is_counted_only_while_it_generates(model: Path) -> None:
    roles = role_memories(script_config(model, "placement=colocate"), "cuda", GPU_BYTES)
    (engine,) = (role for role in roles if role.role == "rollout")
    others = [role for role in roles if role is not engine]
    assert engine.resident == 0
    assert engine.call == pytest.approx(0.4 * GPU_BYTES)
    (total,), (without,) = (pool_bytes(memories).values() for memories in (roles, others))
    resident = sum(role.resident for role in others)
    assert total == pytest.approx(max(without, resident + engine.call))
    here = (role.weights + role.moments - role.host for role in others)
    assert resident == pytest.approx(sum(here))


def test_offloaded_weights_are_on_the_gpu_during_a_weight_sync(model: Path) -> None:
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload={}"
    offloaded, resident = (
        memory_by_role(script_config(model, offload.format(on))) for on in ("true", "false")
    )
    whole_head = 102400 * 4096 * (4 + 2)
    assert resident["rollout"].sync == whole_head
    assert offloaded["rollout"].sync == whole_head + offloaded["actor"].weights


def test_a_reward_model_may_score_while_the_engine_generates(model: Path) -> None:
    judge = ("reward.model.enable=true", f"reward.model.path={model}")
    scorer = memory_by_role(script_config(model, "placement=colocate", *judge))["reward_model"]
    assert scorer.call == 0
    assert scorer.resident > scorer.weights + scorer.gathered


def test_a_run_that_does_not_fit_is_rejected_with_its_sizes(model: Path) -> None:
    check_memory(script_config(model), GPU)
    more = (
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    )
    words = (
        r"does not fit: .* GiB per GPU, .* GiB too much \(74 of 80 GiB usable\)\. "
        r"actor: .* in a call; rollout: .*First use smaller passes .*checkpointing=true"
    )
    with pytest.raises(ConfigError, match=words):
        check_memory(script_config(model, *more), GPU)


NO_ROWS = (
    "~actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "~critic.ppo_micro_batch_size_per_gpu",
)
NO_VLLM = (
    "~actor_rollout_ref.rollout.tensor_model_parallel_size",
    "~actor_rollout_ref.rollout.gpu_memory_utilization",
)


def test_the_token_budget_is_halved_until_every_pool_fits(model: Path) -> None:
    by_tokens = "actor_rollout_ref.actor.use_dynamic_bsz=true", *NO_ROWS

    def settled(gib: float | None, *more: str) -> int | None:
        config = script_config(model, *by_tokens, *more)
        config = fit_passes(config, Devices("cuda", None if gib is None else 1, gib=gib))
        return config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    def needed(tokens: int, gib: int) -> float:
        config = script_config(model, *by_tokens, TOKENS.format(tokens))
        return max(pool_bytes(role_memories(config, "cuda", gib * GIB)).values())

    assert settled(None) is settled(1000) is None
    tokens = settled(40)
    assert tokens in (2048, 4096, 8192)
    assert needed(tokens, 40) <= (40 - 4) * GIB < needed(2 * tokens, 40)
    assert settled(1) == 512 + 512
    assert settled(1, TOKENS.format(9999)) == 9999


@pytest.mark.parametrize(("prompt", "response"), [(256, 256), (1024, 3072), (2048, 14336)])
@pytest.mark.parametrize("checkpointing", ["null", "false"])
def test_fitted_passes_leave_a_reserve(
    model: Path, prompt: int, response: int, checkpointing: str
) -> None:
    """8 % are reserved for CUDA contexts, communicators and allocator gaps."""
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={checkpointing}",
        "actor_rollout_ref.rollout.name=vllm",
        "algorithm=grpo",
        "data.train_files=x.parquet",
        f"data.max_prompt_length={prompt}",
        f"data.max_response_length={response}",
        "trainer.simulate=8x80GiB",
    ]
    config = fit_passes(load_config(settings), GPU)
    roles = role_memories(config, "cuda", GPU_BYTES)
    if pool_bytes(roles)["global_pool"] > 0.92 * GPU_BYTES:
        assert tokens_per_pass(config) == prompt + response
        with pytest.raises(ConfigError, match=r"74 of 80 GiB usable"):
            check_memory(config, GPU)
    else:
        check_memory(config, GPU)


def test_the_plan_shows_the_fitted_passes_before_the_run(model: Path) -> None:
    by_tokens = "actor_rollout_ref.actor.use_dynamic_bsz=true", *NO_ROWS
    config = script_config(model, *by_tokens, "trainer.simulate=8x40GiB")
    before = plan_text(config)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu is None
    config = fit_passes(config, Devices("cuda", 8, gib=40))
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu is not None
    assert plan_text(config) == before
    assert "NOT" not in before


def test_an_engines_pool_needs_no_reserve() -> None:
    """vLLM's share of a GPU includes its workspaces."""
    engine = RoleMemory("rollout", "pool", "", takes_a_share=True)
    assert usable_bytes([engine], "cuda", GPU_BYTES) == GPU_BYTES
    both = usable_bytes([engine, RoleMemory("ref", "pool", "")], "cuda", GPU_BYTES)
    assert both == pytest.approx(0.92 * GPU_BYTES)
    assert usable_bytes([RoleMemory("ref", "pool", "")], "cuda", 24 * GIB) == 20 * GIB
    assert usable_bytes([RoleMemory("ref", "pool", "")], "cpu", GPU_BYTES) == GPU_BYTES


def test_gradient_checkpointing_is_the_default_only_on_gpus(model: Path) -> None:
    def activations(device: str, checkpointing: str) -> float:
        keys = [
            f"{section}.enable_gradient_checkpointing={checkpointing}"
            for section in ("actor_rollout_ref.model", "critic.model")
        ]
        roles = memory_by_role(script_config(model, *keys), device)
        return sum(role.activations or 0 for role in roles.values())

    assert activations("cuda", "null") == activations("cuda", "true") < activations("cuda", "false")
    assert activations("cpu", "null") == activations("cpu", "false")


def test_processes_on_cpus_share_the_memory_of_their_node(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def settled(gib: float, *more: str) -> int | None:
        monkeypatch.setattr("trainer.ppo.memory.memory_gib", lambda _: gib)
        more = ("data.train_batch_size=4096", "trainer.n_gpus_per_node=2", *more)
        config = load_config(overrides(tiny_dir, tmp_path, *more))
        config = fit_passes(config, Devices("cpu", None))
        return config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    assert settled(64) is None
    assert 16 + 8 < (settled(0.1) or 0) < LARGEST_PASS
    assert settled(1e-6) == 16 + 8
    assert settled(1e-6, "ray.address=head:6379") is None


def test_reward_models_use_the_token_budget_of_the_actor(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    judge = ("reward.model.enable=true", f"reward.model.path={classifier}")
    tokens = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=240"
    rows = "reward.model.micro_batch_size_per_gpu=3"
    by_tokens, by_rows = (
        load_config(overrides(tiny_dir, tmp_path, *judge, *more))
        for more in ((tokens,), (tokens, rows))
    )
    assert largest_pass(by_tokens, "reward_model") == LargestPass(240, 10)
    assert largest_pass(by_rows, "reward_model") == LargestPass(3 * 24, 3)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("actor_rollout_ref.ref.fsdp_config.param_offload=true", "ref.fsdp_config.param_offload"),
        ("actor_rollout_ref.actor.strategy=fsdp_offload", "actor.strategy=fsdp_offload"),
    ],
)
def test_offloading_is_rejected_on_cpus(
    model: Path, setting: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.models.load.check_files", lambda *model: None)  # it has none
    more = ["trainer.device=cpu", "actor_rollout_ref.rollout.name=native", *NO_VLLM]
    off = "actor_rollout_ref.ref.fsdp_config.param_offload=null"
    check_models(script_config(model, *more, off))
    with pytest.raises(ConfigError, match=f"{named}.*this run is on CPUs"):
        check_models(script_config(model, *more, off, setting))


def test_copies_of_checkpoints_are_counted_in_host_memory(model: Path) -> None:
    def copies(*more: str) -> dict[str, float]:
        roles = memory_by_role(script_config(model, "trainer.save_freq=5", *more))
        return {name: role.copies for name, role in roles.items() if role.copies}

    # float32 weights and two moments, a quarter on each of four ranks
    host_bytes = copies()
    assert host_bytes["actor"] == NUM_WEIGHTS * 3 * 4 / 4
    assert set(host_bytes) == {"actor", "critic"}
    whole = "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]"
    assert copies(whole)["actor"] == NUM_WEIGHTS * (1 + 2)
    assert copies("actor_rollout_ref.model.lora_rank=8")["actor"] < host_bytes["actor"] / 100
    assert copies("trainer.async_save=false") == {}
    text = explain(script_config(model, "trainer.simulate=8x80GiB"))
    message = (
        r"Host memory per GPU for checkpoints \(trainer.async_save\): actor_rollout_ref_pool 19 GiB"
    )
    assert re.search(message, text)


def test_recomputed_layers_are_chosen_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimates = []

    def counted(*arguments: Any) -> Any:
        estimates.append(arguments)
        return role_memories(*arguments)

    unset = "enable_gradient_checkpointing=null"
    keys = f"actor_rollout_ref.model.{unset}", f"critic.model.{unset}", "trainer.simulate=8x40GiB"
    by_tokens = "actor_rollout_ref.actor.use_dynamic_bsz=true", *NO_ROWS, TOKENS.format(8192)
    config = fit_passes(script_config(model, *by_tokens, *keys), Devices("cuda", 8, gib=40))
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing is True
    monkeypatch.setattr("trainer.ppo.memory.role_memories", counted)
    check_memory(config, Devices("cuda", 8, gib=40))
    assert "NOT" not in plan_text(config)
    assert len(estimates) == 2


def test_as_few_layers_are_recomputed_as_memory_demands(model: Path) -> None:
    key, unset = "actor_rollout_ref.model.{}", "enable_gradient_checkpointing=null"
    by_tokens = "actor_rollout_ref.actor.use_dynamic_bsz=true", *NO_ROWS, TOKENS.format(8192)
    by_tokens += key.format(unset), f"critic.model.{unset}"

    def settled(gib: float, *more: str) -> int | None:
        config = script_config(model, *by_tokens, *more)
        config = fit_passes(config, Devices("cuda", 8, gib=gib))
        check_memory(config, Devices("cuda", 8, gib=gib))
        return config.actor_rollout_ref.model.enable_gradient_checkpointing

    sizes = {gib: settled(gib) for gib in (40, 50, 60, 80, 300)}
    numbers = [30 if count is True else count for count in sizes.values()]
    assert numbers == sorted(numbers, reverse=True)
    assert len({*numbers}) > 2
    assert sizes[300] == 0

    assert settled(300, key.format("enable_gradient_checkpointing=7")) == 7
    assert settled(300, key.format("enable_gradient_checkpointing=true")) is True
    assert fit_passes(script_config(model), Devices("cpu", 8, gib=300)) == script_config(model)
    some, all_layers = (
        memory_by_role(
            script_config(model, *by_tokens, key.format(f"enable_gradient_checkpointing={count}"))
        )
        for count in (15, 30)
    )
    none = memory_by_role(
        script_config(model, *by_tokens, key.format("enable_gradient_checkpointing=false"))
    )
    sizes_of_actor = [roles["actor"].activations or 0 for roles in (all_layers, some, none)]
    assert sizes_of_actor == sorted(sizes_of_actor)
    assert sizes_of_actor[1] == pytest.approx((sizes_of_actor[0] + sizes_of_actor[2]) / 2, rel=0.1)
