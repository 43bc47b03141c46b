"""The CPU target's own kernels, C++ under ``jax.ffi`` on XLA's thread pool: dense products, paged attention, cache
writes.  ``library`` compiles them with the host's C++ compiler; where there is none, XLA's operations serve."""
