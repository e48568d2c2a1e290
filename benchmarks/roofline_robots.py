"""Rooflines of one robot: as it is, with a model five times slower, and with 50 ms of network; and of the model's stages.

    python benchmarks/roofline_robots.py --model pi0.5 --out benchmarks/results/roofline_h200      # on an H200
    OMP_NUM_THREADS=1 python benchmarks/roofline_robots.py --model pi05-metaworld --denoise-steps 3 --execute 4 \\
        --out benchmarks/results/roofline_metaworld

A preset runs on random observations and the world is what its actions take at the control rate; a checkpoint runs in
Meta-World, where observing is rendering. The slow model really runs five times, the network really waits. Writes a trace a
variant, the points and the sentences (.json), and both figures (.png, .svg); where there is no matplotlib, say `--no-figures`
and later, elsewhere, `--figures-from` that .json. Fails if the sentence of a variant does not blame what was made slow, so the
model as it is has to be faster than 50 ms, and the world not much slower than it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from load import DeadlineAware, make_inputs, make_model

from stretto.control.device import DeviceRoof, StageCost, StagePoint, place
from stretto.control.plots import draw_control_roofline, draw_device_roofline
from stretto.control.roofline import Point, locate, read_trace
from stretto.core.plan import Mode
from stretto.deploy.provenance import provenance
from stretto.sched.hardware import CPU, H200


@dataclass(frozen=True)
class Answer:
    """One request, in seconds."""

    observe_s: float
    queue_s: float
    inference_s: float
    stage_s: Mapping[str, float]


Ask = Callable[[], Answer]
VARIANTS: Mapping[str, tuple[int, float]] = {"as_it_is": (1, 0.0), "model_5x_slower": (5, 0.0), "network_50_ms": (1, 50.0)}
"""Name -> how often the model runs for one answer, and milliseconds of network, both ways together."""


def of_engine(model: Any, device: str, prompt: int) -> tuple[Ask, Callable[[], None]]:
    """Ask a model of random weights; returns the question and what ends it."""
    mode: Mode = "graph" if device.startswith("cuda") else "eager"
    server = DeadlineAware(model, device, mode, prompt=prompt, plan="stages", cap=1, buckets=())
    server.join(0)
    inputs, count = make_inputs(model, prompt), [0]

    def ask() -> Answer:
        count[0] += 1
        begin_s = time.perf_counter()
        chunk = server.submit(0, inputs[count[0] % len(inputs)], float("inf")).result()
        whole_s = time.perf_counter() - begin_s
        queue_s = min(chunk.queue_ms / 1e3, whole_s)
        return Answer(0.0, queue_s, whole_s - queue_s, {name: ms / 1e3 for name, ms in chunk.stage_ms.items()})

    return ask, server.close


def of_world(policy: Any, env: str, task: str, execute: int) -> tuple[Ask, Callable[[], None]]:
    """Ask a checkpoint what to do in its simulator, and do it."""
    from stretto.core.policy import RequestOptions
    from stretto.evals.env import find_environment

    world = find_environment(env)(task)
    session = policy.open_session("robot")
    episode = [1_000_000]
    seen = [world.reset(episode[0])]

    def ask() -> Answer:
        begin_s = time.perf_counter()
        reply = policy.submit(seen[0], RequestOptions(), session).result()
        whole_s = time.perf_counter() - begin_s
        done = False
        for action in reply.actions[: execute - 1]:
            done = world.step(action, observe=False).done
            if done:
                break
        begin_s = time.perf_counter()
        if done:
            episode[0] += 1
            seen[0] = world.reset(episode[0])
        else:
            step = world.step(reply.actions[execute - 1])
            seen[0] = step.observation or world.reset(episode[0])
        observe_s = time.perf_counter() - begin_s
        queue_s = min(reply.queue_ms / 1e3, whole_s)
        return Answer(observe_s, queue_s, whole_s - queue_s, {name: ms / 1e3 for name, ms in reply.stage_ms.items()})

    def close() -> None:
        world.close()
        policy.close()

    return ask, close


def line(ask: Ask, times: int, network_ms: float, fixed: Mapping[str, Any]) -> str:
    """Ask once and return the line of a trace."""
    begin_s = time.perf_counter()
    time.sleep(network_ms / 1e3)
    transfer_s = time.perf_counter() - begin_s if network_ms else 0.0
    answers = [ask() for _ in range(times)]
    found = {
        "observe_s": answers[-1].observe_s,
        "transfer_s": transfer_s,
        "queue_s": answers[0].queue_s,
        "inference_s": sum(a.inference_s for a in answers) + sum(a.queue_s for a in answers[1:]),
        "actuate_s": 0.0,
        "stage_s": {name: sum(a.stage_s[name] for a in answers) for name in answers[0].stage_s},
    }
    return json.dumps({**fixed, **found})


def stage_costs(model: Any, seconds: Mapping[str, float], prompt: int) -> list[StageCost]:
    """Count FLOPs of the matrix products and attention of one row, and the bytes that must move: weights, keys, values."""
    c, net = model.config, model.module
    element = 2 if net.dtype == torch.bfloat16 else 4
    v, big, small = c.vision, c.language, c.expert
    image_tokens, patches = c.image_tokens, c.tokens_per_camera
    prefix, suffix, heads = image_tokens + prompt, c.suffix_tokens, big.heads * big.head_dim

    def layer(width: int, mlp: int) -> int:
        return width * (2 * heads + 2 * big.kv_heads * big.head_dim) + 3 * width * mlp

    tower = v.depth * (4 * v.width**2 + 2 * v.width * v.mlp) + 3 * v.patch**2 * v.width + v.width * big.width
    vision = 2 * image_tokens * tower + c.cameras * v.depth * 4 * patches**2 * v.width
    last = 2 * big.width * big.kv_heads * big.head_dim
    prefix_flops = 2 * prefix * ((big.depth - 1) * layer(big.width, big.mlp) + last) + (big.depth - 1) * 4 * prefix**2 * heads
    step = 2 * suffix * small.depth * layer(small.width, small.mlp) + small.depth * 4 * suffix * (prefix + suffix) * heads
    kv = big.depth * prefix * 2 * big.kv_heads * big.head_dim * element
    weights = {name: sum(p.numel() * p.element_size() for p in part.parameters()) for name, part in net.named_children()}
    # Of the embedding only the prompt's rows are read.
    table = net.prefix.embed
    weights["prefix"] -= table.numel() * table.element_size()
    per_step = weights["expert"] + weights["action_in"] + weights["action_out"] + kv
    return [
        StageCost("vision", seconds["vision"], vision, weights["vision"]),
        StageCost("prefix", seconds["prefix"], prefix_flops, weights["prefix"] + kv),
        StageCost("denoise", seconds["denoise"], step * c.denoise_steps, per_step * c.denoise_steps),
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    if options.figures_from is not None:
        return redraw(options.figures_from)
    if (preset := options.model) in ("pi0.5", "pi0", "tiny"):
        model = make_model(preset, options.device, options.dtype, ())
        prompt = min(options.prompt, model.config.tokenizer_max_length)
        ask, close = of_engine(model, options.device, prompt)
    else:
        from stretto.deploy.policy import PolicyOptions, load_policy

        steps = options.denoise_steps
        made = PolicyOptions(device=options.device, max_batch=1, plan="per_visit", rtc=(), denoise_steps=steps)
        policy = load_policy(options.model, made)
        policy.warm()
        model, prompt = policy.loaded.model, options.prompt
        ask, close = of_world(policy, options.env, options.task, options.execute)
    fixed = {
        "executed_steps": options.execute,
        "control_hz": options.control_hz,
        "horizon": model.config.action_horizon,
        "mode": "sync",
    }
    for _ in range(5):
        ask()
    lines: dict[str, list[str]] = {name: [] for name in VARIANTS}
    # In turns, so that whatever else the machine does falls on all of them.
    for _ in range(options.requests):
        for name, (times, network_ms) in VARIANTS.items():
            lines[name].append(line(ask, times, network_ms, fixed))
    points: list[Point] = []
    for name in VARIANTS:
        path = trace_path(options.out, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines[name]) + "\n")
        points.append(locate(name, read_trace(path)))
        print(points[-1].sentence)
    close()
    seconds = {name: ms / 1e3 for name, ms in points[0].stages_ms_p50.items()}
    roof = CPU if options.device == "cpu" else H200
    stages = place(stage_costs(model, seconds, prompt), DeviceRoof(roof.name, roof.flops, roof.bandwidth_bytes_s))
    result = {
        **provenance(torch.device(options.device)),
        **{name: getattr(options, name) for name in ("model", "control_hz", "execute", "requests")},
        "denoise_steps": model.config.denoise_steps,
        "roof": {"name": roof.name, "peak_flops": roof.flops, "bandwidth_bytes_s": roof.bandwidth_bytes_s},
        "points": [p.to_json() for p in points],
        "stages": [{field: getattr(s, field) for field in s.__slots__} for s in stages],
    }
    saved = options.out.with_suffix(".json")
    saved.write_text(json.dumps(result, indent=1) + "\n")
    if options.figures:
        redraw(saved)
    wrong = [p.sentence for p, who in zip(points[1:], ("model", "network"), strict=True) if p.limited_by != who]
    if wrong:
        raise SystemExit("not what was made slow:\n" + "\n".join(wrong))
    return result


def trace_path(out: Path, variant: str) -> Path:
    return out.with_name(f"{out.name}_{variant}_trace.jsonl")


def redraw(saved: Path) -> dict[str, Any]:
    """Draw both figures of a result, from its traces and its stages."""
    result: dict[str, Any] = json.loads(saved.read_text())
    out = saved.with_suffix("")
    points = [locate(name, read_trace(trace_path(out, name))) for name in VARIANTS]
    stages = [StagePoint(**stage) for stage in result["stages"]]
    for ending in ("png", "svg"):
        draw_control_roofline(points, out.with_suffix(f".{ending}"))
        draw_device_roofline(stages, DeviceRoof(**result["roof"]), out.with_name(f"{out.name}_stages.{ending}"))
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pi0.5", help="pi0.5, pi0 or tiny with random weights, or a checkpoint")
    parser.add_argument("--env", default="metaworld")
    parser.add_argument("--task", default="drawer-open")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--denoise-steps", type=int, help="of a checkpoint; by default what it says")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--execute", type=int, default=5, help="actions executed a request")
    parser.add_argument("--control-hz", type=float, default=80.0)
    parser.add_argument("--requests", type=int, default=60, help="of each variant")
    parser.add_argument("--out", type=Path, default=Path("roofline"), help="names all files, without their ending")
    parser.add_argument("--no-figures", dest="figures", action="store_false")
    parser.add_argument("--figures-from", type=Path, help="draw the figures of this .json and its traces, and run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
