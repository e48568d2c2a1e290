"""The adapter to vla-eval; the tests of its behaviour need that package."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.core.errors import ConfigError, ObservationError

INSTALLED = importlib.util.find_spec("vla_eval") is not None


@pytest.mark.skipif(INSTALLED, reason="vla-eval is installed")
def test_without_vla_eval_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="pip install vla-eval"):
        importlib.import_module("stretto.evals.vla_eval")


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A toy pi0.5 with fresh weights, in the exported layout."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes" / "metaworld"))
    small, export = importlib.import_module("small_pi05"), importlib.import_module("export")
    tokenizer = small.build_tokenizer(tmp_path / "tokenizer.json")
    raw = small.lerobot_config("toy", 40, 8, tokenizer.vocabulary, 4)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    torch.save(small.build_net(export.Pi0Config.from_lerobot(raw), 0).state_dict(), tmp_path / "weights.pt")
    values = np.linspace(-1, 1, 40).reshape(10, 4)
    stats = {f"{f}.{k}": v for f in ("observation.state", "action") for k, v in small.statistics(values).items()}
    np.savez(tmp_path / "stats.npz", **stats)
    export.export(tmp_path, tmp_path / "exported")
    return str(tmp_path / "exported")


@pytest.mark.skipif(not INSTALLED, reason="needs vla-eval")
def test_a_benchmark_batch_becomes_one_chunk_a_robot(checkpoint: str) -> None:
    from stretto.evals.vla_eval import CAMERAS, StrettoModelServer

    server = StrettoModelServer(checkpoint, device="cpu", dtype="float32", max_batch_size=2)
    picture = np.zeros((64, 64, 3), np.uint8)
    obs = {"images": dict.fromkeys(CAMERAS, picture), "states": np.zeros(4), "task_description": "open the drawer"}
    replies = server.predict_batch([obs, obs], [None, None])
    assert [reply["actions"].shape for reply in replies] == [(8, 4), (8, 4)]
    assert server.chunk_size == 8
    with pytest.raises(ObservationError, match=r"images\.wrist"):
        server.translate({**obs, "images": {"agentview": picture}})
    server.policy.close()
