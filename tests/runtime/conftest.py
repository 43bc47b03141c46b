"""Engines over small models; compiled programs are shared by all tests of a run."""

import collections
import pathlib
import sys

import pytest
import tokenizers

from precast.runtime.config import EngineConfig
from precast.runtime.loading import load_engine

sys.path.append(str(pathlib.Path(__file__).parent))  # for toy_models


@pytest.fixture(scope="session")
def plan_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("plans")


@pytest.fixture(scope="session")
def make_engine(plan_dir):
    """Builds an engine over a checkpoint; the keywords are EngineConfig's."""

    def make(checkpoint, **settings):
        defaults = {"dtype": "float32", "slots": 4, "page_size": 4, "token_budget": 12, "plan_dir": str(plan_dir)}
        tokenizer = tokenizers.Tokenizer.from_str(checkpoint.text.tokenizer_json)
        return load_engine(checkpoint, EngineConfig(**defaults | settings), tokenizer=tokenizer)

    return make


class Collected:
    """All that one output sequence gave out."""

    def __init__(self):
        self.deltas = []

    @property
    def token_ids(self):
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def text(self):
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self):
        return [one for delta in self.deltas for one in delta.logprobs or ()]

    @property
    def finish_reason(self):
        return self.deltas[-1].finish_reason


@pytest.fixture(scope="session")
def run():
    """Runs (prompt ids, params) pairs to their end; returns Collected by (request number, index).

    ``arrive`` gives the step at which each request is added; ``at_step`` is called with (engine, step).
    """

    def run_all(engine, requests, *, arrive=None, at_step=None, check=True):
        outputs = collections.defaultdict(Collected)
        waiting = sorted(range(len(requests)), key=lambda i: arrive[i] if arrive else 0)
        step = 0
        while waiting or engine.has_work:
            while waiting and (not arrive or arrive[waiting[0]] <= step):
                number = waiting.pop(0)

                def sink(delta, number=number):
                    outputs[number, delta.index].deltas.append(delta)

                engine.add(engine.prepare(f"r{number}", *requests[number], sink))
            engine.step()
            if check:
                engine.check_integrity()
            if at_step:
                at_step(engine, step)
            step += 1
            assert step < 5000, "the engine makes no progress"
        assert engine.stats().num_free_pages == engine.stats().num_pages
        return outputs

    return run_all
