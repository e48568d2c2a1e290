"""Describes a checkpoint from its files alone: no weight is read, no device is touched."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from stretto.deploy.checkpoint import open_checkpoint
from stretto.deploy.precision import FILE, Calibration
from stretto.models.pi0 import Pi0Model, build
from stretto.processors.spec import ProcessorSpec
from stretto.processors.stats import Degenerate
from stretto.processors.transforms import Normalize
from stretto.runtime.weights import check_weights

BATCHES = (1, 4, 8, 32)


def describe(
    name: str | Path, *, dtype: str, preset: str | None, tokenizer: Path | None, degenerate: Degenerate
) -> dict[str, Any]:
    """Return everything a user needs to know before serving a checkpoint, as plain JSON values.

    Raises:
        CheckpointError: if a file, a statistic or a tensor is missing, damaged or does not fit, as when it is loaded.
    """
    opened = open_checkpoint(name, preset=preset, tokenizer=tokenizer, degenerate=degenerate)
    processor, config, path = opened.processor, opened.config, opened.path
    spec = processor.spec
    model = build(config, device="meta", dtype=dtype)
    shapes = check_weights(model, path)
    known = set(model.weight_map().views)
    parameters = sum(p.numel() for p in model.module.parameters())
    return {
        "checkpoint": {
            "path": str(path),
            "layout": opened.layout,
            "family": config.family,
            "tensors in the files": len(shapes),
            "tensors the network reads": len(known),
            "parameters in use": f"{parameters / 1e6:,.1f} M",
        },
        "network": asdict(config),
        "processing": {
            "state width": spec.state_dim,
            "action width": spec.action_dim,
            "action horizon": spec.action_horizon,
            "camera slots": list(spec.slots),
            "image size": list(spec.resolution),
            "resize": spec.resizer,
            "state in the prompt": spec.prompt.has_state,
            "token limit": spec.prompt.token_limit,
            "tokenizer": str(processor.tokenizer.source),
            "dimensions held at a constant": list(spec.held),
        },
        "fp8": _fp8(path),
        "statistics": _statistics(spec),
        "observation": processor.observation_schema(),
        "memory": [_memory(model, batch) for batch in BATCHES],
    }


def _fp8(path: Path) -> dict[str, object]:
    """Return what calibration lies beside the checkpoint; whether it is of these weights is checked when they are loaded."""
    if not (path / FILE).is_file():
        return {"calibration": "none; `stretto calibrate` makes one"}
    return Calibration.read(path / FILE).describe()


def _statistics(spec: ProcessorSpec) -> dict[str, dict[str, object]]:
    """Return, by feature, how it is normalised and by which numbers of each dimension."""
    found: dict[str, dict[str, object]] = {}
    norms = [n for step in spec.group.steps if isinstance(step, Normalize) for n in (step.state_stats, step.action_stats)]
    for norm in norms:
        found[norm.feature] = {"mode": norm.mode, "width": norm.width}
        for name, values in norm.statistics().items():
            found[norm.feature][name] = [float(f"{v:.6g}") for v in values]
    return found


def _memory(model: Pi0Model, batch: int) -> dict[str, int]:
    weights = sum(t.numel() * t.element_size() for t in [*model.module.parameters(), *model.module.buffers()])
    slots = 2 * batch + 1
    arena = slots * sum(spec.nbytes for spec in model.values.values())
    return {"batch": batch, "weight_bytes": weights, "arena_bytes": arena, "total_bytes": weights + arena}
