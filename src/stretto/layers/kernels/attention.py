"""Bidirectional attention with grouped heads: over fresh keys, and over a slot of a KV arena plus fresh keys.

Shape legend: B rows, T query tokens, N keys, H query heads, K key/value heads, d head size, S arena slots, P arena tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels.split_attention import Keys, fits, split_attention


def attention_reference(
    q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, *, key_mask_BN: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attend every query to every key whose mask is set; a row without any valid key gives zeros. Returns [B, T, H, d].

    `scale` defaults to d ** -0.5; `key_mask_BN` is bool or uint8.
    """
    if key_mask_BN is None:
        return _sdpa(q_BTHd, k_BNKd, v_BNKd, None, scale)
    valid_BN = key_mask_BN.bool()
    return _masked(q_BTHd, k_BNKd, v_BNKd, valid_BN[:, None, None, :], scale)


def prefix_attention_reference(
    q_BTHd: Tensor,
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    key_mask_BP: Tensor | None = None,
    length_B: Tensor | None = None,
    k_suffix_BTKd: Tensor | None = None,
    v_suffix_BTKd: Tensor | None = None,
    suffix_lead: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attend to the row's slot of a KV arena, then to fresh suffix keys. Returns [B, T, H, d].

    Arena keys count when their mask (bool or uint8) is set and their index is below `length_B` (int32 or int64).
    With `suffix_lead` n > 0 the first n suffix tokens see, of the suffix, only themselves; the others see all of it.
    A row without any valid key gives zeros. Nothing is read back to the host.
    """
    k, v = k_arena_SPKd[slots_B], v_arena_SPKd[slots_B]
    (batch, prefix), tokens = k.shape[:2], q_BTHd.shape[1]
    valid = torch.ones(batch, 1, prefix, dtype=torch.bool, device=k.device)
    if key_mask_BP is not None:
        valid = valid & key_mask_BP.bool()[:, None]
    if length_B is not None:
        valid = valid & (torch.arange(prefix, device=k.device) < length_B[:, None])[:, None]
    if k_suffix_BTKd is not None and v_suffix_BTKd is not None:
        k, v = torch.cat((k, k_suffix_BTKd), dim=1), torch.cat((v, v_suffix_BTKd), dim=1)
        follows = torch.arange(tokens, device=k.device) >= suffix_lead
        leads = torch.arange(k_suffix_BTKd.shape[1], device=k.device) < suffix_lead
        sees = (follows[:, None] | leads[None]).expand(batch, -1, -1)
        valid = torch.cat((valid.expand(-1, tokens, -1), sees), dim=-1)
    return _masked(q_BTHd, k, v, valid[:, None], scale)


def _masked(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, valid: Tensor, scale: float | None) -> Tensor:
    """Attend under a mask that broadcasts to [B, H, T, N]."""
    # A query without any valid key would give NaN: let it see everything, then zero it.
    some = valid.any(-1, keepdim=True)
    out = _sdpa(q_BTHd, k_BNKd, v_BNKd, valid | ~some, scale)
    return torch.where(some.transpose(1, 2), out, torch.zeros_like(out))


def _sdpa(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Pack the query heads of one KV head as rows, so that K and V are read once and every SDPA backend will do."""
    batch, tokens, heads, _ = q_BTHd.shape
    kv_heads = k_BNKd.shape[2]
    group = heads // kv_heads
    q = q_BTHd.reshape(batch, tokens, kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
    k, v = k_BNKd.transpose(1, 2), v_BNKd.transpose(1, 2)
    if mask is not None and mask.shape[-2] > 1:
        mask = mask.repeat_interleave(group, dim=-2)
    if mask is not None:
        mask = mask.expand(batch, kv_heads, tokens * group, -1)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, kv_heads, tokens, group, -1).transpose(1, 2).flatten(2, 3)


def attention_triton(
    q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, *, key_mask_BN: Tensor | None = None, scale: float | None = None
) -> Tensor:
    return split_attention(q_BTHd, Keys(k_BNKd, v_BNKd, mask_BP=key_mask_BN), scale)


def prefix_attention_triton(
    q_BTHd: Tensor,
    k_arena_SPKd: Tensor,
    v_arena_SPKd: Tensor,
    slots_B: Tensor,
    *,
    key_mask_BP: Tensor | None = None,
    length_B: Tensor | None = None,
    k_suffix_BTKd: Tensor | None = None,
    v_suffix_BTKd: Tensor | None = None,
    suffix_lead: int = 0,
    scale: float | None = None,
) -> Tensor:
    keys = Keys(k_arena_SPKd, v_arena_SPKd, slots_B, key_mask_BP, length_B, k_suffix_BTKd, v_suffix_BTKd, suffix_lead)
    return split_attention(q_BTHd, keys, scale)


def _masked_call(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, *, key_mask_BN: Tensor | None = None, **_: object) -> bool:
    """Without a mask SDPA has faster kernels."""
    return key_mask_BN is not None and fits(q_BTHd, k_BNKd, v_BNKd)


def _arena_call(q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, **named: object) -> bool:
    suffix = [x for x in (named.get("k_suffix_BTKd"), named.get("v_suffix_BTKd")) if isinstance(x, Tensor)]
    return fits(q_BTHd, k_arena_SPKd, v_arena_SPKd, *suffix)


attention = FusedOp(attention_reference, attention_triton, supports=_masked_call)
prefix_attention = FusedOp(prefix_attention_reference, prefix_attention_triton, supports=_arena_call)
