"""Keeps rank threads apart in autocast's cache of casts, of which torch has one for all threads.

A weight that is used twice inside an autocast is cast once, and its gradients are added up in the lower precision;
the cache is cleared when any thread leaves its outermost autocast. So a rank that leaves one would have another's
weight cast twice. Here the cache is cleared only when no rank is inside, and a rank that has left enters again only
when it was: ranks go through their autocasts in rounds, and each finds the casts that it would find alone.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class _Rounds:
    """Who is inside an autocast, and who has left one since the casts were forgotten."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._left: set[int] = set()

    def enter(self) -> None:
        """Waits until no cast of this thread is left from before."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: me not in self._left)
            self._inside.add(me)

    def leave(self) -> None:
        """Has all casts forgotten once nobody needs any."""
        me = threading.get_ident()
        with self._changed:
            self._inside.discard(me)
            self._left.add(me)
            if not self._inside:
                self._forget()
                self._left.clear()
                self._changed.notify_all()


class _Thread(threading.local):
    """Whether this thread is one of a run's ranks."""

    is_rank = False


_thread = _Thread()
_enter, _forget = torch.autocast_increment_nesting, torch.clear_autocast_cache
_rounds = _Rounds(_forget)
_runs: list[None] = []
_lock = threading.Lock()


def _entered() -> int:
    depth = _enter()
    if _thread.is_rank and depth == 1:
        _rounds.enter()
    return depth


def _cleared() -> None:
    if _thread.is_rank:
        _rounds.leave()
    else:
        _forget()


@contextmanager
def casts_apart() -> Iterator[None]:
    """While entered, torch's autocast tells here when a rank thread enters or leaves it."""
    with _lock:
        _runs.append(None)
        torch.autocast_increment_nesting, torch.clear_autocast_cache = _entered, _cleared
    try:
        yield
    finally:
        with _lock:
            _runs.pop()
            if not _runs:
                torch.autocast_increment_nesting, torch.clear_autocast_cache = _enter, _forget


@contextmanager
def as_rank() -> Iterator[None]:
    """While entered, this thread is a rank of a run, which has its casts for itself."""
    _thread.is_rank = True
    try:
        yield
    finally:
        _thread.is_rank = False
