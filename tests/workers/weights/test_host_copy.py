"""Unchanged weights are not sent, and the rollout's weights are still the actor's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.stand_ins import Group, checksums, flip_a_bit_of_text, keeping, versions
from verl_like.errors import WeightSyncError
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.weights.host_copy import HostCopy
from workers.weights.sync import deliver_weights, publish_weights, sync_weights

Bring = Callable[[Any, Any, int], dict[str, float]]


def deliver(actor: Any, rollout: Any, version: int) -> dict[str, float]:
    publish_weights(actor, version)
    return deliver_weights(actor, rollout, version)


both_ways = pytest.mark.parametrize("bring", [sync_weights, deliver])


def num_bytes(figures: dict[str, float]) -> float:
    return figures["perf/weight_sync_mib"] * 2**20


@pytest.fixture
def changing(actor: Group) -> Group:
    """Return an actor that sends its changes."""
    for worker in actor.workers:
        worker.sends_changed = True
    return actor


@pytest.fixture
def keepers() -> Group:
    return Group([keeping(rank, 2) for rank in range(2)])


@both_ways
def test_frozen_weights_are_sent_once_and_later_only_changed_ones(
    changing: Group, keepers: Group, bring: Bring
) -> None:
    module = changing.workers[0].engine.module
    whole = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    assert num_bytes(bring(changing, keepers, 0)) == whole
    assert num_bytes(bring(changing, keepers, 1)) == 0
    for version in range(2, 5):
        with torch.no_grad():
            module.small += 1
        assert num_bytes(bring(changing, keepers, version)) == 3 * 2
        assert set(checksums(keepers)) == {checksums(changing)[0]}
        assert versions(keepers) == [version] * 2


def test_a_group_that_missed_versions_gets_all_changes_since(changing: Group) -> None:
    regular, rare = Group([keeping()]), Group([keeping()])
    rare.workers[0].role = "rollout_1"
    module = changing.workers[0].engine.module
    deliver(changing, regular, 0)
    deliver_weights(changing, rare, 0)
    for version, weight in enumerate((module.small, module.scale), 1):
        with torch.no_grad():
            weight += 1
        deliver(changing, regular, version)
    assert num_bytes(deliver_weights(changing, rare, 2)) == 3 * 2 + 4
    assert checksums(rare) == checksums(regular) == checksums(changing)[:1]


def test_a_flipped_bit_in_the_end_marker_is_caught(
    changing: Group, keepers: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit_of_text(monkeypatch, b'"merging"')
    with pytest.raises(WeightSyncError, match="1 corrupt: the end marker"):
        sync_weights(changing, keepers, 0)


@both_ways
def test_different_settings_of_actor_and_rollout_raise(
    changing: Group, rollout: Group, keepers: Group, bring: Bring
) -> None:
    with pytest.raises(WeightSyncError, match="weight_sync=changed.*keeps no copy"):
        bring(changing, rollout, 0)
    for worker in changing.workers:
        worker.sends_changed = False
    with pytest.raises(WeightSyncError, match="1 corrupt: the missing summary of all weights"):
        bring(changing, keepers, 1)


# ------------------------------------------------------------------------------------------- LoRA


def lora_pair(
    one_layer_dir: Path, engine: str, dtype: str | None = None, merges: bool = True
) -> tuple[Group, Group]:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=8)
    config.actor_rollout_ref.model.lora_rank = 2
    config.actor_rollout_ref.model.lora_alpha = 5
    config.actor_rollout_ref.rollout.name = engine
    config.actor_rollout_ref.rollout.weight_sync = "changed"
    config.actor_rollout_ref.rollout.merge_lora = merges
    config.actor_rollout_ref.rollout.dtype = dtype
    config.actor_rollout_ref.actor.optim.lr = 0.02
    actor = Group([started(ActorWorker, config, 20)])
    return actor, Group([started(RolloutWorker, config)])


def gap_between(actor: Group, rollout: Group) -> float:
    """Return the largest difference between the actor's merged weights and the rollout's."""
    sender = actor.workers[0]
    merged = dict(sender.engine.named_full_tensors(dtype=sender.sent_dtype))
    weights = dict(rollout.workers[0].engine.named_weights())
    assert weights.keys() == merged.keys()
    gaps = [weights[name].detach().float() - merged[name].detach().float() for name in weights]
    return max(float(gap.abs().max()) for gap in gaps)


@pytest.mark.parametrize(("dtype", "bring"), [(None, deliver), ("bfloat16", sync_weights)])
def test_lora_factors_are_sent_and_merged_at_every_version(
    one_layer_dir: Path, tmp_path: Path, dtype: str | None, bring: Bring
) -> None:
    """Two versions, a resume into new processes, and one more."""
    actor, rollout = lora_pair(one_layer_dir, "native", dtype)
    whole = num_bytes(bring(actor, rollout, 0))
    for version in range(1, 3):
        actor.update_actor(make_batch(8, seed=version))
        assert gap_between(actor, rollout) > 1e-4
        assert 0 < num_bytes(bring(actor, rollout, version)) < 0.1 * whole
        assert gap_between(actor, rollout) <= 1e-6
        assert rollout.weights_checksum() == actor.weights_checksum(True)
    actor.save_checkpoint(str(tmp_path / "actor"))

    resumed, new = lora_pair(one_layer_dir, "native", dtype)
    resumed.load_checkpoint(str(tmp_path / "actor"))
    assert num_bytes(bring(resumed, rollout, 2)) == whole, "a new sender sends everything"
    assert num_bytes(bring(resumed, new, 2)) == whole
    for group in (rollout, new):
        assert group.weights_checksum() == resumed.weights_checksum(True)
    resumed.update_actor(make_batch(8, seed=9))
    assert num_bytes(bring(resumed, new, 3)) < 0.1 * whole
    assert gap_between(resumed, new) <= 1e-6


def test_the_order_of_base_and_factors_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x.lora_B": (6, 2), "x.weight": (6, 4), "x.lora_A": (2, 4), "y": (3,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    merging = {"adapters": {"x": {"scaling": 2.5, "transposed": False}}, "dtype": None}
    expected = tensors["x.weight"].double() + 2.5 * (
        tensors["x.lora_B"].double() @ tensors["x.lora_A"].double()
    )
    for names in (list(shapes), list(reversed(shapes))):
        copy = HostCopy()
        copy.tensors, copy.merging = {name: tensors[name] for name in names}, merging
        merged = dict(copy.effective())
        assert merged.keys() == {"x.weight", "y"}
        torch.testing.assert_close(merged["x.weight"].double(), expected, atol=1e-6, rtol=0)


def test_missing_and_misshapen_factors_are_one_error() -> None:
    copy = HostCopy()
    shapes = {"x.weight": (6, 4), "x.lora_A": (2, 5), "x.lora_B": (6, 2), "y.weight": (3, 3)}
    copy.tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    adapter = {"scaling": 1.0, "transposed": False}
    copy.merging = {"adapters": {"x": adapter, "y": adapter}, "dtype": None}
    words = (
        r"adapters: 2 missing: y.lora_A, y.lora_B; "
        r"1 of another shape: x \(base, B, A: \[6, 4\] \+ \[6, 2\] \+ \[2, 5\]\)"
    )
    with pytest.raises(WeightSyncError, match=words):
        copy._check_adapters()


@pytest.mark.vllm
def test_vllm_gets_the_merged_weights_of_the_sent_factors(one_layer_dir: Path) -> None:
    actor, rollout = lora_pair(one_layer_dir, "vllm")
    whole = num_bytes(sync_weights(actor, rollout, 0))
    for version in (1, 2):
        actor.update_actor(make_batch(8, seed=version))
        assert 0 < num_bytes(sync_weights(actor, rollout, version)) < 0.1 * whole
        assert rollout.weights_checksum() == actor.weights_checksum(True)


@pytest.mark.vllm
def test_vllm_gets_only_the_adapter_unless_it_is_merged(one_layer_dir: Path) -> None:
    actor, rollout = lora_pair(one_layer_dir, "vllm", merges=False)
    num_adapter = sum(w.nbytes for w in actor.workers[0].engine.parameters())
    for version in (0, 1):
        assert num_bytes(sync_weights(actor, rollout, version)) == num_adapter
        assert rollout.weights_checksum() == actor.weights_checksum(True)
        actor.update_actor(make_batch(8, seed=version))
    assert rollout.weights_checksum() != actor.weights_checksum(True)
