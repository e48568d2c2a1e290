"""The end of a denoise step: from velocity patches to the clean latent that they imply, and to the next noise level.

Shape legend: B rows, F frames, C channels, h w latent height and width, p patch size, N = F (h / p) (w / p) tokens, P = p p C
values of a patch, S denoise steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import cdiv, jit, tl
from stretto.layers.noise import FIRST, GOLDEN, SECOND, UNIT, normal, step_keys

BLOCK = 512


def unpatchify(patches_BNP: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Return [B, F, C, h, w] from patches whose channel is the fastest axis; `grid` is the patches of a frame."""
    rows, columns = grid
    channels = patches_BNP.shape[2] // patch**2
    cut = patches_BNP.reshape(len(patches_BNP), -1, rows, columns, patch, patch, channels)
    return cut.permute(0, 1, 6, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


def renoise_reference(
    patches_BNP: Tensor, x_BFChw: Tensor, place_B3: Tensor, steps_B: Tensor, sigmas_2S: Tensor, patch: int
) -> Tensor:
    """Return x at the next noise level: (1 - next) x0 + next * fresh noise, with x0 = x - sigma * velocity. In fp32.

    `sigmas_2S` (fp64) holds a step's sigma and the next one's. Of a place the second number is the key of the chunk's noise,
    the third how many frames are given: those stay as they are. Steps and places are int64.
    """
    _, frames, _, height, width = x_BFChw.shape
    v = unpatchify(patches_BNP, (height // patch, width // patch), patch).float()
    sigma, following = sigmas_2S[:, steps_B, None, None, None, None]
    x0 = x_BFChw.double() - sigma * v.double()
    # The noise of the step to come: step 0 has the noise that the chunk began with.
    fresh = normal(step_keys(place_B3[:, 1], steps_B + 1), tuple(x_BFChw.shape[1:]))
    renoised = ((1.0 - following) * x0 + following * fresh.double()).float()
    given_BF = torch.arange(frames, device=x_BFChw.device) < place_B3[:, 2:]
    return torch.where(given_BF[:, :, None, None, None], x_BFChw, renoised)


@jit
def _mixed(x: tl.tensor, FIRST: tl.constexpr, SECOND: tl.constexpr) -> tl.tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@jit
def _renoise_kernel(
    patches: tl.tensor,
    x: tl.tensor,
    place: tl.tensor,
    steps: tl.tensor,
    sigmas: tl.tensor,
    out: tl.tensor,
    place_b: tl.tensor,
    count: tl.tensor,
    half: tl.tensor,
    channels: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    denoise_steps: tl.tensor,
    PATCH: tl.constexpr,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    UNIT: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    b = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    step = tl.load(steps + b)
    key = _mixed(tl.load(place + b * place_b + 1) * 31 + GOLDEN + (step + 1), FIRST, SECOND)
    bits = _mixed(key + (tl.where(at < half, at, at - half).to(tl.int64) + 1) * GOLDEN, FIRST, SECOND)
    low, high = bits & 0xFFFFFFFF, (bits >> 32) & 0xFFFFFFFF
    radius = tl.sqrt(-2.0 * tl.log((low.to(tl.float64) + 0.5) * UNIT))
    angle = (high.to(tl.float64) + 0.5) * TURN
    fresh = (radius * tl.where(at < half, tl.cos(angle), tl.sin(angle))).to(tl.float32).to(tl.float64)

    column, row = at % width, at // width % height
    channel, frame = at // (width * height) % channels, at // (width * height * channels)
    token = (frame * (height // PATCH) + row // PATCH) * (width // PATCH) + column // PATCH
    within = ((row % PATCH) * PATCH + column % PATCH) * channels + channel
    base = b.to(tl.int64) * count
    v = tl.load(patches + base + token * (PATCH * PATCH * channels) + within, mask=inside, other=0.0).to(tl.float64)
    was = tl.load(x + base + at, mask=inside, other=0.0)
    sigma, following = tl.load(sigmas + step), tl.load(sigmas + denoise_steps + step)
    made = (1.0 - following) * (was.to(tl.float64) - sigma * v) + following * fresh
    given = frame < tl.load(place + b * place_b + 2)
    tl.store(out + base + at, tl.where(given, was, made.to(tl.float32)), mask=inside)


def renoise_triton(
    patches_BNP: Tensor, x_BFChw: Tensor, place_B3: Tensor, steps_B: Tensor, sigmas_2S: Tensor, patch: int
) -> Tensor:
    batch, frames, channels, height, width = x_BFChw.shape
    count = frames * channels * height * width
    out = torch.empty(x_BFChw.shape, dtype=torch.float32, device=x_BFChw.device)
    _renoise_kernel[(cdiv(count, BLOCK), batch)](
        patches_BNP.contiguous(), x_BFChw.contiguous(), place_B3, steps_B.contiguous(), sigmas_2S.contiguous(), out,
        place_B3.stride(0), count, (count + 1) // 2, channels, height, width, sigmas_2S.shape[1],
        PATCH=patch, GOLDEN=GOLDEN, FIRST=FIRST, SECOND=SECOND, UNIT=UNIT, TURN=2.0 * math.pi * UNIT,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _dense_places(patches_BNP: Tensor, x_BFChw: Tensor, place_B3: Tensor, *_: object) -> bool:
    return place_B3.stride(1) == 1 and place_B3.dtype == torch.int64 and x_BFChw.dtype == torch.float32


renoise = FusedOp(renoise_reference, renoise_triton, supports=_dense_places)
