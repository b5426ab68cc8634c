"""Imports without the garbage collector in between: it is off while the module runs, and afterwards as it was."""

from __future__ import annotations

import gc
import sys

import pytest

from diptych.ground.importing import import_whole, on_first_use


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that notes whether the collector was on while it was imported."""
    (tmp_path / "noted_import.py").write_text("import gc\nwas_on = gc.isenabled()\n")
    (tmp_path / "raising_import.py").write_text("raise ValueError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "noted_import", raising=False)


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


def test_a_name_is_imported_where_it_is_first_asked_for(module):
    get = on_first_use("noting", {"noted_import": "was_on gc", "raising_import": "other"})
    assert "noted_import" not in sys.modules
    assert get("was_on") is False
    assert "raising_import" not in sys.modules
    with pytest.raises(AttributeError, match="module 'noting' has no attribute 'off'"):
        get("off")
