"""pi0.5 as plain torch writes it, its blocks compiled by `torch.compile`, in a graph: the yardstick beside ours.

    python benchmarks/pi05_stock.py --out stock.json            # batches of 1, 4, 8 and 32
    python benchmarks/pi05_stock.py --small                     # a tiny model on the CPU, and how far it is from ours

Same weights, route and measurement as `pi05_table.py`; no kernel of ours. Streams are in bf16, norms and rotation in fp32 as
the reference has them, attention is torch's own with a mask, keys of the prefix are read from where the prefix left them. One
compiled function serves all layers of a part, so compiling takes seconds; `--ahead` compiles all batch sizes side by side, in
processes of their own, whose results this one then finds on disk.

Shape legend: B rows, T tokens, D width, H heads, K key/value heads, d head size, P prefix tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from nvidia_smi import Chip
from pi05_route import Runner, build, measure
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, scaled_dot_product_attention

from stretto.deploy.provenance import provenance
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.patchify import patchify_reference
from stretto.layers.kernels.prefix_layout import PrefixLayout, prefix_layout_reference
from stretto.layers.kernels.rope import rope_reference, rotary_angles, rotate, split_qkv
from stretto.models.pi0_net import Condition, Pi0Net, PrefixArena

Turns = tuple[Tensor, Tensor]
"""Cosine and sine of the tokens' angles."""


def attended(q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, mask: Tensor | None) -> Tensor:
    """Return [B, T, H d]; all query heads share their group's keys."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BTKd, v_BTKd))
    if k.shape[1] != q.shape[1]:
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


def rms(x: Tensor, scale: Tensor, shift: Tensor | float, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1.0 + scale) + shift).to(x.dtype)


def geglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(gelu(gate, approximate="tanh") * up, down)


def vision_block(h: Tensor, heads: int, eps: float, *weights: Tensor) -> Tensor:
    w1, b1, qkv, qkv_b, out, out_b, w2, b2, up, up_b, down, down_b = weights
    x = linear(layer_norm(h, h.shape[-1:], w1, b1, eps), qkv, qkv_b)
    q, k, v = x.view(*x.shape[:-1], 3, heads, -1).unbind(2)
    h = h + linear(attended(q, k, v, None), out, out_b)
    x = layer_norm(h, h.shape[-1:], w2, b2, eps)
    return h + linear(gelu(linear(x, up, up_b), approximate="tanh"), down, down_b)


def prefix_block(
    h: Tensor, heads: int, head_dim: int, eps: float, turns: Turns, mask: Tensor, *weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (h, keys, values)."""
    w1, qkv, out, w2, gate_up, down = weights
    q, k, v = split_qkv(linear(rms(h, w1, 0.0, eps), qkv), heads, qkv.shape[0] // head_dim // 2 - heads // 2, head_dim)
    q, k = rotate(q, *turns), rotate(k, *turns)
    h = h + linear(attended(q, k, v, mask), out)
    return h + geglu(rms(h, w2, 0.0, eps), gate_up, down), k, v


def expert_block(
    h: Tensor,
    lines: tuple[Tensor, Tensor],
    heads: int,
    head_dim: int,
    eps: float,
    turns: Turns,
    mask: Tensor,
    kv_SPKd: tuple[Tensor, Tensor],
    slots_B: Tensor,
    *weights: Tensor,
) -> Tensor:
    qkv, out, gate_up, down = weights
    (scale1, shift1, gate1), (scale2, shift2, gate2) = (line[:, None].chunk(3, dim=-1) for line in lines)
    x = linear(rms(h, scale1, shift1, eps), qkv)
    q, k, v = split_qkv(x, heads, qkv.shape[0] // head_dim // 2 - heads // 2, head_dim)
    q, k = rotate(q, *turns), rotate(k, *turns)
    keys, values = (torch.cat((kept[slots_B], own), dim=1) for kept, own in zip(kv_SPKd, (k, v), strict=True))
    h = (h + gate1 * linear(attended(q, keys, values, mask), out)).to(h.dtype)
    return (h + gate2 * geglu(rms(h, scale2, shift2, eps), gate_up, down)).to(h.dtype)


class StockNet:
    """A view of the network's weights that runs on torch's operators alone; for `Pi0Model.run_on`."""

    def __init__(self, net: Pi0Net, *, compiled: bool) -> None:
        self.net, self.config, self.dtype, self.table = net, net.config, net.dtype, net.table
        blocks = (vision_block, prefix_block, expert_block)
        self._vision_block, self._prefix_block, self._expert_block = (
            torch.compile(block, fullgraph=True, dynamic=False) if compiled else block for block in blocks
        )
        norms = [(b.norm1, b.norm2) for b in net.vision.blocks]
        self._norms = [[p.to(self.dtype) for n in pair for p in (n.weight, n.bias)] for pair in norms]

    def prefix_layout(self, image_mask_BC: Tensor, token_count_B: Tensor, prompt: int) -> PrefixLayout:
        return prefix_layout_reference(image_mask_BC, token_count_B, self.config.tokens_per_camera, prompt)

    def tabled(self, steps_B: Tensor) -> Condition:
        return self.net.tabled(steps_B)

    def vision(self, images_BCRR3: Tensor) -> Tensor:
        tower = self.net.vision
        patches = patchify_reference(images_BCRR3.flatten(0, 1), tower.patch, dtype=self.dtype)
        h = linear(patches, tower.embed.weight, tower.embed.bias) + tower.position.to(self.dtype)
        for b, (w1, b1, w2, b2) in zip(tower.blocks, self._norms, strict=True):
            first = w1, b1, b.qkv.weight, b.qkv.bias, b.out.weight, b.out.bias
            h = self._vision_block(h, b.heads, tower.eps, *first, w2, b2, b.up.weight, b.up.bias, b.down.weight, b.down.bias)
        last = tower.norm
        x = layer_norm(h, h.shape[-1:], last.weight.to(self.dtype), last.bias.to(self.dtype), tower.eps)
        return tower.project(x).reshape(images_BCRR3.shape[0], -1, tower.project.out_features)

    def prefix(self, image_tokens_BID: Tensor, tokens_BL: Tensor, layout: PrefixLayout, arena: PrefixArena) -> None:
        prefix, dims, eps = self.net.prefix, self.config.language, self.net.prefix.eps
        text = embedding(tokens_BL, prefix.embed) * math.sqrt(dims.width)
        h = torch.cat((image_tokens_BID, text), dim=1)
        positions_BP = layout.positions_BP
        turns = rotary_angles(positions_BP, dims.head_dim, self.config.rope_theta)
        mask = layout.mask_BP[:, None, None]
        *blocks, last = prefix.blocks
        for i, b in enumerate(blocks):
            w1, w2 = prefix.attention_norms[i], prefix.mlp_norms[i]
            weights = w1, b.qkv.weight, b.out.weight, w2, b.gate_up.weight, b.down.weight
            h, k, v = self._prefix_block(h, dims.heads, dims.head_dim, eps, turns, mask, *weights)
            arena(i, k, v)
        qkv = linear(rms(h, prefix.attention_norms[len(blocks)], 0.0, eps), last.qkv.weight)
        arena(len(blocks), *rope_reference(qkv, positions_BP, **last.rotary)[1:])

    def velocity(self, x_BHA: Tensor, condition: Condition, prefix: PrefixKV, state_BW: Tensor | None = None) -> Tensor:
        net, dims, eps = self.net, self.config.expert, self.config.norm_eps
        h = net.action_in(x_BHA.float()).to(self.dtype)
        lines = condition.table[condition.rows]
        tokens = torch.arange(h.shape[1], device=h.device)
        turns = rotary_angles(prefix.suffix_start_B[:, None] + tokens, dims.head_dim, self.config.rope_theta)
        own = prefix.mask_BP.new_ones(h.shape[0], h.shape[1])
        mask = torch.cat((prefix.mask_BP, own), dim=1)[:, None, None]
        for i, b in enumerate(net.expert.layers()):
            kv, weights = (prefix.k_SNPKd[:, i], prefix.v_SNPKd[:, i]), (b.qkv, b.out, b.gate_up, b.down)
            h = self._expert_block(
                h, (lines[:, 2 * i], lines[:, 2 * i + 1]), dims.heads, dims.head_dim, eps, turns, mask, kv, prefix.slots_B,
                *(layer.weight for layer in weights),
            )  # fmt: skip
        scale, shift, _ = lines[:, -1][:, None].chunk(3, dim=-1)
        return net.action_out(rms(h.float(), scale, shift, eps))


def apart(model: Any, device: torch.device, compiled: bool) -> float:
    """Return the relative difference between the actions of the stock route and of ours on the same inputs."""
    found = []
    for net in (model.module, StockNet(model.module, compiled=compiled)):
        model.run_on(net)
        runner = Runner(model, device, 1, model.buckets[0].lengths[-1])
        runner.launch(model.route.whole, "eager")(0)
        found.append(runner.bench.arenas["x"][1].float().clone())
    return float((found[1] - found[0]).norm() / found[0].norm())


def ahead(args: argparse.Namespace) -> None:
    """Compile for every batch size in a process of its own, all at once."""
    flags = ["--device", args.device, *(["--small"] if args.small else []), "--compile-only"]
    made = [subprocess.Popen([sys.executable, __file__, *flags, "--batches", str(batch)]) for batch in args.batches]
    for process in made:
        process.wait()


def rows(args: argparse.Namespace, device: torch.device, batches: Sequence[int]) -> None:
    begun, chip = time.monotonic(), Chip()
    model = build(device, args.small)
    prompt, name_of = model.buckets[0].lengths[-1], "B={}, prefix 968{}".format
    result: dict[str, Any] = {**provenance(device), "rows": {}}

    def keep(name: str, run: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() - begun > args.budget:
            row: dict[str, Any] = {"skipped": "no time left"}
        else:
            try:
                row = run()
            except Exception as error:  # one case must not cost the others their figures
                row = {"error": f"{type(error).__name__}: {error}"[:600]}
        result["rows"][name] = row
        print(f"{time.monotonic() - begun:6.1f} s  stock torch: {name}  {json.dumps(row)}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    with torch.inference_mode():
        for compiled in (True, False):
            model.run_on(StockNet(model.module, compiled=compiled and device.type == "cuda"))  # type: ignore[arg-type]
            # Not compiled, the smallest batch is enough to see what compiling gains.
            for batch in batches if compiled else batches[:1]:
                if args.compile_only:
                    Runner(model, device, batch, prompt).launch(model.route.whole)
                    continue
                name = name_of(batch, ", compiled" if compiled else "")
                keep(name, lambda b=batch: measure(Runner(model, device, b, prompt), chip, sustained=b == 32, share=0.3))  # type: ignore[misc]
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            if args.compile_only:
                break
        if not args.compile_only:
            keep("relative difference of actions", lambda: {"of_ours": apart(model, device, compiled=device.type == "cuda")})
    chip.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 8, 32])
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; no row begins after them")
    parser.add_argument("--ahead", action="store_true", help="compile for all batch sizes side by side first")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.small |= args.device == "cpu"
    if args.ahead:
        ahead(args)
        if args.compile_only:
            return
    rows(args, torch.device(args.device), args.batches)


if __name__ == "__main__":
    main()
