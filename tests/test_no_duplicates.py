"""No two places of the code share twelve lines.

The lines of a file are compared without their indentation. Blank lines and comments do not count
and do not end a copy: code copied under another comment is a copy. Import statements and docstrings
do not count either, but end one: a signature that an interface prescribes does not add up with the
lines that follow its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT
from tests.import_graph import parsed, sources

FOLDERS = ("verl_like", "workers", "trainer", "examples", "docs", "benchmarks", "tools")
TOO_MANY = 12

Line = tuple[int, str]
"""(number, text without indentation)."""


def is_left_out(node: ast.AST) -> bool:
    """An import, or a docstring: of a module, a class, a function or an attribute."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Import | ast.ImportFrom)


def lines_left_out(tree: ast.Module) -> set[int]:
    """The numbers of the lines of imports and docstrings."""
    numbers: set[int] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt) and is_left_out(node):
            assert node.end_lineno is not None, "ast gives every parsed node an end"
            numbers.update(range(node.lineno, node.end_lineno + 1))
        inner = ast.iter_child_nodes(node)
        pending += [child for child in inner if not isinstance(child, ast.expr)]
    return numbers


def stretches(text: str, left_out: set[int]) -> Iterator[list[Line]]:
    """The lines that count, cut where something is left out."""
    stretch: list[Line] = []
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if number in left_out:
            yield stretch
            stretch = []
        elif stripped and not stripped.startswith("#"):
            stretch.append((number, stripped))
    yield stretch


def windows(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """(number of the first line, texts) of every twelve lines that follow each other."""
    text = path.read_text(encoding="utf-8")
    for stretch in stretches(text, lines_left_out(parsed(path))):
        texts = [line for _, line in stretch]
        for start in range(len(stretch) - TOO_MANY + 1):
            yield stretch[start][0], tuple(texts[start : start + TOO_MANY])


def copies(paths: list[Path]) -> list[str]:
    """Every two places whose next twelve lines are the same."""
    first_place: dict[tuple[str, ...], str] = {}
    found = []
    for path in paths:
        for number, window in windows(path):
            place = f"{path}:{number}"
            earlier = first_place.setdefault(window, place)
            if earlier != place:
                found.append(f"{earlier} and {place}")
    return found


def test_no_two_places_share_twelve_lines() -> None:
    paths = [path for folder in FOLDERS for path in sources(folder)]
    found = [pair.replace(f"{ROOT}/", "") for pair in copies(paths)]
    assert found == [], "give what they share one home"


def write(folder: Path, name: str, num_shared: int, apart: str = "") -> Path:
    """A file with that many numbered lines, and `apart` after the fifth."""
    lines = [f"shared_{i} = {i}" for i in range(num_shared)]
    text = "\n".join([f"{name} = 0", *lines[:5], *apart.splitlines(), *lines[5:], ""])
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_twelve_lines_are_a_copy_and_eleven_are_none(tmp_path: Path) -> None:
    assert copies([write(tmp_path, "a", 11), write(tmp_path, "b", 11)]) == []
    c, d = write(tmp_path, "c", 12), write(tmp_path, "d", 12)
    assert copies([c, d]) == [f"{c}:2 and {d}:2"]


def test_comments_and_blank_lines_do_not_hide_a_copy_and_docstrings_part_it(tmp_path: Path) -> None:
    plain = write(tmp_path, "plain", 12)
    commented = write(tmp_path, "commented", 12, apart="\n# a reason\n")
    documented = write(tmp_path, "documented", 12, apart='"""Of\nwhat."""')
    assert copies([plain, commented]) == [f"{plain}:2 and {commented}:2"]
    assert copies([plain, documented]) == []
