"""Finding the objects that a configuration names: registered, dotted, or in a file."""

import math
import os
import re
from pydoc import render_doc

import pytest

from verl_like.errors import ConfigError, nearest
from verl_like.extend import EVAL
from verl_like.registry import Registry, load_attribute, load_object

KEYS = "data.custom_cls.path", "data.custom_cls.name"


@pytest.fixture
def estimators():
    registry = Registry("estimator")
    registry.register("gae")(1)
    registry.register("grpo", "group_relative")(2)
    return registry


def test_a_decorated_function_is_registered_and_returned(estimators):
    @estimators.register("mine")
    def mine():
        return 3

    assert mine() == 3
    assert estimators.look_up("mine") is mine


def test_a_registry_is_a_mapping_in_the_order_of_registration(estimators):
    assert list(estimators) == ["gae", "grpo", "group_relative"]
    assert dict(estimators) == {"gae": 1, "grpo": 2, "group_relative": 2}


def test_the_repr_of_a_registry_lists_names_without_entries(estimators):
    assert repr(estimators) == "Registry('estimator': gae, grpo, group_relative)"


def test_help_on_a_registry_names_its_kind(estimators):
    assert "Each estimator by name." in render_doc(estimators)


def test_a_name_or_alias_that_is_taken_is_rejected(estimators):
    with pytest.raises(
        ConfigError, match="estimator 'gae' is already registered, as 1. Use another name for 9"
    ):
        estimators.register("gae")(9)
    assert estimators["gae"] == 1
    with pytest.raises(ConfigError, match="estimator 'grpo' is already registered"):
        estimators.register("new", "grpo")(9)


def test_a_dotted_path_is_imported(estimators):
    assert estimators.look_up("math.sqrt") is math.sqrt


def test_a_name_is_suggested_by_its_end():
    assert nearest("rewards", ["response_mask", "token_level_rewards"]) == (
        " Did you mean 'token_level_rewards'?"
    )


def test_a_name_with_swapped_letters_is_suggested_first():
    assert nearest("gpro", ["gmpo", "grpo", "gspo"]).startswith(" Did you mean 'grpo' or ")


def test_an_unknown_name_lists_the_known_and_the_nearest(estimators):
    with pytest.raises(
        ConfigError,
        match=r"unknown estimator 'grp'\. Did you mean 'grpo'\? Known: gae, grpo. For",
    ):
        estimators.look_up("grp")


@pytest.mark.parametrize("path", ["no_such_package.f", "math.no_such_function"])
def test_a_path_that_cannot_be_imported_is_rejected_with_the_reason(estimators, path):
    with pytest.raises(ConfigError, match=rf"estimator '{path}' cannot be imported \(.*no_such"):
        estimators.look_up(path)


def test_a_missing_object_names_its_setting_and_the_nearest():
    with pytest.raises(
        ConfigError,
        match=r"trainer.cls=math.sqr cannot be imported \(module 'math' has no 'sqr'\)."
        r".*Did you mean 'sqrt'",
    ):
        load_object("math.sqr", "trainer.cls")


@pytest.mark.parametrize("path", ["no_dot", ".relative", "", "mine.py"])
def test_an_invalid_path_is_rejected_with_an_example(path):
    message = f"role_workers.critic={path} is not the path of an object, such as my_module.MyClass"
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_object(path, "role_workers.critic")


def test_an_object_is_loaded_by_its_file_or_module_and_its_name(estimators, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import os\nfrom re import sub\nclass Own: ...\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    cls = load_object("./mine.py:Own", "trainer.cls")
    assert load_object("mine.py:Own", "trainer.cls") is cls
    assert load_object("math:sqrt", "trainer.cls") is math.sqrt
    assert estimators.look_up("math:sqrt") is math.sqrt
    problem = r"trainer.cls=mine.py:Owm: mine.py has no 'Owm'. It has Own. Did you mean 'Own'\?"
    with pytest.raises(ConfigError, match=problem):
        load_object("mine.py:Owm", "trainer.cls")
    (tmp_path / "empty.py").touch()
    with pytest.raises(ConfigError, match=r"empty.py has no 'Own'. It has no public names.$"):
        load_object("empty.py:Own", "trainer.cls")
    with pytest.raises(ConfigError, match=r"trainer.cls=none.py:Own: there is no such file"):
        load_object("none.py:Own", "trainer.cls")
    with pytest.raises(ConfigError, match=r"trainer.cls=./mine:Own cannot be imported"):
        load_object("./mine:Own", "trainer.cls")


def test_a_file_that_has_changed_is_read_again(tmp_path):
    file = tmp_path / "changing.py"
    for number in (1, 22):
        file.write_text(f"value = {number}\n", encoding="utf-8")
        os.utime(file, ns=(number, number))
        assert load_object(f"{file}:value", "here") == number


def test_a_syntax_error_names_its_place_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken_code.py").write_text("x = 1\ndef f(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for path in (f"{tmp_path}/broken_code.py:f", "broken_code.f", "broken_code:f"):
        with pytest.raises(ConfigError, match=r"broken_code.py, line 2: .*def f\(:") as caught:
            load_object(path, "trainer.cls")
        assert "\n" not in str(caught.value)


def test_a_dataclass_with_postponed_annotations_loads_from_a_file(tmp_path):
    file = tmp_path / "own_data.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Row:\n"
        "    prompt: str = 'hi'\n",
        encoding="utf-8",
    )
    assert load_attribute(str(file), "Row", *KEYS)().prompt == "hi"


def test_a_missing_file_names_the_folders_searched(tmp_path):
    file = tmp_path / "nowhere.py"
    with pytest.raises(ConfigError, match=r"data.custom_cls.path=.*there is no such file \(looked"):
        load_attribute(str(file), "Row", *KEYS)


def test_a_file_that_imports_a_missing_package_is_rejected(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import no_such_package\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own.py cannot be imported \(.*no_such_package"):
        load_attribute(str(file), "Row", *KEYS)


def test_a_missing_module_names_the_accepted_forms():
    with pytest.raises(
        ConfigError, match=r"data.custom_cls.path=no_such_module cannot be imported .*ends in .py"
    ):
        load_attribute("no_such_module", "Row", *KEYS)


def test_a_missing_name_lists_the_names_of_the_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("letters = digits = 1\n_private = 2\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"name='leters': .* It has digits, letters"):
        load_attribute(str(file), "leters", *KEYS)


def test_help_shows_what_one_registers_and_what_a_recipe_is() -> None:
    losses = Registry("loss with an entry", entry="(gap) -> losses")
    assert "(gap) -> losses" in render_doc(losses)
    assert "`EvaluationConfig`" in render_doc(EVAL)
