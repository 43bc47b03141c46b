"""The page pool's books, under random traffic."""

import hypothesis.stateful as stateful
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from precast.runtime.pages import PagePool


class Traffic(stateful.RuleBasedStateMachine):
    """Sequences take pages, share prefixes, remember contents and let go, in any order."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(9)
        self.held = []
        self.content = {}

    @stateful.rule(count=st.integers(1, 5))
    def allocate(self, count):
        if count > self.pool.num_available:
            with pytest.raises(ValueError, match="pages wanted"):
                self.pool.allocate(count)
        else:
            self.held.append(self.pool.allocate(count))

    @stateful.rule(data=st.data(), key=st.integers(0, 6))
    def remember(self, data, key):
        if self.held:
            pages = data.draw(st.sampled_from(self.held))
            self.pool.remember(pages[0], b"%d" % key)

    @stateful.rule(key=st.integers(0, 6))
    def share(self, key):
        page_id = self.pool.find(b"%d" % key)
        if page_id is not None:
            before = self.pool.num_available
            idle = self.pool.is_idle(page_id)
            self.pool.share([page_id])
            assert before - self.pool.num_available == idle
            self.held.append([page_id])

    @stateful.rule(data=st.data())
    def release(self, data):
        if self.held:
            pages = data.draw(st.sampled_from(self.held))
            self.held.remove(pages)
            self.pool.release(pages[::-1])

    @stateful.rule()
    def forget(self):
        self.pool.forget()

    @stateful.invariant()
    def books_balance(self):
        self.pool.check_integrity(self.held)
        in_use = {page_id for pages in self.held for page_id in pages}
        assert self.pool.num_available == self.pool.num_usable - len(in_use)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_a_page_is_released_once():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="nobody holds it"):
        pool.release(pages[:1])


def test_the_least_recently_released_content_goes_first():
    pool = PagePool(4)
    pages = pool.allocate(3)
    for page_id, key in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.remember(page_id, key)
    pool.release(pages)
    pool.share([pages[0]])
    pool.release([pages[0]])
    pool.allocate(1)
    assert [pool.find(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
