"""Tiny checkpoints of both families, written the way their own tools write them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers

STATE, ACTION = "observation.state", "action"
IMAGE, WRIST, EMPTY = "observation.images.image", "observation.images.image2", "observation.images.empty_camera_0"

CORPUS = """Task: pick up the red block, State: 0 1 2 3 4 5 6 7 8 9 -1;
Action: open the drawer and put the bowl on the plate
abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:-_!?
"""


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small unigram model with PaliGemma's conventions: bos 2, no dummy prefix, single digits, newline as one token."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((CORPUS * 4).splitlines()),
        model_writer=out,
        vocab_size=120,
        hard_vocab_limit=False,
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=["\n"],
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("tokenizer") / "paligemma_tokenizer.model"
    path.write_bytes(out.getvalue())
    return path


@pytest.fixture(scope="session")
def tokenizer_json(sentencepiece_model: Path) -> Path:
    """The same vocabulary as a `tokenizer.json`, with the padding and truncation that such files often carry."""
    sp = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    pieces = [(sp.id_to_piece(i), sp.get_score(i)) for i in range(sp.vocab_size())]
    names = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>"}
    vocabulary = [(names.get(i, piece), score) for i, (piece, score) in enumerate(pieces)]
    tok = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=3))
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.decoder = decoders.Replace("▁", " ")
    tok.add_special_tokens(["<pad>", "<eos>", "<bos>", "<unk>"])
    tok.enable_truncation(8)
    tok.enable_padding(length=8)
    path = sentencepiece_model.parent / "tokenizer.json"
    tok.save(str(path))
    return path


LerobotFolder = Callable[..., Path]
OpenpiFolder = Callable[..., Path]


def lerobot_stats(width: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    low = rng.normal(size=width).astype(np.float32)
    high = low + rng.uniform(0.5, 2, width).astype(np.float32)
    return {
        "mean": (low + high) / 2,
        "std": high - low,
        "min": low - 1,
        "max": high + 1,
        "q01": low,
        "q99": high,
        "q10": low + 0.1,
        "q90": high - 0.1,
        "count": np.array([100.0], np.float32),
    }


def _feature(kind: str, *shape: int) -> dict[str, Any]:
    return {"type": kind, "shape": list(shape)}


@pytest.fixture
def lerobot_folder(tmp_path: Path, tokenizer_json: Path) -> LerobotFolder:
    """Return a writer of LeRobot folders. Hooks change the parsed files before they are written."""

    def write(
        family: str = "pi05",
        *,
        mode: str = "QUANTILES",
        relative: bool = False,
        change_config: Callable[[dict[str, Any]], None] | None = None,
        change_pre: Callable[[dict[str, Any]], None] | None = None,
        change_post: Callable[[dict[str, Any]], None] | None = None,
        change_stats: Callable[[dict[str, np.ndarray]], None] | None = None,
    ) -> Path:
        folder = tmp_path / f"{family}_checkpoint"
        folder.mkdir(exist_ok=True)
        inputs = {
            IMAGE: _feature("VISUAL", 3, 256, 256),
            STATE: _feature("STATE", 8),
            WRIST: _feature("VISUAL", 3, 256, 256),
            EMPTY: _feature("VISUAL", 3, 56, 56),
        }
        outputs = {ACTION: _feature("ACTION", 7)}
        norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
        config = {
            "type": family,
            "input_features": inputs,
            "output_features": outputs,
            "chunk_size": 10,
            "max_state_dim": 32,
            "max_action_dim": 32,
            "empty_cameras": 1,
            "image_resolution": [56, 56],
            "normalization_mapping": norm_map,
        }
        norm_config = {"eps": 1e-8, "features": {**inputs, **outputs}, "norm_map": norm_map}
        prompt = "pi05_prepare_state_tokenizer_processor_step" if family == "pi05" else "pi0_new_line_processor"
        tokenizer_config = {"max_length": 200 if family == "pi05" else 48, "padding_side": "right", "task_key": "task"}
        relative_config = {"enabled": relative, "exclude_joints": ["gripper"], "action_names": [*"xyzabc", "gripper_pos"]}
        normalize = {"registry_name": "normalizer_processor", "config": norm_config, "state_file": "a_step_5.safetensors"}
        pre_steps: list[dict[str, Any]] = [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            {"registry_name": "relative_actions_processor", "config": relative_config},
            normalize,
            {"registry_name": prompt, "config": {}},
            {"registry_name": "tokenizer_processor", "config": tokenizer_config},
            {"registry_name": "device_processor", "config": {"device": "cuda", "float_dtype": None}},
        ]
        post_steps: list[dict[str, Any]] = [
            {"registry_name": "unnormalizer_processor", "config": norm_config, "state_file": "b_step_0.safetensors"},
            {"registry_name": "absolute_actions_processor", "config": {"enabled": relative}},
            {"registry_name": "device_processor", "config": {"device": "cpu"}},
        ]
        pre, post = {"name": "policy_preprocessor", "steps": pre_steps}, {"name": "policy_postprocessor", "steps": post_steps}
        flat = {f"{f}.{k}": v for f, w, s in ((STATE, 8, 1), (ACTION, 7, 2)) for k, v in lerobot_stats(w, s).items()}
        for hook, value in ((change_config, config), (change_pre, pre), (change_post, post), (change_stats, flat)):
            if hook is not None:
                hook(value)  # type: ignore[arg-type]
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "policy_preprocessor.json").write_text(json.dumps(pre))
        (folder / "policy_postprocessor.json").write_text(json.dumps(post))
        for name in ("a_step_5.safetensors", "b_step_0.safetensors"):
            save_file(flat, folder / name)
        (folder / "tokenizer.json").write_text(tokenizer_json.read_text())
        return folder

    return write


@pytest.fixture
def openpi_folder(tmp_path: Path, sentencepiece_model: Path) -> OpenpiFolder:
    """Return a writer of openpi exports whose statistics are as wide as asked."""

    def write(
        *,
        state_dim: int = 8,
        action_dim: int = 7,
        padded: int = 0,
        horizon: int | None = 10,
        change_stats: Callable[[dict[str, Any]], None] | None = None,
    ) -> Path:
        folder = tmp_path / "openpi_checkpoint"
        assets = folder / "assets" / "lab" / "robot"
        assets.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(3)

        def stats(width: int) -> dict[str, list[float]]:
            low, pad = rng.normal(size=width), max(0, padded - width)
            high = low + rng.uniform(0.5, 2, width)
            rows = {"mean": (low + high) / 2, "std": high - low, "q01": low, "q99": high}
            return {k: np.pad(v, (0, pad)).tolist() for k, v in rows.items()}

        table = {"state": stats(state_dim), "actions": stats(action_dim)}
        if change_stats is not None:
            change_stats(table)
        (assets / "norm_stats.json").write_text(json.dumps({"norm_stats": table}))
        if horizon is not None:
            (folder / "config.json").write_text(json.dumps({"action_dim": 32, "action_horizon": horizon}))
        (folder / "paligemma_tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
        return folder

    return write


def libero_observation(seed: int = 0, size: tuple[int, int] = (224, 224)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "observation/image": rng.integers(0, 256, (*size, 3), dtype=np.uint8),
        "observation/wrist_image": rng.integers(0, 256, (*size, 3), dtype=np.uint8),
        "observation/state": rng.normal(size=8),
        "prompt": "pick up the red block",
    }


def lerobot_observation(seed: int = 0, size: tuple[int, int] = (64, 64)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        IMAGE: rng.integers(0, 256, (*size, 3), dtype=np.uint8),
        WRIST: rng.integers(0, 256, (*size, 3), dtype=np.uint8),
        STATE: rng.normal(size=8).astype(np.float32),
        "task": "pick up the red block",
    }


@pytest.fixture
def libero() -> Callable[..., dict[str, Any]]:
    return libero_observation


@pytest.fixture
def lerobot_obs() -> Callable[..., dict[str, Any]]:
    return lerobot_observation
