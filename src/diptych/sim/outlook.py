"""Whether enough of a load's requests will be good: known before they are over, and often before they have begun.

outlook = Outlook(tally, n_requests=240, good_share=0.95)
outlook.came(record, max_tokens=80)
outlook.passed(at_s)                  # nothing happens before at_s any more
outlook.is_lost, outlook.is_won       # certainly; neither: not yet known
"""

from __future__ import annotations

import math
from heapq import heappop, heappush

from diptych.metrics import RequestRecord
from diptych.sim.tally import Tally

_SLACK = 1.0 + 1e-9  # a limit that is missed by rounding alone is not missed for certain


class Outlook:
    """good_share: of the requests that the tally counts, of n_requests in all, that must meet its limits."""

    def __init__(self, tally: Tally, *, n_requests: int, good_share: float) -> None:
        self._tally, self._n_requests, self._good_share = tally, n_requests, good_share
        self._ttft_s, self._tpot_s = (
            math.inf if limit is None else limit * _SLACK for limit in (tally.limits.ttft_s, tally.limits.tpot_s)
        )
        # when it is looked at next: its first token is due, or its last one
        self._due: list[tuple[float, int, int, RequestRecord]] = []
        self._n_come = 0
        self._late: set[str] = set()  # open, and have missed a limit
        self.is_lost = False

    def came(self, record: RequestRecord, max_tokens: int) -> None:
        """A request that the tally counts."""
        self._n_come += 1
        heappush(self._due, (record.arrival_s + self._ttft_s, self._n_come, max_tokens, record))

    def over(self, request_id: str) -> None:
        """The tally has seen its end."""
        self._late.discard(request_id)
        self._judge()

    def passed(self, at_s: float) -> None:
        """All that began before at_s has been told, so what has not come has not come by then."""
        due = self._due
        while due and due[0][0] < at_s:
            _, number, max_tokens, record = heappop(due)
            if record.is_over:
                continue
            first_s = record.first_token_s
            if max_tokens and first_s is not None and first_s - record.arrival_s <= self._ttft_s:
                last_s = first_s + (max_tokens - 1) * self._tpot_s
                heappush(due, (last_s, number, 0, record))
                continue
            self._late.add(record.request_id)
            self._judge()

    def _judge(self) -> None:
        self.is_lost = self._tally.most_good_share(self._n_requests, n_late=len(self._late)) < self._good_share

    @property
    def is_won(self) -> bool:
        """Whether those that are good already are enough, whatever becomes of the others."""
        return self._tally.least_good_share(self._n_requests) >= self._good_share
