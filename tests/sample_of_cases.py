"""`--sample SEED`: leave out long tests, and most cases of tests with many, drawn by the seed.

`bash tests/run.sh` draws a new seed and prints it. `bash tests/run.sh all` runs every case.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

FRACTION = 5
"""A test keeps at least one of so many cases."""


def sampled(items: Sequence[pytest.Item], seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return (kept, left out) items; long tests are left out.

    Which cases a test keeps depends only on the seed and its name, so that the processes of
    pytest-xdist, and a later run of a few files, choose the same.
    """
    by_test: dict[str, list[pytest.Item]] = defaultdict(list)
    left_out = {item.nodeid for item in items if item.get_closest_marker("long")}
    for item in items:
        by_test[item.nodeid.partition("[")[0]].append(item)
    for test, cases in by_test.items():
        count = -(-len(cases) // FRACTION)
        if count < len(cases):
            names = sorted(case.nodeid for case in cases)
            chosen = random.Random(f"{seed} {test}").sample(names, count)
            left_out |= {*names} - {*chosen}
    return (
        [item for item in items if item.nodeid not in left_out],
        [item for item in items if item.nodeid in left_out],
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", metavar="SEED", help="run only some cases of each test")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--sample")
    if seed is not None:
        items[:], left_out = sampled(items, seed)
        config.hook.pytest_deselected(items=left_out)
