"""The expert's launches with products in e4m3, at true shape: each against plain torch on the codes it was given, and timed.

A part of `expert_chain.py --fp8`.

Shape legend: as in layers.cuda.chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from expert import denoise
from torch import Tensor

from stretto.layers.cuda.chain import LAUNCHES, Coded, ExpertChain, Memory
from stretto.layers.fp8 import Fp8Linear, ObservedLinear, Reader
from stretto.layers.kernels.attention import PrefixKV
from stretto.layers.kernels.coded_layers import CodedStream, code_stream, coded_layer
from stretto.layers.kernels.expert_layers import Shape
from stretto.layers.kernels.stream import Stream, open_stream
from stretto.models.pi0_expert import ExpertNorms
from stretto.models.pi0_fp8 import Fp8Net
from stretto.models.pi0_net import Pi0Net


def coded_net(net: Pi0Net, x_BHA: Tensor, prefix: PrefixKV) -> Fp8Net:
    """Return the net with its expert's products in FP8, on scales from one run of the denoise loop."""
    noted: dict[str, ObservedLinear] = {}

    def note(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        noted[name] = layer = ObservedLinear(name, weight_NK, bias_N)
        return layer

    def make(name: str, weight_NK: Tensor, bias_N: Tensor | None) -> Reader:
        return Fp8Linear(name, weight_NK, bias_N, float(noted[name].largest)) if name.startswith("expert") else noted[name]

    denoise(Fp8Net(net, note, expert_rows=0), x_BHA, prefix)  # type: ignore[arg-type]
    return Fp8Net(net, make, expert_rows=1 << 30)


class CodedCase:
    """One call of the launches in e4m3, at one denoise step; `run` takes what `ExpertChain.run` does."""

    def __init__(self, chain: ExpertChain, net: Fp8Net, prefix: PrefixKV, tokens: int, step: int) -> None:
        assert net.coded is not None
        self.chain, self.net, self.prefix, self.coded = chain, net.net, prefix, net.coded
        self.norms = self.net.norms_of(self.net.tabled(torch.tensor([step], device=self.net.table.device)))
        self.lines = [self.norms.lines(i) for i in range(2 * net.config.expert.depth + 1)]
        self.theta, self.weights = net.config.rope_theta, net.coded.weights
        self.shape = Shape(**self.net.expert.layers()[0].rotary, eps=self.norms.eps)
        residual = torch.randn(1, tokens, net.config.expert.width, device=self.net.table.device)
        self.stream = open_stream.reference(residual, self.norms.lines(0), self.net.dtype)

    def run(self, launches: int | None = None, **more: Any) -> Stream:
        lines, eps = (self.lines[0], self.lines[1]), self.norms.eps
        named = {"theta": self.theta, "eps": eps, "launches": launches, "coded": self.coded, **more}
        return self.chain.run(self.stream, self.weights, lines, self.prefix, **named)

    def memory(self) -> Memory:
        return Memory(self.chain.sizes, self.stream.residual_BTD.shape[1], self.net.table.device, coded=True)


def off_by(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of what is wanted: a sum in another order may give a neighbouring code."""
    return ((got.float() - want.float()).square().mean() / want.float().square().mean()).sqrt().item()


def check_coded_launches(case: CodedCase, layers: int = 2) -> Iterator[dict[str, Any]]:
    """Compare what each launch leaves with its reference, given what those before left."""
    stream = code_stream(case.stream, case.norms.eps)
    for launch in range(layers * LAUNCHES):
        layer, kind = divmod(launch, LAUNCHES)
        memory = case.memory()
        case.run(launch + 1, memory=memory)
        torch.cuda.synchronize()
        # Only what earlier launches left is given; what later ones do is not looked at.
        left = tuple(
            x[None] if kind > i else None
            for i, x in enumerate((memory.attended(), memory.stream(end=False)[0], memory.hidden()), 1)
        )
        want = coded_layer(layer, stream, case.coded, case.lines, case.prefix, case.shape, left)
        if kind in (2, 4):
            codes, squares = memory.stream(end=kind == 4)
            of = want.middle if kind == 2 else want.end
            error = max(
                off_by(codes[None], of.codes_BTD),
                off_by(squares.mean(-1)[None, :, None] * squares.shape[1] / codes.shape[1], of.mean_BT1),
            )
            if kind == 4:
                stream = of._replace(codes_BTD=codes[None].clone())
        else:
            fresh = torch.cat((memory.queries(), *(x[:, None] for x in memory.fresh())), dim=1)
            got = (fresh, memory.attended(), None, memory.hidden())[kind]
            assert got is not None
            error = off_by(got[None], (want.fresh_BTCd, want.attended_BTI, None, want.hidden_BTF)[kind])
        yield {"kind": "launch", "form": "e4m3", "launch": launch, "error": error}


def whole_reference(case: CodedCase) -> CodedStream:
    """Run all layers in plain torch, on their own codes."""
    stream = code_stream(case.stream, case.norms.eps)
    for i in range(len(case.weights)):
        stream = coded_layer(i, stream, case.coded, case.lines, case.prefix, case.shape).end
    return stream


def check_coded_whole(case: CodedCase, plain: Stream) -> dict[str, Any]:
    """Compare all layers with plain torch, run twice, and with the launches in bf16."""
    got, again, want = case.run(), case.run(), whole_reference(case)
    return {
        "residual": off_by(got.residual_BTD, want.residual_BTD),
        "from_bf16": off_by(got.residual_BTD, plain.residual_BTD),
        "twice_equal": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
        "finite": bool(got.scaled_BRD.isfinite().all()),
    }


def with_codes(net: Pi0Net, chain: ExpertChain, coded: Coded, theta: float) -> None:
    """Let the net's expert run by these launches."""

    def streamed(stream: Stream, norms: ExpertNorms, prefix: PrefixKV, _: Coded | None = None) -> Stream:
        lines = norms.lines(0), norms.lines(1)
        return chain.run(stream, coded.weights, lines, prefix, theta=theta, eps=norms.eps, coded=coded)

    object.__setattr__(net.expert, "streamed", streamed)
