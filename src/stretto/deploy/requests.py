"""The way of one request through a policy: checked, prepared, handed to the engine, and answered in the robot's units."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from stretto.core.chunk import Chunk
from stretto.core.errors import DeadlineError, ObservationError, SupersededError
from stretto.core.policy import PolicyReply, RequestOptions
from stretto.deploy.input_rows import InputRows
from stretto.deploy.realtime import Realtime
from stretto.deploy.shadow import Shadow
from stretto.deploy.tickets import RobotState, Ticket
from stretto.processors.policy import ModelInputs, PolicyProcessor
from stretto.runtime.engine import Engine


class Requests:
    """Takes requests of all robots of one policy; any thread may call it."""

    def __init__(
        self,
        engine: Engine,
        processor: PolicyProcessor,
        realtime: Realtime,
        rows: InputRows,
        shadow: Shadow | None,
        threads: int,
        version: Callable[[], int],
    ) -> None:
        """Make the way. `version` says of which weights answers are from now on."""
        self.engine, self.processor, self.realtime, self.rows = engine, processor, realtime, rows
        self.shadow, self.version = shadow, version
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="prepare")

    def take(self, observation: Mapping[str, object], options: RequestOptions, robot: RobotState, now_s: float) -> Ticket:
        """Read what a request asks for; nothing is queued yet.

        Raises:
            ObservationError: naming the option that asks for what this policy does not offer.
        """
        if options.priority:
            raise ObservationError("rt.priority", got=options.priority, expected="0: who goes first follows from deadlines")
        with robot.turn:
            if options.reset:
                robot.forget()
            wish = self.realtime.read(options, robot.last_HD)
            robot.asked += 1
            number, episode = robot.asked, robot.episode
        deadline_s = now_s + self.realtime.allowance_s(options)
        reply: Future[PolicyReply] = Future()
        return Ticket(reply, observation, options, robot, number, episode, wish, now_s, deadline_s)

    def prepare_beside(self, ticket: Ticket) -> None:
        """Prepare on a thread of its own."""
        self._pool.submit(self.prepare, ticket)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def prepare(self, ticket: Ticket) -> None:
        """Turn an observation into the model's inputs and hand them in; errors come on the reply."""
        if not ticket.reply.set_running_or_notify_cancel():
            return
        # The edge of one request: a fault that nobody foresaw must not leave its robot waiting.
        try:
            self._check_newest(ticket)
            images = None
            # A shadow, or a second attempt, reads inputs once more when the row has gone to another request.
            if self.shadow is None and not ticket.options.late:
                ticket.row = ticket.robot.stream.row()
                images = ticket.row.views["images"]
            inputs = self.processor.preprocess(ticket.observation, images)
            ticket.preprocess_ms = (self.engine.now_s - ticket.arrived_s) * 1e3
            self._hand_in(ticket, inputs)
        except Exception as error:
            ticket.reply.set_exception(error)

    def _check_newest(self, ticket: Ticket) -> None:
        if ticket.number < ticket.robot.asked and self.engine.plan.dispatch == "deadline_limited":
            raise SupersededError("superseded", "a newer observation of the same robot took its place")

    def _hand_in(self, ticket: Ticket, inputs: ModelInputs) -> None:
        robot = ticket.robot
        deadline_s = math.inf if ticket.overdue else ticket.deadline_s
        with robot.turn:
            # Again, and in one turn: the dispatch policy takes the later chunk of a stream for the newer observation.
            self._check_newest(ticket)
            rows = self.rows.of(inputs, ticket)
            (row, ticket.row), lengths = (ticket.row, None), {"prompt": inputs.token_count}
            chunk = robot.stream.submit(rows, lengths=lengths, seed=ticket.options.seed, deadline_s=deadline_s, row=row)
            self.rows.look_ahead(ticket)
        chunk.add_done_callback(lambda f: self._finish(ticket, f, inputs, rows))

    def _finish(
        self, ticket: Ticket, done: Future[Chunk], inputs: ModelInputs, rows: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        # The edge again, on the engine's thread.
        try:
            error = done.exception()
            if isinstance(error, DeadlineError) and ticket.options.late and not ticket.overdue:
                # Without a deadline it yields to all that can still be on time, so lateness does not spread.
                ticket.overdue = True
                self._hand_in(ticket, inputs)
            else:
                ticket.reply.set_result(self._reply(ticket, done.result(), inputs))
                if self.shadow is not None:
                    self.shadow.offer(rows, {"prompt": inputs.token_count}, done.result().outputs["x"])
        except Exception as failure:
            ticket.reply.set_exception(failure)

    def _reply(self, ticket: Ticket, chunk: Chunk, inputs: ModelInputs) -> PolicyReply:
        begin_s = time.perf_counter()
        actions = self.processor.postprocess(chunk.outputs["x"], inputs.context)
        ticket.robot.remember(ticket.episode, chunk.index, actions)
        postprocess_ms = (time.perf_counter() - begin_s) * 1e3
        notes = (f"{inputs.clipped_values} pixel values were clipped to the valid range",) if inputs.clipped_values else ()
        return PolicyReply(
            actions=actions.copy(),
            infer_ms=chunk.run_ms,
            queue_ms=chunk.queue_ms,
            stage_ms={"preprocess": ticket.preprocess_ms, **chunk.stage_ms, "postprocess": postprocess_ms},
            batch_size=max(chunk.batch_sizes.values()),
            mode=chunk.mode,
            weight_version=self.version(),
            request_id=ticket.options.request_id,
            prefix_steps_honoured=ticket.wish.delay,
            late=ticket.overdue or self.engine.now_s > ticket.deadline_s,
            notes=notes,
        )
