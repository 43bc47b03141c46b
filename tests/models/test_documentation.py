"""The table of models is what the code says."""

from __future__ import annotations

import pathlib

from precast.models.families import table

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_table_of_models_is_up_to_date():
    assert (DOCS / "models.md").read_text() == table.markdown()
