"""Print the size of the code: lines, files, functions, imports, and what a PPO run imports.

    python tools/counts.py [--closure]

Code lines have no blanks, comments or docstrings. `--closure` lists the modules that a PPO run on
text with one process imports at once, by room.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("verl_like", "workers", "trainer")
ENTRIES = (
    *("trainer.ppo.stages", "trainer.launch", "trainer.recipe_command"),
    *("workers.roles.actor", "workers.roles.rollout", "workers.roles.reference"),
)
"""Modules that a PPO run on text imports."""
LOADED = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(file for m in [*sys.modules.values()] if (file := getattr(m, "__file__", None))))
"""
NOT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
SHORT = 5


def code_lines(text: str) -> int:
    """Return the number of lines with code."""
    docs = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def files(*folders: str) -> list[Path]:
    """Return the Python files of these folders."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def total(paths: Iterable[Path]) -> int:
    """Return the code lines of all files."""
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)


def closure() -> list[Path]:
    """Return the files of the packages that `ENTRIES` import at once."""
    command = [sys.executable, "-c", LOADED, *ENTRIES]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    roots = [ROOT / name for name in PACKAGES]
    paths = [Path(file) for file in printed.split()]
    return [path for path in paths if any(path.is_relative_to(root) for root in roots)]


def shape(paths: Iterable[Path]) -> Counter[str]:
    """Count functions, imports, conditional expressions and walruses."""
    counts: Counter[str] = Counter()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function):
                counts["functions"] += 1
                body = node.body[1:] if ast.get_docstring(node) else node.body
                first = body[0].lineno if body else node.lineno
                counts["short functions"] += (node.end_lineno or first) - first + 1 <= SHORT
            elif isinstance(node, ast.Import | ast.ImportFrom):
                counts["import lines"] += (node.end_lineno or node.lineno) - node.lineno + 1
            counts["conditional expressions"] += isinstance(node, ast.IfExp)
            counts["walruses"] += isinstance(node, ast.NamedExpr)
    return counts


def main(*arguments: str) -> None:
    """Print the counts."""
    ours, imported = files(*PACKAGES), closure()
    lines, counts = total(ours), shape(ours)
    tests = total(files("tests"))
    short, conditional = counts["short functions"], counts["conditional expressions"]
    rows = {
        "code lines of the packages": f"{lines:,}",
        "files": f"{len(ours)}",
        "imports, share of the code lines": f"{counts['import lines'] / lines:.1%}",
        "imported at once by a PPO run": f"{total(imported):,} lines in {len(imported)} files",
        f"functions of at most {SHORT} lines": f"{short / counts['functions']:.0%}",
        "functions per 1,000 lines": f"{1000 * counts['functions'] / lines:.0f}",
        "conditional expressions per 100 lines": f"{100 * conditional / lines:.1f}",
        "walruses": f"{counts['walruses']}",
        "code lines of tests": f"{tests:,}",
        "code lines of benchmarks": f"{total(files('benchmarks')):,}",
    }
    for name, value in rows.items():
        print(f"{name:40} {value}")
    if "--closure" in arguments:
        for path in sorted(imported, key=lambda path: -code_lines(path.read_text())):
            print(f"{code_lines(path.read_text()):6} {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
