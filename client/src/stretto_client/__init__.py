"""The robot side of Stretto: a policy client, a real-time action broker and the wire codec. No torch."""

from stretto_client.broker import BrokerStats, RealtimeBroker
from stretto_client.codec import CodecError
from stretto_client.delay import DelayEstimator
from stretto_client.errors import (
    ClientError,
    ClockError,
    ConnectionLostError,
    FieldError,
    PolicyTimeoutError,
    ReplyError,
    ServerError,
    StarvedError,
)
from stretto_client.options import Handshake, Options
from stretto_client.policy import PolicyClient
from stretto_client.trace import TracedPolicy

__version__ = "0.1.0"

__all__ = [
    "BrokerStats",
    "ClientError",
    "ClockError",
    "CodecError",
    "ConnectionLostError",
    "DelayEstimator",
    "FieldError",
    "Handshake",
    "Options",
    "PolicyClient",
    "PolicyTimeoutError",
    "RealtimeBroker",
    "ReplyError",
    "ServerError",
    "StarvedError",
    "TracedPolicy",
]
