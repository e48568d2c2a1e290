"""The stages of a chunk's route: embed, one stage a block, head.

Shape legend: B rows, F frames of a chunk, T tokens of a frame, N = F T tokens, D width, H heads, d head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from stretto.core.errors import ConfigError
from stretto.core.model import Row, Rows
from stretto.core.route import StageSpec
from stretto.layers.kernels import qk_norm_rope_write
from stretto.layers.kernels.chunk_attention import Places, chunk_attention, prefer_fastest_attention
from stretto.layers.kernels.level_norm import level_gated_add
from stretto.layers.kernels.renoise import renoise
from stretto.layers.kernels.rope_3d import rope_3d_turns
from stretto.models.wan_config import WanConfig
from stretto.models.wan_net import GATE1, GATE2, ActionAdapter, Block, WanNet
from stretto.models.wan_products import PlainProducts, Products
from stretto.models.wan_ring import Ring

CONTEXT = "context"
PLACE = "place"
"""Which chunk this is, as data on the device: int64 (chunk, key of its noise, frames given clean)."""


@dataclass(frozen=True)
class Clock:
    """What all stages of one visit derive from the rows: where the chunk is, and how noisy each frame is."""

    turns_RT2P: Tensor
    """Rotary cosines and sines of each frame of each row, R = B F."""
    slots_R: Tensor
    offsets_R: Tensor
    """State slot and first ring token of each frame."""
    levels_BF: Tensor
    history: Places
    """What of its ring each row attends to."""
    prompt: Places


class Clocks:
    """Makes the clock of a batch once a denoise step, not once a block."""

    def __init__(self, config: WanConfig) -> None:
        self.config = config
        self.ring = Ring(config.window_frames, config.sink_frames, config.frames_per_chunk)
        self._made: WeakKeyDictionary[Rows, dict[Hashable, Clock]] = WeakKeyDictionary()

    def of(self, rows: Rows) -> Clock:
        host = rows.host
        # What was made outside a capture must not be baked into it.
        capturing = rows.steps_B.is_cuda and torch.cuda.is_current_stream_capturing()
        key = (capturing, rows.size, *((row.chunk, row.step, row.state_slot) for row in host))
        made = self._made.setdefault(rows, {})
        if key not in made:
            made[key] = self._make(rows, host)
        return made[key]

    def _make(self, rows: Rows, host: Sequence[Row]) -> Clock:
        config, place_B3 = self.config, rows.get(PLACE)
        frames = torch.arange(config.frames_per_chunk, device=place_B3.device)
        given_BF = frames < place_B3[:, 2:]
        # Every step past the last denoise step runs at the level of the clean pass; given frames are clean throughout.
        levels_B = rows.steps_B.clamp(max=config.policy.clean_step)
        levels_BF = torch.where(given_BF, config.policy.clean_step + 1, levels_B[:, None])
        frames_BF = place_B3[:, :1] * config.frames_per_chunk + frames
        pages_B = ((place_B3[:, 0] + 1) * config.frames_per_chunk).clamp(max=config.window_frames)
        return Clock(
            rope_3d_turns(frames_BF.flatten(), (1, *config.grid), config.head_dim, theta=config.rope_theta),
            rows.state_slots_B.repeat_interleave(config.frames_per_chunk),
            (self.ring.pages(frames_BF) * config.tokens_per_frame).flatten(),
            levels_BF,
            self._places(
                rows, [self.ring.valid(row.chunk) * config.tokens_per_frame for row in host], pages_B * config.tokens_per_frame
            ),
            self._places(rows, [config.text_tokens] * len(host), torch.full_like(pages_B, config.text_tokens)),
        )

    def _places(self, rows: Rows, tokens: Sequence[int], tokens_B: Tensor) -> Places:
        tokens_B[len(rows.host) :] = 0
        return Places(tuple(row.state_slot for row in rows.host), tuple(tokens), rows.state_slots_B, tokens_B)


class EmbedStage:
    """Latent patches to hidden tokens."""

    def __init__(self, net: WanNet) -> None:
        self.net, self.modules = net, (net.patch_embedding,)
        self.spec = StageSpec("embed", reads=("x",), writes=("h",))

    def run(self, rows: Rows) -> None:
        rows.put("h", self.net.patch_embedding(self.net.patchify(rows.get("x"))))


class BlockStage:
    """One transformer block over the rows of any streams and steps; keeps their rings and prompt keys and values.

    What depends on a row's place in time is read from the device, so a capture stays right as chunks go on. Which slices
    of the rings are read is fixed in a capture: rings that are still filling run eagerly, full ones by `capture_key`.
    """

    alike = "block"

    def __init__(self, net: WanNet, index: int, clocks: Clocks) -> None:
        self.net, self.clocks, self.config = net, clocks, net.config
        block = net.blocks[index]
        assert isinstance(block, Block)
        self.block, self.modules = block, (block,)
        self.products: Products = PlainProducts(block)
        self.tracks = net.config.actions
        name = f"block.{index}"
        self.k, self.v, self.cross_k, self.cross_v = (f"{name}.{part}" for part in ("k", "v", "cross_k", "cross_v"))
        self.spec = StageSpec(
            name,
            reads=("h", PLACE, *(track.value for track in self.tracks)),
            writes=("h",),
            state=(self.k, self.v, self.cross_k, self.cross_v),
        )
        # Kept by arena, so that it lives and dies with what it tells about: state slot -> (stream, version).
        self._prompts = WeakTensorKeyDictionary()

    def capture_key(self, host: Sequence[Row]) -> Hashable:
        """Return the state slots, which a capture bakes in with full rings; None while a ring is filling."""
        ring = self.clocks.ring
        if any(ring.valid(row.chunk) < ring.window_frames for row in host):
            return None
        return tuple(row.state_slot for row in host)

    def refresh(self) -> None:
        """Follow a change of the weights: code them anew, in place, and make every prompt's keys and values anew."""
        self.products.refresh()
        self._prompts.clear()

    def prepare(self, rows: Rows) -> None:
        """Write the prompt keys and values of rows whose prompt is new to their state slot. Outside any capture."""
        k_arena, v_arena = rows.arena(self.cross_k), rows.arena(self.cross_v)
        written: dict[int, tuple[int, int]] = self._prompts.setdefault(k_arena, {})  # type: ignore[no-untyped-call]
        for i, row in enumerate(rows.host):
            version, context = rows.condition(i, CONTEXT)
            if written.get(row.state_slot) != (row.stream, version):
                k, v = self.block.cross_attn.keys_values(self.net.embed_text(context))
                k_arena[row.state_slot].copy_(k)
                v_arena[row.state_slot].copy_(v)
                written[row.state_slot] = (row.stream, version)

    def run(self, rows: Rows) -> None:
        block, h = self.block, rows.get("h")
        if h.is_cuda:
            prefer_fastest_attention()
        if not (h.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.prepare(rows)
        clock = self.clocks.of(rows)
        if not clock.history.slots:
            expected = "host rows for every real row of the batch: which state slots it reads is fixed in a capture"
            raise ConfigError("mode", got="graph, captured without rows", expected=expected)
        levels_BF, table, products = clock.levels_BF, block.table_L6D, self.products
        y = self._self_attention(rows, clock, products.qkv(products.enter(h, levels_BF)))
        if self.tracks:
            h = self._act(rows, level_gated_add(h, y, table, levels_BF, gate=GATE1))
            x = products.norm_for_query(h)
        else:
            x, h = products.after_self(h, y, levels_BF)
        k, v = rows.arena(self.cross_k), rows.arena(self.cross_v)
        y = products.cross_out(chunk_attention(products.query(x), k, v, clock.prompt).flatten(2))
        x, h = products.after_cross(h, y, levels_BF)
        rows.put("h", level_gated_add(h, products.feed_forward(x), table, levels_BF, gate=GATE2))

    def _self_attention(self, rows: Rows, clock: Clock, qkv_BNC: Tensor) -> Tensor:
        config, attn = self.config, self.block.self_attn
        k_ring, v_ring = rows.arena(self.k).flatten(1, 2), rows.arena(self.v).flatten(1, 2)
        # A page is a frame: frame by frame, a chunk may wrap around the end of the ring.
        q = qk_norm_rope_write(
            qkv_BNC.view(-1, config.tokens_per_frame, 3 * config.width),
            attn.norm_q.weight,
            attn.norm_k.weight,
            clock.turns_RT2P,
            k_ring,
            v_ring,
            clock.slots_R,
            clock.offsets_R,
            eps=config.eps,
        )
        q_BNHd = q.view(rows.size, -1, config.heads, config.head_dim)
        return self.products.self_out(chunk_attention(q_BNHd, k_ring, v_ring, clock.history).flatten(2))

    def _act(self, rows: Rows, x_BND: Tensor) -> Tensor:
        for track in self.tracks:
            adapter = self.block.actions[track.name]
            assert isinstance(adapter, ActionAdapter)
            x_BND = adapter(x_BND, self.net.embed_action(track.name, rows.get(track.value)))
        return x_BND


class HeadStage:
    """Velocity, the clean latent that it implies, and that latent at the next noise level with fresh noise."""

    def __init__(self, net: WanNet, clocks: Clocks) -> None:
        self.net, self.clocks, self.config = net, clocks, net.config
        self.modules = (net.head,)
        self.spec = StageSpec("head", reads=("h", "x", PLACE), writes=("x",))
        sigmas = [level.sigma for level in net.config.levels]
        # The last clean latent is the output: it goes on with a noise share of 0.
        self._sigmas = torch.tensor([sigmas, [*sigmas[1:], 0.0]], dtype=torch.float64)

    def velocity(self, rows: Rows) -> Tensor:
        """Return v = noise - x0 as the network sees it, [B, F, C, h, w] in fp32."""
        patches = self.net.head(rows.get("h"), self.clocks.of(rows).levels_BF)
        return self.net.unpatchify(patches).float()

    def run(self, rows: Rows) -> None:
        patches = self.net.head(rows.get("h"), self.clocks.of(rows).levels_BF)
        if self._sigmas.device != patches.device:
            self._sigmas = self._sigmas.to(patches.device)
        rows.put("x", renoise(patches, rows.get("x"), rows.get(PLACE), rows.steps_B, self._sigmas, self.config.patch))
