"""Speculation against none, in turns: the table of LAB.md. Close everything else first; `--help` has the cases.

    .venv/bin/python benchmarks/speculation.py proposer
    .venv/bin/python benchmarks/speculation.py grid --shape qwen2.5-0.5b --weights int8      # auto, every cell, against off
    .venv/bin/python benchmarks/speculation.py grid --shape llama-3.2-1b --weights int8 --head --batches 1 4   # a head's time
    .venv/bin/python benchmarks/speculation.py grid --shape llama-3.2-1b --weights int8 --draft --batches 1      # a model's
    .venv/bin/python benchmarks/speculation.py quoting --shape llama-3.2-1b --weights int8   # lookup where answers quote
    .venv/bin/python benchmarks/speculation.py quoting                                       # the bundled model's own text
    .venv/bin/python benchmarks/speculation.py citing                                        # a grammar that makes it quote
    .venv/bin/python benchmarks/speculation.py drafters                                      # those that ship with it

Where a random model cannot say anything worth guessing, acceptance is scripted: the drafter knows the answer, errs at the
stated rate and takes no time, so what is measured is verification and the choice of depth. Medians of rounds in turns, with
their 95 % interval; a run on a disturbed machine says so. Each cell of a grid is timed in pairs with off until its interval
says whether it is at least 0.97 of it: yes, no, or not decided.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter, process_time

import torch

from diptych.compute.drafting.heads import TargetTensors
from diptych.compute.loading.random_weights import RandomSource
from diptych.compute.runner import random_model
from diptych.control.speculation import Guesser
from diptych.cost.drafts.acceptance import chances_at, expected_tokens
from diptych.cost.drafts.prices import DraftPrices
from diptych.engine.drafters import OpenDrafter, OpenDraftModel, OpenEagle, eagle_of, shipped
from diptych.engine.llm import LLM
from diptych.engine.load import bundled_dir, load
from diptych.ground.config import EngineConfig, SchedulerConfig, engine_config
from diptych.ground.request import Request, SamplingParams, StructuredSpec
from diptych.ground.step import StepPlan, StepResult
from diptych.lab.experiment import Stage
from diptych.lab.rounds import DISTURBED, Effort, Verdict, measure, pairs
from diptych.lab.scripted import Lane, Race
from diptych.models.named import SHAPES

BEGIN_S = perf_counter()
BATCHES = (1, 4, 16, 64)
ACCEPTANCES = (0.0, 0.3, 0.6, 0.8, 0.95)
GOAL = 0.97  # of off, in every cell of a grid
UNDECIDED_TIMES = 3  # so many budgets for a cell whose interval holds the goal; most are decided in a fraction of one
QUOTING = 0.95  # of a draft in an answer that copies its prompt, where a random model is timed
PROMPT, ANSWER = 128, 128  # tokens, where nobody says
GRID_TOKENS = 1024  # of all answers of a cell of the grid together, and of all prompts; 32 of each sequence at least
LONG_S = 2.0  # a run that takes longer warms itself up
HEAD_DRAFTS = 8
# of --draft: JackFram/llama-68m, with the words of the model that it drafts for
DRAFT_SHAPE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "head_dim": 64} | dict.fromkeys(
    ("num_attention_heads", "num_key_value_heads"), 12
)
DRAFT_WORDS = 32_000  # of EAGLE-3 heads as they are published
SEED = 1
PASSAGE = (
    "The ferry leaves the harbour at seven in the morning and returns at nine in the evening. On Sundays it leaves at ten. "
    "Bicycles travel free of charge, and dogs must be kept on a lead while they are on deck. "
)
QUESTIONS = (
    f"Repeat this text word for word: {PASSAGE}",
    f"Copy the following.\n{PASSAGE}",
    PASSAGE * 2 + "The ferry leaves",
)
LINES = (
    "The ferry leaves the harbour at seven in the morning and returns at nine in the evening.",
    "On Sundays and on holidays the first ferry leaves at ten, and the last one comes back at six.",
    "Bicycles travel free of charge, but there is room for no more than twelve of them at a time.",
    "Dogs must be kept on a lead while they are on deck, and are not allowed in the dining room.",
    "Children under six years travel free, and those under fourteen pay half of the price.",
    "Tickets are sold at the harbour office and on board, where they can be paid for in cash alone.",
)
CITED = 4  # lines of an answer


def proposer(context_tokens: int = 32_768, n_steps: int = 20_000) -> None:
    """Processor time of `lookup` per token: guess, compare with what came, at a context of 32k tokens."""
    for name, every in (("an answer that copies its context", 40), ("one that has nothing of it", 1)):
        rng = random.Random(1)
        tokens = [rng.randrange(50_000) for _ in range(context_tokens)]
        request = Request(request_id="r", prompt_token_ids=tuple(tokens), sampling=SamplingParams(), arrival_s=0.0)
        guesser = Guesser(SchedulerConfig(speculate="lookup"), n_vocab=50_000)
        speculation = guesser.begin(request, DraftPrices(lambda shape: 1.0))
        assert speculation is not None
        begin_s = process_time()
        for _ in range(-(-context_tokens // 4096)):
            speculation.propose(tokens)
        read_s = process_time() - begin_s
        source = 1000
        begin_s = process_time()
        for step in range(n_steps):
            speculation.propose(tokens)
            token_id = tokens[source] if every > 1 and step % every else rng.randrange(50_000)
            source = source + 1 if source < context_tokens - 1 else 1000
            speculation.learn((token_id,))
            tokens.append(token_id)
        per_token_s = (process_time() - begin_s) / n_steps
        print(
            f"{name}: {1e6 * per_token_s:.2f} us per token (goal: under 5); reading the context {1e3 * read_s:.1f} ms"
        )


def stage_of(options: argparse.Namespace, n_tokens: int) -> Stage:
    """A random model of the shape, or the bundled one."""
    settings = {"weights": options.weights, "max_context_tokens": n_tokens}
    if options.threads is not None:
        settings["threads"] = options.threads
    config = engine_config(**settings)
    if options.shape is None:
        loaded = load(str(bundled_dir()), config)
        model, name = loaded.model, loaded.name
    else:
        loaded, name = None, options.shape
        model = random_model(SHAPES[options.shape], config.compute, seed=SEED)
    effort = Effort(rounds=options.rounds, budget_s=options.budget, long_s=LONG_S)
    return Stage(
        model=model,
        name=name,
        config=config,
        loaded=loaded,
        longest_tokens=n_tokens,
        effort=effort,
        progress=tell,
    )


def tell(text: str) -> None:
    """What is being done, beside the table."""
    print(f"    {perf_counter() - BEGIN_S:5.0f} s: {text}", file=sys.stderr, flush=True)


def race_of(stage: Stage, batch: int, options: argparse.Namespace) -> Race:
    """Over a KV pool of its own."""
    prompt_tokens, answer_tokens = lengths(batch, options)
    n_tokens = prompt_tokens + answer_tokens
    engines = stage.engines(context_tokens=n_tokens, n_tokens=batch * n_tokens)
    return Race(engines, batch=batch, prompt_tokens=prompt_tokens, new_tokens=answer_tokens)


def lengths(batch: int, options: argparse.Namespace) -> tuple[int, int]:
    """Tokens of each prompt and answer: fewer in a large batch, where every step has as many."""
    most = max(32, GRID_TOKENS // batch)
    return options.prompt or min(PROMPT, most), options.answer or min(ANSWER, most)


def grid(options: argparse.Namespace) -> None:
    """As many drafts as pay against none, in every cell. Scripted acceptance.

    --head: drafts come from a random EAGLE-3 head in the published layout, run by the executor behind every draw; --draft: from
    a random model of DRAFT_SHAPE. At batch 1 it says what plain arithmetic allows, and where a step's time went.
    """
    stage = stage_of(options, max(sum(lengths(batch, options)) for batch in options.batches))
    print(f"{stage.name}, {stage.model.weights_format}: speed with as many drafts as pay over off; acceptance scripted")
    opened = opened_drafter(stage, options)
    if opened is not None:
        share, words = opened.model.weight_bytes / stage.model.weight_bytes, opened.model.spec.vocab_size
        name = "EAGLE-3 head" if options.head else "model of JackFram/llama-68m's shape"
        print(f"  drafted by a random {name} over {words} words, its time included: it reads {share:.1%} of the model")
    effort = Effort(rounds=options.rounds, budget_s=UNDECIDED_TIMES * options.budget)
    verdicts: Counter[Verdict] = Counter()
    for batch in options.batches:
        prompt_tokens, answer_tokens = lengths(batch, options)
        tell(f"batch {batch}, prompts of {prompt_tokens} tokens and answers of {answer_tokens}: the answers")
        race = race_of(stage, batch, options)
        for acceptance in options.acceptances:
            tell(f"batch {batch}, acceptance {acceptance}")
            scripted = race.lane if opened is None else partial(race.drafting_lane, opened)
            lane = scripted(acceptance=acceptance)
            found = pairs(race.plain.token_s, lane.token_s, effort, limit=GOAL)
            verdicts[found.verdict] += 1
            held = f"{lane.accepted_tokens} of {lane.drafted_tokens} drafts held"
            busy = f"; others took {found.others:.0%} of the cores" if found.others > DISTURBED else ""
            most = ""
            if opened is not None and batch == 1:
                gain, n = allowed(stage, opened, acceptance)
                most = f"; {found.gain.value / gain:.0%} of the {gain:.2f} that arithmetic allows with {n} drafts"
            if found.verdict is Verdict.OPEN:
                most += f"; it may be {max(0.0, GOAL - found.gain.low):.3f} below {GOAL} and no more"
            print(f"  batch {batch:>2}, acceptance {acceptance:<4}: {found.text()}; {held}{most}{busy}", flush=True)
            if opened is not None and batch == 1:
                print(f"    {parts(race.plain, lane, opened)}", flush=True)
    told = ", ".join(f"{verdict.value} {verdicts[verdict]}" for verdict in Verdict)
    print(f"at least {GOAL} of off, cells: {told}")


class RandomEagle(RandomSource):
    """The tensors of an EAGLE-3 head as they are published: an output projection of its own, the model's embedding."""

    def has(self, name: str) -> bool:
        """See HeadSource."""
        return name not in ("fc.bias", "embed_tokens.weight")

    def integers(self, name: str, length: int) -> torch.Tensor:
        """d2t: its words are the first of the model's."""
        return torch.zeros(length, dtype=torch.int64)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of what was asked for."""
        return self._shapes[name]


def parts(plain: Lane, lane: Lane, opened: OpenDrafter) -> str:
    """Where the time of a step goes, medians of one run of each: kernels, drafter, and the host around and between them."""
    told = []
    for name, one in (("without", plain), ("with", lane)):
        steps: list[tuple[float, StepPlan, StepResult]] = []
        one.driver.watch(lambda plan, result, s=steps, d=one.driver: s.append((d.clock.now_s(), plan, result)))
        one.token_s()
        drafting = [
            (steps[i][0] - steps[i - 1][0], plan, result)
            for i, (_, plan, result) in enumerate(steps)
            if i and not plan.shape.prefill_tokens and (plan.n_tokens > 1) == (one is lane)
        ]
        if not drafting:
            return "no step with drafts"
        wall_s, device_s, host_s, draft_s = (
            median(times) for times in zip(*((s, r.device_s, r.host_s, r.draft_s) for s, _, r in drafting), strict=True)
        )
        rest_s = median(s - r.device_s - r.host_s - r.draft_s for s, _, r in drafting)
        text = f"a step {name} drafts {1e3 * wall_s:.2f} ms: kernels {1e3 * device_s:.2f}"
        if one is lane:
            rows = median(plan.n_tokens for _, plan, _ in drafting)
            n = median(chunk.wanted_drafts or 0 for _, plan, _ in drafting for chunk in plan.chunks)
            forward_s = opened.times.estimate_s(drafting[-1][1].shape.with_drafts([1 - drafting[-1][1].n_tokens]))
            text += (
                f" for {rows:g} rows, drafter {1e3 * draft_s:.2f} for {n:g} drafts ({1e3 * forward_s:.2f} a forward)"
            )
        told.append(f"{text}, host {1e3 * host_s:.2f}, between steps {1e3 * rest_s:.2f}")
    return "; ".join(told)


def opened_drafter(stage: Stage, options: argparse.Namespace) -> OpenDrafter | None:
    """The drafter of tensors that the options name."""
    if options.head:
        return eagle_head(stage, options)
    if not options.draft:
        return None
    if options.shape is None:
        raise SystemExit("--draft is for a --shape; the bundled model has a draft model of its own: drafters")
    model = random_model(SHAPES[options.shape] | DRAFT_SHAPE, stage.config.compute, seed=SEED + 1, beside=stage.model)
    config = engine_config(stage.config, max_draft_tokens=HEAD_DRAFTS)
    return OpenDraftModel(model=model, config=config, kind="draft", vocab_size=stage.model.spec.vocab_size)


def eagle_head(stage: Stage, options: argparse.Namespace) -> OpenDrafter:
    """A random EAGLE-3 head for the random model."""
    if options.shape is None:
        raise SystemExit("--head is for a --shape; the bundled model has heads of its own: drafters")
    shape = dict(SHAPES[options.shape])
    raw = shape | {"num_hidden_layers": 1, "draft_vocab_size": options.draft_vocabulary or shape["vocab_size"]}
    shared = TargetTensors(RandomSource(SEED), stage.model.spec)
    config = engine_config(stage.config, max_draft_tokens=HEAD_DRAFTS)
    opened = eagle_of(config, stage.model, raw, RandomEagle(SEED + 1), shared, path="a random head")
    opened.kind = "eagle"
    return opened


def allowed(stage: Stage, head: OpenDrafter, acceptance: float) -> tuple[float, int]:
    """What plain arithmetic allows at batch 1, and with how many drafts: time is weights read, and rows are free."""
    forward = head.model.weight_bytes / stage.model.weight_bytes  # of a step
    fusion = head.fusion.weight_bytes / stage.model.weight_bytes if isinstance(head, OpenEagle) and head.fusion else 0.0
    gains = [
        expected_tokens(chances_at(acceptance, n)) / (1.0 + fusion + n * forward) for n in range(1, HEAD_DRAFTS + 1)
    ]
    return max(gains), gains.index(max(gains)) + 1


def quoting(options: argparse.Namespace) -> None:
    """Batch 1, answers that quote their prompt: scripted for a shape, lookup's own guesses for the bundled model."""
    if options.shape is not None:
        stage = stage_of(options, sum(lengths(1, options)))
        race = race_of(stage, 1, options)
        lane = race.lane(acceptance=QUOTING)
        rounds = stage.measure([race.plain.token_s, lane.token_s])
        gain = rounds.of(lambda t: t[0] / t[1])
        print(
            f"{stage.name}, batch 1, scripted acceptance {QUOTING}: {gain.text()} x (goal: 2.5); {lane.n_steps} steps"
        )
        return
    versus_off(options, {"lookup": {"speculate": "lookup"}, "auto": {"speculate": "auto"}}, params=looping(options))


def citing(options: argparse.Namespace) -> None:
    """The bundled model cites lines of its prompt, word for word, as a regular expression demands: the model chooses which
    lines and how they fall into tokens, the grammar lets nothing else pass, and lookup finds what it reads off the prompt.
    """
    line = f"({'|'.join(line.replace('.', '[.]') for line in LINES)})"
    source = r'\{"lines":\[' + ",".join([f'"{line}"'] * CITED) + r"\]\}"
    questions = [
        f"{text}\nWhich of these lines answer the question {question} Cite {CITED}, word for word, as JSON.\n"
        for text in ("\n".join(LINES), json.dumps(LINES))
        for question in ("when the ferry leaves?", "what a ticket costs?")
    ]
    for temperature in (0.0, 0.8):
        print(f"temperature {temperature}")
        params = SamplingParams(
            max_tokens=CITED * 64,
            temperature=temperature,
            seed=1,
            structured=StructuredSpec(kind="regex", source=source),
        )
        ways = {kind: {"speculate": kind} for kind in ("lookup", "auto")}
        versus_off(options, ways, questions=questions, params=params)


def drafters(options: argparse.Namespace) -> None:
    """The bundled model's own drafters on held prompts, greedy and at temperature 0.8."""
    kinds = ("lookup", *shipped(bundled_dir()), "auto")
    for temperature in (0.0, 0.8):
        print(f"temperature {temperature}")
        versus_off(options, {kind: {"speculate": kind} for kind in kinds}, params=looping(options, temperature))


def looping(options: argparse.Namespace, temperature: float = 0.0) -> SamplingParams:
    """Answers of one length, whatever they come to."""
    return SamplingParams(max_tokens=options.answer or ANSWER, temperature=temperature, seed=1, ignore_eos=True)


def versus_off(
    options: argparse.Namespace,
    ways: dict[str, dict[str, str]],
    *,
    params: SamplingParams,
    questions: Sequence[str] = QUESTIONS,
) -> None:
    """Decode time of the same answers, each way in turn."""
    loaded = load(str(bundled_dir()), engine_config(weights=options.weights))
    config = replace(EngineConfig(), max_context_tokens=1024, kv_memory_bytes=1 << 28)
    runs: list[Callable[[], float]] = []
    told: list[tuple[int, int, int]] = []
    wanted = None
    for settings in ({"speculate": "off"}, *ways.values()):
        llm = LLM(loaded, config, **settings)

        def decode_s(llm: LLM = llm) -> float:
            return sum(llm.generate([question], params)[0].timings.decode_s for question in questions)

        done = [llm.generate([question], params)[0] for question in questions]
        answers = [one.choices[0].token_ids for one in done]
        assert wanted in (None, answers), "speculation changed an answer"
        wanted = answers
        usages = [one.usage for one in done]
        n_drafted, n_held = sum(u.drafted_tokens for u in usages), sum(u.accepted_tokens for u in usages)
        told.append((sum(u.output_tokens for u in usages), n_drafted, n_held))
        runs.append(decode_s)
    rounds = measure(runs, Effort(rounds=options.rounds, budget_s=options.budget))
    print(f"  off: {rounds.of(lambda t: told[0][0] / t[0]).text()} tok/s")
    for i, name in enumerate(ways):
        gain = rounds.of(lambda t, i=i: t[0] / t[1 + i])  # type: ignore[misc]
        n_tokens, n_drafted, n_held = told[1 + i]
        per_step = n_tokens / (n_tokens - n_held)
        print(f"  {name}: {gain.text()} x off, {per_step:.2f} tokens per step, {n_held} of {n_drafted} drafts held")


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("proposer", "grid", "quoting", "citing", "drafters"))
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), help="random weights of this shape (default: the bundled model)"
    )
    parser.add_argument("--head", action="store_true", help="grid: drafts of a random EAGLE-3 head, at its own time")
    drafter = (
        "grid: drafts of a small random model, at its own time; it reads again what a real one would have guessed right"
    )
    parser.add_argument("--draft", action="store_true", help=drafter)
    words = "--head: words that it drafts, 0 for the model's; default: %(default)s, as heads are published"
    parser.add_argument("--draft-vocabulary", type=int, default=DRAFT_WORDS, help=words)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--budget", type=float, default=30.0, help="seconds to go on until medians are settled, or a cell is decided"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    fewer = f"default: {PROMPT}, in a grid's large batches fewer, 32 at least"
    parser.add_argument("--prompt", type=int, help=f"tokens of each prompt; {fewer}")
    parser.add_argument("--answer", type=int, help=f"tokens of each answer; {fewer}")
    parser.add_argument("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    options = parser.parse_args()
    if options.case == "proposer":
        proposer()
    else:
        {"grid": grid, "quoting": quoting, "citing": citing, "drafters": drafters}[options.case](options)


if __name__ == "__main__":
    main()
