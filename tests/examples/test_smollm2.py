"""The results on SmolLM2: their rows, rewards and environment, and the script on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.smollm2.make import CITIES, FORMS, GOODS, NAMES, THINGS, people, played, shops
from examples.smollm2.make import main as make_rows
from examples.smollm2.rewards import person
from examples.smollm2.shop import Shop
from tests import ROOT
from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines
from verl_like import Observation, TrajectoryEnd

ANSWER = '{"name": "Leo", "age": 60, "city": "Lima"}'


def test_the_test_has_other_names_cities_goods_and_things() -> None:
    for words in (NAMES, CITIES, THINGS):
        assert not {*words["train"].split()} & {*words["val"].split()}
    assert not {*GOODS["train"]} & {*GOODS["val"]}
    starts = tuple(form.split("{")[0] or form.split("}")[1].split()[0] for form in FORMS["val"])
    new = [row for row in people("val") if any(start in str(row["prompt"]) for start in starts)]
    assert len(new) == len(people("val")) // 2
    seen = {row["calculation"] for row in shops("train")}
    assert not seen & {row["calculation"] for row in shops("val")}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (ANSWER, 1.0),
        ('{\n "city": "Lima", "name": "Leo", "age": 60}', 1.0),
        ('{"name": "Leo", "age": "60", "city": "Lima"}', 0.75),
        ('{"name": "Leo", "age": 60, "city": "Lima", "x": 1}', 0.75),
        ('{"name": "Lima"}', 0.25),
        ('{"a": 1, "b": 2}', 0.0),
        (f"```json\n{ANSWER}\n```", 0.0),
        ("[1]", 0.0),
        ("Leo", 0.0),
    ],
)
def test_the_reward_is_the_part_that_is_right(response: str, score: float) -> None:
    assert person(response, ANSWER) == {"score": score, "acc": float(score == 1)}


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["calc 12 * 3", "36"], 1.0),
        (["calc 3*12", "36."], 1.0),
        (["calc 12 * 3", "It is 36"], 0.3),
        (["calc 12 + 3", "15"], 0.0),
        (["calc 12 * 3", "calc 12 * 3"], 0.3),
        (["36"], 0.0),
        (["To calculate"], 0.0),
    ],
)
def test_only_a_call_and_its_result_have_the_whole_reward(turns: list[str], reward: float) -> None:
    game = Shop()
    game.reset(result=36)
    *calls, end = [game.step(text) for text in turns]
    assert all(isinstance(call, Observation) for call in calls)
    assert isinstance(end, TrajectoryEnd)
    assert end.reward == reward


def test_the_solved_problems_have_the_whole_reward() -> None:
    for row in shops("train"):
        game = Shop()
        game.reset(row["result"])
        _, call, result, answer = played(row)["messages"]
        observed = game.step(call["content"])
        assert isinstance(observed, Observation)
        assert observed.text == result["content"]
        end = game.step(answer["content"])
        assert isinstance(end, TrajectoryEnd)
        assert end.reward == 1


def test_pairs_are_the_best_and_the_worst_sample_of_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    text = "system\nYou\nuser\nWrite one.\nassistant\n"
    samples = [
        {"uid": uid, "input": text, "output": f"{uid}{score}", "score": score}
        for uid, scores in (("a", (0.5, 0.9, 0.1)), ("b", (0.2, 0.2)))
        for score in scores
    ]
    file = tmp_path / "validation" / "1.jsonl"
    file.write_text("".join(json.dumps(sample) + "\n" for sample in samples), "utf-8")
    make_rows(["--pairs", str(tmp_path), str(tmp_path / "data")])
    (row,) = map(
        json.loads, (tmp_path / "data" / "pairs_val.jsonl").read_text("utf-8").splitlines()
    )
    assert row["prompt"] == [{"role": "user", "content": "Write one."}]
    assert (row["chosen"], row["rejected"]) == ("a0.9", "a0.1")


def test_the_page_has_the_accuracies_of_the_runs() -> None:
    page = (ROOT / "docs" / "smollm2.md").read_text("utf-8")
    data = json.loads((ROOT / "docs" / "data" / "results.json").read_text("utf-8"))
    curve = data["smollm2"]["curves"]["GRPO"]
    rows = re.findall(r"^\d\|(0\.\d{3})\|(0\.\d{3})\|(0\.\d{3})$", page, re.M)
    assert [tuple(map(float, row)) for row in rows] == [*zip(*curve.values(), strict=True)]


@pytest.mark.long
@pytest.mark.example
@pytest.mark.parametrize("which", ["grpo", "ppo", "lora", "agent"])
def test_the_script_trains(which: str, tmp_path: Path, tiny_dir: Path, forked_python: Path) -> None:
    """The real model is for `tests/run_real.sh`; this is one step on a tiny one."""
    run, steps = EXAMPLES / "smollm2" / "run.sh", ["trainer.total_training_steps=1"]
    where = {"RUN_DIR": tmp_path, "PYTHON": forked_python, "MODEL": tiny_dir / "model"}
    wide = ["data.max_prompt_length=400", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    done = bash(run, which, *steps, *wide, "data.max_response_length=64", **where)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in lines(tmp_path / which)] == [1]
