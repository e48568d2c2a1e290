"""Fused ops, one file each: a plain-torch reference beside its Triton kernel, behind one callable."""

from stretto.layers.kernels.activation import geglu, gelu_tanh
from stretto.layers.kernels.ada_rms_norm import Modulation, ada_rms_norm, gated_add_ada_rms_norm
from stretto.layers.kernels.attention import attention, prefix_attention
from stretto.layers.kernels.layer_norm import (
    gated_add,
    gated_add_layer_norm,
    gated_add_modulated_layer_norm,
    layer_norm,
    modulated_layer_norm,
    sum_layer_norm,
)
from stretto.layers.kernels.linear_activation import dense, linear_geglu, linear_gelu
from stretto.layers.kernels.linear_layer_norm import linear_add_layer_norm
from stretto.layers.kernels.linear_rope import linear_rope_write
from stretto.layers.kernels.patchify import patchify
from stretto.layers.kernels.rms_norm import rms_norm, sum_rms_norm
from stretto.layers.kernels.rope import rope, rope_write
from stretto.layers.kernels.rope_3d import qk_norm_rope_write, rope_3d

__all__ = [
    "Modulation",
    "ada_rms_norm",
    "attention",
    "dense",
    "gated_add",
    "gated_add_ada_rms_norm",
    "gated_add_layer_norm",
    "gated_add_modulated_layer_norm",
    "geglu",
    "gelu_tanh",
    "layer_norm",
    "linear_add_layer_norm",
    "linear_geglu",
    "linear_gelu",
    "linear_rope_write",
    "modulated_layer_norm",
    "patchify",
    "prefix_attention",
    "qk_norm_rope_write",
    "rms_norm",
    "rope",
    "rope_3d",
    "rope_write",
    "sum_layer_norm",
    "sum_rms_norm",
]
