"""Who owns which page of the KV cache.

A page is free, held by one or more sequences, or evictable: held by nobody but still remembered under the key
of its content, so that an equal prefix can take it up again.  The least recently released is evicted first.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from precast.models.cache import SCRATCH_PAGE


class PagePool:
    """Page ids 1 to ``num_pages - 1`` (0 is the scratch page)."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}: it must be at least 2, one of them scratch")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, SCRATCH_PAGE, -1))
        self._holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._evictable: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` pages; raises ValueError, taking none, when there are not as many."""
        if count > self.num_available:
            raise ValueError(f"{count} pages wanted: only {self.num_available} are available")
        page_ids = []
        for _ in range(count):
            page_id = self._free.pop() if self._free else self._evict()
            self._holders[page_id] = 1
            page_ids.append(page_id)
        return page_ids

    def share(self, page_ids: Iterable[int]) -> None:
        """Adds a holder to each page, which must be held or evictable."""
        for page_id in page_ids:
            if not self._holders[page_id]:
                del self._evictable[page_id]
            self._holders[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Takes a holder off each page.  Pass a sequence's pages last first, so that prefixes outlive their tails."""
        for page_id in page_ids:
            if self._holders[page_id] < 1:
                raise ValueError(f"page {page_id} is released but nobody holds it")
            self._holders[page_id] -= 1
            if not self._holders[page_id]:
                if page_id in self._key_of:
                    self._evictable[page_id] = None
                else:
                    self._free.append(page_id)

    def remember(self, page_id: int, key: bytes) -> None:
        """Lets ``find`` give this held page for ``key``.  The first page of a key stays the one that is found."""
        if key not in self._page_of and page_id not in self._key_of:
            self._page_of[key] = page_id
            self._key_of[page_id] = key

    def find(self, key: bytes) -> int | None:
        """The page whose content has this key, held or evictable."""
        return self._page_of.get(key)

    def is_idle(self, page_id: int) -> bool:
        """Whether nobody holds the page: sharing it takes one from ``num_available``."""
        return not self._holders[page_id]

    def forget(self) -> None:
        """Forgets all contents; evictable pages become free."""
        self._page_of.clear()
        self._key_of.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()

    def check_integrity(self, held: Iterable[Iterable[int]] = ()) -> None:
        """Raises AssertionError unless the books balance.

        Args:
          held: the page lists of everybody who holds pages; when given, holders must match them exactly.
        """
        free, evictable = set(self._free), set(self._evictable)
        in_use = {page_id for page_id, holders in enumerate(self._holders) if holders}
        assert len(free) == len(self._free), "a page is free twice"
        assert SCRATCH_PAGE not in free | evictable | in_use, "the scratch page was handed out"
        assert not (free & evictable or free & in_use or evictable & in_use), "a page is in two states"
        assert len(free) + len(evictable) + len(in_use) == self.num_usable, "a page is lost"
        assert all(holders >= 0 for holders in self._holders), "a page has fewer than no holders"
        assert evictable <= set(self._key_of), "an evictable page has no key"
        assert {page_id: key for key, page_id in self._page_of.items()} == self._key_of, "keys and pages disagree"
        counts = collections.Counter(page_id for pages in held for page_id in pages)
        if counts or not in_use:
            assert counts == {page_id: self._holders[page_id] for page_id in in_use}, "holders and books disagree"

    def _evict(self) -> int:
        page_id, _ = self._evictable.popitem(last=False)
        del self._page_of[self._key_of.pop(page_id)]
        return page_id
