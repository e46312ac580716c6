"""Looking parts up by name or dotted path."""

import math

import pytest

from verl_like.errors import ConfigError
from verl_like.registry import look_up

REGISTRY = {"gae": 1, "grpo": 2}


def test_a_registered_name_gives_its_entry():
    assert look_up("grpo", REGISTRY, "estimator") == 2


def test_a_dotted_path_is_imported():
    assert look_up("math.sqrt", {}, "function") is math.sqrt


def test_an_unknown_name_lists_what_there_is_and_the_nearest():
    with pytest.raises(
        ConfigError, match=r"unknown estimator 'grp'; there are gae, grpo.*Did you mean 'grpo'"
    ):
        look_up("grp", REGISTRY, "estimator")


@pytest.mark.parametrize("path", ["no_such_package.f", "math.no_such_function"])
def test_a_path_that_cannot_be_imported_says_why(path):
    with pytest.raises(ConfigError, match=rf"estimator '{path}' cannot be imported \(.*no_such"):
        look_up(path, REGISTRY, "estimator")
