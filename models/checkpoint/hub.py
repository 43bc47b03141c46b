"""Models by their Hugging Face hub id, through huggingface_hub's cache."""

from __future__ import annotations

import re

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from precast.models.errors import CheckpointError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PATTERNS = ("*.json", "*.safetensors", "*.jinja")


def is_hub_id(name: str) -> bool:
    """Whether ``name`` has the form owner/model."""
    return _ID.fullmatch(name) is not None and ".." not in name


def download(hub_id: str) -> str:
    """Fetches what is not in the cache yet, with a progress bar, and returns the local directory.

    A broken download goes on where it stopped.

    Raises:
      CheckpointError: no such model, no access, or no network.
    """
    try:
        return huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_PATTERNS))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{hub_id} is neither a file or directory here nor in the Hugging Face cache, "
            f"and the hub cannot be reached ({_first_line(error)}): give a local path"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise CheckpointError(f"{hub_id} cannot be had from the Hugging Face hub: {_first_line(error)}") from None
    except OSError as error:
        raise CheckpointError(f"{hub_id} could not be downloaded: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
