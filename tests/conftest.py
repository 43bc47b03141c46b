"""Tests run on the CPU, whatever accelerators' compilers are installed."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
