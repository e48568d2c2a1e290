"""The Wan block as plain torch writes it, compiled by `torch.compile`: the yardstick beside ours.

Same weights, same full rings, keys of the prompt at hand, cuDNN's attention ahead of FlashAttention 2 (about twice as fast
on Hopper). Rotation is in fp32 by a table made once; modulation in fp32, as the reference has it.

Shape legend: N tokens, D width, H heads, d head size, X keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention
from wan_rows import VISITS, WINDOW, LocalRows

from stretto.layers.kernels.chunk_attention import prefer_fastest_attention
from stretto.layers.kernels.rope_3d import rope_3d_turns_reference
from stretto.models.wan import WanModel, build
from stretto.models.wan_config import SPECS, WanConfig, tiny_config
from stretto.models.wan_net import Block

CHUNK = 3 * WINDOW


def _turned(x_NHd: Tensor, cos_NP: Tensor, sin_NP: Tensor) -> Tensor:
    even, odd = x_NHd.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_NP[:, None], sin_NP[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_NHd.dtype)


def _attend(q_NHd: Tensor, k_XHd: Tensor, v_XHd: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHd, k_XHd, v_XHd))
    return scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


def _modulated(h_ND: Tensor, shift_D: Tensor, scale_D: Tensor, eps: float) -> Tensor:
    return (layer_norm(h_ND.float(), h_ND.shape[-1:], eps=eps) * (1.0 + scale_D) + shift_D).to(h_ND.dtype)


def _gated(h_ND: Tensor, y_ND: Tensor, gate_D: Tensor) -> Tensor:
    return (h_ND.float() + y_ND.float() * gate_D).to(h_ND.dtype)


def stock_block(
    h_ND: Tensor,
    block: Block,
    e_6D: Tensor,
    cos_NP: Tensor,
    sin_NP: Tensor,
    k_ring_XHd: Tensor,
    v_ring_XHd: Tensor,
    cross_k_THd: Tensor,
    cross_v_THd: Tensor,
    at: int,
) -> Tensor:
    """Return h after the block; writes its keys and values from ring token `at` on."""
    own, cross, heads = block.self_attn, block.cross_attn, k_ring_XHd.shape[1]
    shift1, scale1, gate1, shift2, scale2, gate2 = e_6D.unbind(0)
    tokens, width = h_ND.shape
    q, k, v = linear(_modulated(h_ND, shift1, scale1, block.eps), own.qkv.weight, own.qkv.bias).chunk(3, dim=-1)
    q, k = (rms_norm(x, (width,), norm.weight, block.eps) for x, norm in ((q, own.norm_q), (k, own.norm_k)))
    q, k, v = (x.unflatten(-1, (heads, -1)) for x in (q, k, v))
    k_ring_XHd[at : at + tokens] = _turned(k, cos_NP, sin_NP)
    v_ring_XHd[at : at + tokens] = v
    y = linear(_attend(_turned(q, cos_NP, sin_NP), k_ring_XHd, v_ring_XHd), own.o.weight, own.o.bias)
    h = _gated(h_ND, y, gate1)
    x = layer_norm(h, (width,), block.norm3.weight, block.norm3.bias, block.eps)
    q = rms_norm(linear(x, cross.q.weight, cross.q.bias), (width,), cross.norm_q.weight, block.eps)
    h = h + linear(_attend(q.unflatten(-1, (heads, -1)), cross_k_THd, cross_v_THd), cross.o.weight, cross.o.bias)
    first, second = (block.ffn[name] for name in ("0", "2"))
    x = gelu(linear(_modulated(h, shift2, scale2, block.eps), first.weight, first.bias), approximate="tanh")  # type: ignore[arg-type]
    return _gated(h, linear(x, second.weight, second.bias), gate2)  # type: ignore[arg-type]


def stock_of(
    model: WanModel, rows: LocalRows, *, compiled: bool, visits: int = VISITS
) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """Return what runs the stock block `visits` times on the first of the rows, and what runs it once and returns h."""
    config, stage = model.config, model.stages["block.0"]
    block = stage.block  # type: ignore[attr-defined]
    frame = CHUNK * config.frames_per_chunk
    device = model.device
    if device.type == "cuda":
        prefer_fastest_attention()
    starts = frame + torch.arange(config.frames_per_chunk, device=device)
    turns = rope_3d_turns_reference(starts, (1, *config.grid), config.head_dim, theta=config.rope_theta)
    cos, sin = turns.flatten(0, 1).unbind(1)
    ring = [rows.arena(name)[1].flatten(0, 1) for name in (stage.k, stage.v)]  # type: ignore[attr-defined]
    prompt = [rows.arena(name)[1] for name in (stage.cross_k, stage.cross_v)]  # type: ignore[attr-defined]
    page = stage.clocks.ring.page(frame)  # type: ignore[attr-defined]
    one = torch.compile(stock_block, fullgraph=True, dynamic=False) if compiled else stock_block

    def once() -> Tensor:
        args = (block, block.table_L6D[0], cos, sin, *ring, *prompt, page * config.tokens_per_frame)
        out: Tensor = one(rows.get("h")[0], *args)
        return out

    def run() -> None:
        for _ in range(visits):
            once()

    return run, once


def sized(name: str, frames: int) -> WanConfig:
    config = replace(tiny_config(), sink_frames=0) if name == "wan-tiny" else SPECS[name]
    return replace(config, blocks=1, frames_per_chunk=frames, window_frames=WINDOW)


def main() -> None:
    """Compile the stock block of one model, so that a later process finds it in the cache on disk."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("frames", type=int)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        model = build(sized(args.model, args.frames), device=device)
        model.randomize(seed=0)
        stock_of(model, LocalRows(model, 1, CHUNK), compiled=True)[1]()


if __name__ == "__main__":
    main()
