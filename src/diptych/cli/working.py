"""What commands compute with, each imported where it is first used: `--help`, plans, and what is wrong with arguments are told
without a tensor library, which takes longer to load than all else there is.

    from diptych.cli import working
    llm = working.LLM(model, config)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diptych.ground.importing import on_first_use

if TYPE_CHECKING:
    from diptych.compute.ceilings import ABOVE, machine_ceilings
    from diptych.compute.loading.calibration import DIRECTIONS, calibrated
    from diptych.compute.loading.held import Held, what_is_held
    from diptych.compute.loading.quant import save_quantised
    from diptych.compute.rank import run_linked
    from diptych.compute.runner import Model, random_model
    from diptych.engine.async_llm import AsyncLLM
    from diptych.engine.calibration_text import calibration_of
    from diptych.engine.cost_view import CostView
    from diptych.engine.engine import Engine, OutputDelta
    from diptych.engine.llm import LLM, Completion
    from diptych.engine.load import LoadedModel, load, model_dir
    from diptych.engine.model_profile import local_predictor, profile_gap
    from diptych.engine.report import PhaseObserver, PhaseReport, phase_report
    from diptych.lab.bench import BenchReport, StaticBench
    from diptych.lab.load_picture import draw
    from diptych.lab.mix import MixReport, run_mix
    from diptych.server.run import bind, run_server

__all__ = [
    "ABOVE", "DIRECTIONS", "LLM", "AsyncLLM", "BenchReport", "Completion", "CostView", "Engine", "Held", "LoadedModel",
    "MixReport", "Model", "OutputDelta", "PhaseObserver", "PhaseReport", "StaticBench", "bind", "calibrated",
    "calibration_of", "draw", "load", "local_predictor", "machine_ceilings", "model_dir", "phase_report",
    "profile_gap", "random_model", "run_linked", "run_mix", "run_server", "save_quantised", "what_is_held",
]  # fmt: skip

HOMES = {
    "diptych.compute.ceilings": "ABOVE machine_ceilings",
    "diptych.compute.loading.calibration": "DIRECTIONS calibrated",
    "diptych.compute.loading.held": "Held what_is_held",
    "diptych.compute.loading.quant": "save_quantised",
    "diptych.compute.rank": "run_linked",
    "diptych.compute.runner": "Model random_model",
    "diptych.engine.async_llm": "AsyncLLM",
    "diptych.engine.calibration_text": "calibration_of",
    "diptych.engine.cost_view": "CostView",
    "diptych.engine.engine": "Engine OutputDelta",
    "diptych.engine.llm": "Completion LLM",
    "diptych.engine.load": "LoadedModel load model_dir",
    "diptych.engine.model_profile": "local_predictor profile_gap",
    "diptych.engine.report": "PhaseObserver PhaseReport phase_report",
    "diptych.lab.bench": "BenchReport StaticBench",
    "diptych.lab.load_picture": "draw",
    "diptych.lab.mix": "MixReport run_mix",
    "diptych.server.run": "bind run_server",
}
__getattr__ = on_first_use(__name__, HOMES)
