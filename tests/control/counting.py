"""Counts operations instead of milliseconds: bytecodes run in `diptych.control`, and list elements copied by slices."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diptych.control

ROOM = str(Path(diptych.control.__file__).parent)


class CountingList(list):
    """A list that counts every element it hands out."""

    touched = 0

    def __getitem__(self, key):
        value = super().__getitem__(key)
        CountingList.touched += len(value) if isinstance(key, slice) else 1
        return value

    def __iter__(self):
        CountingList.touched += len(self)
        return super().__iter__()


def operations(call: Callable[[], Any]) -> tuple[Any, int]:
    """Run `call`; answers its result and bytecodes + touched elements in control."""
    n_opcodes = 0

    def trace(frame, event, argument):
        nonlocal n_opcodes
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        n_opcodes += event == "opcode"
        return trace

    before, CountingList.touched = sys.gettrace(), 0
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, n_opcodes + CountingList.touched
