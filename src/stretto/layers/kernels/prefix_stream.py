"""The residual stream that a prefix begins with: image tokens, then scaled embeddings of the prompt.

Shape legend: B rows, I image tokens, L prompt tokens, P = I + L, V words, D width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.language import block_of, jit, tl, warps_of


def prefix_stream_reference(image_tokens_BID: Tensor, tokens_BL: Tensor, embed_VD: Tensor) -> Tensor:
    """Return [B, P, D] in the dtype of the embeddings, in which they are multiplied by sqrt(D)."""
    text = embedding(tokens_BL, embed_VD) * math.sqrt(embed_VD.shape[1])
    return torch.cat((image_tokens_BID.to(text.dtype), text), dim=1)


@jit
def _prefix_stream_kernel(
    image: tl.tensor,
    tokens: tl.tensor,
    embed: tl.tensor,
    out: tl.tensor,
    image_tokens: tl.tensor,
    text_tokens: tl.tensor,
    width: tl.tensor,
    factor: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if at < image_tokens:
        value = tl.load(image + (row * image_tokens + at) * width + column, mask=inside, other=0.0).to(out.dtype.element_ty)
    else:
        word = tl.load(tokens + row * text_tokens + at - image_tokens).to(tl.int64)
        text = tl.load(embed + word * width + column, mask=inside, other=0.0)
        value = (text.to(tl.float32) * factor).to(out.dtype.element_ty)
    tl.store(out + (row * (image_tokens + text_tokens) + at) * width + column, value, mask=inside)


def prefix_stream_triton(image_tokens_BID: Tensor, tokens_BL: Tensor, embed_VD: Tensor) -> Tensor:
    (batch, image_tokens, width), text_tokens = image_tokens_BID.shape, tokens_BL.shape[1]
    out = torch.empty(batch, image_tokens + text_tokens, width, dtype=embed_VD.dtype, device=image_tokens_BID.device)
    block = block_of(width)
    _prefix_stream_kernel[(image_tokens + text_tokens, batch)](
        image_tokens_BID.contiguous(), tokens_BL.contiguous(), embed_VD, out, image_tokens, text_tokens, width,
        math.sqrt(width), BLOCK=block, num_warps=max(warps_of(block) // 2, 1),
    )  # fmt: skip
    return out


def _supports(image_tokens_BID: Tensor, tokens_BL: Tensor, embed_VD: Tensor) -> bool:
    return embed_VD.is_contiguous()


prefix_stream = FusedOp(prefix_stream_reference, prefix_stream_triton, _supports)
