"""Models by their Hugging Face hub id, through huggingface_hub's cache."""

from __future__ import annotations

import re

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

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
    except GatedRepoError:
        raise CheckpointError(
            f"{hub_id} is gated: accept its terms at {constants.ENDPOINT}/{hub_id}, then log in with `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{hub_id} is neither a file or directory here nor a public model on {constants.ENDPOINT}: "
            "correct the name; if it is private, log in with `hf auth login`"
        ) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{hub_id} is neither a file or directory here nor in the Hugging Face cache, "
            f"and the hub cannot be reached ({_first_line(error)}): give a local path"
        ) from None
    # The client passes on errors of its HTTP library, and which library that is depends on its version.
    except Exception as error:
        raise CheckpointError(f"{hub_id} could not be downloaded: {_first_line(error)}: try again") from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
