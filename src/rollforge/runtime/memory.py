"""Memory that this process has freed, back to the system.

Knows: the C library's heap. Does not know: tensors, what was freed.
"""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Hands free heap pages to the system; does nothing where the C library is not glibc.

    glibc keeps what lies below the top of its heap, and a process whose large tensors come and go gathers hundreds of
    MB of that. The pages are fetched again when needed, at a cost: call it where little will be.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
