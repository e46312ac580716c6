"""A reward process finds a function of any kind; one that cannot be called is rejected."""

from __future__ import annotations

import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from trainer.api.inputs import reward_list
from verl_like.errors import ConfigError
from workers.rewards.functions import gsm8k
from workers.rewards.outcome import with_source
from workers.rewards.scorer import FunctionSpec, Scorer

SAMPLE = {"solution_str": "aab", "raw_prompt": "say a", "letter": "a"}


def object_with(bonus: Any) -> Any:
    """A reward object whose class is pickled by value, without an imported file."""

    class Bonus:
        def __init__(self) -> None:
            self.bonus = bonus

        def __call__(self, response: str) -> float:
            return len(response) + self.bonus

    return Bonus()


def scored(item: dict[str, Any]) -> tuple[float | None, dict[str, float], str | None]:
    """Score one sample in a reward process."""
    scorer = Scorer(FunctionSpec(item["path"], item["function"], columns=["letter"]), 120.0)
    try:
        scorer.start()
        (score,) = scorer.score([SAMPLE])
        return score
    finally:
        scorer.stop()


def test_closures_lambdas_and_objects_score_in_another_process(tmp_path: Path) -> None:
    weights = {"a": 2.0, "b": 1.0}

    async def of_a_response(response: str, letter: str) -> dict[str, float]:
        return {"score": response.count(letter) * weights[letter], "size": len(response)}

    def of_a_batch(responses: list[str], letter: list[str]) -> list[float]:
        return [
            weights[name] * len(response) for name, response in zip(letter, responses, strict=True)
        ]

    functions = [of_a_response, lambda prompt, **row: len(prompt), object_with(0.5), of_a_batch]
    items = reward_list(functions, tmp_path, ["letter"])
    assert [item["name"] for item in items] == ["of_a_response", "reward", "Bonus", "of_a_batch"]

    assert [scored(item) for item in items] == [
        (4.0, {"size": 3.0}, None),
        (5.0, {}, None),
        (3.5, {}, None),
        (6.0, {}, None),
    ]


def test_an_error_of_a_local_function_has_its_line(tmp_path: Path) -> None:
    def broken(response: str) -> float:
        return float(response)  # the line

    (item,) = reward_list([broken], tmp_path, ["letter"])
    _, _, error = scored(item)
    assert with_source(str(error)).endswith("return float(response)  # the line")


def test_module_functions_have_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text("def score(response):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_rewards

    first, second = reward_list([own_rewards.score, gsm8k], tmp_path / "rewards", [])
    assert (first["path"], first["function"]) == (str(tmp_path / "own_rewards.py"), "score")
    assert (second["path"], second["function"]) == ("workers.rewards.functions", "gsm8k")
    assert not (tmp_path / "rewards").exists()


def test_a_function_may_have_settings_and_other_kinds_stay(tmp_path: Path) -> None:
    remote = {"name": "judge", "kind": "remote", "url": "http://127.0.0.1:1/score"}
    with_settings = {
        "function": lambda response, bonus: bonus,
        "weight": 0.5,
        "kwargs": {"bonus": 1},
    }
    first, second, third = reward_list([with_settings, remote, lambda response: 0.0], tmp_path, [])
    assert first["weight"] == 0.5
    assert second == remote
    assert [first["name"], third["name"]] == ["reward", "reward_2"]


class OfTensors(torch.nn.Module):
    """A reward that reads tensors, which no caller passes."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.sum()


def test_a_module_that_reads_a_response_is_a_reward(tmp_path: Path) -> None:
    class Judge(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, response: str) -> torch.Tensor:
            return self.scale * len(response)

    (item,) = reward_list([Judge()], tmp_path, ["letter"])
    assert item["name"] == "Judge"
    loaded = runpy.run_path(item["path"])[item["function"]]
    assert loaded("aab").item() == 6.0


def test_a_reward_model_in_memory_is_written_to_a_folder(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_labels=1, **sizes)
    reward = {"name": "taste", "function": LlamaForSequenceClassification(config), "weight": 0.5}
    (item,) = reward_list([reward], tmp_path, [])
    assert item == {
        "name": "taste",
        "weight": 0.5,
        "kind": "model",
        "path": str(tmp_path / "taste"),
    }
    assert {"config.json", "model.safetensors"} <= {
        file.name for file in Path(item["path"]).iterdir()
    }
    config.num_labels = 2
    with pytest.raises(ConfigError, match="a sequence classifier with one label"):
        reward_list([LlamaForSequenceClassification(config)], tmp_path, [])


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (OfTensors(), "'input_ids'.*Available: prompt, response"),
        (lambda response, topic: 0.0, r"'topic'.*the rows' columns letter"),
        ("mine.py", "reward='mine.py': pass the function itself, or a dict"),
        ({"function": object_with(threading.Lock())}, "cannot be sent to the process.*pickle"),
    ],
)
def test_impossible_rewards_are_rejected(reward: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        reward_list([reward], tmp_path, ["letter"])
