"""Train the small pi0.5 by flow matching on the collected shards.

With t=1 noise and t=0 actions: x_t = t * noise + (1 - t) * actions, and the network learns the velocity noise - actions.
Half of the chunks start with some actions given clean, at their own time t=0, and without loss on them: the same weights
then continue a chunk whose first actions are already committed, as real-time chunking asks.

Shape legend: N observations, B rows of a batch, K draws of noise a row, H action horizon, A action width.
Usage: python recipes/metaworld/train.py --demos out/metaworld/demos --out out/metaworld/train --minutes 4
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_pi05 import ACTION_DIM, SIZES, build_net, build_tokenizer, encode_prompts, lerobot_config, normalizer, statistics
from torch import Tensor

from stretto.evals.metaworld import INSTRUCTIONS
from stretto.models.pi0_config import Pi0Config
from stretto.models.pi0_net import Condition, Pi0Net, PrefixKV

ARRAYS = ("images", "states", "chunks", "prompts")


@dataclass(frozen=True)
class Demos:
    """All demonstrations on the training device."""

    images_NCSS3: Tensor
    tokens_NL: Tensor
    counts_N: Tensor
    actions_NHA: Tensor
    """Normalised."""


def load_demos(folders: Sequence[Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return images, states, chunks and prompt indices of all shards, in the order of their names."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.npz"))]
    if not paths:
        raise SystemExit(f"no shards in {[str(f) for f in folders]}: run collect.py first")
    shards = [np.load(path) for path in paths]
    images, states, chunks, prompts = (
        np.concatenate([s[k] for s in shards]) for k in ("images", "states", "chunks", "prompts")
    )
    return images, states, chunks, prompts


def augment(images_BCSS3: Tensor, shift: int) -> Tensor:
    """Return float pixels in [-1, 1], each picture moved by up to `shift` pixels and with its own light."""
    batch, cameras, size = images_BCSS3.shape[:3]
    device = images_BCSS3.device
    moved = torch.randint(-shift, shift + 1, (2, batch, cameras, 1), device=device) + torch.arange(size, device=device)
    rows, columns = moved.clamp_(0, size - 1)
    b = torch.arange(batch, device=device)[:, None, None, None]
    c = torch.arange(cameras, device=device)[None, :, None, None]
    pixels = images_BCSS3[b, c, rows[..., :, None], columns[..., None, :]].float() / 127.5 - 1.0
    light = torch.rand(2, batch, cameras, 1, 1, 1, device=device) * 2.0 - 1.0
    return (pixels * (1.0 + 0.15 * light[0]) + 0.1 * light[1]).clamp_(-1.0, 1.0)


def prefix_of(net: Pi0Net, images_BCSS3: Tensor, tokens_BL: Tensor, counts_B: Tensor, draws: int) -> PrefixKV:
    """Run vision and prefix once; each row's keys and values are then read by `draws` suffixes."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def keep(layer: int, k_BPKd: Tensor, v_BPKd: Tensor) -> None:
        keys.append(k_BPKd)
        values.append(v_BPKd)

    seen = torch.ones(images_BCSS3.shape[:2], dtype=torch.bool, device=images_BCSS3.device)
    layout = net.prefix_layout(seen, counts_B, tokens_BL.shape[1])
    net.prefix(net.vision(images_BCSS3), tokens_BL, layout, keep)
    slots = torch.arange(len(tokens_BL), device=tokens_BL.device).repeat_interleave(draws)
    places = (x.repeat_interleave(draws, 0) for x in (layout.mask_BP, layout.length_B, layout.start_B))
    return PrefixKV(torch.stack(keys, 1), torch.stack(values, 1), slots, *places)


def flow_loss(net: Pi0Net, demos: Demos, rows_B: Tensor, draws: int, max_delay: int, shift: int) -> Tensor:
    """Return the mean squared error of the velocity over the actions that are not given."""
    prefix = prefix_of(net, augment(demos.images_NCSS3[rows_B], shift), demos.tokens_NL[rows_B], demos.counts_N[rows_B], draws)
    actions = demos.actions_NHA[rows_B].repeat_interleave(draws, 0)
    count, horizon, _ = actions.shape
    device = actions.device
    # Beta(1.5, 1) by its inverse distribution function: most training goes to the noisy end.
    t = torch.rand(count, device=device) ** (1 / 1.5) * 0.999 + 0.001
    delay = torch.randint(1, max_delay + 1, (count,), device=device) * (torch.rand(count, device=device) < 0.5)
    given = torch.arange(horizon, device=device) < delay[:, None]
    noise = torch.randn_like(actions)
    x = torch.where(given[..., None], actions, t[:, None, None] * noise + (1 - t[:, None, None]) * actions)
    # One line a row for its t, and a last one for t=0, which the given actions point to.
    table = net.time(torch.cat((t, t.new_zeros(1)))).table
    lines = torch.where(given, count, torch.arange(count, device=device)[:, None])
    velocity = net.velocity(x, Condition(table, lines), prefix)
    error = (velocity.float() - (noise - actions)).square().mean(-1)
    return (error * ~given).sum() / (~given).sum()


@torch.no_grad()
def sample_actions(net: Pi0Net, images_BCSS3: Tensor, tokens_BL: Tensor, counts_B: Tensor, noise_BHA: Tensor) -> Tensor:
    """Return normalised action chunks [B, H, A] by Euler steps, plainly and without the runtime."""
    prefix = prefix_of(net, images_BCSS3, tokens_BL, counts_B, 1)
    x, steps = noise_BHA, net.config.denoise_steps
    for i in range(steps):
        t = torch.full((len(x),), 1.0 - i / steps, device=x.device)
        x = x - net.velocity(x, net.time(t), prefix).float() / steps
    return x


class Average:
    """Exponential moving average of all weights, kept in place."""

    def __init__(self, net: Pi0Net, decay: float) -> None:
        self.live, self.decay = list(net.parameters()), decay
        self.mean = [p.detach().clone() for p in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], 1.0 - decay)

    @torch.no_grad()
    def store(self) -> None:
        """Put the averages into the network."""
        for p, mean in zip(self.live, self.mean, strict=True):
            p.copy_(mean)


def schedule(progress: float, warmup: float = 0.03) -> float:
    """Return the share of the top learning rate: a linear start, then half a cosine down to 2 %."""
    if progress < warmup:
        return progress / warmup + 1e-3
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def fit(net: Pi0Net, demos: Demos, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train until `steps` or `minutes` are over, whichever comes first; leave the averaged weights in the network."""
    device = demos.tokens_NL.device
    decayed = [p for p in net.parameters() if p.dim() == 2]
    plain = [p for p in net.parameters() if p.dim() != 2]
    groups = [{"params": decayed, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    average, history = Average(net, 0.999), []
    started, last, total = time.monotonic(), 0, torch.zeros((), device=device)
    limit_s = options.minutes * 60
    for step in range(options.steps):
        progress = max(step / options.steps, (time.monotonic() - started) / limit_s)
        if progress >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(progress)
        rows = torch.randint(len(demos.counts_N), (options.batch,), device=device)
        with half_precision(device):
            loss = flow_loss(net, demos, rows, options.draws, options.max_delay, options.shift)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        average.update(step)
        total += loss.detach()
        if (step + 1) % options.log_every == 0 or step + 1 == options.steps:
            elapsed = time.monotonic() - started
            history.append({"step": step + 1, "loss": float(total) / (step + 1 - last), "seconds": elapsed})
            total.zero_()
            last = step + 1
            print(
                f"step {step + 1}: loss {history[-1]['loss']:.4f}, {(step + 1) / elapsed:.1f} steps/s, {elapsed:.0f} s",
                flush=True,
            )
    average.store()
    net.refresh()
    return history


def half_precision(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


Stats = dict[str, dict[str, np.ndarray]]


def prepare(options: argparse.Namespace, stats: Stats | None) -> tuple[dict[str, Any], Stats, Demos]:
    """Read the shards, write config, statistics and tokenizer to the output folder, and move everything to the device.

    A network that goes on learning keeps the statistics that it began with.
    """
    out = Path(options.out)
    images, states, chunks, prompts = load_demos([Path(folder) for folder in options.demos])
    if stats is None:
        stats = {"observation.state": statistics(states), "action": statistics(chunks.reshape(-1, chunks.shape[-1]))}
    tokenizer = build_tokenizer(out / "tokenizer.json")
    texts: Sequence[str] = tuple(INSTRUCTIONS.values())
    tokens, counts = encode_prompts(tokenizer, [texts[i] for i in prompts], states, stats["observation.state"])
    raw = lerobot_config(options.size, images.shape[2], chunks.shape[1], tokenizer.vocabulary, options.max_delay)
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    np.savez(out / "stats.npz", **{f"{f}.{k}": v for f, found in stats.items() for k, v in found.items()})
    actions = normalizer("action", stats["action"], ACTION_DIM).normalize(chunks)
    device = torch.device(options.device)
    on_device = (torch.from_numpy(x).to(device) for x in (images, actions.astype(np.float32)))
    images_on, actions_on = on_device
    print(f"{len(images)} observations, {images.nbytes / 1e9:.2f} GB of pictures, prompts of up to {int(counts.max())} tokens")
    return raw, stats, Demos(images_on, tokens.to(device), counts.to(device), actions_on)


def train(options: argparse.Namespace, before: tuple[Pi0Net, Stats] | None = None) -> tuple[Pi0Net, Stats]:
    """Run the whole training; the result is `weights.pt` beside the files of `prepare`."""
    raw, stats, demos = prepare(options, before[1] if before else None)
    net = before[0] if before else build_net(Pi0Config.from_lerobot(raw), options.seed).to(options.device)
    print(f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f} M weights on {options.device}", flush=True)
    history = fit(net, demos, options)
    out = Path(options.out)
    torch.save(net.state_dict(), out / "weights.pt")
    (out / "losses.json").write_text(json.dumps(history, indent=1) + "\n")
    return net, stats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cuda = torch.cuda.is_available()
    parser.add_argument("--demos", nargs="+", default=["out/metaworld/demos"])
    parser.add_argument("--out", default="out/metaworld/train")
    parser.add_argument("--size", default="small", choices=sorted(SIZES))
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--minutes", type=float, default=4.0, help="stop after this long; the learning rate follows")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--draws", type=int, default=4, help="draws of noise for each observation of a batch")
    parser.add_argument("--max-delay", type=int, default=8, help="most actions given clean at the start of a chunk")
    parser.add_argument("--shift", type=int, default=2, help="augmentation: pixels")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
