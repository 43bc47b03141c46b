"""What the command-line programs share: their own set of flags, help that reads well, one-line errors."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from absl import flags

_WIDTH = 100


def parse(command: str, summary: str, values: flags.FlagValues, argv: Sequence[str] | None = None) -> list[str]:
    """Parses the command line into ``values`` and returns the positional arguments.

    ``--help`` prints the summary and every flag of ``values``, in the order of their definition,
    and exits with 0.  A flag that is unknown or has a bad value ends the program with one line.

    Args:
      command: the program's name.
      summary: usage and description, for people.
      values: the program's flags; not absl's global ones, so that programs can be imported together.
      argv: arguments without the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if any(argument in ("-h", "-help", "--help", "-?") for argument in arguments):
        print(_help(summary, values))
        sys.exit(0)
    try:
        return values([command, *arguments])[1:]
    except flags.Error as error:
        fail(command, f"{' '.join(str(error).split())} (--help lists the flags)", status=2)


def fail(command: str, message: str, status: int = 1) -> NoReturn:
    """Ends the program with one line on stderr."""
    print(f"{command}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def _help(summary: str, values: flags.FlagValues) -> str:
    lines = [textwrap.dedent(summary).strip(), "", "Flags:"]
    for group in values.flags_by_module_dict().values():
        for flag in group:
            default = "" if flag.default is None else f" (default: {flag.default})"
            text = textwrap.wrap(flag.help + default, _WIDTH - 6)
            lines += [f"  --{flag.name}", *(f"      {line}" for line in text)]
    return "\n".join(lines)
