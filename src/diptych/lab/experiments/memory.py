"""The limit that KV memory sets: what happens, and what it costs, when the pool cannot hold every running sequence."""

from __future__ import annotations

from dataclasses import replace

from diptych.lab.drive import Driver, Engines
from diptych.lab.experiment import Check, Experiment, Outcome, Stage, conclude, point

SHARES = (1.0, 0.75, 0.5, 0.25)
REQUESTS = 8


class _Crowd:
    """Requests that all arrive at once on a pool of some size: the time until the last has ended."""

    def __init__(self, driver: Driver, *, prompt_tokens: int, new_tokens: int) -> None:
        self._driver = driver
        self._prompt_tokens = prompt_tokens
        self._new_tokens = new_tokens
        self.preemptions = 0

    def wall_s(self) -> float:
        """Run them once."""
        driver = self._driver
        before, begin_s = driver.core.stats().preemptions, driver.clock.now_s()
        for i in range(REQUESTS):
            driver.submit(f"{i}", driver.prompt(self._prompt_tokens), new_tokens=self._new_tokens)
        driver.run()
        self.preemptions = driver.core.stats().preemptions - before
        return driver.clock.now_s() - begin_s


def _kv_memory(stage: Stage) -> Outcome:
    context = min(512, stage.context_tokens)
    new_tokens = context // 2
    prompt = context - new_tokens
    need = REQUESTS * context
    scheduler = replace(stage.config.scheduler, max_running_sequences=REQUESTS)
    config = replace(stage.config, scheduler=scheduler)
    spare = REQUESTS * config.block_tokens  # which `Engines` adds
    settings = {"enable_prefix_cache": False}
    crowds: list[_Crowd] = []
    predicted: list[float | None] = []
    for share in SHARES:
        n_tokens = max(int(share * need) - spare, context)
        engines = Engines(stage.model, config, predictor=stage.predictor, context_tokens=context, n_tokens=n_tokens)
        crowds.append(_Crowd(engines.driver(**settings), prompt_tokens=prompt, new_tokens=new_tokens))
        rehearsal = engines.rehearsal(**settings)
        rehearsed = None if rehearsal is None else _Crowd(rehearsal, prompt_tokens=prompt, new_tokens=new_tokens)
        predicted.append(None if rehearsed is None else rehearsed.wall_s())
    rounds = stage.measure([crowd.wall_s for crowd in crowds])
    cost = rounds.of(lambda t: t[-1] / t[0])
    return conclude(
        [
            point("all requests", share, rounds.point(i), predicted[i])
            for i, share in enumerate(SHARES)
        ],
        [Check(what=f"time with {SHARES[-1]:.0%} of the memory over that with all of it", estimate=cost, limit=1.1)],
        rounds,
        finding=(
            f"{REQUESTS} requests that grow to {context} tokens each take {1e3 * rounds.point(0).value:.0f} ms where the KV "
            f"pool holds them all, and {1e3 * rounds.point(len(SHARES) - 1).value:.0f} ms ({cost.value:.2f}x) in a pool for "
            f"{SHARES[-1]:.0%} of that: every one is answered, by giving up the last arrived and computing it again"
        ),
        notes=[
            "preemptions: " + ", ".join(
                f"{crowd.preemptions} with {share:.0%} of the memory" for share, crowd in zip(SHARES, crowds, strict=True)
            ),
            "a smaller pool also runs fewer sequences in a step, so that each reading of the weights serves fewer of them",
        ],
    )  # fmt: skip


KV_MEMORY = Experiment(
    name="kv-memory",
    title="A KV pool too small for all that runs",
    claim="KV memory limits how much runs at once: a full pool loses no request, and pays in preemptions and smaller batches",
    x_label="KV pool, as a share of what all requests need",
    y_label="all requests",
    run=_kv_memory,
)
