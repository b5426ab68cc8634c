"""Keys and values on their way from the engine that read a prompt to the one that answers it.

Every engine sends over one port and receives over one; a piece occupies both for its bytes over the bandwidth, one piece
after the other, and is there a latency later. Pieces follow the chunks of a prefill, so most of a long prompt has travelled
before its last chunk is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diptych.ground.bounds import Bound
from diptych.ground.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins the pools: per engine and direction. An infinite bandwidth is one that never counts."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no link is."""
        if not self.bytes_per_s > 0.0:
            raise ConfigError(f"the link carries {self.bytes_per_s:g} bytes a second; it must be more than 0")
        Bound(float, 0.0, 60.0, "seconds").take("the link's latency", self.latency_s, ConfigError)


_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_PER_S = {"us": 1e6, "ms": 1e3, "s": 1.0}


def parse_link(text: str) -> Link:
    """A link from 50GB/s or 50GB/s,10us. Bytes, not bits: 400 Gb/s are 50GB/s. ConfigError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kB|MB|GB|TB)/s(?:,(\d+(?:\.\d+)?)(us|ms|s))?", text.replace(" ", ""))
    if found is None:
        raise ConfigError(
            f"cannot read the link {text!r}",
            hint="bytes a second and a latency, such as 50GB/s,10us (400 Gb/s are 50GB/s)",
        )
    rate, unit, wait, time_unit = found.groups()
    return Link(
        bytes_per_s=float(rate) * _UNITS[unit], latency_s=float(wait) / _PER_S[time_unit] if wait is not None else 0.0
    )


@dataclass(slots=True)
class Ports:
    """When each engine's ports are free again."""

    link: Link
    sending_s: dict[int, float] = field(default_factory=dict)
    receiving_s: dict[int, float] = field(default_factory=dict)

    def send(self, sender: int, receiver: int, n_bytes: float, at_s: float) -> float:
        """The instant at which a piece that is ready at at_s has come."""
        begin_s = max(at_s, self.sending_s.get(sender, 0.0), self.receiving_s.get(receiver, 0.0))
        end_s = begin_s + n_bytes / self.link.bytes_per_s
        self.sending_s[sender] = self.receiving_s[receiver] = end_s
        return end_s + self.link.latency_s
