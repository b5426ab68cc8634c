"""Options of commands that price a model: how one copy lies on its devices, beside --tp; its adapters; what devices cost."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from diptych.cost.adapters import Loras
from diptych.cost.layout import Layout
from diptych.cost.profile import LOCAL
from diptych.cost.tables import device_names, device_spec
from diptych.ground.bounds import Bound
from diptych.ground.errors import ConfigError


def layout_options(parser: argparse.ArgumentParser) -> None:
    """How one copy lies on its devices, beside --tp."""
    add = parser.add_argument
    add("--ep", type=int, default=1, metavar="N", help="expert parallel: experts stand whole, in N groups of devices")
    add("--pp", type=int, default=1, metavar="N", help="stages of a pipeline, each with its part of the layers")
    add(
        "--dp-attention",
        type=int,
        default=1,
        metavar="N",
        help="attention-data parallel: N groups of --tp devices with sequences of their own share the experts",
    )


def layout_of(options: argparse.Namespace) -> Layout:
    """What they say."""
    return Layout(dp=options.dp_attention, ep=options.ep, pp=options.pp)


def lora_option(parser: argparse.ArgumentParser) -> None:
    """Adapters of the requests."""
    parser.add_argument("--lora", metavar="N[:RANK]", help="requests have N adapters of that rank (16) in turn")


def loras_of(options: argparse.Namespace) -> Loras | None:
    """What it says."""
    return None if options.lora is None else Loras.parse(options.lora)


def prices_of(entries: list[str] | None) -> dict[str, float]:
    """USD an hour of one device by its name in the table, from NAME=USD. ConfigError for what is no price, or no device."""
    prices: dict[str, float] = {}
    for entry in entries or ():
        name, _, text = entry.partition("=")
        try:
            value = float(text)
        except ValueError:
            raise ConfigError(f"cannot read --price {entry!r}", hint="for example --price h100=2.50") from None
        Bound(float, 0.0, None, "USD", is_low_open=True).take(f"--price of {name}", value, ConfigError)
        device = table_name(name)
        if device in prices:
            raise ConfigError(f"--price says twice what {device} costs: {prices[device]:g} and {value:g} USD")
        prices[device] = value
    return prices


def table_name(device: str) -> str:
    """A device's name in the table, by any of its names; those of LOCAL are this machine."""
    return device if device in LOCAL else device_spec(device.lower()).name


def devices_of(text: str | None, prices: Collection[str]) -> list[str]:
    """The devices to choose from: those named, each once, else all that have a price. ConfigError for a price of any other."""
    named = [name.strip() for name in (text or "").split(",") if name.strip()]
    if text is not None and not named:
        raise ConfigError(f"{text!r} names no device", hint="NAME[,NAME]; without it all that have a price are tried")
    if not named:
        priced = [name for name in device_names() if name in prices or device_spec(name).usd_per_hour is not None]
        return priced + [name for name in prices if name in LOCAL]
    chosen = list(dict.fromkeys(map(table_name, named)))
    for name in prices:
        if name not in chosen:
            raise ConfigError(f"--price names {name}, which is not among {', '.join(named)}", hint="leave it out")
    return chosen
