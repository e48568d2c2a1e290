"""Which tokens of a prefix there are, and where they stand: images as their cameras are, then a prompt of so many tokens.

Shape legend: B rows, C cameras, P prefix tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl, warps_of


class PrefixLayout(NamedTuple):
    mask_BP: Tensor
    """bool: the tokens that there are."""
    length_B: Tensor
    """int32: of images, masked ones too, and prompt."""
    start_B: Tensor
    """int32: how many tokens there are, which is the position of what follows."""
    positions_BP: Tensor
    """int32: of the tokens that there are, from 0 on."""


def prefix_layout_reference(image_mask_BC: Tensor, token_count_B: Tensor, tokens_per_camera: int, prompt: int) -> PrefixLayout:
    """Return the layout for prompts padded to `prompt` tokens."""
    images_BI = image_mask_BC.repeat_interleave(tokens_per_camera, dim=1)
    text_BL = torch.arange(prompt, device=token_count_B.device) < token_count_B[:, None]
    mask_BP = torch.cat((images_BI, text_BL), dim=1)
    length_B, start_B = token_count_B.int() + images_BI.shape[1], mask_BP.sum(-1, dtype=torch.int32)
    return PrefixLayout(mask_BP, length_B, start_B, mask_BP.cumsum(-1, dtype=torch.int32) - 1)


@jit
def _kernel(
    image_mask: tl.tensor,
    token_count: tl.tensor,
    mask: tl.tensor,
    length: tl.tensor,
    start: tl.tensor,
    positions: tl.tensor,
    each: tl.tensor,
    prompt: tl.tensor,
    CAMERAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    images = CAMERAS * each
    tokens, count = images + prompt, tl.load(token_count + row).to(tl.int32)
    seen = tl.load(image_mask + row * CAMERAS + at // each, mask=at < images, other=0).to(tl.int32)
    there = tl.where(at < images, seen, (at - images < count).to(tl.int32))
    there = tl.where(at < tokens, there, 0)
    place = row * tokens + at
    tl.store(mask + place, there.to(tl.int1), mask=at < tokens)
    tl.store(positions + place, tl.cumsum(there, 0) - 1, mask=at < tokens)
    tl.store(length + row, count + images)
    tl.store(start + row, tl.sum(there, 0))


def prefix_layout_triton(image_mask_BC: Tensor, token_count_B: Tensor, tokens_per_camera: int, prompt: int) -> PrefixLayout:
    batch, cameras = image_mask_BC.shape
    tokens, device = cameras * tokens_per_camera + prompt, image_mask_BC.device
    mask_BP = torch.empty(batch, tokens, dtype=torch.bool, device=device)
    length_B, start_B = torch.empty(2, batch, dtype=torch.int32, device=device)
    positions_BP = torch.empty(batch, tokens, dtype=torch.int32, device=device)
    block = block_of(tokens)
    _kernel[(batch,)](
        image_mask_BC.contiguous(), token_count_B.contiguous(), mask_BP, length_B, start_B, positions_BP,
        tokens_per_camera, prompt, CAMERAS=cameras, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return PrefixLayout(mask_BP, length_B, start_B, positions_BP)


prefix_layout = FusedOp(prefix_layout_reference, prefix_layout_triton)
