"""Pipeline schedules, layers by stages, and models without stages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.samples import check_axes_of
from tests.workers.training.rank_layouts import FAMILIES, SIZES, saved
from verl_like.errors import ConfigError
from workers.config import ModelConfig, ParallelConfig
from workers.memory import LargestPass, engine_memory
from workers.parallel.pipeline import (
    Action,
    deal,
    max_pending_passes,
    num_chunks,
    schedule,
    stage_ranges,
)
from workers.training.microbatch import split_largest
from workers.training.role_model_spec import RoleModelSpec

KINDS = ("gpipe", "1f1b", "interleaved")


@pytest.mark.parametrize("num_passes", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_schedule_has_no_deadlock(kind: str, num_ranks: int, num_passes: int) -> None:
    last = num_ranks * num_chunks(kind) - 1
    lists = [schedule(kind, rank, num_ranks, num_passes) for rank in range(num_ranks)]
    done: set[tuple[bool, int, int]] = set()
    places = [0] * num_ranks
    while True:
        moved = False
        for rank, actions in enumerate(lists):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                stage = action.chunk * num_ranks + rank
                needed = (True, stage - 1, action.number) if stage else None
                if not action.is_forward:
                    needed = (stage == last, min(stage + 1, last), action.number)
                if needed is not None and needed not in done:
                    break
                done.add((action.is_forward, stage, action.number))
                places[rank] += 1
                moved = True
        if not moved:
            break
    assert len(done) == 2 * (last + 1) * num_passes == sum(map(len, lists))
    for actions, chunk in itertools.product(lists, range(num_chunks(kind))):
        for is_forward in (True, False):
            numbers = [a.number for a in actions if (a.is_forward, a.chunk) == (is_forward, chunk)]
            # gradients are added in the order of one process
            assert numbers == list(range(num_passes))


@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_match_torch(kind: str, num_ranks: int, rounds: int) -> None:
    from torch.distributed.pipelining import schedules

    num_passes, chunks = rounds * num_ranks, num_chunks(kind)
    names = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
    of_torch: Any = object.__new__(getattr(schedules, names.get(kind, "ScheduleInterleaved1F1B")))
    of_torch._n_microbatches, of_torch._num_stages, of_torch.n_local_stages = (
        num_passes,
        num_ranks,
        chunks,
    )
    of_torch.pp_group_size, of_torch.rank = num_ranks, 0
    of_torch.number_of_rounds, of_torch.microbatches_per_round = rounds, num_ranks
    if chunks == 1:
        tables = of_torch._get_pipeline_order()
    else:
        tables = {
            rank: of_torch._calculate_single_rank_operations(rank) for rank in range(num_ranks)
        }
    for rank in range(num_ranks):
        theirs = []
        for a in tables[rank]:
            if a is not None and a.computation_type.name in ("FORWARD", "FULL_BACKWARD"):
                is_forward = a.computation_type.name == "FORWARD"
                theirs.append(Action(is_forward, a.stage_index // num_ranks, a.microbatch_index))
        ours = schedule(kind, rank, num_ranks, num_passes)
        if kind == "1f1b":  # torch counts the last rank's forward passes from 1
            ours, theirs = ([action[:2] for action in actions] for actions in (ours, theirs))
        assert ours == theirs


def test_one_rank_alternates_forward_and_backward_passes() -> None:
    assert schedule("1f1b", 0, 1, 2) == [
        *(Action(True, 0, 0), Action(False, 0, 0), Action(True, 0, 1), Action(False, 0, 1))
    ]
    assert [max_pending_passes("1f1b", rank, 4) for rank in range(4)] == [4, 3, 2, 1]


def costs_of(costs: list[float], first: float, last: float, ranges: list[range]) -> list[float]:
    sums = [sum(costs[number] for number in layers) for layers in ranges]
    sums[0] += first
    sums[-1] += last
    return sums


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_stage_is_as_small_as_possible(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    *costs, first, last = torch.randint(1, 20, (10,), generator=generator).tolist()
    for num_stages in (2, 3, 4):
        stages = deal(costs, first, last, num_stages)
        assert [number for layers in stages for number in layers] == list(range(len(costs)))
        every = []
        for borders in itertools.combinations(range(1, len(costs)), num_stages - 1):
            cuts = itertools.pairwise([0, *borders, len(costs)])
            every.append(max(costs_of(costs, first, last, [range(*cut) for cut in cuts])))
        assert all(map(len, stages))
        assert max(costs_of(costs, first, last, stages)) == min(every)


def test_embeddings_and_head_count_as_much_as_layers() -> None:
    assert deal([1.0] * 8, 0.0, 0.0, 2) == [range(4), range(4, 8)]
    assert deal([1.0] * 8, 0.0, 2.0, 2) == [range(5), range(5, 8)]
    assert deal([1.0] * 8, 2.0, 2.0, 4) == [range(1), range(1, 4), range(4, 7), range(7, 8)]
    assert deal([1.0, 1.0, 4.0, 1.0, 1.0], 0.0, 0.0, 3) == [range(2), range(2, 3), range(3, 5)]


def test_few_passes_are_halved_until_every_rank_has_one() -> None:
    assert split_largest([[0, 1, 2, 3, 4]], [9, 8, 5, 3, 1], 2) == [[0, 2, 4], [1, 3]]
    assert split_largest([[0, 1], [2, 3, 4]], [9, 8, 2, 2, 1], 3) == [[0], [1], [2, 3, 4]]
    assert split_largest([[1], [0]], [3, 4], 4) == [[1], [0]]


def spec_of(folder: Path, pp: int, **settings: Any) -> RoleModelSpec:
    schedule = {name: settings.pop(name) for name in ("pp_schedule",) if name in settings}
    model = ModelConfig(path=str(folder / "model"), **settings.pop("model", {}))
    parallel = ParallelConfig(pp=pp, **schedule)
    return RoleModelSpec("model.path", model, parallel=parallel, trains=True, **settings)


def test_models_without_enough_stages_are_rejected(tmp_path: Path) -> None:
    saved(tmp_path, "llama", num_hidden_layers=3)
    check_axes_of(spec_of(tmp_path, 3), 3)
    with pytest.raises(
        ConfigError, match=r"^parallel.pp=4 .* makes 4 stages of the 3 layers .* 3\.$"
    ):
        check_axes_of(spec_of(tmp_path, 4), 4)
    with pytest.raises(
        ConfigError,
        match=r"schedule=interleaved makes 4 stages of the 3 layers .*pp to at most 1\.",
    ):
        check_axes_of(spec_of(tmp_path, 2, pp_schedule="interleaved"), 2)
    with pytest.raises(
        ConfigError, match=r"^critic.parallel.pp=3 make|^critic.parallel.pp=5 .* 3 "
    ):
        check_axes_of(spec_of(tmp_path, 5, head="scalar", section="critic.model"), 5)
    only_one = {"lora_rank": 2, "target_modules": r".*layers\.0\..*q_proj"}
    with pytest.raises(ConfigError, match="nothing in stage 1 is trained"):
        check_axes_of(spec_of(tmp_path, 2, model=only_one), 2)
    with pytest.raises(ConfigError, match="parallel.pp=2 gives every rank only.*quantization=int8"):
        check_axes_of(spec_of(tmp_path, 2, quantization="int8"), 2)


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "GPT2Config": ({"n_embd": 32, "n_layer": 2, "n_head": 4}, "it has wpe outside"),
    "OPTConfig": ({"ffn_dim": 32, "word_embed_proj_dim": 32}, "not have one embedding table"),
    "BloomConfig": ({"n_layer": 2, "n_head": 4}, "it has word_embeddings_layernorm outside"),
    "Gemma3nTextConfig": (
        {"num_kv_shared_layers": 0, "laurel_rank": 4, "intermediate_size": [32, 32]}
        | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 50},
        "not have one embedding table",
    ),
    "GraniteConfig": (
        {"embedding_multiplier": 3.0},
        "in a test of GraniteForCausalLM, it was wrong",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_class_that_cannot_be_split_into_stages_is_rejected(tmp_path: Path, name: str) -> None:
    import transformers

    sizes, message = OTHERS[name]
    config = getattr(transformers, name)(**SIZES | sizes)
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=f"parallel.pp=2: .*cannot be split into stages: .*{message}"
    ):
        check_axes_of(spec_of(tmp_path, 2), 2)


@pytest.mark.parametrize("family", [name for name in FAMILIES if "head" not in name])
def test_stages_of_a_family_match_the_whole_model(tmp_path: Path, family: str) -> None:
    saved(tmp_path, family)
    check_axes_of(spec_of(tmp_path, 2), 2)


def test_the_memory_estimate_is_of_the_largest_rank(tmp_path: Path) -> None:
    saved(tmp_path, "llama", num_hidden_layers=8, tie_word_embeddings=False)
    largest = LargestPass(64, 32)

    def weights(pp: int) -> float:
        return engine_memory(spec_of(tmp_path, pp), "actor", "pool", pp, "cpu", largest).weights

    whole = weights(1)
    assert 0.49 * whole < weights(2) < 0.6 * whole
    assert 0.24 * whole < weights(4) < 0.4 * whole


@pytest.mark.parametrize(("words", "of_last"), [(64, 2), (150_000, 1)])
def test_a_large_head_leaves_the_last_stage_fewer_layers(words: int, of_last: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 32768}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=words, **sizes, **heads))
    assert [len(layers) for layers in stage_ranges(model, 2)] == [4 - of_last, of_last]
