"""The measured profiles that come with the package: `sched/profiles/*.json`, one for each model, device and chunk shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from stretto.sched.profile import Profile
from stretto.sched.shapes import WORLDS


def shipped() -> Iterator[Profile]:
    """Yield all of them, by file name."""
    folder = files("stretto.sched") / "profiles"
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".json"):
            yield Profile.from_json(entry.read_text(encoding="utf-8"))


def find(model: str, device: str, facts: Mapping[str, Any]) -> Profile | None:
    """Return the measured profile of a model on a device kind whose facts are these; None if there is none.

    Facts that are not given may be anything, but the first match of a fixed order is returned.
    """
    for profile in shipped():
        same = all(profile.facts.get(name) == value for name, value in facts.items())
        if (profile.model, profile.device) == (model, device) and same:
            return profile
    return None


def for_shape(model: str, device: str, shape: Mapping[str, float]) -> Profile | None:
    """Return the measured profile at the chunk shape of a scenario, for its number of steps; without a decoder by default.

    The latent frames of a chunk are those asked for, or the model's usual ones. Picture size and window are those of the
    measurement, unless asked for.
    """
    usual = {"frames_per_chunk": WORLDS[model].frames_per_chunk} if model in WORLDS else {}
    wanted: dict[str, Any] = {"decoder": "none", **usual, **shape}
    steps = wanted.pop("steps", None)
    profile = find(model, device, wanted)
    return profile if profile is None or steps is None else profile.with_steps(int(steps))


def shapes_of(model: str, device: str) -> list[str]:
    """List the chunk shapes at which a model was measured, in words."""
    return [describe(p) for p in shipped() if (p.model, p.device) == (model, device)]


def describe(profile: Profile) -> str:
    """Say in one line where a profile's costs come from and at what chunk shape."""
    made, facts = profile.provenance, profile.facts
    words = [made.source if made.source == "computed" else f"{made.source} {made.date} at {made.commit}"]
    if "frames_per_chunk" in facts:
        words.append(f"{facts['frames_per_chunk']} of {facts['window_frames']} latent frames")
    if "tokens" in facts:
        words.append(f"{facts['tokens']} tokens a chunk")
    if "pixels" in facts:
        words.append("x".join(str(n) for n in facts["pixels"]))
    if profile.carry != "none":
        words.append(f"{profile.steps} steps")
    if "decoder" in facts:
        words.append(f"decoder {facts['decoder']}")
    return ", ".join([*words, made.note]) if made.note else ", ".join(words)
