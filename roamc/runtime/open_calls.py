"""Calls that are open: their forward has run, what it saved is held, and their backward has not run yet.

How many are open at one time is known when the backward of one begins. Calls whose backward never runs, as in an
evaluation without ``torch.no_grad()``, do not count; which ones these are, only time tells:

    call a   forward----------------------------backward        most = 2: a and b are open as b's backward begins
    call b            forward---------backward                  c was open then as well, but its backward never ran
    call c      forward-------------------------------dropped
"""

from __future__ import annotations

import itertools
import sys
import weakref
from dataclasses import dataclass

import torch

from roamc.locks import Lock
from roamc.units import Bytes


class Held:
    """What all open calls of one model hold, whatever program they run.

    Attributes:
        nbytes: bytes that calls hold which are open now.
        most: most bytes so far at one time, of the call that runs and of those that are open beside it.
    """

    def __init__(self) -> None:
        self.nbytes: Bytes = 0
        self.most: Bytes = 0


@dataclass(eq=False)
class _Moment:
    """The beginning of a backward.

    Attributes:
        sure: number of calls that were open and whose backward has begun since, itself included.
        unsure: the other calls that were open, without those that were dropped since.
    """

    sure: int
    unsure: set[int]


class OpenCalls:
    """Counts the open calls of one graph, in one combination of sizes, and of all programs made for it in turn.

    Args:
        held: what is held by the model that the graph is of.

    Attributes:
        most: number of calls that were open at one time so far, at most, and whose backward has begun; 0 before any.
        beside: most bytes that open calls of other graphs of the model held when a call of this one began.
        nbytes: bytes that its own open calls hold.
        planned: number of open calls that the plan counts, if more of them make another plan; else no limit.
    """

    def __init__(self, held: Held | None = None) -> None:
        self.held = held or Held()
        self.most = 0
        self.beside: Bytes = 0
        self.nbytes: Bytes = 0
        self.planned = sys.maxsize
        self._lock = Lock()
        self._tickets = itertools.count()
        self._open: dict[int, tuple[int, Bytes]] = {}
        self._begun: set[int] = set()
        self._moments: list[_Moment] = []

    @property
    def outgrown(self) -> bool:
        """Whether more calls were open than the plan counts, so that another is made before the next call."""
        return self.most > self.planned

    def begin(self, needed: Bytes) -> None:
        """Note that a call begins, which needs ``needed`` bytes by itself."""
        with self._lock.now:
            self.beside = max(self.beside, self.held.nbytes - self.nbytes)
            self.held.most = max(self.held.most, self.held.nbytes + needed)

    def open(self, token: torch.Tensor, nbytes: Bytes) -> None:
        """Note that a call is open until its backward, or until ``token``, one of its saved tensors, is gone.

        Args:
            token: a tensor whose storage no other open call has.
            nbytes: what the call holds while it is open.
        """
        with self._lock.now:
            ticket = next(self._tickets)
            self._open[ticket] = (token.untyped_storage().data_ptr(), nbytes)
            self.nbytes += nbytes
            self.held.nbytes += nbytes
        weakref.finalize(token, self._close, ticket).atexit = False

    def backward(self, token: torch.Tensor, *, kept: bool) -> None:
        """Note that the backward of the call with this ``token`` begins; with ``kept`` the call stays open."""
        pointer = token.untyped_storage().data_ptr()
        with self._lock.now:
            ticket = next((number for number, (place, _) in self._open.items() if place == pointer), None)
            if ticket is None:
                return
            if ticket not in self._begun:
                self._count(ticket)
            if not kept:
                self._close(ticket)

    def _count(self, ticket: int) -> None:
        """Count the calls that are open as the first backward of one begins, or will have been when theirs begins."""
        self._begun.add(ticket)
        self._moments.append(_Moment(len(self._begun), set(self._open) - self._begun))
        for moment in self._moments:
            moment.sure += ticket in moment.unsure
            moment.unsure.discard(ticket)
            self.most = max(self.most, moment.sure)
        self._forget_moments()

    def _close(self, ticket: int) -> None:
        with self._lock.now:
            _, nbytes = self._open.pop(ticket, (0, 0))
            self.nbytes -= nbytes
            self.held.nbytes -= nbytes
            self._begun.discard(ticket)
            for moment in self._moments:
                moment.unsure.discard(ticket)
            self._forget_moments()

    def _forget_moments(self) -> None:
        """Drop the moments that cannot raise :attr:`most` any more."""
        self._moments = [moment for moment in self._moments if moment.sure + len(moment.unsure) > self.most]
