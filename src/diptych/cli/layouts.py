"""Options of commands that price a model: how one copy lies on its devices, beside --tp; and its adapters."""

from __future__ import annotations

import argparse

from diptych.cost.adapters import Loras
from diptych.cost.layout import Layout


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
