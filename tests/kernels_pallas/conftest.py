"""The CPU kernels' library, for the tests that run it."""

import pytest

from precast.kernels_pallas.native import library


@pytest.fixture(scope="session")
def native_library(tmp_path_factory):
    """Its content; it is registered from here on."""
    made = library.registered() or library.build(tmp_path_factory.mktemp("libraries"), "this one")
    assert made is not None
    library.register(made)
    return made
