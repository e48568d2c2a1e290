"""The `stretto` command: one module per verb, imported only when its verb is called, so that help is instant."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from stretto.core.errors import StrettoError

VERBS = {
    "serve": "serve a policy checkpoint to robots (openpi protocol, one port)",
    "world": "run or verify a streaming world model",
    "bench": "time a model at its true shapes, per stage",
    "profile": "measure what each stage of a model costs here, for plans",
    "eval": "evaluate a policy in closed loop on simulated robots",
    "demo": "three simulated robots, one server, on this machine, now",
    "plan": "place streams on GPUs and say how many fit",
    "roofline": "say what limits a robot: the model, the network or the world",
    "calibrate": "measure the scales that a policy needs to run in FP8",
    "inspect": "show what a checkpoint is and what a request must hold",
    "doctor": "check driver, torch, backends, rendering and ports",
}


class Verb(Protocol):
    Args: type[Any]

    def run(self, args: Any) -> int: ...


def usage() -> str:
    lines = [f"  {verb:<10}{text}" for verb, text in VERBS.items()]
    return "\n".join(["usage: stretto VERB [options]", "", *lines, "", "`stretto VERB --help` shows the options of a verb."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code. A user's mistake is one line on standard error and exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0
    if args[0] == "--version":
        from stretto import __version__

        print(__version__)
        return 0
    if args[0] not in VERBS:
        print(f"error: unknown verb {args[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    import tyro

    module: Any = importlib.import_module(f"stretto.cli.{args[0]}")
    parsed = tyro.cli(module.Args, prog=f"stretto {args[0]}", description=VERBS[args[0]], args=args[1:])
    try:
        return int(module.run(parsed))
    except StrettoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
