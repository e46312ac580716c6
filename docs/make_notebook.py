"""Run the notebook and write docs/notebook.md: `python docs/make_notebook.py`.

The outputs are stored in the notebook, and the page shows them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "notebook" / "sft_then_grpo.ipynb"
PAGE = ROOT / "docs" / "notebook.md"
PICTURES = ROOT / "docs" / "images"
HEAD = "This page shows `examples/notebook/sft_then_grpo.ipynb` with its outputs."
PICTURE_TEXTS = (
    "Mean score of each of the 50 steps",
    "KL to the reference in each of the 50 steps",
)
"""The alternative texts of the pictures."""
PLAN = re.compile(r"^Peak memory .*?^With --full.*?\n", re.M | re.S)


def run(notebook: Any) -> None:
    """Execute every cell in an empty folder."""
    from nbclient import NotebookClient

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where)
        client.execute(env={**os.environ, "PATH": path})
        text = json.dumps(notebook, indent=1, ensure_ascii=False).replace(f"{folder}/", "")
    for cell in (cleaned := json.loads(text))["cells"]:
        cell["metadata"] = {}
        outputs = [output for output in cell.get("outputs", []) if output.get("name") != "stderr"]
        for output in outputs:
            output.get("metadata", {}).clear()
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs
    NOTEBOOK.write_text(json.dumps(cleaned, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def page_of(notebook: Any) -> str:
    """The page of a notebook with outputs."""
    numbers = count(1)
    named = iter(PICTURE_TEXTS)
    title, *cells = notebook["cells"]
    heading, _, intro = "".join(title["source"]).partition("\n")
    parts = [heading, HEAD, intro.strip()]
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        texts, pictures = outputs_of(cell)
        parts.append(f"```python no-run\n{source}\n```")
        parts += [f"```text\n{texts.rstrip()}\n```"] if texts else []
        names = [f"notebook-{next(numbers)}.svg" for _ in pictures]
        parts += [f"![{next(named)}](images/{name})" for name in names]
    return "\n\n".join(filter(None, parts)) + "\n"


def outputs_of(cell: Any) -> tuple[str, list[str]]:
    """Return what a cell printed, and its pictures, without a run's plan and progress bar."""
    texts, pictures = "", []
    for output in cell.get("outputs", []):
        if output.get("name") == "stdout":
            texts += PLAN.sub("", "".join(output["text"]))
        html = "".join(output.get("data", {}).get("text/html", []))
        pictures += re.findall(r'<svg role="img".*?</svg>', html, re.S)
    return texts, pictures


def write(notebook: Any) -> None:
    """Write the page and its pictures."""
    PAGE.write_text(page_of(notebook), encoding="utf-8")
    pictures = [picture for cell in notebook["cells"] for picture in outputs_of(cell)[1]]
    for number, picture in enumerate(pictures, 1):
        (PICTURES / f"notebook-{number}.svg").write_text(picture + "\n", encoding="utf-8")


if __name__ == "__main__":
    import nbformat

    run(nbformat.read(NOTEBOOK, as_version=4))
    write(json.loads(NOTEBOOK.read_text(encoding="utf-8")))
    print(f"wrote {NOTEBOOK} and {PAGE}")
