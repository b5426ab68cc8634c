"""Compiles of grammars that take long: what they cost those who ask for others."""

import contextlib
import os
import sys
import threading

import pytest
from tests.compute.test_structured import EOS, TOKENIZER, WIDTH, spec

from diptych.compute.sampling import structured
from diptych.compute.sampling.structured import GrammarCompiler
from diptych.engine.text.tokenizer import Tokenizer
from diptych.ground.errors import CapacityError, GrammarError


def test_compile_time_is_bounded(monkeypatch):
    """A grammar that compiles too long is refused, and the engine does not wait for it."""
    is_over = threading.Event()
    monkeypatch.setattr(structured, "MAX_COMPILE_S", 0.01)
    monkeypatch.setattr(structured, "_compile", lambda tokenizer, grammar: is_over.wait(60))
    try:
        with pytest.raises(GrammarError, match="took more than"):
            GrammarCompiler(Tokenizer(TOKENIZER, {}, EOS), WIDTH).compile(spec("regex", "slow"))
    finally:
        is_over.set()


def test_a_compile_past_its_time_holds_up_no_other(monkeypatch):
    """Two of them had both threads for good, and every new grammar was refused as one that takes too long."""
    is_over, slow_threads, compiles = threading.Event(), [], structured._compile

    def compile_or_wait(tokenizer, grammar):
        if '"slow' not in grammar():
            return compiles(tokenizer, grammar)
        slow_threads.append(threading.current_thread())
        is_over.wait(60)
        raise GrammarError("slow")

    monkeypatch.setattr(structured, "_compile", compile_or_wait)
    compiler = GrammarCompiler(Tokenizer(TOKENIZER, {}, EOS), WIDTH)
    assert compiler.compile(spec("grammar", 'start: "known"'))
    monkeypatch.setattr(structured, "MAX_COMPILE_S", 0.2)
    try:
        for number in range(structured._MAX_LEFT):
            with pytest.raises(GrammarError, match="took more than"):
                compiler.compile(spec("grammar", f'start: "slow{number}"'))
            if number + 1 < structured._MAX_LEFT:
                monkeypatch.setattr(structured, "MAX_COMPILE_S", 60.0)
                assert compiler.compile(spec("grammar", f'start: "quick{number}"')).begin()
                monkeypatch.setattr(structured, "MAX_COMPILE_S", 0.2)
        if sys.platform == "linux":
            assert {os.getpriority(os.PRIO_PROCESS, one.native_id) for one in slow_threads} == {19}
            assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19
        with pytest.raises(CapacityError, match="4 others that took more than"):
            compiler.compile(spec("grammar", 'start: "one more"'))
        assert compiler.compile(spec("grammar", 'start: "known"'))
    finally:
        is_over.set()
    for one in slow_threads:
        one.join(60)
    monkeypatch.setattr(structured, "MAX_COMPILE_S", 60.0)
    assert compiler.compile(spec("grammar", 'start: "one more"'))
    compiler.close()


def test_a_grammar_that_was_not_begun_is_not_the_one_that_takes_long(monkeypatch):
    """It was told to become simpler, whatever it was, where two others had the places."""
    is_over, n_begun = threading.Event(), threading.Semaphore(0)

    def wait(tokenizer, grammar):
        n_begun.release()
        is_over.wait(60)
        raise GrammarError("slow")

    monkeypatch.setattr(structured, "_compile", wait)
    compiler = GrammarCompiler(Tokenizer(TOKENIZER, {}, EOS), WIDTH)
    compiler._ll_tokenizer()

    def slow(number):
        with contextlib.suppress(GrammarError):
            compiler.compile(spec("grammar", f'start: "slow{number}"'))

    monkeypatch.setattr(structured, "MAX_COMPILE_S", 60.0)
    others = [threading.Thread(target=slow, args=(number,)) for number in range(2)]
    for one in others:
        one.start()
    try:
        for _ in others:
            assert n_begun.acquire(timeout=60)
        monkeypatch.setattr(structured, "MAX_COMPILE_S", 0.05)
        with pytest.raises(CapacityError, match="others are, and none of them ended"):
            compiler.compile(spec("grammar", 'start: "simple"'))
    finally:
        is_over.set()
    for one in others:
        one.join(60)
    compiler.close()
