"""The tables in the docs match the code; `python docs/make_tables.py` writes them."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
import yaml

from tests import ROOT
from tests.conftest import load
from tests.workers.models import vision
from tests.workers.models.test_image_input import PADDED
from trainer.config.keys import leaf_keys
from trainer.ppo.recipe import PPO
from workers.config import OptimConfig

FAMILIES = "actor|critic|distillation|global_seqlen|perf|response|response_length|rollout_corr"
FAMILIES += (
    "|agents|async|dynamic_sampling|pf_ppo|ref|reward|score|selection|timing_s|train|training|val"
)
NAMES = re.compile(rf'"((?:{FAMILIES})/\w+(?:/\w+)?)"')


@pytest.mark.parametrize("name", load("docs/make_tables.py").TABLES)
def test_a_table_is_current(name: str) -> None:
    path, text = load("docs/make_tables.py").filled(name)
    assert path.read_text(encoding="utf-8") == text, "run: python docs/make_tables.py"


def test_the_table_of_models_has_the_layouts_of_rows_with_images() -> None:
    layouts: dict[str, list[str]] = {}
    for family in vision.FAMILIES:
        layout = "padded" if family in PADDED else "packed"
        layouts.setdefault(family.partition("+")[0], []).append(layout)
    table = {model_type: " or ".join(names) for model_type, names in layouts.items()}
    assert load("docs/model_table.py").IMAGES == table


def test_the_keys_that_are_usually_set_exist_on_their_page() -> None:
    tables = load("docs/make_tables.py")
    known = {key.name for key in leaf_keys(PPO.schema)}
    known |= {f"critic.optim.{key.name}" for key in leaf_keys(OptimConfig)}
    assert tables.USUAL_KEYS.keys() == tables.KEY_PAGES.keys()
    for page, names in tables.USUAL_KEYS.items():
        assert [name for name in names if name not in known] == []
        assert {tables.key_page(name.rpartition(".")[0]) for name in names} == {page}


def test_every_metric_of_the_code_has_a_meaning() -> None:
    """Names that the code writes as one literal; families such as `reward/<name>` are patterns."""
    groups = yaml.safe_load(
        (ROOT / "trainer/tools/report/metrics.yaml").read_text(encoding="utf-8")
    )
    known = [name for metrics in groups.values() for name in metrics]
    code = [path for room in ("trainer", "workers") for path in (ROOT / room).rglob("*.py")]
    names = {name for path in code for name in NAMES.findall(path.read_text(encoding="utf-8"))}
    families = {"critic/score", "critic/rewards", "critic/advantages", "critic/returns"}
    families |= {"agents/num_call", "agents/num_turns", "agents/ended", "agents/by_environment"}
    unknown = names - families - {"critic/values"}
    assert [name for name in unknown if not any(fnmatchcase(name, key) for key in known)] == []


def test_the_site_gets_code_blocks_that_it_can_show() -> None:
    hooks = load("docs/hooks.py")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert "\n```python no-run\n" in "".join(pages)
    assert not re.search(r"^```\S+ ", "\n".join(map(hooks.on_page_markdown, pages)), re.M)


def test_every_key_has_an_anchor_with_its_whole_name() -> None:
    hooks = load("docs/hooks.py")
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    text = "\n".join(map(hooks.on_page_markdown, pages))
    anchors = {*re.findall(r"\{#([\w.]+)\}", text)}
    shared = {
        name
        for line in re.findall("The same keys are in (.*)", text)
        for name in re.findall("`(.*?)`", line)
    }
    names = {key.name for key in leaf_keys(PPO.schema) if key.section not in shared}
    assert names | {"model.path", "async_training.sampler"} <= anchors
    links = {*re.findall(r"^\[`[\w.]+`\]\(#([\w.]+)\)", text, re.M)}
    assert len(links) > 20
    assert links <= anchors


def test_keys_are_tables_of_type_default_and_meaning() -> None:
    page = (ROOT / "docs" / "keys_run.md").read_text(encoding="utf-8")
    section = page.partition("## `trainer`")[2].partition("## ")[0]
    assert "Key|Type|Default|Meaning" in section
    assert re.search(r"^`total_training_steps`↻\|int\|`null`\|Steps of the run", section, re.M)
    assert re.search(r"^\[`trainer.n_gpus_per_node`\]\(#trainer\)\|You have", page, re.M)
