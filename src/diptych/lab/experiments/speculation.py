"""Experiments on speculation: what verifying drafts costs and gains, where it stops, and whose drafts hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import sqrt

from diptych.control.speculation import EveryGuess
from diptych.cost.drafts.acceptance import chances_at, expected_tokens
from diptych.engine.drafters import shipped
from diptych.engine.llm import LLM
from diptych.ground.config import EngineConfig
from diptych.ground.phase import Phase
from diptych.ground.request import SamplingParams
from diptych.ground.shape import ChunkShape, StepShape
from diptych.lab.experiment import Check, Experiment, Outcome, Point, Stage, cannot, conclude, point, quantity
from diptych.lab.rounds import Estimate
from diptych.lab.scripted import Race
from diptych.metrics import DraftNote

DEPTHS = (1, 2, 4, 8, 16)
ACCEPTANCES = (0.5, 0.8, 0.95)
BATCHES = (1, 4, 16, 64)
FIXED = 4
PROMPT = 64
ANSWER = 48
SCRIPTED = "acceptance is scripted: the drafter knows the answer and errs at the stated rate; it takes no time"
_PASSAGE = (
    "The ferry leaves the harbour at seven in the morning and returns at nine in the evening. On Sundays it leaves at ten. "
    "Bicycles travel free of charge, and dogs must be kept on a lead while they are on deck. "
)
KINDS = {
    "quotes its prompt": [
        f"Repeat this text word for word: {_PASSAGE}",
        f"Copy the following.\n{_PASSAGE}\n{_PASSAGE}",
    ],
    "free text": ["Once upon a time there was a little girl who", "The history of the town begins with"],
}
POSITIONS = 8


def _race(stage: Stage, batch: int) -> Race:
    tokens = PROMPT + ANSWER
    engines = stage.engines(context_tokens=tokens, n_tokens=batch * tokens)
    return Race(engines, batch=batch, prompt_tokens=PROMPT, new_tokens=ANSWER)


def _token_s(stage: Stage, batch: int, depth: int, acceptance: float) -> float | None:
    """Predicted seconds per token of one sequence, scheduler and sampler included."""
    if stage.predictor is None:
        return None
    chunk = ChunkShape(Phase.DECODE, 1 + depth, PROMPT + ANSWER // 2, True, batch)
    step_s = stage.predictor.predict(StepShape((chunk,))).total_s
    return step_s / expected_tokens(chances_at(acceptance, depth))


def _depth(stage: Stage) -> Outcome:
    race = _race(stage, 1)
    cells = [(a, d) for a in ACCEPTANCES for d in DEPTHS]
    lanes = [race.lane(acceptance=a, draft_tokens=d) for a, d in cells]
    rounds = stage.measure([race.plain.token_s, *(lane.token_s for lane in lanes)])
    plain = _token_s(stage, 1, 0, 0.0)
    points: list[Point] = []
    for acceptance in ACCEPTANCES:
        name = f"acceptance {acceptance:g}"
        points.append(point(name, 0, rounds.point(0), plain))
        points += [
            point(name, d, rounds.point(1 + i), _token_s(stage, 1, d, a))
            for i, (a, d) in enumerate(cells)
            if a == acceptance
        ]
    best = len(cells) - len(DEPTHS)  # the first of the highest acceptance
    gain = rounds.of(lambda t: t[0] / min(t[1 + best :]))
    hurt = rounds.of(lambda t: t[len(DEPTHS)] / t[0])  # the deepest of the lowest
    return conclude(
        points,
        [Check(what=f"gain of the best depth at acceptance {ACCEPTANCES[-1]:g}", estimate=gain, limit=1.3)],
        rounds,
        finding=(
            f"at acceptance {ACCEPTANCES[-1]:g} the best depth gives tokens {gain.value:.2f} times as fast; at "
            f"{ACCEPTANCES[0]:g}, {DEPTHS[-1]} drafts make a token take {hurt.value:.2f} times as long as none"
        ),
        notes=[SCRIPTED, f"one sequence, {PROMPT} tokens of prompt and {ANSWER} of answer" + stage.cached_weights],
    )


def _batch(stage: Stage) -> Outcome:
    batches = [b for b in BATCHES if b * (PROMPT + ANSWER) <= 64 * stage.longest_tokens]
    acceptance = 0.8
    samplers, points = [], []
    races = [_race(stage, batch) for batch in batches]
    for race in races:
        samplers += [
            race.plain.token_s,
            race.lane(acceptance=acceptance, draft_tokens=FIXED).token_s,
            race.lane(acceptance=acceptance).token_s,
            race.lane(acceptance=0.0).token_s,
        ]
    rounds = stage.measure(samplers)
    names = (f"always {FIXED} drafts", "as many as pay", "as many as pay, none right")
    gains: list[list[Estimate]] = []
    for i, batch in enumerate(batches):
        plain, fixed = _token_s(stage, batch, 0, 0.0), _token_s(stage, batch, FIXED, acceptance)
        predicted = None if plain is None or fixed is None else plain / fixed
        row = [rounds.of(lambda t, i=i, k=k: t[4 * i] / t[4 * i + k]) for k in (1, 2, 3)]  # type: ignore[misc]
        gains.append(row)
        points += [
            quantity(name, batch, gain, "times the speed without", predicted=predicted if k == 0 else None)
            for k, (name, gain) in enumerate(zip(names, row, strict=True))
        ]
    least = min((gain for row in gains for gain in row[1:]), key=lambda gain: gain.value)
    crossed = next((b for b, row in zip(batches, gains, strict=True) if row[0].value < 1.0), None)
    told = (
        f"{FIXED} drafts each stop paying at batch {crossed}"
        if crossed
        else f"{FIXED} drafts each pay at every batch here"
    )
    return conclude(
        points,
        [Check(what="speed with as many drafts as pay, at the worst", estimate=least, limit=0.97)],
        rounds,
        finding=f"at acceptance {acceptance:g} {told}; as many as pay give {least.value:.2f} times the speed at the worst",
        notes=[
            SCRIPTED,
            "when it hurts: a full batch has no empty rows, and every rejected draft takes one from a neighbour",
        ],
    )


def _whose(stage: Stage) -> Outcome:
    if stage.loaded is None:
        return cannot("drafts of a text need a model with words")
    config = replace(stage.config, max_context_tokens=min(512, stage.context_tokens))
    config = replace(config, kv_memory_bytes=16 * _context_bytes(stage, config))
    points: list[Point] = []
    shares: dict[tuple[str, str], Estimate] = {}
    for drafter in ("lookup", "prediction", *shipped(stage.loaded.directory)):
        for kind, prompts in KINDS.items():
            notes = list(_drafted(stage, config, drafter, prompts))
            for j in range(POSITIONS):
                tried = sum(note.drafted_tokens > j for note in notes)
                held = sum(note.accepted_tokens > j for note in notes)
                if held:
                    points.append(
                        quantity(f"{drafter}, {kind}", j + 1, _share(held, tried), "share of drafts that held")
                    )
                if j == 0:
                    shares[drafter, kind] = _share(max(held, 1), max(tried, 1))
    quoting, free = (shares["lookup", kind] for kind in KINDS)
    check = Check(what="first drafts of lookup that hold, quoting over free", estimate=_times(quoting, free), limit=1.0)
    return Outcome(
        points=tuple(points),
        verdict=check.verdict,
        finding=(
            f"of lookup's first drafts {quoting.value:.0%} hold where the answer should quote its prompt and {free.value:.0%} "
            f"in free text; of a prediction with every twentieth word changed, {shares['prediction', 'free text'].value:.0%}"
        ),
        checks=(check.text(),),
        notes=(
            "a draft holds only where those before it did; intervals are Wilson's of the share, no prediction exists",
            "greedy answers of at most 96 tokens; depth is not priced here",
        ),
        noise="counts, not times: the same on every machine",
    )


def _times(left: Estimate, right: Estimate) -> Estimate:
    """The ratio, with an interval that holds it wherever each of the two is."""
    return Estimate(
        value=left.value / right.value,
        low=left.low / right.high,
        high=left.high / right.low,
        spread=0.0,
        samples=left.samples + right.samples,
    )


def _context_bytes(stage: Stage, config: EngineConfig) -> int:
    blocks = -(-(config.max_context_tokens or 1) // config.block_tokens)
    return blocks * stage.model.kv_bytes_per_block(config.block_tokens)


def _drafted(stage: Stage, config: EngineConfig, drafter: str, prompts: Sequence[str]) -> Iterator[DraftNote]:
    """What came of the drafts of each prompt's answer."""
    assert stage.loaded is not None
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True, max_draft_tokens=POSITIONS)
    for prompt in prompts:
        llm = LLM(stage.loaded, config, speculate="off" if drafter == "prediction" else drafter)
        llm.engine.core._scheduler.drafts.depths = EveryGuess(rows=64)
        asked = params
        if drafter == "prediction":
            (known,) = llm.generate([prompt], replace(params, max_draft_tokens=0))
            words = known.choices[0].text.split(" ")
            words[19::20] = ["otherwise"] * len(words[19::20])
            asked = replace(params, prediction=" ".join(words))
        (done,) = llm.generate([prompt], asked)
        yield from done.record.drafts


def _share(held: int, tried: int) -> Estimate:
    """With Wilson's 95 % interval."""
    z, p = 1.96, held / tried
    middle, width = p + z * z / (2 * tried), z * sqrt(p * (1 - p) / tried + z * z / (4 * tried * tried))
    low, high = ((middle + sign * width) / (1 + z * z / tried) for sign in (-1, 1))
    return Estimate(value=p, low=min(low, p), high=max(high, p), spread=0.0, samples=tried)


SPECULATION_DEPTH = Experiment(
    name="speculation-depth",
    title="Time per token against the number of drafts",
    claim="rows that verify drafts are nearly free until arithmetic takes over, so right drafts multiply decode's speed",
    x_label="drafts per step",
    y_label="time per token",
    run=_depth,
)
SPECULATION_BATCH = Experiment(
    name="speculation-batch",
    title="Speculation against the batch",
    claim="drafts fill a small batch's empty rows; the gain goes as the batch grows, and choosing by price loses none",
    x_label="sequences",
    y_label="speed",
    run=_batch,
    is_log_x=True,
)
SPECULATION_DRAFTERS = Experiment(
    name="speculation-drafters",
    title="Whose drafts hold, and how far",
    claim="a text that quotes can be guessed from itself, and free text hardly",
    x_label="position of the draft",
    y_label="drafts that hold",
    run=_whose,
)
