"""Where each tensor of a pi0 or pi0.5 checkpoint goes, and seeded random weights of true shapes.

Canonical names are those that openpi's converter and LeRobot write today.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from stretto.core.weights import WeightMap
from stretto.models.pi0_net import GemmaBlock, Pi0Net
from stretto.models.pi0_vision import VisionBlock

ROOT = "paligemma_with_expert."
PALIGEMMA = f"{ROOT}paligemma."
VISION = f"{PALIGEMMA}model.vision_tower.vision_model."
LANGUAGE = f"{PALIGEMMA}model.language_model."
EXPERT = f"{ROOT}gemma_expert.model."
EMBED = f"{LANGUAGE}embed_tokens.weight"
RENAMES = (
    # transformers before 4.52 had no `model` level; later ones dropped `vision_model`.
    (f"{PALIGEMMA}language_model.model.", LANGUAGE),
    (f"{PALIGEMMA}language_model.lm_head.", f"{PALIGEMMA}lm_head."),
    (f"{PALIGEMMA}vision_tower.vision_model.", VISION),
    (f"{PALIGEMMA}multi_modal_projector.", f"{PALIGEMMA}model.multi_modal_projector."),
    (f"{PALIGEMMA}model.vision_tower.embeddings.", f"{VISION}embeddings."),
    (f"{PALIGEMMA}model.vision_tower.encoder.", f"{VISION}encoder."),
    (f"{PALIGEMMA}model.vision_tower.post_layernorm.", f"{VISION}post_layernorm."),
)


@torch.no_grad()
def weight_map(net: Pi0Net) -> WeightMap:
    """Return the map from checkpoint names to views of the network's live storage."""
    views = {name: view.detach() for name, view in _all_views(net)}
    last = net.config.language.depth - 1
    dead = rf"{_escaped(LANGUAGE)}layers\.{last}\.(self_attn\.[qo]_proj|mlp\.\w+|post_attention_layernorm)\.weight"
    unused = (
        dead,
        rf"{_escaped(LANGUAGE)}norm\.weight",
        rf"{_escaped(ROOT)}gemma_expert\.(lm_head|model\.embed_tokens)\.weight",
        rf"{_escaped(ROOT)}.*(rotary_emb\.inv_freq|embeddings\.position_ids)",
    )
    tied = {f"{PALIGEMMA}lm_head.weight": EMBED}
    return WeightMap(views, tied, unused, prefixes=("model.", "model.model."), renames=RENAMES)


@torch.no_grad()
def randomize(net: Pi0Net, seed: int) -> None:
    """Fill every weight at a scale that keeps activations sane. Each tensor has its own sub-seed, so order is no matter.

    Reproducible on one type of device.
    """
    for name, view in weight_map(net).views.items():
        generator = torch.Generator(device=view.device)
        generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.randn(view.shape, generator=generator, device=view.device, dtype=view.dtype)
        spread, centre = _scale(name, view)
        view.copy_(values.mul_(spread).add_(centre))


def _scale(name: str, view: Tensor) -> tuple[float, float]:
    """Return standard deviation and mean for one tensor."""
    if name.endswith(".dense.bias"):
        return 0.0, 0.0
    if view.dim() == 1:
        return 0.02, 1.0 if name.startswith(VISION) and "norm" in name and name.endswith("weight") else 0.0
    if name == EMBED or "position_embedding" in name:
        return 0.02, 0.0
    # Flat attention and small gates would let actions ignore images and prompt, and then hide errors in either.
    gain = 1.4 if name.endswith(("q_proj.weight", "k_proj.weight")) else 1.0 if name.endswith(".dense.weight") else 0.7
    return gain / (view.numel() // view.shape[0]) ** 0.5, 0.0


def _all_views(net: Pi0Net) -> Iterator[tuple[str, Tensor]]:
    yield from _vision(net)
    yield EMBED, net.prefix.embed
    for i, block in enumerate(net.prefix.blocks):
        assert isinstance(block, GemmaBlock)
        at = f"{LANGUAGE}layers.{i}."
        yield from _gemma(at, block)
        yield f"{at}input_layernorm.weight", net.prefix.attention_norms[i]
        if i < len(net.prefix.mlp_norms):
            yield f"{at}post_attention_layernorm.weight", net.prefix.mlp_norms[i]
    for i, block in enumerate(net.expert.blocks):
        assert isinstance(block, GemmaBlock)
        yield from _gemma(f"{EXPERT}layers.{i}.", block)
    yield from _expert_norms(net)
    yield from _named("action_in_proj.", net.action_in)
    yield from _named("action_out_proj.", net.action_out)
    if net.config.family == "pi05":
        yield from _named("time_mlp_in.", net.time.mlp_in)
        yield from _named("time_mlp_out.", net.time.mlp_out)
    else:
        yield from _named("state_proj.", net.state_in)
        yield from _named("action_time_mlp_in.", net.time.mlp_in)
        yield from _named("action_time_mlp_out.", net.time_mlp_out)


def _vision(net: Pi0Net) -> Iterator[tuple[str, Tensor]]:
    tower = net.vision
    at = f"{VISION}embeddings."
    yield f"{at}patch_embedding.weight", tower.embed.weight.view(-1, 3, tower.patch, tower.patch)
    yield f"{at}patch_embedding.bias", tower.embed.bias
    yield f"{at}position_embedding.weight", tower.position
    for i, block in enumerate(tower.blocks):
        assert isinstance(block, VisionBlock)
        at = f"{VISION}encoder.layers.{i}."
        yield from _named(f"{at}layer_norm1.", block.norm1)
        yield from _named(f"{at}layer_norm2.", block.norm2)
        yield from ((f"{at}self_attn.{n}", v) for n, v in block.qkv.views().items())
        yield from _named(f"{at}self_attn.out_proj.", block.out)
        yield from _named(f"{at}mlp.fc1.", block.up)
        yield from _named(f"{at}mlp.fc2.", block.down)
    yield from _named(f"{VISION}post_layernorm.", tower.norm)
    yield from _named(f"{PALIGEMMA}model.multi_modal_projector.linear.", tower.project)


def _gemma(at: str, block: GemmaBlock) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{at}self_attn.{n}", v) for n, v in block.qkv.views().items())
    if block.heads:
        yield from _named(f"{at}self_attn.o_proj.", block.out)
        yield from ((f"{at}mlp.{n}", v) for n, v in block.gate_up.views().items())
        yield from _named(f"{at}mlp.down_proj.", block.down)


def _expert_norms(net: Pi0Net) -> Iterator[tuple[str, Tensor]]:
    """Yield the norms in the order in which a forward meets them, as the table numbers them."""
    names = [f"layers.{i}.{part}" for i in range(net.config.expert.depth) for part in ("input", "post_attention")]
    names = [f"{EXPERT}{n}_layernorm" for n in names] + [f"{EXPERT}norm"]
    for i, name in enumerate(names):
        if net.config.family == "pi05":
            dense = net.time.dense.views()
            yield f"{name}.dense.weight", dense[f"{i}.weight"]
            yield f"{name}.dense.bias", dense[f"{i}.bias"]
        else:
            yield f"{name}.weight", net.norms[i]


def _named(at: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{at}{n}", p) for n, p in module.named_parameters(recurse=False))


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")
