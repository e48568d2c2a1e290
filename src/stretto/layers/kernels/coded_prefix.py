"""Attention of a prefix to itself in e4m3: a pass rotates and codes what the QKV product made, a kernel in CUDA C++ attends.

The arena gets keys and values as ever, for those who read them later. Codes are of values times fixed numbers, `by`, under
which no value that the product can make is cut (`code_factors`): e4m3 is a floating-point format, so a finer scale gains
nothing. Where the kernel is not to be had, attention is computed in the network's own precision and its result is coded.

Shape legend: B rows, T tokens, C = (H + 2) d columns of q, k and v side by side, H query heads that share one key/value head,
d head size, S arena slots, P arena tokens, W as in layers/cuda/coded_prefix.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.layers.cuda.coded_prefix import HEAD, ORDER, RUN, Codes, attention_for
from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.attention import attention_reference
from stretto.layers.kernels.coded_attention import prefix_attention_fp8
from stretto.layers.kernels.fp8_activation import E4M3, E4M3_MAX, fp8_chip, store_fp8, to_fp8_reference
from stretto.layers.kernels.language import cdiv, jit, tl
from stretto.layers.kernels.linear_rope import rotary_table
from stretto.layers.kernels.rotate_write import rotate_write, rotate_write_reference
from stretto.layers.tuning import Config, Key, Tunable, tuned

OP = "coded_prefix_attention"
ROUNDED = 1.2
"""How much larger than exact products those of rounded factors may be."""


def code_factors(weight_CD: Tensor, gain_D: Tensor, heads: int, kv_heads: int = 1) -> Tensor:
    """Return what q, k and v of rows with a norm of sqrt(D), times `gain_D`, may be multiplied by: three numbers in fp32.

    A row of the weight has no larger product than its own norm times that of its input; rotation mixes two of them.
    """
    rows_C = torch.linalg.vector_norm(weight_CD.float() * gain_D.float(), dim=-1) * weight_CD.shape[1] ** 0.5
    head_dim = weight_CD.shape[0] // (heads + 2 * kv_heads)
    widths = [n * head_dim for n in (heads, kv_heads, kv_heads)]
    largest = torch.stack([part.amax() for part in rows_C.split(widths)])
    mixed = torch.tensor([2**0.5, 2**0.5, 1.0], device=largest.device)
    return E4M3_MAX / (largest * mixed * ROUNDED).clamp_min(1e-6)


def coded_prefix_attention_reference(
    qkv_BTC: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    mask_BT: Tensor,
    by: Tensor,
    multiplier: Tensor,
    *,
    heads: int,
) -> Tensor:
    """Return attention of coded queries, keys and values, [B, T, H, d], as `to_fp8` writes it.

    Rotated keys, and values, are written to the first T tokens of the rows' slots. `table` is of `rotary_table`, `by` of
    `code_factors`.
    """
    q = rotate_write_reference(qkv_BTC, table, k_arena_SPKd, v_arena_SPKd, slots_B, heads=heads)
    k, v = (arena[slots_B, : qkv_BTC.shape[1]] for arena in (k_arena_SPKd, v_arena_SPKd))
    coded = [to_fp8_reference(x, by[i]).float() / by[i] for i, x in enumerate((q, k, v))]
    attended = attention_reference(*coded, key_mask_BN=mask_BT)
    return to_fp8_reference(attended.to(qkv_BTC.dtype), multiplier)


@jit
def _rotate_code_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    slots: tl.tensor,
    by: tl.tensor,
    k_out: tl.tensor,
    v_out: tl.tensor,
    q_codes: tl.tensor,
    k_codes: tl.tensor,
    v_codes: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    k_slot: tl.tensor,
    k_t: tl.tensor,
    v_slot: tl.tensor,
    v_t: tl.tensor,
    HEADS: tl.constexpr,
    EACH: tl.constexpr,
    HALF: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """Rotate and code a run of tokens: EACH query heads, or keys, or values."""
    first, part, b = tl.program_id(0) * RUN, tl.program_id(1), tl.program_id(2).to(tl.int64)
    dtype: tl.constexpr = k_out.dtype.element_ty
    t = first + tl.arange(0, RUN)
    inside = (t < tokens)[:, None]
    row = (b * tokens + t)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    source = qkv + row * ((HEADS + 2) * 2 * HALF)
    page = tl.load(slots + b).to(tl.int64)
    if part <= HEADS // EACH:
        c = tl.load(cos + row * HALF + pair, mask=inside, other=0.0)
        s = tl.load(sin + row * HALF + pair, mask=inside, other=0.0)
        for i in range(EACH if part < HEADS // EACH else 1):
            head = part * EACH + i
            low = tl.load(source + head * 2 * HALF + pair, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(source + head * 2 * HALF + HALF + pair, mask=inside, other=0.0).to(tl.float32)
            # Rounded as the arena has them, so that codes are of what is kept.
            new_low, new_high = (low * c - high * s).to(dtype), (high * c + low * s).to(dtype)
            if head < HEADS:
                at = q_codes + (row * HEADS + head) * (2 * HALF) + pair
                store_fp8(at, new_low.to(tl.float32), by, inside)
                store_fp8(at + HALF, new_high.to(tl.float32), by, inside)
            else:
                kept = k_out + page * k_slot + t.to(tl.int64)[:, None] * k_t + pair
                tl.store(kept, new_low, mask=inside)
                tl.store(kept + HALF, new_high, mask=inside)
                at = k_codes + row * (2 * HALF) + pair
                store_fp8(at, new_low.to(tl.float32), by + 1, inside)
                store_fp8(at + HALF, new_high.to(tl.float32), by + 1, inside)
    else:
        channel = tl.arange(0, 2 * HALF)[None, :]
        value = tl.load(source + (HEADS + 1) * 2 * HALF + channel, mask=inside, other=0.0)
        tl.store(v_out + page * v_slot + t.to(tl.int64)[:, None] * v_t + channel, value.to(dtype), mask=inside)
        # The same in the order of keys that the kernel in CUDA C++ has, token by token side by side.
        place = tl.arange(0, RUN)
        key = first + place // 16 * 16 + place % 16 // 4 * 2 + place % 2 + place % 4 // 2 * 8
        line = (b * tokens + key)[:, None] * ((HEADS + 2) * 2 * HALF) + (HEADS + 1) * 2 * HALF + channel
        value = tl.load(qkv + line, mask=(key < tokens)[:, None], other=0.0).to(dtype).to(tl.float32)
        at = v_codes + (b * (2 * HALF) + channel) * width + first + place[:, None]
        store_fp8(at, value, by + 2, (place < RUN)[:, None])


def rotate_code(
    qkv_BTC: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    by: Tensor,
    heads: int,
) -> Codes:
    """Rotate a product, write its keys and values to the arena, and return the codes of all of it."""
    batch, tokens, columns = qkv_BTC.shape
    head_dim, width = columns // (heads + 2), cdiv(tokens, RUN) * RUN
    q = torch.empty(batch, tokens, heads, head_dim, dtype=E4M3, device=qkv_BTC.device)
    k = torch.empty(batch, tokens, head_dim, dtype=E4M3, device=qkv_BTC.device)
    v = torch.empty(batch, head_dim, width, dtype=E4M3, device=qkv_BTC.device)
    each = 2 if heads % 2 == 0 else 1
    _rotate_code_kernel[(width // RUN, heads // each + 2, batch)](
        qkv_BTC, *table, slots_B, by, k_arena_SPKd, v_arena_SPKd, q, k, v, tokens, width,
        *k_arena_SPKd.stride()[:2], *v_arena_SPKd.stride()[:2],
        HEADS=heads, EACH=each, HALF=head_dim // 2, RUN=RUN, num_warps=8,
    )  # fmt: skip
    return Codes(q, k, v, by)


def coded_prefix_attention_cuda(
    qkv_BTC: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    mask_BT: Tensor,
    by: Tensor,
    multiplier: Tensor,
    *,
    heads: int,
) -> Tensor:
    batch, tokens, columns = qkv_BTC.shape
    key = (batch, tokens, heads, columns // (heads + 2))
    choice = tuned(OP, key, E4M3, qkv_BTC.device)
    arenas = (k_arena_SPKd, v_arena_SPKd)
    return run(choice, qkv_BTC, table, *arenas, slots_B, mask_BT, by, multiplier, heads)


def run(
    choice: Config | None,
    qkv_BTC: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    mask_BT: Tensor,
    by: Tensor,
    multiplier: Tensor,
    heads: int,
) -> Tensor:
    """Run one choice; None is the rule. `plain` attends in the network's own precision."""
    launches = attention_for(qkv_BTC) if qkv_BTC.shape[-1] == (heads + 2) * HEAD else None
    if launches is None or (choice is not None and choice["impl"] == "plain"):
        q = rotate_write(qkv_BTC, table, k_arena_SPKd, v_arena_SPKd, slots_B, heads=heads)
        k, v = (x[:, : qkv_BTC.shape[1]] for x in (k_arena_SPKd, v_arena_SPKd))
        return prefix_attention_fp8(q, k, v, slots_B, mask_BT, multiplier)
    codes = rotate_code(qkv_BTC, table, k_arena_SPKd, v_arena_SPKd, slots_B, by, heads)
    return launches.run(codes, mask_BT, multiplier, groups=None if choice is None else int(choice["groups"]))


def _supports(
    qkv_BTC: Tensor,
    table: tuple[Tensor, Tensor],
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    mask_BT: Tensor,
    *_: Tensor,
    **__: int,
) -> bool:
    arenas = (k_arena_SPKd, v_arena_SPKd)
    dense = all(a.stride(-1) == 1 and a.shape[2] == 1 and a.dtype == qkv_BTC.dtype for a in arenas)
    whole = qkv_BTC.is_contiguous() and all(x.is_contiguous() for x in table) and mask_BT.stride(-1) == 1
    return dense and whole and fp8_chip(qkv_BTC.device)


def _candidates(key: Key) -> list[Config]:
    return [{"impl": "plain"}, *({"impl": "cuda", "groups": n} for n in (1, 2))]


def _inputs(key: Key, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    batch, tokens, heads, head_dim = key
    qkv = torch.randn(batch, tokens, (heads + 2) * head_dim, dtype=torch.bfloat16, device=device)
    arena = torch.zeros(2, batch, 2, tokens, 1, head_dim, dtype=torch.bfloat16, device=device)
    positions = torch.arange(tokens, device=device).expand(batch, -1)
    mask = torch.ones(batch, tokens, dtype=torch.bool, device=device)
    by, multiplier = torch.full((3,), 16.0, device=device), torch.full((1,), 100.0, device=device)
    slots = torch.randperm(batch, device=device)
    return qkv, rotary_table(positions, head_dim, 1e4), arena[0][:, 1], arena[1][:, 1], slots, mask, by, multiplier, heads


def in_order(v_BTd: Tensor) -> Tensor:
    """Return the columns of coded values, [B, d, W], as the kernel reads them."""
    batch, tokens, head_dim = v_BTd.shape
    padded = v_BTd.new_zeros(batch, cdiv(tokens, RUN) * RUN, head_dim, dtype=torch.uint8)
    padded[:, :tokens] = v_BTd.view(torch.uint8)
    order = torch.tensor(ORDER, device=v_BTd.device)
    placed = padded.view(batch, -1, len(ORDER), head_dim)[:, :, order].flatten(1, 2)
    return placed.transpose(1, 2).contiguous().view(v_BTd.dtype)


coded_prefix_attention = FusedOp(coded_prefix_attention_reference, coded_prefix_attention_cuda, _supports)
TUNABLES = (Tunable(OP, {"impl": ("cuda", "plain"), "groups": (1, 2)}, _candidates, _inputs, run),)
