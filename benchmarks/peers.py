"""pi0.5 by LeRobot and by PhyAI, as each ships it, with random weights at true shape: what ours is compared with.

    python benchmarks/peers.py lerobot --cases 1:200 4:200 --out lerobot.json      # lerobot 0.6.1 with transformers 5.5.4
    python benchmarks/peers.py phyai --cases 1:16 1:200 32:200 --out phyai.json    # PhyAI d27fe18 with flashinfer 0.6.12
    python benchmarks/peers.py lerobot --small                                     # a tiny model on the CPU, to try the script

Neither is part of this project or among its dependencies: what is asked for must be importable, or the result says that it is
not. A case is `batch:prompt tokens`. Times are the device's, from pictures and tokens on it to actions on it, of each peer's
own call, inputs in turn, after a pause below 32 robots; for LeRobot, which launches kernel by kernel, the host decides, so
wall time stands beside. Nothing of a peer is changed but its weights: they are drawn in place of a checkpoint's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from nvidia_smi import Chip
from torch import Tensor, nn

from stretto.deploy.provenance import provenance

SETS = 4
VOCABULARY = 257_152
CHUNK, WIDTH, CAMERAS, LONGEST, PIXELS = 50, 32, 3, 200, 224
Call = Callable[[int], Tensor]
"""Answers one batch of requests with the inputs of a turn."""


def drawn(module: nn.Module, seed: int = 0) -> None:
    """Overwrite all weights in place: products keep the size of what passes through, norms stay near the identity."""
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            torch.manual_seed(seed + sum(name.encode()))
            noise = torch.randn(weight.shape, device=weight.device, dtype=torch.float32)
            if weight.dim() > 1:
                noise *= 0.7 / math.sqrt(weight[0].numel())
            else:
                noise = weight.float().nan_to_num(0.0).clamp(0.0, 1.0).round() + 0.02 * noise
            weight.copy_(noise)


def inputs_of(batch: int, device: torch.device, dtype: torch.dtype, vocabulary: int) -> list[tuple[Tensor, Tensor]]:
    """Return pixels [batch, cameras, 3, height, width] in -1..1 and tokens [batch, longest prompt], a pair a turn."""
    return [
        (
            torch.rand(batch, CAMERAS, 3, PIXELS, PIXELS, device=device).mul_(2).sub_(1).to(dtype),
            torch.randint(1, vocabulary, (batch, LONGEST), device=device),
        )
        for _ in range(SETS)
    ]


@contextmanager
def shrunk(module: Any) -> Iterator[int]:
    """Inside, LeRobot builds its network with few and narrow layers; yields the size of its vocabulary."""
    whole, size = module.PaliGemmaForConditionalGenerationWithPiGemma, 300

    def small(config: Any) -> nn.Module:
        vision, text = config.vision_config, config.text_config
        vision.hidden_size, vision.intermediate_size, vision.num_hidden_layers, vision.num_attention_heads = 32, 64, 2, 2
        vision.projection_dim, text.vocab_size = 64, size
        return whole(config=config)

    gemma = module.GemmaConfig(width=64, depth=2, mlp_dim=128, num_heads=8, num_kv_heads=1, head_dim=16)
    with (
        patch.object(module, "PaliGemmaForConditionalGenerationWithPiGemma", small),
        patch.object(module, "get_gemma_config", lambda variant: gemma),
    ):
        yield size


class LeRobot:
    """`PI05Pytorch.sample_actions`, eager, in bf16 as it ships: vision, projector and norms stay in fp32."""

    def __init__(self, device: torch.device, small: bool) -> None:
        import transformers
        from lerobot import __version__
        from lerobot.policies.pi05 import modeling_pi05
        from lerobot.policies.pi05.configuration_pi05 import PI05Config

        self.device = device
        self.versions = {"lerobot": __version__, "transformers": transformers.__version__}
        config = PI05Config(device=device.type, dtype="bfloat16", chunk_size=CHUNK, max_action_dim=WIDTH)
        with torch.device(device):
            if small:
                with shrunk(modeling_pi05) as self.vocabulary:
                    self.net = modeling_pi05.PI05Pytorch(config)
            else:
                self.vocabulary = VOCABULARY
                self.net = modeling_pi05.PI05Pytorch(config)
        self.net.to(device).eval()
        drawn(self.net)

    def call(self, batch: int, prompt: int) -> Call:
        """Return what answers one batch; LeRobot runs over all 200 places of a prompt, whatever its length."""
        sets = inputs_of(batch, self.device, torch.float32, self.vocabulary)
        seen = [torch.ones(batch, dtype=torch.bool, device=self.device)] * CAMERAS
        held = (torch.arange(LONGEST, device=self.device) < prompt).expand(batch, -1)

        def run(turn: int) -> Tensor:
            pixels, tokens = sets[turn % SETS]
            actions: Tensor = self.net.sample_actions(list(pixels.unbind(1)), seen, tokens, held)
            return actions

        return run

    def close(self) -> None:
        """Nothing is held beside the network."""


class PhyAI:
    """`Engine.step` in bf16 with its CUDA graphs; which of its kernels it takes is left to its own environment variables."""

    def __init__(self, device: torch.device, small: bool) -> None:
        import flashinfer
        from phyai.models.pi05.scheduler_ws1_pi05 import PI05WS1Scheduler

        if small:
            raise RuntimeError("phyai runs on a GPU only, at true shape")
        self.device, self.engine = device, None
        self.versions = {"flashinfer": flashinfer.__version__}
        self.versions |= {name: value for name, value in os.environ.items() if name.startswith("PHYAI_")}
        self.scheduler = PI05WS1Scheduler

    def call(self, batch: int, prompt: int) -> Call:
        """Build an engine for this batch size, with weights drawn where a checkpoint would have been loaded."""
        from phyai.engine import Engine, EngineArgs
        from phyai.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
        from phyai.models.pi05.main_pi05 import PI05Args
        from phyai.models.pi05.scheduler_ws1_pi05 import PI05Request

        setup = self.scheduler.setup

        def with_weights(scheduler: Any) -> None:
            drawn(scheduler.model)
            setup(scheduler)

        self.close()
        place = DeviceConfig(target=str(self.device), params_dtype=torch.bfloat16)
        config = EngineConfig(device=place, runtime=RuntimeConfig(use_cuda_graph=True))
        with patch.object(self.scheduler, "setup", with_weights):
            self.engine = Engine(EngineArgs(plugin="pi05", plugin_args=PI05Args(max_batch_size=batch), config=config))
        engine = self.engine
        lengths = torch.full((batch,), prompt, device=self.device)
        requests = [
            PI05Request(pixel_values=pixels, input_ids=tokens, lang_lens=lengths)
            for pixels, tokens in inputs_of(batch, self.device, torch.bfloat16, VOCABULARY)
        ]

        def run(turn: int) -> Tensor:
            actions: Tensor = engine.step(requests[turn % SETS])
            return actions

        return run

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.engine = None
            torch.cuda.empty_cache()


PEERS: dict[str, Callable[[torch.device, bool], LeRobot | PhyAI]] = {"lerobot": LeRobot, "phyai": PhyAI}


def timed(call: Call, device: torch.device, batch: int, seconds: float) -> dict[str, Any]:
    """Time calls for so many seconds, at least three; the first two, which may compile, do not count."""
    begin = time.monotonic()
    for turn in range(2):
        actions = call(turn).float()
    if not bool(torch.isfinite(actions).all()) or not float(actions.std()):
        raise ArithmeticError(f"actions of random weights: got std {float(actions.std())}, expected finite numbers that differ")
    on_device, wall, turn = list[float](), list[float](), 2
    first_s, end = time.monotonic() - begin, time.monotonic() + seconds
    while len(wall) < 3 or time.monotonic() < end:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            time.sleep(0.01 if batch < 32 else 0.0)
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            from_s = time.perf_counter()
            events[0].record()
            call(turn)
            events[1].record()
            torch.cuda.synchronize(device)
            on_device.append(events[0].elapsed_time(events[1]))
        else:
            from_s = time.perf_counter()
            call(turn)
        wall.append((time.perf_counter() - from_s) * 1e3)
        turn += 1
    row = {"requests": len(wall), "first_two_s": round(first_s, 2), "wall_p50_ms": quantile(wall, 0.5)}
    ms = on_device or wall
    return {"p50_ms": quantile(ms, 0.5), "p99_ms": quantile(ms, 0.99), "least_ms": round(min(ms), 3), **row}


def quantile(ms: list[float], share: float) -> float:
    return round(float(torch.tensor(ms, dtype=torch.float64).quantile(share)), 3)


def case_of(text: str) -> tuple[int, int]:
    batch, prompt = text.split(":")
    return int(batch), int(prompt)


def row_of(peer: LeRobot | PhyAI, chip: Chip, batch: int, prompt: int, seconds: float) -> dict[str, Any]:
    """Time one case; its error is its row."""
    begin = time.monotonic()
    try:
        call = peer.call(batch, prompt)
        from_s = time.monotonic()
        row = timed(call, peer.device, batch, seconds)
        row |= {"built_s": round(from_s - begin, 2)} | chip.between(from_s, time.monotonic())
    except Exception as error:  # one case must not cost the others their figures
        row = {"error": f"{type(error).__name__}: {error}"[:600]}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=list(PEERS))
    parser.add_argument("--cases", nargs="+", type=case_of, default=[(1, 200)], metavar="BATCH:PROMPT")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed calls, a case")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds; no case begins after them")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a tiny network")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun, device = time.monotonic(), torch.device(args.device)
    result: dict[str, Any] = {**provenance(device), "peer": args.peer, "rows": {}}

    def keep(name: str, row: dict[str, Any]) -> None:
        result["rows"][name] = row
        print(f"{time.monotonic() - begun:6.1f} s  {args.peer}: {name}  {json.dumps(row)}", flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")

    with torch.inference_mode():
        try:
            peer = PEERS[args.peer](device, args.small)
        except (ImportError, RuntimeError) as error:
            keep("not run", {"error": f"{args.peer} cannot run here: {error}"})
            return
        result["versions"], chip = peer.versions, Chip()
        for batch, prompt in args.cases:
            run = partial(row_of, peer, chip, batch, prompt, 0.0 if device.type == "cpu" else args.seconds)
            late = time.monotonic() - begun > args.budget
            keep(f"B={batch}, prefix {768 + prompt}", {"skipped": "no time left"} if late else run())
        chip.close()
        peer.close()


if __name__ == "__main__":
    main()
