"""Check every Triton kernel against its reference at pi0.5's and Wan's true shapes, and time both, on one CUDA device.

    python benchmarks/kernels.py --out kernels.json [--batch 1,4,32] [--only attention] [--sweep]

Times are CUDA-graph replays over several sets of random inputs. A kernel that fails is a row with its error; the rest runs on.
Errors are the largest absolute difference to the reference in fp32, over the largest absolute value there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stretto.layers import kernels as ops
from stretto.layers.dispatch import FusedOp, implementation
from stretto.layers.kernels import Modulation
from stretto.layers.kernels.rope_3d import rope_3d_turns
from stretto.layers.kernels.split_attention import Keys, Tiling, choose_tiling, split_attention

BF16 = torch.bfloat16
L2_BYTES = 60 * 2**20
MAX_SETS = 8
CALLS_PER_GRAPH = 24
MAX_REPLAYS = 30
BUDGET_MS = 1500.0
HEADS = {"heads": 8, "kv_heads": 1, "head_dim": 256, "theta": 1e4}
# Two units in the last place of bf16, relative to the largest value.
TOLERANCE = 2**-7

Args = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One op at one shape; `mutates` are the positions of arguments that it writes."""

    name: str
    batch: int
    op: FusedOp[Any, Any]
    make: Callable[[], Args]
    mutates: tuple[int, ...] = ()


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def fp32(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.float32)


def affine(width: int) -> tuple[Tensor, Tensor]:
    return fp32(width), fp32(width)


def table(batch: int, width: int) -> Modulation:
    """Modulation of one norm among 37, each row at its own denoise step."""
    wide = 0.1 * normal(10, 37 * 3 * width)
    return Modulation(wide[:, 9 * width : 12 * width], torch.randint(0, 10, (batch,), device="cuda"))


def arena(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """One layer of a KV arena of 4 layers, and shuffled slots."""
    whole = normal(batch + 1, 4, 2, 968, 1, 256)
    return whole[:, 2, 0], whole[:, 2, 1], torch.randperm(batch, device="cuda") + 1


def masked_lengths(batch: int) -> dict[str, Tensor]:
    """Three cameras (the last one absent in every other row), then a prompt of 100 to 200 tokens."""
    length = torch.randint(868, 969, (batch,), device="cuda", dtype=torch.int32)
    mask = (torch.arange(968, device="cuda") < length[:, None]).to(torch.uint8)
    mask[1::2, 512:768] = 0
    return {"key_mask_BP": mask, "length_B": length}


def expert_attention(batch: int) -> Args:
    k, v, slots = arena(batch)
    qkv = normal(batch, 50, 10, 256)
    fresh = {"k_suffix_BTKd": qkv[:, :, 8:9].contiguous(), "v_suffix_BTKd": qkv[:, :, 9:]}
    return (qkv[:, :, :8].contiguous(), k, v, slots), {**masked_lengths(batch), **fresh}


def prefix_self_attention(batch: int) -> Args:
    k, v, slots = arena(batch)
    return (normal(batch, 968, 8, 256), k, v, slots), masked_lengths(batch)


def fresh_attention(batch: int) -> Args:
    """The prefix over its own keys, before they are in an arena."""
    qkv = normal(batch, 968, 10, 256)
    named = {"key_mask_BN": masked_lengths(batch)["key_mask_BP"].bool()}
    return (qkv[:, :, :8].contiguous(), qkv[:, :, 8:9].contiguous(), qkv[:, :, 9:]), named


def rope_write_args(batch: int) -> Args:
    k, v, slots = arena(batch)
    return (normal(batch, 968, 2560), positions(batch, 968), k, v, slots), HEADS


def positions(batch: int, tokens: int) -> Tensor:
    return torch.arange(tokens, device="cuda", dtype=torch.int32).expand(batch, tokens).contiguous()


def image(batch: int) -> Tensor:
    return torch.randint(0, 256, (3 * batch, 224, 224, 3), dtype=torch.uint8, device="cuda")


def cases(batch: int) -> Iterator[Case]:
    b, eps = batch, 1e-6

    def case(name: str, op: FusedOp[Any, Any], make: Callable[[], Args], mutates: tuple[int, ...] = ()) -> Case:
        return Case(name, b, op, make, mutates)

    def simple(name: str, op: FusedOp[Any, Any], make: Callable[[], tuple[Any, ...]], **named: Any) -> Case:
        return Case(name, b, op, lambda: (make(), named))

    yield simple("expert ada_rms_norm", ops.ada_rms_norm, lambda: (normal(b, 50, 1024), table(b, 1024), eps))
    yield simple(
        "expert gated_add_ada_rms_norm", ops.gated_add_ada_rms_norm,
        lambda: (normal(b, 50, 1024), normal(b, 50, 1024), table(b, 1024), table(b, 1024), eps),
    )  # fmt: skip
    yield simple("expert rope", ops.rope, lambda: (normal(b, 50, 2560), positions(b, 50)), **HEADS)
    yield simple("expert geglu", ops.geglu, lambda: (normal(b, 50, 8192),))
    yield case("expert prefix_attention", ops.prefix_attention, lambda: expert_attention(b))
    yield simple("prefix rms_norm", ops.rms_norm, lambda: (normal(b, 968, 2048), normal(2048), eps))
    yield simple(
        "prefix sum_rms_norm", ops.sum_rms_norm, lambda: (fp32(b, 968, 2048), (normal(b, 968, 2048),), normal(2048), eps)
    )
    yield case("prefix rope_write", ops.rope_write, lambda: rope_write_args(b), (2, 3))
    yield simple("prefix geglu", ops.geglu, lambda: (normal(b, 968, 32768),))
    yield case("prefix prefix_attention", ops.prefix_attention, lambda: prefix_self_attention(b))
    yield case("prefix attention", ops.attention, lambda: fresh_attention(b))
    yield simple("vision patchify", ops.patchify, lambda: (image(b), 14))
    yield simple("vision layer_norm", ops.layer_norm, lambda: (fp32(3 * b, 256, 1152), *affine(1152), eps), dtype=BF16)
    yield simple(
        "vision sum_layer_norm", ops.sum_layer_norm,
        lambda: (fp32(3 * b, 256, 1152), (normal(3 * b, 256, 1152),), *affine(1152), eps),
    )  # fmt: skip
    yield simple("vision gelu_tanh", ops.gelu_tanh, lambda: (normal(3 * b, 256, 4304), normal(4304)))
    if b == 1:
        yield from wan_cases()


def wan_cases() -> Iterator[Case]:
    """One latent frame of 1,560 tokens through Wan 14B's elementwise ops."""
    tokens, width, eps = 1560, 5120, 1e-6

    def lines() -> Tensor:
        return 0.1 * fp32(1, 1, width)

    def x() -> Tensor:
        return normal(1, tokens, width)

    def case(op: FusedOp[Any, Any], make: Callable[[], tuple[Any, ...]], **named: Any) -> Case:
        return Case(f"wan {op.name}", 1, op, lambda: (make(), named))

    yield case(ops.rms_norm, lambda: (x(), normal(width), eps), unit_offset=False)
    yield case(ops.modulated_layer_norm, lambda: (x(), lines(), lines(), eps))
    yield case(ops.gated_add, lambda: (x(), x(), lines()))
    yield case(ops.gated_add_layer_norm, lambda: (x(), x(), lines(), normal(width), normal(width), eps))
    yield case(ops.gated_add_modulated_layer_norm, lambda: (x(), x(), lines(), lines(), lines(), eps))
    start = torch.tensor([37], device="cuda")
    yield case(ops.rope_3d, lambda: (normal(1, tokens, 40, 128), start, (1, 30, 52)))
    yield Case("wan qk_norm_rope_write", 1, ops.qk_norm_rope_write, ring_write_args, (5, 6))


def ring_write_args() -> Args:
    """One frame of 14B into page 3 of a ring of 4."""
    ring, one = normal(2, 2, 4 * 1560, 40, 128), torch.tensor([1], device="cuda")
    qkv, turns = normal(1, 1560, 3 * 5120), rope_3d_turns(torch.tensor([37], device="cuda"), (1, 30, 52), 128)
    return (qkv, normal(5120), normal(5120), turns, ring[:, 0], ring[:, 1], one, 3 * 1560 * one), {"eps": 1e-6}


def tensors_of(args: Args) -> Iterator[Tensor]:
    for arg in (*args[0], *args[1].values()):
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from (x for x in arg if isinstance(x, Tensor))


def mapped(args: Args, change: Callable[[Tensor], Tensor]) -> Args:
    """Return the arguments with `change` applied to every tensor."""

    def one(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return change(arg)
        return Modulation(*(one(x) for x in arg)) if isinstance(arg, Modulation) else arg

    return tuple(one(a) for a in args[0]), {k: one(v) for k, v in args[1].items()}


def outputs(case: Case, call: Callable[..., Any], args: Args) -> list[Tensor]:
    """Run once and return what came back, and what was written in place."""
    result = call(*args[0], **args[1])
    return [*(result if isinstance(result, tuple) else (result,)), *(args[0][i] for i in case.mutates)]


def error(got: list[Tensor], want: list[Tensor]) -> float:
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if not torch.isfinite(a).all():
            return float("inf")
        worst = max(worst, ((a.float() - b.float()).abs().max() / b.float().abs().max()).item())
    return worst


def check(case: Case) -> dict[str, Any]:
    """Compare both implementations with the reference in fp32, and two runs of the kernel with each other."""
    kernel = case.op.kernel
    if kernel is None:
        return {"ok": True}
    args = case.make()
    copy: Callable[[], Args] = lambda: mapped(args, torch.clone)  # noqa: E731
    exact = outputs(case, case.op.reference, mapped(args, lambda x: x.float() if x.dtype == BF16 else x.clone()))
    reference = error(outputs(case, case.op.reference, copy()), exact)
    first, second = outputs(case, kernel, copy()), outputs(case, kernel, copy())
    triton = error(first, exact)
    repeats = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return {
        "error_triton": triton,
        "error_reference": reference,
        "repeats": repeats,
        "ok": repeats and triton <= max(TOLERANCE, 2 * reference),
    }


def time_us(call: Callable[..., Any], make: Callable[[], Args]) -> float:
    """Median time of one call inside a graph that goes round several sets of inputs."""
    first = make()
    size = sum(x.numel() * x.element_size() for x in tensors_of(first))
    sets = [first, *(make() for _ in range(min(MAX_SETS, max(2, 2 * L2_BYTES // size + 1)) - 1))]
    calls = max(CALLS_PER_GRAPH // len(sets), 1) * len(sets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in sets[:2]:
            call(*args[0], **args[1])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            args = sets[i % len(sets)]
            call(*args[0], **args[1])
    elapsed = [replay_ms(graph) for _ in range(3)]
    replays = int(min(max(BUDGET_MS / elapsed[-1], 5), MAX_REPLAYS))
    return statistics.median(replay_ms(graph) for _ in range(replays)) * 1000 / calls


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop))


def attempt(row: dict[str, Any], key: str, work: Callable[[], Any]) -> None:
    """Put the outcome of `work` into the row, or the text of its error."""
    try:
        outcome = work()
    except Exception as e:  # one failing kernel must not hide the others
        row["ok"] = False
        row.setdefault("errors", {})[key] = f"{type(e).__name__}: {e}"[:2000]
        torch.cuda.empty_cache()
        return
    row.update(outcome if isinstance(outcome, dict) else {key: outcome})


def measure(case: Case) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name, "op": case.op.name, "batch": case.batch, "ok": True}
    row["implementation"] = implementation(case.op, "cuda:0")
    attempt(row, "check", lambda: check(case))
    if case.op.kernel is not None:
        kernel = case.op.kernel
        attempt(row, "triton_us", lambda: time_us(kernel, case.make))
    attempt(row, "reference_us", lambda: time_us(case.op.reference, case.make))
    torch.cuda.empty_cache()
    return row


def sweep(batch: int) -> Iterator[dict[str, Any]]:
    """Time the attention kernel over tilings, for the expert's and the prefix's shape."""
    shapes = [("expert", expert_attention, 400, 1018), ("prefix", prefix_self_attention, 8 * 968, 968)]
    for name, make, rows, keys in shapes:
        chosen = choose_tiling(rows, batch, keys, 256, torch.cuda.get_device_properties(0).multi_processor_count)
        splits = (1, 2, 4, 8, 16) if name == "expert" and batch < 32 else (1, 2) if batch < 32 else (1,)
        blocks = [(64, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3)]
        tilings = {chosen, *(Tiling(m, n, s, w, st) for m, n, w, st in blocks for s in splits)}
        for cut in sorted(tilings):
            row: dict[str, Any] = {
                "case": f"{name} attention",
                "batch": batch,
                "tiling": cut._asdict(),
                "chosen": cut == chosen,
            }
            attempt(row, "triton_us", partial(time_us, partial(tiled, cut), partial(make, batch)))
            yield row


def tiled(cut: Tiling, q: Tensor, k: Tensor, v: Tensor, slots: Tensor, **named: Tensor) -> Tensor:
    suffix = named.get("k_suffix_BTKd"), named.get("v_suffix_BTKd")
    return split_attention(q, Keys(k, v, slots, named["key_mask_BP"], named["length_B"], *suffix), None, cut)


def show(row: dict[str, Any]) -> str:
    def number(key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-".rjust(int(form.split(".")[0]))

    if "tiling" in row:
        mark, cut = "*" if row["chosen"] else " ", tuple(row["tiling"].values())
        return f"{row['case']:32s} {row['batch']:3d} {number('triton_us', '9.2f')} {mark} {cut} {row.get('errors', '')}"
    gain = f"{row['reference_us'] / row['triton_us']:6.1f}x" if {"reference_us", "triton_us"} <= set(row) else "     -"
    state = "ok" if row["ok"] else f"FAILED {row.get('errors', '')}"
    numbers = [number("triton_us", "9.2f"), number("reference_us", "9.2f"), gain]
    numbers += [number("error_triton", "9.2e"), number("error_reference", "9.2e")]
    return f"{row['case']:32s} {row['batch']:3d} {' '.join(numbers)}  {state}"


def environment() -> dict[str, str]:
    import triton

    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() if shutil.which("git") else ""
    device = torch.cuda.get_device_name(0)
    return {"device": device, "commit": commit or "unknown", "torch": torch.__version__, "triton": triton.__version__}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--batch", default="1,4,32", help="batch sizes, with commas")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--sweep", action="store_true", help="also time the attention kernel over tilings")
    options = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {**environment(), "rows": [], "sweep": []}
    print(f"{'case':32s}   B triton_us   torch_us   gain err_triton err_torch")
    with torch.inference_mode():
        for batch in map(int, options.batch.split(",")):
            for case in cases(batch):
                if options.only in case.name:
                    report["rows"].append(measure(case))
                    print(show(report["rows"][-1]), flush=True)
            for row in sweep(batch) if options.sweep else ():
                report["sweep"].append(row)
                print(show(row), flush=True)
            options.out.write_text(json.dumps(report, indent=1))
    return 0 if all(row["ok"] for row in report["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
