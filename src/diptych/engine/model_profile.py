"""What this machine's measured profiles say of a loaded model: its step times, why not, and what would be faster."""

from __future__ import annotations

from typing import Any

import torch

from diptych.compute.ops.cpu.kernels import faster_set
from diptych.compute.ops.torch.model import card_of
from diptych.compute.runner import Model
from diptych.cost.calibrated import CalibratedModel
from diptych.cost.profile import COMMANDS, is_measured, load_profile
from diptych.cost.roofline import NoRate
from diptych.engine.cost_view import CostView
from diptych.engine.memory import memory_of
from diptych.ground.bounds import counted, real
from diptych.ground.errors import ConfigError
from diptych.ground.phase import Phase
from diptych.models.gpu_kernels import left_to_torch

SAME_MEMORY = 0.03  # by which the memory that two drivers find on one card may differ
FASTER = 1.05  # times as fast, from which on another backend is worth a word


def profile_kind(model: Model) -> str:
    """Which of the machine's profiles speaks of this model's steps."""
    return "cpu" if model.device.type == "cpu" else "gpu"


def calibration_command(model: Model) -> str:
    """What measures what this model runs on."""
    is_only = model.device.type == "cpu" and not torch.cuda.is_available()
    return "diptych lab calibrate" if is_only else COMMANDS[profile_kind(model)]


def measured_kernels(model: Model) -> str:
    """What a profile's times hold for: the kernel set; on a GPU the card with the versions of what made its kernels, without
    ours where torch's own have the model.
    """
    if model.device.type == "cpu":
        return model.instruction_set
    return f"{model.instruction_set if model.keeps_bits else card_of(model.device)}, torch {torch.__version__}"


def profile_damage(model: Model) -> str | None:
    """What is wrong with the profile of what this model runs on, and what mends it; None for a sound one and without one.

    Predictions are missed then, and no answer is.
    """
    try:
        if is_measured(profile_kind(model)):
            load_profile(kind=profile_kind(model))
    except ConfigError as error:
        return f"{error.message} ({calibration_command(model)} writes it anew)"
    return None


def profile_gap(model: Model) -> str | None:
    """Why this machine's measured profile says nothing of the model's step times, with the command that changes it where one
    does; None where it says it.
    """
    untimed = _never_timed_on_gpu(model)
    if untimed is not None:
        return untimed
    kind, command = profile_kind(model), calibration_command(model)
    if not is_measured(kind):
        own, other = ("machine", "GPU") if kind == "cpu" else ("GPU", "processor")
        beside = is_measured("gpu" if kind == "cpu" else "cpu")
        others = f", only its {other} was" if kind == "cpu" else f", only the {other} beside it was"
        return f"this {own} was never measured{others if beside else ''} ({command})"
    damage = profile_damage(model)
    if damage is not None:
        return damage
    profile = load_profile(kind=kind)
    differing = _unlike_cpu(profile, model) if kind == "cpu" else _unlike_gpu(profile, model)
    if differing is not None:
        return f"this {'machine' if kind == 'cpu' else 'GPU'} was measured {differing} ({command})"
    if kind == "gpu":
        try:
            _predictor(profile, model)
        except NoRate as error:
            return f"{model.weights_format} weights are not timed on a GPU: {error.message}"
    return None


def _never_timed_on_gpu(model: Model) -> str | None:
    """Why no calibration of the GPU would have its times: torch's kernels compute it where ours run, and ours are timed."""
    is_by_torch = model.device.type != "cpu" and not model.keeps_bits
    if not is_by_torch or model.instruction_set == card_of(model.device):  # where ours do not run, torch's are timed
        return None
    found = left_to_torch(model.spec)
    why = f"for {model.weights_format} weights" if found is None else f"for its {found}"
    return f"torch's kernels compute this model on a GPU, {why}; only ours are timed"


def _unlike_cpu(profile: dict[str, Any], model: Model) -> str | None:
    measured, own = profile.get("backend", model.backend_name), model.backend_name
    if measured == own:
        measured, own = profile.get("kernels", model.instruction_set), model.instruction_set
    if measured == own:
        measured, own = (counted(n, "thread") for n in (profile.get("threads", model.threads), model.threads))
    return None if measured == own else f"with {measured}, not with {own}"


def _unlike_gpu(profile: dict[str, Any], model: Model) -> str | None:
    measured, own = profile.get("kernels"), measured_kernels(model)
    if measured != own:
        return f"with {measured}, not with {own}"
    then, now = (n / 2**30 for n in (real(profile.get("memory_bytes")) or 0.0, memory_of(model.device).total_bytes))
    if abs(then / now - 1.0) > SAME_MEMORY:  # a part of the card, or another of its name
        return f"with {then:.0f} GiB of memory, not with {now:.0f}"
    return None


def _predictor(profile: dict[str, Any], model: Model) -> CalibratedModel:
    view = CostView(model)
    return CalibratedModel.from_profile(profile, view.spec, view.quant, kv=view.kv)


def faster_kernels(model: Model) -> str | None:
    """The kernel set that this processor has and the model, told to use another, does not use; None where there is none."""
    return faster_set(model.instruction_set) if model.backend_name == "cpu" else None


def faster_backends(model: Model) -> dict[str, str]:
    """Phases in which another backend was measured to be faster on this machine with the same weights, and how much.

    The profile compares two backends, that which it is of and another; the model may run on either of them.
    """
    if profile_kind(model) != "cpu" or not is_measured("cpu") or profile_damage(model) is not None:
        return {}
    profile = load_profile()
    other = profile.get("elsewhere")
    if not isinstance(other, dict) or other.get("weights") != model.weights_format:
        return {}
    if profile_gap(model) is None:
        name, power = other.get("backend"), 1
    elif model.backend_name == other.get("backend"):
        name, power = profile.get("backend"), -1
    else:
        return {}
    times = {phase.value: other.get(phase.value) for phase in Phase}
    gains = {phase: value**power for phase, value in times.items() if isinstance(value, float) and value > 0.0}
    return {
        phase: f"the {name} backend is {gain:.1f} times as fast here with {model.weights_format} weights"
        for phase, gain in gains.items()
        if gain > FASTER
    }


def local_predictor(model: Model) -> CalibratedModel | None:
    """Step times predicted from this machine's measured profile; None where `profile_gap` says why not."""
    if profile_gap(model) is not None:
        return None
    return _predictor(load_profile(kind=profile_kind(model)), model)
