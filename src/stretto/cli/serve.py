"""`stretto serve CHECKPOINT`: one policy, one port, many robots."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional

from stretto.cli.options import PolicyFlags


@dataclass(frozen=True)
class Args:
    checkpoint: Positional[str]
    """A LeRobot folder, an openpi PyTorch export, or the name of an embedded checkpoint."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 opens the port to the network (set --api-key then)."""
    port: int = 8000
    api_key: str | None = None
    """Clients must send `Authorization: Api-Key <key>`."""
    max_message_bytes: int | None = None
    """Largest message; by default derived from the cameras that the checkpoint declares."""
    max_sessions: int = 256
    trace: tuple[Path, ...] = ()
    """Write every request to these files: FILE.jsonl for `stretto roofline` (say --control-hz too), FILE.json for Perfetto."""
    trace_max_mb: float = 64.0
    """Most that one trace may take on disk; what is older goes."""
    policy: Annotated[PolicyFlags, OmitArgPrefixes] = field(default_factory=PolicyFlags)


def run(args: Args) -> int:
    from stretto.deploy.policy import load_policy
    from stretto.serve.options import ServerOptions
    from stretto.serve.run import bind, run_server

    options = ServerOptions(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        max_message_bytes=args.max_message_bytes,
        max_sessions=args.max_sessions,
        traces=args.trace,
        trace_max_mb=args.trace_max_mb,
    )
    with bind(options) as listener:
        policy = load_policy(args.checkpoint, args.policy.resolve())
        print(f"{policy.loaded.path}: {policy.loaded.report}", file=sys.stderr)
        run_server(policy, options, listener=listener)
    return 0
