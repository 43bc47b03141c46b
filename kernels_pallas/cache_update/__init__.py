"""Writing new keys and values into a paged cache, in place."""

from precast.kernels_pallas.cache_update.api import cache_update

__all__ = ["cache_update"]
