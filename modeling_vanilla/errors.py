"""The exceptions that end a script with one line instead of a traceback."""

import os
import sys


class InputError(ValueError):
    """Input that the user can mend; the message is one line naming file, line and remedy."""


class Stopped(Exception):
    """The run was asked to stop by signal `number`; what was done is saved."""

    def __init__(self, number, message):
        super().__init__(message)
        self.number = number


def run(main):
    """Call a script's `main` and return its exit code: 0, 2 for an InputError, 128 + n when stopped by signal n."""
    try:
        main()
    except InputError as error:
        say(f"error: {error}")
        return 2
    except Stopped as stop:
        say(str(stop))
        return 128 + stop.number
    return 0


def say(message):
    """Print on stderr; all processes of a launch but the first say which they are."""
    rank = int(os.environ.get("RANK", 0))
    print(f"process {rank}: {message}" if rank else message, file=sys.stderr)
