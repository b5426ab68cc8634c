"""Imports without the garbage collector in between: it is off while the module runs, and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from diptych.ground.importing import import_whole


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that notes whether the collector was on while it was imported."""
    (tmp_path / "noted_import.py").write_text("import gc\nwas_on = gc.isenabled()\n")
    (tmp_path / "raising_import.py").write_text("raise ValueError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_it_is_off_meanwhile_and_on_afterwards(module):
    assert import_whole("noted_import").was_on is False
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        import_whole("raising_import")
    assert gc.isenabled()


def test_it_stays_off_for_those_who_have_it_off(module):
    gc.disable()
    try:
        import_whole("math")
        assert not gc.isenabled()
    finally:
        gc.enable()
