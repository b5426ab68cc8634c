"""`diptych plan --users`: one screen that names what to buy, the same answer from any number of processes, clear errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure

from diptych.cli.layouts import devices_of, prices_of
from diptych.cli.plan import app
from diptych.cli.users_picture import draw
from diptych.cli.users_text import row_of
from diptych.cost.setup import setup_of
from diptych.ground.errors import ConfigError
from diptych.metrics import Limits
from diptych.sim.capacity import Ask, Bisection, Trial, bisect_one, pooled, run_one
from diptych.sim.link import Link
from diptych.sim.pareto import Point
from diptych.sim.pools import Pool, Service
from diptych.sim.search import Layout, none_holds, with_cheaper
from diptych.sim.service import Report
from diptych.workload import LengthRange

# answers of a few tokens keep hundreds of simulated requests cheap
SMALL = ["llama-3.1-8b", "--users", "40", "--prompt", "200:600", "--output", "4:16", "--turns", "3", "--think", "4s"]
DEVICES = ["--hardware", "l40s", "--tp", "1"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations of a few requests: what is tested here is the search, not its numbers."""
    for name, requests in {"SHORT": 50, "LONG": 60, "WHOLE": 80, "LONGEST": 120}.items():
        monkeypatch.setattr(f"diptych.sim.search.{name}", requests)


@pytest.fixture(autouse=True, scope="module")
def simulated_once() -> Iterator[None]:
    """A trial that several searches of this process make is simulated by the first; other processes simulate all of theirs."""
    known: dict[tuple[str, int, int], list[tuple[Trial, object]]] = {}

    def kept(simulated: Callable[[Trial], object]) -> Callable[[Trial], object]:
        def run(trial: Trial) -> object:
            alike = known.setdefault((simulated.__name__, trial.n_users, trial.n_requests), [])
            for other, found in alike:
                if other == trial:
                    return found
            alike.append((trial, simulated(trial)))
            return alike[-1][1]

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("run", "run_if_good", "holds"):
            patch.setattr(Trial, name, kept(getattr(Trial, name)))
        yield


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    app([*SMALL, *DEVICES, *arguments, "--json"])
    read: dict[str, object] = json.loads(capsys.readouterr().out)
    return read


def test_a_screen_says_what_to_buy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every question of the purchase has its line."""
    picture = tmp_path / "p.png"
    slo = ("--slo", "ttft=1s,tpot=80ms,e2e=30s")
    app([*SMALL, *DEVICES, *slo, "--processes", "1", "--picture", str(picture)])
    page = capsys.readouterr().out
    for words in (
        "within TTFT 1 s, TPOT 80 ms, 30 s in all",
        "limits this service",
        "buy ",
        "crossover:",
        "prefix cache:",
        "twice the users:",
        "how sure:",
        "for longer:",
    ):
        assert words in page
    assert len(page.splitlines()) < 40
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_lines_of_the_picture_differ_by_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """By colour alone those of four and of eight devices were red and green, with one mark for all."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    points = [
        Point(
            name=f"device {n}", is_pools=False, batch=b, tokens_per_s_of_device=9.0 * b, tokens_per_s_of_user=90.0 / b
        )
        for n in range(9)
        for b in (1, 8)
    ]
    draw(Mock(ask=Mock(limits=Limits())), points, Path("p.png"))
    assert len({line.get_marker() for line in drawn[0].axes[0].lines}) == 9


def test_processes_change_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    """The search is the same whoever simulates, and names the cheapest layout that holds."""
    found = answer(capsys, "--processes", "1")
    assert found == answer(capsys, "--processes", "2")
    best = found["best"]
    assert isinstance(best, dict)
    assert best["holds"]
    assert best["good_share"] >= 0.95
    layouts = [*found["colocated"], *found["pools"]]  # type: ignore[misc]
    assert best["cost"] == min(one["cost"] for one in layouts if one["holds"])


def test_what_does_not_hold_for_longer_is_marked_and_not_bought(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old table showed such layouts as good, and told how sure the answer was of another layout than it bought."""

    def refuses_one(trial: Trial) -> Report:
        report = run_one(trial)
        return replace(report, good_share=0.5) if trial.service.n_engines == n_found else report

    n_found = 0
    first = answer(capsys, "--processes", "1")["best"]
    n_found = sum(pool["n_engines"] for pool in first["pools"])  # type: ignore[index]
    monkeypatch.setattr("diptych.sim.search.run_one", refuses_one)
    found = answer(capsys, "--processes", "1")
    layouts = [*found["colocated"], *found["pools"]]  # type: ignore[misc]
    refused = [one for one in layouts if one["good_share_for_longer"] == 0.5]
    assert refused
    assert all(one["good_share"] >= 0.95 and not one["holds"] for one in refused)
    best = found["best"]
    assert isinstance(best, dict)
    assert best["holds"]
    assert best in layouts
    assert [pool["setup"] for pool in best["pools"]] == [pool["setup"] for pool in found["if_steps_are_slow"]]  # type: ignore[union-attr]
    app([*SMALL, *DEVICES, "--processes", "1"])
    page = capsys.readouterr().out
    assert "50.0% (no)" in page
    assert "it is not what to buy" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--users", "0"], "--users is 0"),
        (["--users", "100000000000"], "--users is 100000000000"),
        (["--users", "9", "--slo", "ttft=1s"], "a capacity needs limits on both phases"),
        (
            ["--users", "9", "--slo", "ttft=1us,tpot=1us", *DEVICES],
            "with a single user none of llama-3.1-8b bf16 on l40s",
        ),
        (["--users", "9", "--think=-3s"], "think time is '-3s'"),
        (["--users", "9", "--turns", "0"], "turns is 0"),
        (["--users", "9", "--share", "1.5"], "the share that must be good is 1.5"),
        (["--users", "9", "--hardware", "toaster"], "toaster"),
        (["--users", "9", "--hardware", "l40s", "--price", "l40s=free"], "cannot read --price 'l40s=free'"),
        (["--users", "9", "--hardware", "l40s", "--price", "l40s=-1"], "--price of l40s is -1"),
        (
            ["--users", "9", "--hardware", "l40s", "--price", "a100-80gb-sxm=1"],
            "names a100-80gb-sxm, which is not among l40s",
        ),
        (["--users", "9", "--tp", "0"], "--tp is '0'"),
        (["--users", "9", "--tp", "9" * 5000], "--tp is '999"),
        (["--users", "9", "--link", "fast"], "cannot read the link 'fast'"),
        (["--users", "9", "--ep", "8", *DEVICES], "llama-3.1-8b has no experts to be parallel"),
        (["--users", "9", "--pp", "200", *DEVICES], "they cannot stand on 200 stages"),
        (["--users", "9", "--dp-attention", "2", *DEVICES], "no experts to share"),
        (["--users", "9", "--pp", "0"], "pipeline parallel degree is 0"),
        (["--users", "9", "--processes", "0", *DEVICES], "processes is 0"),
        (
            ["--users", "9", "--turns", "100", "--prompt", "2000:3000", *DEVICES],
            "a conversation has 205,200 tokens at least (100 turns of 2000 and 50, 200 before them); the context holds 131,072",
        ),
        (["--users", "9", *DEVICES, "--price", "l40s=1", "--price", "L40S=2"], "says twice what l40s costs: 1 and 2"),
    ],
)
def test_impossible_questions_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    """What, the number, the limit; before anything long begins."""
    with pytest.raises(SystemExit) as ended:
        app(["llama-3.1-8b", *arguments])
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert "Traceback" not in printed.err


def test_prices_of_any_device(capsys: pytest.CaptureFixture[str]) -> None:
    """A price makes a device one to choose from; this machine can have one, too."""
    assert prices_of(["local=1", "H100=2"]) == {"local": 1.0, "h100-80gb-sxm": 2.0}
    priced = devices_of(None, {"m2-max-38": 0.5, "local": 1.0})
    assert {"m2-max-38", "local", "l40s"} <= {*priced}
    assert "m2-max-38" not in devices_of(None, {})
    assert answer(capsys, "--processes", "1", "--price", "L40S=7")["best"]["cost"] % 7 == 0  # type: ignore[index]


def test_a_million_users_are_checked_without_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their histories were written out, 20 GB of them, to see whether the numbers were possible."""

    def made(*_: object) -> object:
        raise AssertionError

    monkeypatch.setattr("diptych.sim.capacity.UsersLoad", made)
    limits, length = Limits(ttft_s=1.0, tpot_s=0.1), LengthRange(low=50, high=350)
    Ask(n_users=1_000_000, think_s=30.0, turns=8, message=length, output=length, limits=limits)
    with pytest.raises(ConfigError, match="users is 0"):
        Ask(n_users=0, think_s=30.0, turns=8, message=length, output=length, limits=limits)


def test_an_engine_with_room_to_spare_is_not_taken_to_be_full(capsys: pytest.CaptureFixture[str]) -> None:
    """One engine held all who asked, so the search looked no further; pools were bisected up to three times as many, and
    seemed to cost less from twice the users on.
    """
    few = ["--users", "4", "--processes", "1"]
    found = answer(capsys, *few)
    assert found["colocated"][0]["users_per_engine"] == 4  # type: ignore[index]
    assert found["crossover_users"] is None
    app([*SMALL, *DEVICES, *few])
    page = capsys.readouterr().out
    assert "4 or more" in page
    assert "two pools cost more than engines that do both, and for up to a hundred times as many" in page


def test_a_device_that_does_not_multiply_so_leaves_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """One device without fp32 among all that were asked about was the whole answer."""
    app(
        [
            "qwen2.5-0.5b",
            "--users",
            "2",
            "--hardware",
            "l40s,mi300x",
            "--weights",
            "fp32",
            "--tp",
            "1",
            "--processes",
            "1",
        ]
    )
    page = capsys.readouterr().out
    assert "buy 1 x l40s" in page
    assert "note: mi300x has no peak rate for fp32" in page


def test_a_model_that_fits_nowhere_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """With what its weights take."""
    with pytest.raises(SystemExit):
        app(["llama-3.1-70b", "--users", "9", "--hardware", "l40s", "--tp", "1"])
    assert "leaves room for 0 tokens of KV" in capsys.readouterr().err


def test_a_device_of_which_too_many_are_needed_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one device that would need more than 1,024 engines ended the search for all of them."""
    monkeypatch.setattr("diptych.sim.search.MAX_ENGINES", 30)
    rough = bisect_one

    def weak(asked: Bisection) -> int:
        return 1 if asked.service.pool.setup.hardware.name == "l4" else rough(asked)

    monkeypatch.setattr("diptych.sim.search.bisect_one", weak)
    arguments = [*SMALL, "--hardware", "l40s,l4", "--tp", "1", "--processes", "1"]
    app([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["too_weak"] == ["llama-3.1-8b bf16 on l4"]
    assert {pool["setup"] for one in found["colocated"] for pool in one["pools"]} == {"llama-3.1-8b bf16 on l40s"}
    app(arguments)
    assert "note: more than 1,024 x (llama-3.1-8b bf16 on l4) would be needed" in capsys.readouterr().out


@pytest.mark.slow
def test_conversations_that_may_outgrow_the_context_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """What the context cannot hold is refused in the simulation, and the answer said nothing of it."""
    longer = ["--prompt", "100:70000", "--turns", "2", "--output", "4:16", "--think", "60s"]
    app(["llama-3.1-8b", "--users", "4", *longer, "--slo", "ttft=60s,tpot=2s", "--share", "0.5",
         "--hardware", "h100-80gb-sxm", "--tp", "1", "--processes", "1"])  # fmt: skip
    page = capsys.readouterr().out
    assert "note: a conversation may have 140,232 tokens, and the context holds 131,072" in page


def test_a_hint_is_that_of_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """Two laptops that nothing joins were told to get a larger device or a larger --tp."""
    with pytest.raises(SystemExit):
        app(["llama-3.1-8b", "--users", "9", "--hardware", "m2-max-38", "--tp", "2"])
    told = capsys.readouterr().err
    assert "m2-max-38 has no link to a second device" in told
    assert "larger" not in told
    with pytest.raises(SystemExit):
        app(["accuracy", "rows.csv"])
    assert "rows of one's own: --rows FILE.csv" in capsys.readouterr().err


def test_a_device_that_cannot_hold_the_model_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    app([*SMALL, "--hardware", "l40s,t4", "--tp", "1", "--processes", "1"])
    page = capsys.readouterr().out
    assert "note: llama-3.1-8b bf16 on t4 leaves room for" in page
    assert "on t4: llama" not in page


def test_where_nothing_holds_the_nearest_is_told() -> None:
    """Without it nobody knew whether a looser limit would do, or nothing would."""
    service = Service.of(setup_of("llama-3.1-8b", "l40s"))
    ask = Ask(
        n_users=4, think_s=1.0, turns=2, message=LengthRange(low=200, high=200), output=LengthRange(low=4, high=4),
        limits=Limits(ttft_s=1.0, tpot_s=0.08),
    )  # fmt: skip
    report = Trial(service=service, ask=ask, n_users=4, n_requests=20).run()
    layouts = [Layout(service=service, cost=1.0, report=replace(report, good_share=share)) for share in (0.5, 0.912)]
    error = none_holds([*layouts, Layout(service=service, cost=1.0)])
    assert "the nearest, 1 x (llama-3.1-8b bf16 on l40s), keeps 91.2% of requests within them" in error.message
    assert "nearest" not in none_holds([Layout(service=service, cost=1.0)]).message  # only sized


def test_what_would_cost_less_is_simulated_whole() -> None:
    """Four L40S at 4.4 USD an hour stood below three A100 at 5.4 that were to be bought: they had only been sized."""
    service = Service.of(setup_of("llama-3.1-8b", "l40s"))
    ask = Ask(
        n_users=4, think_s=1.0, turns=2, message=LengthRange(low=200, high=200), output=LengthRange(low=4, high=4),
        limits=Limits(ttft_s=1.0, tpot_s=0.08),
    )  # fmt: skip
    held, less, more = (
        Layout(service=service, cost=cost, holds=holds) for cost, holds in ((5.4, True), (4.4, None), (6.6, None))
    )
    found = with_cheaper(ask, [held, less, more], map, lambda setup: 4.4)
    assert (found[0], found[2]) == (held, more)
    assert (found[1].holds, found[1].cost) == (True, 4.4)
    assert found[1].report is not None
    found = with_cheaper(ask, [replace(held, holds=False), less, more], map, lambda setup: 4.4)
    assert [one.holds for one in found] == [False, True, True], "where nothing holds all are tried"


def test_two_pools_with_long_names_take_two_lines() -> None:
    """The numbers beside a name of 66 letters were broken into pieces."""
    pools = [Pool.of(setup_of("llama-3.1-70b", name, tp=4)) for name in ("h200-141gb-sxm", "h100-80gb-sxm")]
    layout = Layout(service=pooled(*pools, Link(bytes_per_s=1e9)), cost=1.0)
    name = row_of(layout, 10)[0]
    assert name == "decode 4 x h100-80gb-sxm (tp 4),\nprefill 4 x h200-141gb-sxm (tp 4)"
