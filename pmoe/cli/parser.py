"""A parser of command lines with errors of one line, which suggest a correction for a mistyped word."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from pmoe.text import meant


class Parser(argparse.ArgumentParser):
    """A parser of the command line of `pmoe` or of one of its subcommands.

    It differs from argparse's parser in its errors. They do not repeat the usage. If a command, an option or
    a choice is mistyped, they suggest the name that is most similar.
    """

    def error(self, message: str) -> NoReturn:
        """Prints one line with the message and the command that prints the usage. Exits with code 2."""
        self.refuse(f"{message} (see {self.prog} --help)")

    def refuse(self, message: str) -> NoReturn:
        """Prints one line with a message, without advice to read the help. Exits with code 2."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Returns the result of argparse, but refuses unknown options first.

        If a required option is mistyped, argparse would only report that the required option is missing.
        """
        for word in sys.argv[1:] if args is None else args:
            is_option = word.startswith("--") and word != "--" and " " not in word
            if not is_option and (word == "--" or self._subparsers is not None):
                break  # the words from here on are text, or belong to a subcommand
            name = word.partition("=")[0]
            if is_option and not any(known.startswith(name) for known in self._option_string_actions):
                self.error(f"unknown option {name}{meant(name, self._option_string_actions)}")
        return super().parse_known_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError if an argument has a value that is not among the argument's choices.

        The message suggests the choice that is most similar to the value. If the argument is the name of a
        subcommand, the method prints a shorter message in one line and exits instead, because argparse's
        message lists all subcommands twice.
        """
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [*map(str, action.choices or ())]
            suggestion = meant(str(value), choices)
            if isinstance(action, argparse._SubParsersAction):
                self.error(f"unknown command {value!r}{suggestion or ': must be ' + ' or '.join(choices)}")
            raise argparse.ArgumentError(action, f"{error.message}{suggestion}") from None
