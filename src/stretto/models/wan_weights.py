"""How Wan weights are named: in the original checkpoints, by diffusers, and in the `.pt` files of distilled models."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stretto.core.errors import CheckpointError
from stretto.core.weights import WeightMap
from stretto.layers.linear import FusedLinear
from stretto.models.wan_net import WanNet

Layout = Literal["original", "diffusers"]

PREFIXES = ("model.", "model.diffusion_model.", "generator.", "generator.model.", "transformer.")
WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)\.")
GENERATORS = ("generator_ema", "generator")

# Original name -> diffusers' name, of whole names or of what follows `blocks.{i}.`.
OUTSIDE = (
    ("patch_embedding", "patch_embedding"),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1"),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2"),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1"),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2"),
    ("time_projection.1", "condition_embedder.time_proj"),
    ("head.head", "proj_out"),
    ("head.modulation", "scale_shift_table"),
)
INSIDE = (
    ("self_attn.norm_q", "attn1.norm_q"),
    ("self_attn.norm_k", "attn1.norm_k"),
    ("self_attn.q", "attn1.to_q"),
    ("self_attn.k", "attn1.to_k"),
    ("self_attn.v", "attn1.to_v"),
    ("self_attn.o", "attn1.to_out.0"),
    ("cross_attn.norm_q", "attn2.norm_q"),
    ("cross_attn.norm_k", "attn2.norm_k"),
    ("cross_attn.q", "attn2.to_q"),
    ("cross_attn.k", "attn2.to_k"),
    ("cross_attn.v", "attn2.to_v"),
    ("cross_attn.o", "attn2.to_out.0"),
    ("norm3", "norm2"),
    ("ffn.0", "ffn.net.0.proj"),
    ("ffn.2", "ffn.net.2"),
    ("modulation", "scale_shift_table"),
)


def diffusers_name(original: str) -> str:
    """Return diffusers' name of an original tensor name; names without a twin there are returned as they are."""
    block = re.match(r"blocks\.\d+\.", original)
    start = block.group() if block else ""
    rest = original[len(start) :]
    for ours, theirs in INSIDE if block else OUTSIDE:
        if rest == ours or rest.startswith(ours + "."):
            return start + theirs + rest[len(ours) :]
    return original


def views(net: WanNet) -> dict[str, Tensor]:
    """Return every weight under its original name and in its original shape; fused storage is cut into its parts."""
    named: dict[str, Tensor] = {}
    fused = {name: module for name, module in net.named_modules() if isinstance(module, FusedLinear)}
    for name, module in fused.items():
        parent = name.rpartition(".")[0]
        named |= {f"{parent}.{part}": view for part, view in module.views().items()}
    for name, parameter in net.named_parameters():
        if name.rpartition(".")[0] not in fused:
            named[name] = parameter.data
    conv = named["patch_embedding.weight"]
    patch = net.config.patch
    named["patch_embedding.weight"] = conv.view(net.config.width, net.config.channels, 1, patch, patch)
    return {name: view.detach() for name, view in named.items()}


def weight_map(net: WanNet, *, actions: bool = True) -> WeightMap:
    """Return the map of a network: original names, with diffusers' names as their twins.

    Args:
        actions: include the action adapters; a base checkpoint has none, and without them they stay as they are.
    """
    named = views(net)
    here = {n: v for n, v in named.items() if not v.is_meta and (actions or ".actions." not in f".{n}")}
    elsewhere = [n for n in named if n not in here]
    return WeightMap(
        views=here,
        tied={diffusers_name(n): n for n in here if diffusers_name(n) != n},
        unused=tuple(re.escape(n) for n in {*elsewhere, *(diffusers_name(n) for n in elsewhere)}),
        prefixes=PREFIXES,
    )


class BaseWeights:
    """The weights of a network without its action adapters, which are set to do nothing."""

    def __init__(self, net: WanNet, refresh: Callable[[], None]) -> None:
        self._net, self._refresh = net, refresh

    def weight_map(self) -> WeightMap:
        return weight_map(self._net, actions=False)

    @torch.no_grad()
    def refresh(self) -> None:
        for name, parameter in self._net.named_parameters():
            if ".actions." in f".{name}" and not parameter.is_meta:
                parameter.zero_()
        self._refresh()


def detect(names: Iterable[str]) -> Layout:
    """Tell the layout of a checkpoint from its tensor names.

    Raises:
        CheckpointError: if it is neither, or of a variant that this family does not run.
    """
    found = set(names)
    if any("img_emb." in n or "image_embedder." in n or "add_k_proj" in n or "k_img" in n for n in found):
        raise CheckpointError(
            "an image-to-video checkpoint with CLIP image attention (img_emb, k_img); expected text-to-video or TI2V"
        )
    if any(n.endswith("self_attn.q.weight") for n in found):
        return "original"
    if any(n.endswith("attn1.to_q.weight") for n in found):
        return "diffusers"
    raise CheckpointError(f"not a Wan transformer: no self_attn.q or attn1.to_q among {sorted(found)[:5]} ...")


def read_pt(path: str | Path, *, ema: bool = True) -> dict[str, Tensor]:
    """Return the generator's tensors of a Self-Forcing or CausVid `.pt`, mapped from the file, under original names.

    Args:
        ema: take the averaged weights where the file has them.

    Raises:
        CheckpointError: if the file is absent, damaged, needs unpickling of objects, or holds no generator.
    """
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as e:
        raise CheckpointError(f"{path}: holds objects that are not tensors; only plain weights are read") from e
    except (OSError, RuntimeError, ValueError, EOFError) as e:
        raise CheckpointError(f"{path}: cannot be read ({e})") from e
    return plain_names(_generator(held, str(path), ema))


def plain_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without the prefixes and wrapper names that training code leaves in."""
    unwrapped = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    prefix = WeightMap({}, prefixes=PREFIXES)
    return {prefix.canonical(name): tensor for name, tensor in unwrapped.items()}


def _generator(held: object, path: str, ema: bool) -> dict[str, Tensor]:
    if not isinstance(held, dict):
        raise CheckpointError(f"{path}: holds a {type(held).__name__}, expected a dict of tensors")
    order = GENERATORS if ema else GENERATORS[::-1]
    chosen = next((held[name] for name in order if name in held), held)
    if not isinstance(chosen, dict) or not all(isinstance(t, Tensor) for t in chosen.values()):
        raise CheckpointError(f"{path}: no generator among {sorted(map(str, held))[:5]}")
    return chosen
