"""Hooks of mkdocs: addresses, formulas, anchors of keys, docstrings, `llms.txt` from the nav.

`llms.txt` (https://llmstxt.org) lists the pages of the site for language models: the title in the
nav, the address, and the first sentence of each page.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
NO_PROSE = ("#", "    ", "```", "|", "<", "!", "-", ">")
"""Starts of paragraphs that are not sentences."""


def on_config(config: Any) -> Any:
    """Set the addresses of the site and of the repository, if there are any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if urls := project.get("urls"):
        config.site_url = urls["Documentation"]
        config.repo_url = urls["Repository"]
        config.edit_uri = "edit/main/docs/"
    fence = {"name": "math", "class": "math", "format": to_mathml}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def to_mathml(source: str, *_: Any, **__: Any) -> str:
    """Return a formula as MathML, which browsers show without a script."""
    from latex2mathml.converter import convert  # type: ignore[import-untyped,unused-ignore]

    return convert(source, display="block")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Give every key in the tables of keys an anchor with its whole name: `#trainer.seed`.

    The tables of the Python API are followed by the docstrings. The mark of a block that tests do
    not run is removed: the site's Markdown has no such marks.
    """
    markdown = markdown.replace("```python no-run\n", "```python\n")
    markdown = API_TABLE_END.sub(lambda mark: f"{mark[0]}\n\n{docstrings(mark[1])}", markdown)
    return KEY_TABLES.sub(lambda block: with_anchors(block[0]), markdown)


API_TABLE_END = re.compile(r"<!-- end api-(\S+) -->")
NO_MEMBERS = {"members": False, "inherited_members": False}
DOCSTRING_ONLY = {**NO_MEMBERS, "merge_init_into_class": False, "show_signature": False}


def docstrings(section: str) -> str:
    """Return what mkdocstrings replaces by the docstrings of a section of the Python API."""
    pages = yaml.safe_load((ROOT / "docs" / "data" / "api.yaml").read_text(encoding="utf-8"))
    (names,) = [sections[section] for sections in pages.values() if section in sections]
    return "\n\n".join(
        f"::: {name}\n    options: {json.dumps(options_of(members))}"
        for name, members in names.items()
    )


def options_of(members: Any) -> dict[str, Any]:
    """Return the options of mkdocstrings for an entry of `docs/data/api.yaml`."""
    if members is None or isinstance(members, dict):
        return {name: value for name, value in (members or {}).items() if name != "listed"}
    if members == "docstring":
        return DOCSTRING_ONLY
    return {"members": members} if members else NO_MEMBERS


KEY_TABLES = re.compile(r"<!-- begin (?:keys_\w+|\w+(?:-\w+)*-keys) -->.*?<!-- end ", re.S)
"""Matches generated tables of keys."""


def with_anchors(tables: str) -> str:
    """Return tables of keys with an anchor for each key, in the syntax of `attr_list`.

    The name of a key begins with the last heading, which is the section of the key.
    """
    section, lines = "", []
    for line in tables.splitlines():
        if line.startswith("## "):
            name = re.match(r"## `([\w.]+)`", line)
            section = f"{name[1]}." if name else ""
        line = re.sub(r"^`([\w.]+)`", rf"`\1`{{#{section}\1}}", line)
        lines.append(re.sub(r"^\[`([\w.]+)`]\(#\w+\)", r"[`\1`](#\1)", line))
    return "\n".join(lines)


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    """Remember the nav for `on_post_build`."""
    config.extra["nav_of_site"] = nav
    return nav


def on_post_build(config: Any) -> None:
    """Write `llms.txt` into the site."""
    nav = config.extra["nav_of_site"]
    lines = [
        f"# {config.site_name}",
        "",
        f"> {config.site_description}",
        "",
        *lines_of(nav.items, config),
    ]
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def lines_of(items: Any, config: Any) -> Iterator[str]:
    """Yield a heading for each section of the nav and a line for each page."""
    for item in items:
        if item.is_section:
            yield from ("", f"## {item.title}", "")
            yield from lines_of(item.children, config)
        elif item.is_page:
            text = Path(config.docs_dir, item.file.src_uri).read_text(encoding="utf-8")
            yield f"- [{item.title}]({item.canonical_url or item.url}): {first_sentence(text)}"


def first_sentence(page: str) -> str:
    """Return the first sentence of a page, without links and emphasis."""
    paragraphs = [part for part in page.split("\n\n") if not part.startswith(NO_PROSE)]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraphs[0].split()))
    return re.split(r"(?<=[.!?]) ", plain.replace("**", ""))[0].rstrip(":")
