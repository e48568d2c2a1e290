"""The policy server: openpi's WebSocket protocol, health, readiness and metrics on one port."""

from stretto.serve.app import PolicyServer, build_app
from stretto.serve.options import ServerOptions
from stretto.serve.run import ServerThread, run_server
from stretto.serve.service import OffersMetrics, PolicyReply, PolicyService, RequestOptions, Session

__all__ = [
    "OffersMetrics",
    "PolicyReply",
    "PolicyServer",
    "PolicyService",
    "RequestOptions",
    "ServerOptions",
    "ServerThread",
    "Session",
    "build_app",
    "run_server",
]
