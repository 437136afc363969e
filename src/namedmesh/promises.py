"""Groups that are made when they are first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

__all__ = ["Promise"]


class Promise:
    """A group of a pool that is made when it is first asked for, which waits for nobody.

    Args:
        ranks: its ranks.
        rank: this one.
        make: makes it.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, make: Callable[[], dist.ProcessGroup]) -> None:
        self.ranks = ranks
        self._rank = rank
        self._make = make

    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """This rank's place among them."""
        return self.ranks.index(self._rank)

    def group(self) -> dist.ProcessGroup:
        """The group, made now if it was not; does not communicate."""
        return self._make()
