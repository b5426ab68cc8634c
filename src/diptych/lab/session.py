"""One run of the lab: the chosen experiments in order, each result saved as soon as it is there, so that a long sweep
can be resumed after an interruption, or measured in parts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diptych.ground.errors import ConfigError, EngineError
from diptych.lab.experiment import Experiment, Outcome, Point, Roof, Stage, Verdict, cannot, outcome_json
from diptych.lab.experiments import EXPERIMENTS
from diptych.lab.fingerprint import fingerprint
from diptych.lab.report import write_report

FORMAT = 3  # of the saved files; results of another format are measured again


def choose(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names, all when there are none. ConfigError for an unknown one."""
    known = {one.name: one for one in EXPERIMENTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no experiment {unknown[0]!r}", hint=f"known: {', '.join(known)}")
    return [known[name] for name in names] if names else list(EXPERIMENTS)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and keep other labs out of it; ConfigError where one measures into it."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another lab measures into {folder}; two at one time would disturb each other's times and write one report",
                hint="wait for it, or name another folder: --out",
            ) from None
        except OSError:
            pass  # a file system without such locks
        yield
    finally:
        os.close(held)


class LabRun:
    """Runs experiments into a folder. A result of the same model and settings found there is kept, not repeated,
    unless its verdict was withheld for noise. The report holds every result of the folder that belongs to this run.
    """

    def __init__(self, stage: Stage, folder: Path) -> None:
        """Find out what a result in the folder must agree with."""
        self.kept: list[str] = []  # names of experiments whose earlier results are shown again
        self._stage = stage
        self._folder = folder
        model = stage.model
        self._facts = fingerprint() | {
            "model": stage.name,
            "backend": f"{model.backend_name}, {model.weights_format} weights, {model.kv_format} KV, {model.threads} threads",
            "ceilings": f"{stage.ceilings.words()} {stage.ceilings.compute_dtype}",
            "predictions": stage.predictions,
        }
        if stage.cut:
            self._facts["lengths"] = stage.cut
        # what a saved result must agree with to be kept; dates and ceilings differ from run to run
        self._key = {name: self._facts[name] for name in ("model", "backend", "cpu", "diptych", "predictions")} | {
            "format": FORMAT,
            "longest_tokens": stage.longest_tokens,
        }

    def run(self, experiments: Sequence[Experiment], *, on_result: Callable[[Experiment, Outcome], None]) -> Path:
        """Run (or take over) each experiment, rewrite the report after each, and return the page's path."""
        results: dict[str, tuple[Experiment, Outcome]] = {}
        for one in EXPERIMENTS:
            earlier = self._saved(one)
            if earlier is not None:
                results[one.name] = one, earlier
        page = self._folder / "report.html"
        for experiment in experiments:
            kept = results.get(experiment.name)
            if kept is not None and not kept[1].is_noisy:
                outcome = kept[1]
                self.kept.append(experiment.name)
            else:
                outcome = self._fresh(experiment)
            results[experiment.name] = experiment, outcome
            in_order = [results[one.name] for one in EXPERIMENTS if one.name in results]
            page = write_report(self._folder, in_order, title="The two phases, measured", facts=self._facts)
            on_result(experiment, outcome)
        return page

    def _path(self, experiment: Experiment) -> Path:
        return self._folder / f"{experiment.name}.json"

    def _fresh(self, experiment: Experiment) -> Outcome:
        try:
            outcome = experiment.run(self._stage)
        except EngineError as error:
            # one experiment that this model or machine cannot do must not take the others with it
            return cannot(f"could not be run: {error.message}")
        saved = {"key": self._key, "outcome": outcome_json(outcome)}
        self._path(experiment).write_text(json.dumps(saved) + "\n", encoding="utf-8")
        return outcome

    def _saved(self, experiment: Experiment) -> Outcome | None:
        path = self._path(experiment)
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
            return _outcome(saved["outcome"]) if saved["key"] == self._key else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None  # cut off while it was written, or never a result: measure again


def _outcome(fields: dict[str, Any]) -> Outcome:
    lists = {name: tuple(fields[name]) for name in ("checks", "notes", "x_names")}
    return Outcome(
        points=tuple(Point(**point) for point in fields["points"]),
        verdict=Verdict(fields["verdict"]),
        finding=fields["finding"],
        is_noisy=fields["is_noisy"],
        noise=fields["noise"],
        roofs=tuple(Roof(**roof) for roof in fields["roofs"]),
        **lists,
    )
