"""The accelerators' plugins are installed for their compilers; the tests themselves run on the CPU."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
