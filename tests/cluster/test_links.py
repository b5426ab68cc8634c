"""Links between real workers that fail: no wrong token, and every failure is counted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.cluster.test_serve import OPTIONS, WORDS, body, wait_for

from diptych.engine.llm import LLM
from diptych.ground.request import SamplingParams
from server_process import ServerProcess, check_account

pytestmark = [pytest.mark.native, pytest.mark.cluster, pytest.mark.slow]
SCRIPT = Path(__file__).with_name("faulty_links_server.py")
# what a fault makes the worker that answers count: why prompts were read again, why pieces were not taken in
FAULTS: dict[str, tuple[set[str], set[str]]] = {
    "drop10": ({"missing"}, set()),
    "drop30": ({"missing"}, set()),
    "slow": (set(), set()),
    "late": ({"missing"}, {"late"}),
    "reorder": (set(), set()),
    "twice": (set(), set()),
    "bit": ({"checksum"}, {"checksum"}),
    "lease": ({"lease"}, set()),
    "unsaid": (set(), set()),
}
N_REQUESTS = 4


@pytest.fixture(scope="module")
def pools() -> Iterator[ServerProcess]:
    with ServerProcess("--prefill", "1", "--decode", "1", *OPTIONS, script=SCRIPT) as process:
        yield process
        code, errors = process.stop()
        assert code == 0, errors


def counted(server: ServerProcess, name: str) -> Counter[str]:
    rows = re.findall(rf'^diptych_worker_{name}_total{{.*reason="(\w+)".*}} (\S+)$', server.scrape(), re.MULTILINE)
    return Counter({reason: int(float(value)) for reason, value in rows})


@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_of_a_link_between_processes_changes_an_answer(pools: ServerProcess, one: LLM, fault: str) -> None:
    """Over Ray's object store and real processes: text, tokens by source and times add up, and counters say what happened."""
    recomputes, refused = FAULTS[fault]
    before = {name: counted(pools, name) for name in ("recomputes", "parcels_refused")}
    lost_ends = pools.metric("diptych_worker_lost_ends_total")
    asked = [(f"{fault} {n} {WORDS * (8 + 9 * n)}", {"seed": n, "temperature": 0.9}) for n in range(N_REQUESTS)]

    def ask(n: int) -> dict[str, object]:
        prompt, options = asked[n]
        with pools.client() as http:
            answer = http.post(
                "/v1/completions", json=body(prompt, **options), headers={"x-request-id": f"{fault}-{n}"}
            )
            assert answer.status_code == 200, answer.text
            return answer.json()

    with ThreadPoolExecutor(N_REQUESTS) as threads:
        answers = list(threads.map(ask, range(N_REQUESTS)))
    wanted = one.generate([prompt for prompt, _ in asked], [SamplingParams(max_tokens=40, **o) for _, o in asked])
    for answer, completion in zip(answers, wanted, strict=True):
        assert answer["choices"][0]["text"] == completion.choices[0].text
        check_account(answer)
    if fault == "unsaid":  # all of it came, so nothing is read again; what was waited for is counted by itself
        assert pools.metric("diptych_worker_lost_ends_total") == lost_ends + N_REQUESTS

    def news(name: str) -> set[str]:
        return set(counted(pools, name) - before[name])

    wait_for(lambda: refused <= news("parcels_refused"), "what comes after its answer is counted, too", 20)
    found = {name: news(name) for name in before}
    # nothing is given up without a reason, and on a machine that is busy a piece may be late all the same
    assert recomputes <= found["recomputes"] <= recomputes | {"missing", "lease"}, found
    assert found["parcels_refused"] <= refused | {"late"}, found
    pools.check_balance()
