"""A progress bar for prompts that take long to read: prefill is the wait before the first word, so it is shown."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.cli import working
from diptych.ground.events import Event, ScheduledEvent, TokenEvent

PATIENCE_S = 1.0


class PromptBar:
    """Shows itself when the prompt is not read after `patience_s`, and goes with the first token. Silent without a terminal.

    with PromptBar(llm.engine, prompt_tokens, console=console) as bar: ...    # bar.close() before anything else is written
    """

    def __init__(
        self, engine: working.Engine, prompt_tokens: int, *, console: Console, patience_s: float = PATIENCE_S
    ) -> None:
        columns = (
            TextColumn("reading the prompt"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"),
        )
        self._bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        self._task = self._bar.add_task("", total=prompt_tokens)
        self._engine = engine
        self._timer = threading.Timer(patience_s, self._show)
        self._timer.daemon = True
        self._lock = threading.Lock()
        self._is_over = not console.is_terminal

    def __enter__(self) -> PromptBar:
        if not self._is_over:
            self._end_listening = self._engine.listen(self._on_events)
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The prompt is read, or nobody waits for it any more."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._timer.cancel()
        self._bar.stop()
        self._end_listening()

    def _show(self) -> None:
        with self._lock:
            if not self._is_over:
                self._bar.start()

    def _on_events(self, events: list[Event]) -> None:
        """A planned chunk tells that what stands before it is done."""
        for event in events:
            if isinstance(event, ScheduledEvent) and event.index == 0 and not event.is_recompute:
                self._bar.update(self._task, completed=event.context_tokens)
            elif isinstance(event, TokenEvent):
                self.close()
                return
