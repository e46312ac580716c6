"""The variables of a shell script: those that it sets itself, with their defaults."""

from __future__ import annotations

from trainer.migrate.command import filled, variables_of

SCRIPT = """
set -x
A=1
export B="$A and 'two'"  # a word
C=${C:-three}/${A}
D=$(date)
python train.py key=$A
E='two words' F=5
"""


def test_lines_that_set_a_variable_are_read_in_order() -> None:
    values = variables_of(SCRIPT)
    assert values["A"] == "1"
    assert values["B"] == "1 and 'two'"
    assert values["C"] == "three/1"
    assert "E" not in values


def test_what_only_the_shell_knows_stays() -> None:
    assert filled("$HOME/${A}/$(date)/${B:-x}", {"A": "1"}) == "$HOME/1/$(date)/x"
    assert variables_of(SCRIPT)["D"] == "$(date)"
