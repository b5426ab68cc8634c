"""`diptych chat`: a conversation. The history stays in the prefix cache; Ctrl-C stops the answer, not the program."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from diptych.cli import options, working
from diptych.cli.options import config_without_guesses, console, interrupts, loading_bar, sampling_params, tell_room
from diptych.cli.prompt_bar import PromptBar
from diptych.engine.text.template import DEFAULT_TEMPLATE_WORDS
from diptych.ground.errors import EngineError
from diptych.ground.phase import FinishReason
from diptych.ground.request import SamplingParams

app = options.command_app()
HELP = "/reset forgets the conversation, /report shows the last answer's phases, /quit leaves; Ctrl-C stops an answer"


@app.command()
@options.takes(engine=options.ENGINE, drawing=options.SAMPLING, adapter=options.ONE_LORA)
def chat(
    model: options.Model = "bundled",
    system: Annotated[str | None, typer.Option(help="a system prompt")] = None,
    think: Annotated[bool, typer.Option("--think", help="let the model think before it answers")] = False,
    max_tokens: options.MaxTokens = 512,
    *,
    drawing: dict[str, Any],
    engine: dict[str, Any],
    adapter: dict[str, Any],
) -> None:
    """Talk with a model."""
    config = config_without_guesses(max_running_sequences=1, **engine, **options.one_lora(**adapter))
    sampling = sampling_params(max_tokens=max_tokens, **drawing)
    with loading_bar(f"loading {model}") as progress:
        llm = working.LLM.from_pretrained(model, config, progress=progress)
    Conversation(llm, sampling, system=system, think=think).run()


class Conversation:
    """The messages so far and the loop over lines of standard input."""

    def __init__(self, llm: working.LLM, sampling: SamplingParams, *, system: str | None, think: bool) -> None:
        self._llm = llm
        self._sampling = sampling
        self._think = think
        self._first: list[dict[str, object]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._first)
        self._report: str | None = None
        self._ceilings = working.machine_ceilings(llm.loaded.model)

    def run(self) -> None:
        """Read a line, answer it, until /quit or the end of input. Ctrl-C at the prompt drops the line."""
        is_open, is_greeted = True, False
        while is_open:
            try:
                if not is_greeted:
                    is_greeted = True
                    console.print(HELP, style="dim", soft_wrap=True)
                    if self._llm.loaded.template.is_default:
                        console.print(DEFAULT_TEMPLATE_WORDS, style="yellow", soft_wrap=True)
                is_open = self._turn()
            except KeyboardInterrupt:
                console.print()

    def _turn(self) -> bool:
        console.print("> ", style="bold", end="")
        text = sys.stdin.readline()
        line = text.strip()
        if not text:
            console.print()  # the shell goes on in a line of its own
        if not text or line == "/quit":
            return False
        if line == "/reset":
            self._messages = list(self._first)
        elif line == "/report":
            console.print(self._report or "no answer yet", soft_wrap=True)
        elif line.startswith("/"):
            console.print(HELP, style="dim", soft_wrap=True)
        elif line:
            self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        asked: list[dict[str, object]] = [*self._messages, {"role": "user", "content": line}]
        written: list[str] = []
        observer = working.PhaseObserver()
        end_listening = self._llm.engine.listen(observer)

        def on_delta(_: int, delta: working.OutputDelta) -> None:
            bar.close()
            written.append(delta.text)
            sys.stdout.write(delta.text)
            sys.stdout.flush()

        try:
            prompt = self._llm.render(asked, kwargs={"enable_thinking": self._think})
            prompt_tokens = len(prompt.token_ids)
            tell_room(self._llm, prompt_tokens, self._sampling)
            with interrupts() as is_interrupted, PromptBar(self._llm.engine, prompt_tokens, console=console) as bar:
                done = self._llm.generate(
                    [prompt], self._sampling, adapter=next(iter(self._llm.config.loras), None), on_delta=on_delta,
                    is_cancelled=is_interrupted,
                )[0]  # fmt: skip
                print(flush=True)  # to where the answer went, which may be a file: the next begins in a line of its own
                if done.error is not None:
                    raise done.error
        except EngineError as error:
            console.print(f"error: {error}", style="red")
            return
        else:
            report = working.phase_report(
                self._llm.loaded,
                observer,
                ceilings=self._ceilings,
                usage=done.usage,
                timings=done.timings,
                is_cold=False,
            )
            self._report = report.table()
            stopped = "stopped · " if done.choices[0].finish_reason is FinishReason.ABORT else ""
            console.print(f"{stopped}{report.line()}", style="dim", soft_wrap=True)
        finally:
            end_listening()
        # a message that was not answered, for an error or Ctrl-C before the first word, is none of the conversation's
        if stopped and not "".join(written):
            return
        self._messages = [*asked, {"role": "assistant", "content": "".join(written)}]
