"""Bidirectional attention with grouped heads: over fresh keys, and over a slot of a KV arena plus fresh keys.

Which kernel attends to fresh keys, or to a slot alone, is a measured choice; see `RULE` for what holds without one.

Shape legend: B rows, T query tokens, N keys, H query heads, K key/value heads, d head size, S arena slots, P arena tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from stretto.layers.dispatch import FusedOp
from stretto.layers.kernels import gemm
from stretto.layers.kernels import hopper_attention as hopper
from stretto.layers.kernels import short_attention as short
from stretto.layers.kernels import tma_attention as tma
from stretto.layers.kernels.language import cdiv, multiprocessors
from stretto.layers.kernels.split_attention import Keys, fits, split_attention
from stretto.layers.kernels.suffix_attention import attend_to_suffix
from stretto.layers.tuning import Config, tuned

RULE = {False: "sdpa", True: "split"}
"""Without a mask SDPA has faster kernels; with one it has to read the mask for every head. Few keys without a mask are for
`short_attention`, whatever the number of rows: it is the fastest at one robot, and bits are the same in every batch."""


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
    ahead: Tensor | None = None,
) -> Tensor:
    """Attend to the row's slot of a KV arena, then to fresh suffix keys. Returns [B, T, H, d].

    Arena keys count when their mask (bool or uint8) is set and their index is below `length_B` (int32 or int64).
    With `suffix_lead` n > 0 the first n suffix tokens see, of the suffix, only themselves; the others see all of it.
    A row without any valid key gives zeros. Nothing is read back to the host. `ahead` is what a launch behind this one reads
    first: a kernel may bring it to the device's cache meanwhile.
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
    choice = chosen("attention", q_BTHd, k_BNKd, v_BNKd, key_mask_BN)
    return run_attention(choice, q_BTHd, k_BNKd, v_BNKd, key_mask_BN, scale)


def chosen(op: str, q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, mask_BN: Tensor | None) -> Config | None:
    """Return the measured choice of a call, if there is one."""
    if not tma.takes(q_BTHd, k_BNKd, v_BNKd, mask_BN):
        return None
    batch, tokens, heads, head_dim = q_BTHd.shape
    key = (batch, tokens, k_BNKd.shape[1], heads, k_BNKd.shape[2], head_dim, int(mask_BN is not None))
    return tuned(op, key, q_BTHd.dtype, q_BTHd.device)


def run_attention(
    choice: Config | None,
    q_BTHd: Tensor,
    k_BNKd: Tensor,
    v_BNKd: Tensor,
    mask_BN: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Run one choice over fresh keys; None is the rule."""
    one_pass = mask_BN is None and short.takes(q_BTHd, k_BNKd, v_BNKd)
    rule = "short" if one_pass else RULE[mask_BN is not None]
    impl = rule if choice is None or choice["impl"] == "short" else choice["impl"]
    if impl == "sdpa":
        return attention_reference(q_BTHd, k_BNKd, v_BNKd, key_mask_BN=mask_BN, scale=scale)
    if impl == "cudnn":
        return _cudnn(q_BTHd, k_BNKd, v_BNKd, mask_BN, scale)
    if impl == "tma" and choice is not None:
        return tma.tma_attention(q_BTHd, k_BNKd, v_BNKd, tma.Tiling.of(choice), mask_BN=mask_BN, scale=scale)
    if impl == "short":
        return short.short_attention(q_BTHd, k_BNKd, v_BNKd, warps_of_short(choice), scale=scale)
    return split_attention(q_BTHd, Keys(k_BNKd, v_BNKd, mask_BP=mask_BN), scale)


def warps_of_short(choice: Config | None) -> int:
    return 4 if choice is None else int(choice.get("warps", 4))


def _cudnn(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, mask_BN: Tensor | None, scale: float | None) -> Tensor:
    """Attend by cuDNN, with its own grouped heads; a row without any valid key gives an average."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BNKd, v_BNKd))
    bias = None
    if mask_BN is not None:
        bias = torch.where(mask_BN.bool(), 0.0, -1.0e30).to(q.dtype)[:, None, None].expand(*q.shape[:3], -1)
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


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
    ahead: Tensor | None = None,
) -> Tensor:
    if k_suffix_BTKd is None and length_B is None and key_mask_BP is not None:
        choice = chosen("prefix_attention", q_BTHd, k_arena_SPKd, v_arena_SPKd, key_mask_BP)
        return run_prefix_attention(choice, q_BTHd, k_arena_SPKd, v_arena_SPKd, slots_B, key_mask_BP, scale)
    keys = Keys(k_arena_SPKd, v_arena_SPKd, slots_B, key_mask_BP, length_B, k_suffix_BTKd, v_suffix_BTKd, suffix_lead)
    if k_suffix_BTKd is None:
        return split_attention(q_BTHd, keys, scale)
    return attend_to_suffix(q_BTHd, keys, scale, ahead=ahead)


def run_prefix_attention(
    choice: Config | None,
    q_BTHd: Tensor,
    k_SPKd: Tensor,
    v_SPKd: Tensor,
    slots_B: Tensor,
    mask_BP: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Run one choice over the keys of a slot; None is the rule."""
    if choice is not None and choice["impl"] == "hopper" and not hopper.takes(q_BTHd, k_SPKd, v_SPKd):
        choice = None
    choice = choice or prefix_rule(q_BTHd, k_SPKd, v_SPKd, mask_BP)
    if choice is not None and choice["impl"] == "tma":
        return tma.tma_attention(q_BTHd, k_SPKd, v_SPKd, tma.Tiling.of(choice), slots_B=slots_B, mask_BN=mask_BP, scale=scale)
    if choice is not None and choice["impl"] == "hopper":
        cut = hopper.Tiling.of(choice)
        return hopper.hopper_attention(q_BTHd, k_SPKd, v_SPKd, slots_B, mask_BP, cut, scale=scale)
    if choice is not None and choice["impl"] == "cudnn":
        return _cudnn(q_BTHd, k_SPKd[slots_B], v_SPKd[slots_B], mask_BP, scale)
    return split_attention(q_BTHd, Keys(k_SPKd, v_SPKd, slots_B, mask_BP), scale)


def prefix_rule(q_BTHd: Tensor, k_SPKd: Tensor, v_SPKd: Tensor, mask_BP: Tensor) -> Config | None:
    """Wide heads and many queries on Hopper take the TMA kernel, in the tile that was fastest wherever it was measured."""
    batch, tokens, heads, head_dim = q_BTHd.shape
    if tokens < 256 or head_dim != 256 or not (gemm.on_hopper(q_BTHd) and tma.takes(q_BTHd, k_SPKd, v_SPKd, mask_BP)):
        return None
    tiles = batch * cdiv(tokens * heads, 128)
    return tma.Tiling(*((64, 64, 4, 3) if tiles < multiprocessors(q_BTHd) else (128, 64, 8, 2))).config


def _fresh_call(q_BTHd: Tensor, k_BNKd: Tensor, v_BNKd: Tensor, *, key_mask_BN: Tensor | None = None, **_: object) -> bool:
    return key_mask_BN is None or fits(q_BTHd, k_BNKd, v_BNKd)


def _arena_call(q_BTHd: Tensor, k_arena_SPKd: Tensor, v_arena_SPKd: Tensor, slots_B: Tensor, **named: object) -> bool:
    suffix = [x for x in (named.get("k_suffix_BTKd"), named.get("v_suffix_BTKd")) if isinstance(x, Tensor)]
    return fits(q_BTHd, k_arena_SPKd, v_arena_SPKd, *suffix)


attention = FusedOp(attention_reference, attention_triton, supports=_fresh_call)
prefix_attention = FusedOp(prefix_attention_reference, prefix_attention_triton, supports=_arena_call)


class PrefixKV(NamedTuple):
    """Keys and values of a prefix in all layers, read in place: row b's are in slot `slots_B[b]`."""

    k_SNPKd: Tensor  # [slots, layers, P, K, d]
    v_SNPKd: Tensor
    slots_B: Tensor
    mask_BP: Tensor
    length_B: Tensor
    """Keys at this index and beyond are never valid."""
    suffix_start_B: Tensor
    """Rotary position of the first suffix token: the number of valid prefix tokens."""

    def attend(
        self, layer: int, q_BTHd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, lead: int, ahead: Tensor | None = None
    ) -> Tensor:
        """Return what a layer's suffix sees, [B, T, H d]; its first `lead` tokens do not see those behind them."""
        return prefix_attention(q_BTHd, *self.arena(layer), **self.around(k_BTKd, v_BTKd, lead), ahead=ahead).flatten(2)

    def arena(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's keys, values and slots, as `prefix_attention` takes them."""
        return self.k_SNPKd[:, layer], self.v_SNPKd[:, layer], self.slots_B

    def around(self, k_BTKd: Tensor, v_BTKd: Tensor, lead: int) -> dict[str, Any]:
        """Return which keys of a slot count, and the suffix, as `prefix_attention` takes them."""
        suffix = {"k_suffix_BTKd": k_BTKd, "v_suffix_BTKd": v_BTKd, "suffix_lead": lead}
        return {"key_mask_BP": self.mask_BP, "length_B": self.length_B, **suffix}
