"""The exceptions that end a script with one line instead of a traceback."""

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
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stop:
        print(stop, file=sys.stderr)
        return 128 + stop.number
    return 0
