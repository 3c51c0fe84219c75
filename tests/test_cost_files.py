"""Costs in the cache folder: files, broken ones, and what they are kept under."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch

from specdec_triton.engine import cost_files as module
from specdec_triton.engine.cost_files import fingerprint, load, save
from specdec_triton.engine.costs import CostModel

GRID = {(1, 0): 0.040, (1, 2): 0.044, (4, 0): 0.050, (4, 8): 0.064}
KEY = {"target": {"sizes": {"hidden_size": 64}}, "threads": 2}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_saved_is_loaded(cache_folder):
    model = CostModel(GRID, {1: 0.001, 4: 0.002})
    assert load(KEY) is None
    save(model, KEY)
    loaded = load(KEY, device="meta")
    assert (loaded.target, loaded.draft) == (model.target, model.draft)
    assert loaded.curve(2).target.device.type == "meta"
    assert load(KEY | {"threads": 1}) is None
    save(CostModel({(1, 0): 0.5}, {}), KEY)
    assert (load(KEY).target, load(KEY).draft) == ({(1, 0): 0.5}, {})
    (path,) = cache_folder.rglob("*.*")
    assert json.loads(path.read_text())["key"] == KEY


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b'{"target": [[1, 1, 0.5]', id="cut-off"),
        pytest.param(b"\xff\xfe\x00", id="no-text"),
        pytest.param(b"[]", id="a-list"),
        pytest.param(b'{"target": []}', id="no-draft"),
        pytest.param(b'{"target": [[1, 0.5]], "draft": []}', id="short-row"),
        pytest.param(b'{"target": [[1, 1, "fast"]], "draft": []}', id="a-word"),
        pytest.param(b'{"target": [[1, 1, -0.5]], "draft": []}', id="negative"),
        pytest.param(b'{"target": [[1, 1, NaN]], "draft": []}', id="nan"),
        pytest.param(b'{"target": [[0, 1, 0.5]], "draft": []}', id="no-requests"),
        pytest.param(b'{"target": [[1, -1, 0.5]], "draft": []}', id="fewer-than-no-drafts"),
        pytest.param(b'{"target": [[1.5, 1, 0.5]], "draft": []}', id="half-a-request"),
        pytest.param(b'{"target": [[[1], 1, 0.5]], "draft": []}', id="nested"),
        pytest.param(b'{"target": [[1, 1, 0.5]], "draft": [[1, Infinity]]}', id="infinite-draft"),
        pytest.param(b'{"target": [[1, 1, 0.5]], "draft": null}', id="null"),
    ],
)
def test_a_broken_file_is_no_file(content, cache_folder):
    save(CostModel(GRID, {}), KEY)
    (path,) = cache_folder.rglob("*.json")
    path.write_bytes(content)
    assert load(KEY) is None
    save(CostModel(GRID, {}), KEY)
    assert load(KEY).target == GRID


def test_a_folder_that_cannot_be_written_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    save(CostModel(GRID, {}), KEY)
    assert load(KEY) is None


def test_an_interrupted_write_leaves_the_old_file(monkeypatch):
    save(CostModel(GRID, {}), KEY)

    def fail(*paths):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    save(CostModel({(1, 0): 0.5}, {}), KEY)
    assert load(KEY).target == GRID


def fake_adapter(hidden=64, dtype=torch.float32, optimized=False):
    from transformers import LlamaConfig

    model = torch.nn.Linear(hidden, 8, dtype=dtype)
    model._specdec_optimized = optimized
    return SimpleNamespace(model=model, config=LlamaConfig(hidden_size=hidden), dtype=dtype, device=torch.device("cpu"))


def test_the_fingerprint_tells_apart_what_costs_differently(monkeypatch):
    keys = [
        fingerprint(fake_adapter(), exact=True),
        fingerprint(fake_adapter(128), exact=True),
        fingerprint(fake_adapter(dtype=torch.bfloat16), exact=True),
        fingerprint(fake_adapter(optimized=True), exact=True),
        fingerprint(fake_adapter(), exact=False),
        fingerprint(fake_adapter(), fake_adapter(32), exact=True),
        fingerprint(fake_adapter(), fake_adapter(96), exact=True),
        fingerprint(fake_adapter(), "heads", exact=True),
    ]
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    keys.append(fingerprint(fake_adapter(), exact=True))
    monkeypatch.undo()
    monkeypatch.setattr(module, "device_name", lambda device: "another")
    keys.append(fingerprint(fake_adapter(), exact=True))
    monkeypatch.undo()
    texts = [json.dumps(key, sort_keys=True) for key in keys]
    assert len(set(texts)) == len(texts)
    assert json.dumps(fingerprint(fake_adapter(), exact=True), sort_keys=True) == texts[0]
