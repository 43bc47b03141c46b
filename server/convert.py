"""``runtime-convert``: any checkpoint to the project's own format, which restores straight to any mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence

from absl import flags
from tqdm import tqdm

from precast.models.checkpoint import CheckpointError, open_checkpoint
from precast.models.checkpoint.native import save
from precast.server import command

_COMMAND = "runtime-convert"
_SUMMARY = """
usage: runtime-convert MODEL DIRECTORY

Reads MODEL (a Hugging Face directory, a GGUF file or a hub id) and writes it to DIRECTORY, which must
not exist yet or be empty, as orbax arrays that runtime-serve --model DIRECTORY loads.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Converts one checkpoint; ends the program with one line when it cannot.

    Args:
      argv: arguments without the program's name; None takes the process's own.
    """
    arguments = command.parse(_COMMAND, _SUMMARY, flags.FlagValues(), argv)
    if len(arguments) != 2:
        command.fail(_COMMAND, f"it takes MODEL and DIRECTORY, not {len(arguments)} arguments (--help says more)", 2)
    model, directory = arguments
    try:
        checkpoint = open_checkpoint(model)
        with tqdm(total=len(checkpoint.names()), desc=f"converting {checkpoint.name}", unit="array") as bar:
            save(checkpoint, directory, on_array=bar.update)
    except CheckpointError as error:
        command.fail(_COMMAND, str(error))
    except OSError as error:
        command.fail(_COMMAND, f"{directory} cannot be written: {error.strerror or error}")
    print(f"wrote {os.path.abspath(directory)}")


def run() -> None:
    """Console entry point."""
    main()
