"""Streaming decode and encode against the whole video at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.core.errors import ConfigError, ObservationError
from stretto.models.wan_light import LightDecoder
from stretto.models.wan_vae import (
    WAN21_VAE,
    WAN22_VAE,
    StreamingDecoder,
    StreamingEncoder,
    VaeDecoder,
    build_vae,
    load_vae,
    new_caches,
    to_bytes,
)

SMALL = {"dim_mult": (1, 1, 1, 1), "num_res_blocks": 1}
FORMS = [
    pytest.param(WAN21_VAE, {"base_dim": 8, **SMALL}, id="wan2.1"),
    pytest.param(WAN22_VAE, {"base_dim": 8, "decoder_base_dim": 8, **SMALL}, id="wan2.2"),
]
Form = Mapping[str, Any]


def small_vae(form: Form, changes: Form) -> nn.Module:
    torch.manual_seed(0)
    return build_vae(form, **changes)


def latents(vae: nn.Module, frames: int) -> torch.Tensor:
    return torch.randn(frames, vae.config.z_dim, 4, 6, generator=torch.Generator().manual_seed(1))


def whole_decode(vae: nn.Module, x: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(s)[:, None, None] for s in (vae.config.latents_mean, vae.config.latents_std))
    return vae.decode((x * std + mean).transpose(0, 1)[None]).sample[0].transpose(0, 1)


@pytest.mark.parametrize(("form", "changes"), FORMS)
@pytest.mark.parametrize("frames_per_chunk", [1, 3])
def test_streaming_decode_equals_the_full_decode_over_many_chunks(form: Form, changes: Form, frames_per_chunk: int) -> None:
    vae = small_vae(form, changes)
    x = latents(vae, 5 * frames_per_chunk)
    decoder = VaeDecoder(vae)
    caches = new_caches(decoder.caches(4, 6), "cpu")
    parts = [decoder.pixels(chunk, caches, first=i == 0) for i, chunk in enumerate(x.split(frames_per_chunk))]
    assert [len(p) for p in parts] == [4 * frames_per_chunk - 3, *[4 * frames_per_chunk] * 4]
    want = whole_decode(vae, x)
    assert want.std() > 1e-2
    torch.testing.assert_close(torch.cat(parts), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("form", "changes"), FORMS)
@pytest.mark.parametrize(("channels_last", "fused"), [(True, False), (False, True), (True, True)])
def test_other_layouts_and_fewer_passes_give_the_same_frames(
    form: Form, changes: Form, channels_last: bool, fused: bool
) -> None:
    vae = small_vae(form, changes)
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))  # gammas are ones else
    x = latents(vae, 4)
    want = whole_decode(vae, x)
    names = set(vae.state_dict())
    decoder = VaeDecoder(vae, channels_last=channels_last, fused=fused)
    assert set(vae.state_dict()) == names
    caches = new_caches(decoder.caches(4, 6), "cpu")
    got = torch.cat([decoder.pixels(chunk, caches, first=i == 0) for i, chunk in enumerate(x.split(1))])
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("form", "changes"), FORMS)
def test_a_decoder_that_starts_anew_at_a_chunk_leaves_a_seam(form: Form, changes: Form) -> None:
    vae = small_vae(form, changes)
    x = latents(vae, 4)
    decoder = VaeDecoder(vae)
    caches = new_caches(decoder.caches(4, 6), "cpu")
    fresh = decoder.pixels(x[2:], caches, first=True)
    assert len(fresh) == 5
    assert (fresh - whole_decode(vae, x)[-5:]).abs().max() > 1e-4


@pytest.mark.parametrize(("form", "changes"), FORMS)
def test_two_streams_decode_side_by_side_without_mixing(form: Form, changes: Form) -> None:
    vae = small_vae(form, changes)
    x = latents(vae, 6)
    one, two = (StreamingDecoder(VaeDecoder(vae), 4, 6) for _ in range(2))
    got_one, got_two = [], []
    for a, b in zip(x[:3].split(1), x[3:].split(1), strict=True):
        got_one.append(one.decode(a))
        got_two.append(two.decode(b))
    for got, part in ((got_one, x[:3]), (got_two, x[3:])):
        difference = torch.cat(got).int() - to_bytes(whole_decode(vae, part)).int()
        assert difference.abs().max() <= 1


@pytest.mark.parametrize(("form", "changes"), FORMS)
def test_streaming_encode_equals_the_full_encode(form: Form, changes: Form) -> None:
    vae = small_vae(form, changes)
    height, width = 2 * vae.config.scale_factor_spatial, 3 * vae.config.scale_factor_spatial
    video = torch.randint(0, 256, (17, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    encoder = StreamingEncoder(vae, height, width)
    got = torch.cat([encoder.encode(part) for part in video.split([5, 4, 8])])
    pixels = video.permute(3, 0, 1, 2)[None].float() / 127.5 - 1.0
    mean, std = (torch.tensor(s)[:, None, None] for s in (vae.config.latents_mean, vae.config.latents_std))
    want = (vae.encode(pixels).latent_dist.mode()[0].transpose(0, 1) - mean) / std
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)
    with pytest.raises(ObservationError, match="pixels: got 3 frames, expected 4k"):
        encoder.encode(video[:3])


def test_a_saved_vae_is_loaded_from_its_folder(tmp_path: Path) -> None:
    vae = small_vae(WAN21_VAE, {"base_dim": 8, **SMALL})
    vae.save_pretrained(tmp_path)
    x = latents(vae, 2)
    again = load_vae(tmp_path, dtype=torch.float32)
    assert torch.equal(StreamingDecoder(VaeDecoder(again), 4, 6).decode(x), StreamingDecoder(VaeDecoder(vae), 4, 6).decode(x))
    with pytest.raises(ConfigError, match="vae: got"):
        load_vae(tmp_path / "absent")


def test_the_light_decoder_streams_with_its_memory_and_the_first_frame_rule() -> None:
    light = LightDecoder(16, 8, (8, 8, 8), seed=1)
    x = torch.randn(6, 16, 4, 6, generator=torch.Generator().manual_seed(3))
    stream = StreamingDecoder(light, 4, 6)
    parts = [stream.decode(chunk) for chunk in x.split(2)]
    assert [tuple(p.shape) for p in parts] == [(5, 32, 48, 3), (8, 32, 48, 3), (8, 32, 48, 3)]
    whole = StreamingDecoder(light, 4, 6).decode(x)
    assert (torch.cat(parts).int() - whole.int()).abs().max() <= 1
    with pytest.raises(ConfigError, match=r"decoder\.widths"):
        LightDecoder(16, 8, (8, 8, 8, 8))
