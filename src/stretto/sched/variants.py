"""The same model with other chunks: what a refused stream is offered beside fewer steps and a longer promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stretto.sched.admission import Variant
from stretto.sched.hardware import hardware
from stretto.sched.measured import shipped
from stretto.sched.profile import Profile
from stretto.sched.shapes import WORLDS, computed

_SAME = ("window_frames", "pixels", "dtype", "decoder", "precision")


def other_chunks(profile: Profile, shape: Mapping[str, float]) -> tuple[dict[str, Profile], list[Variant]]:
    """Return profiles of a world model with fewer and with more latent frames a chunk, by name, and what to offer of them.

    Measured ones for a measured profile; else half and twice as many frames of the computed `shape`.
    """
    frames = profile.facts.get("frames_per_chunk", 0)
    if not frames:
        return {}, []
    if profile.provenance.source == "measured":
        found = [p.with_steps(profile.steps) for p in shipped() if _alike(p, profile)]
    elif profile.model in WORLDS:
        most = profile.facts["window_frames"]
        sizes = [n for n in (frames // 2, 2 * frames) if 1 <= n <= most]
        here = hardware(profile.device)
        found = [computed(profile.model, here, **{**shape, "frames_per_chunk": n, "window_frames": most}) for n in sizes]
    else:
        return {}, []
    profiles, offered = {}, []
    for other in sorted(found, key=lambda p: int(p.facts["frames_per_chunk"])):
        count = other.facts["frames_per_chunk"]
        name, factor = f"{profile.model}, {count} frames", _pixel_frames(other) / _pixel_frames(profile)
        if count != frames and name not in profiles:
            profiles[name] = replace(other, model=name)
            offered.append(Variant(f"chunks of {count} latent frame{'s' if count > 1 else ''}", name, factor))
    return profiles, offered


def _alike(other: Profile, profile: Profile) -> bool:
    same = all(other.facts.get(name) == profile.facts.get(name) for name in _SAME)
    return (other.model, other.device) == (profile.model, profile.device) and same


def _pixel_frames(profile: Profile) -> float:
    return float(profile.facts["pixel_frames_per_chunk"])
