"""`diptych rank MODEL --tp 2 --tp-address HOST:PORT --tp-rank 1`: a part of a model that another machine serves."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Annotated

import typer

from diptych.cli import options, working
from diptych.ground.config import ComputeConfig
from diptych.ground.errors import ConfigError, EngineError, WorkerLost

app = options.command_app()


@app.command()
def rank(
    model: Annotated[
        str, typer.Argument(help="'bundled', a checkpoint folder, a GGUF file, or a hub name: as rank 0's")
    ],
    tp: Annotated[int, typer.Option("--tp", help="how many machines there are, that of rank 0 included")],
    tp_address: Annotated[str, typer.Option("--tp-address", help="HOST:PORT where rank 0 listens")],
    tp_rank: Annotated[int, typer.Option("--tp-rank", help="which rank this is, from 1 on")],
    threads: options.OwnThreads = None,
    numa: options.Numa = "auto",
) -> None:
    """Compute a part of MODEL for rank 0 (any command with --tp-address) until that ends. All else is as rank 0 says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = ComputeConfig(backend="cpu", tp=tp, tp_address=tp_address, threads=threads, numa=numa)
    if not 0 < tp_rank < tp:
        raise ConfigError(f"tp_rank is {tp_rank}; of {tp} ranks this may be 1 to {tp - 1}", hint="rank 0 is who serves")
    directory = working.model_dir(model)
    # it waits where Python answers no signal; rank 0 hears of its end from the system
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = 0
    try:
        working.run_linked(str(directory), config, tp_rank)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1 if isinstance(error, WorkerLost) else 2
    os._exit(status)  # connections have threads that wait for the others' ends
