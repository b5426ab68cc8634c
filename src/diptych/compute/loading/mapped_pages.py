"""Pages of mapped files, which a process holds while it reads them and no longer."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch


def give_pages_back(tensor: torch.Tensor) -> None:
    """Drop the pages of a view of a mapped file from this process; they are read again when touched. Only for such views."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE  # a neighbour's bytes on the same page come back too
    nbytes = tensor.data_ptr() + tensor.nbytes - begin
    _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)  # each makes a class of its own, and a start gives pages back some hundred times
