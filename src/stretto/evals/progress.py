"""Tell a person how an evaluation goes, on a stream of their choice, and a file what each episode gave."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from stretto.evals.results import Episode


class Progress:
    """A progress bar and a JSONL file; either may be absent. Episodes may be reported from any thread."""

    def __init__(self, stream: IO[str] | None, episodes: int, jsonl: Path | None) -> None:
        self._stream, self._episodes, self._path = stream, episodes, jsonl
        self._lock, self._exit = threading.Lock(), ExitStack()
        self._bar: RichProgress | None = None
        self._lines: IO[str] | None = None
        self._done = self._solved = self._failed = 0

    def __enter__(self) -> Progress:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = self._exit.enter_context(self._path.open("w"))
        if self._stream is not None:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = self._exit.enter_context(RichProgress(*columns, console=Console(file=self._stream)))
            self._task = self._bar.add_task("episodes", total=self._episodes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._exit.close()

    def finished(self, episode: Episode) -> None:
        with self._lock:
            self._done, self._solved = self._done + 1, self._solved + episode.success
            self._failed += bool(episode.cause)
            if self._lines is not None:
                self._lines.write(episode.to_json() + "\n")
                self._lines.flush()
            if self._bar is not None:
                text = f"{self._solved} of {self._done} solved" + (f", {self._failed} broken off" if self._failed else "")
                self._bar.update(self._task, completed=self._done, description=text)
                if episode.cause:
                    self._bar.console.print(f"{episode.task} (seed {episode.seed}): {episode.cause}", markup=False)
