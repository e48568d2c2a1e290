"""Every kind of link delivers what was sent, in order, and tells when the other end is gone."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from stretto.core.route import TensorSpec
from stretto.parallel.dist import CONSUMER, PRODUCER, DistInbox, DistOutbox, Pair, open_store
from stretto.parallel.link import Link
from stretto.parallel.local import LocalLink
from stretto.parallel.pages import PageLayout
from stretto.parallel.peer import PeerInbox, PeerOutbox

CPU = torch.device("cpu")
LAYOUT = PageLayout.of({"x": TensorSpec((3, 2), "float32"), "n": TensorSpec((), "int64"), "h": TensorSpec((5,), "bfloat16")})
MESSAGES = 30


def message(i: int) -> dict[str, torch.Tensor]:
    full = {"x": torch.full((3, 2), i + 0.5), "n": torch.tensor(i), "h": torch.full((5,), i, dtype=torch.bfloat16)}
    return full if i % 3 else {"n": full["n"]}


def open_outbox(kind: str, where: Any) -> Link:
    if kind == "peer":
        return PeerOutbox("consumer", where, LAYOUT, CPU, lost=lambda *_: None)
    return DistOutbox("consumer", Pair(open_store(where), "a-b", PRODUCER, CPU), LAYOUT, CPU, lost=lambda *_: None)


def produce(kind: str, where: Any) -> None:
    outbox = open_outbox(kind, where)
    for i in range(MESSAGES):
        outbox.send({"i": i}, message(i))
    outbox.close()


def send_one_and_stay(kind: str, where: Any) -> None:
    open_outbox(kind, where).send({"i": 0}, message(0))
    signal.pause()


class Consumer:
    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
        self.lost: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()

    def receive(self, header: Any, values: Any, there: Any) -> None:
        there.wait()
        self.got.append((header, dict(values)))

    def lose(self, peer: str, why: str) -> None:
        self.lost.put((peer, why))

    def check(self) -> None:
        assert [header["i"] for header, _ in self.got] == list(range(MESSAGES))
        for i, (_, values) in enumerate(self.got):
            want = message(i)
            assert values.keys() == want.keys()
            assert all(torch.equal(values[name], want[name]) for name in want)


def start(kind: str, consumer: Consumer, body: Callable[[str, Any], None]) -> tuple[Any, Any]:
    context = mp.get_context("spawn")
    if kind == "peer":
        ours, theirs = context.Pipe()
        process = context.Process(target=body, args=(kind, theirs), daemon=True)
        process.start()
        theirs.close()
        inbox: Any = PeerInbox("producer", ours, LAYOUT, CPU, pages=2, receive=consumer.receive, lost=consumer.lose)
        return process, inbox
    server = open_store()
    process = context.Process(target=body, args=(kind, server.port), daemon=True)
    process.start()
    pair = Pair(server, "a-b", CONSUMER, CPU)
    return process, DistInbox("producer", pair, LAYOUT, CPU, receive=consumer.receive, lost=consumer.lose)


@pytest.mark.parametrize("kind", ["peer", "dist"])
def test_chunks_cross_a_process_border_in_order_and_unchanged(kind: str) -> None:
    consumer = Consumer()
    process, inbox = start(kind, consumer, produce)
    inbox.join(60)
    consumer.check()
    process.join(30)
    assert process.exitcode == 0
    assert consumer.lost.empty()


@pytest.mark.parametrize("kind", ["peer", "dist"])
def test_a_producer_that_is_killed_is_noticed_by_its_consumer(kind: str) -> None:
    consumer = Consumer()
    process, inbox = start(kind, consumer, send_one_and_stay)
    while not consumer.got:
        time.sleep(0.01)
    process.kill()
    peer, why = consumer.lost.get(timeout=60)
    assert peer == "producer"
    assert "link" in why
    inbox.join(10)


def test_a_consumer_that_is_killed_does_not_block_its_producer() -> None:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    lost: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    process = context.Process(target=consume_one, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    outbox = PeerOutbox("consumer", ours, LAYOUT, CPU, lost=lambda peer, why: lost.put((peer, why)))
    for i in range(MESSAGES):
        outbox.send({"i": i}, message(i))
    assert lost.get(timeout=30)[0] == "consumer"
    outbox.send({"i": 0}, message(0))
    outbox.close()
    process.join(10)


def consume_one(pipe: Connection) -> None:
    inbox = PeerInbox("producer", pipe, LAYOUT, CPU, pages=2, receive=kill_self, lost=lambda *_: None)
    inbox.join()


def kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_local_link_hands_over_the_same_tensors() -> None:
    consumer = Consumer()
    link = LocalLink("next", consumer.receive)
    values = message(1)
    link.send({"i": 1}, values)
    assert consumer.got[0][1]["x"] is values["x"]


@pytest.mark.multigpu
def test_values_cross_between_two_gpus_of_one_process_in_order_while_both_are_busy() -> None:
    there, here = torch.device("cuda:1"), torch.device("cuda:0")
    consumer, done = Consumer(), queue.SimpleQueue[int]()

    def receive(header: Any, values: Any, mark: Any) -> None:
        consumer.receive(header, {name: value.cpu() for name, value in values.items()}, mark)
        done.put(header["i"])

    link = LocalLink(str(there), receive)
    work = torch.randn(4096, 4096, device=there)
    for i in range(MESSAGES):
        work = work @ work / 64.0  # the consumer is busy, and the producer must not wait for it
        link.send({"i": i}, {name: value.to(here) for name, value in message(i).items()})
    assert [done.get(timeout=30) for _ in range(MESSAGES)] == list(range(MESSAGES))
    link.close()
    consumer.check()
