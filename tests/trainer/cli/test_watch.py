"""`verl-like watch`: the report of a live run, over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.trainer.tools.report.report_runs import make_run, metrics_of
from trainer.cli.watch import main, server_of
from verl_like.errors import ConfigError


def test_the_page_follows_a_run(tmp_path: Path, figures: None) -> None:
    folder = tmp_path / "run"
    with server_of(folder, 0, 2.5) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"

        with pytest.raises(HTTPError, match="503") as not_begun:
            urlopen(url, timeout=60)
        assert b"is not a folder" in not_begun.value.read()

        make_run(folder, 3)
        page = urlopen(url, timeout=60).read().decode()
        assert re.search(r"steps</span><b>3</b>", page)
        assert "location.reload(); }, 2500" in re.sub(r"\s+", " ", page)
        assert urlopen(url, timeout=60).read().decode() == page

        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_of(4)) + "\n")
        assert re.search(r"steps</span><b>4</b>", urlopen(url, timeout=60).read().decode())
        server.shutdown()


def test_remote_folders_are_rejected() -> None:
    with pytest.raises(ConfigError, match="watch reads local folders"):
        main(["s3://bucket/run"])
