"""PPO of mixtures of experts: the actor uses the experts that the rollout chose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, assert_same_numbers, two_steps, with_experts
from tests.trainer.async_training.test_environments import numbers as numbers_of
from tests.trainer.async_training.test_environments import play
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError

POLICY = "actor_rollout_ref"
R3 = f"{POLICY}.actor.router_replay.mode=R3"
GAP = "training/rollout_probs_diff_mean"


def test_replay_changes_no_number_if_the_actor_chooses_the_same_experts(
    tiny_dir: Path, tmp_path: Path
) -> None:
    """One update per step: a second one would change the weights, and thus the routing."""
    model = with_experts(tiny_dir, tmp_path / "model")
    more = (model, f"{POLICY}.actor.ppo_mini_batch_size=8", *POLICY_ALONE)
    plain = two_steps(tiny_dir, tmp_path / "plain", *more)
    assert two_steps(tiny_dir, tmp_path / "replayed", *more, R3) == plain


def test_replay_shrinks_the_gap_to_a_rollout_of_another_dtype(
    tiny_dir: Path, tmp_path: Path
) -> None:
    sizes = {"num_experts": 32, "num_local_experts": 32, "num_hidden_layers": 4}
    sizes |= {"initializer_range": 0.2}
    model = with_experts(tiny_dir, tmp_path / "model", "Mixtral", **sizes)
    one_step = "trainer.total_training_steps=1"
    more = (model, f"{POLICY}.rollout.dtype=bfloat16", *POLICY_ALONE, one_step)
    plain = two_steps(tiny_dir, tmp_path / "plain", *more)
    replayed = two_steps(tiny_dir, tmp_path / "replayed", *more, R3)
    assert replayed[0][GAP] < 0.6 * plain[0][GAP]


@pytest.mark.vllm
def test_the_experts_of_vllm_are_replayed(tiny_dir: Path, tmp_path: Path) -> None:
    sizes = {"num_experts": 32, "num_hidden_layers": 4, "initializer_range": 0.2}
    model = with_experts(tiny_dir, tmp_path / "model", **sizes)
    more = (model, f"{POLICY}.rollout.name=vllm", *POLICY_ALONE, R3)
    for line in two_steps(tiny_dir, tmp_path / "replayed", *more):
        assert line[GAP] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("family", "axis"), [("Mixtral", "ep"), ("Qwen3Moe", "pp")])
def test_two_ranks_that_share_experts_or_layers_equal_one_process(
    family: str, axis: str, tiny_dir: Path, tmp_path: Path
) -> None:
    model = with_experts(tiny_dir, tmp_path / "model", family)
    more = (model, R3)
    of_one = two_steps(tiny_dir, tmp_path / "one", *more)
    spread = [f"{POLICY}.{section}.parallel.{axis}=2" for section in ("actor", "ref")]
    steps = two_steps(tiny_dir, tmp_path / "two", "trainer.n_gpus_per_node=2", *spread, *more)
    assert_same_numbers(steps, of_one, "actor/pg_loss", "actor/grad_norm", GAP)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([R3], "router_replay.mode=R3: LlamaForCausalLM has no routed experts"),
        (
            [R3, f"{POLICY}.rollout.name=vllm", f"{POLICY}.rollout.server_urls=[http://here:8000]"],
            "a vLLM server does not record",
        ),
        (
            [R3.replace("R3", "R2")],
            "mode=R2: choose disabled or R3, .*R2, the actor's own of an earlier pass, is not here",
        ),
    ],
)
def test_a_model_server_or_mode_without_replay_is_rejected(
    settings: list[str], message: str, tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        two_steps(tiny_dir, tmp_path, *settings)


@pytest.mark.slow
@pytest.mark.parametrize("history", ["sampled", "retokenized"])
def test_an_async_run_that_generates_turns_in_chunks_equals_the_synchronous_run(
    history: str, tiny_dir: Path, tmp_path: Path
) -> None:
    model = with_experts(tiny_dir, tmp_path / "model")
    more = (model, R3, f"environment.history_tokens={history}")
    plain = play(tiny_dir, tmp_path / "plain", *more, recipe=PPO)
    chunks = (f"{POLICY}.rollout.max_tokens_per_call=3", "async_training.max_staleness=0")
    in_chunks = play(tiny_dir, tmp_path / "async", *more, *chunks)
    for metrics, expected in zip(numbers_of(in_chunks), numbers_of(plain), strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", GAP):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
