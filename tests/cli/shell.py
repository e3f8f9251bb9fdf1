"""Commands as a shell runs them."""

import json
from unittest.mock import Mock

from typer.testing import CliRunner

import daskfactor
from daskfactor.cli.main import app


def call(*arguments):
    """Run a command, and return its exit code and what it printed."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments):
    """Run a command that has to succeed, and return what it printed."""
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments):
    """Run a command that has to succeed, and return the JSON that it printed."""
    return json.loads(succeed(*arguments, "--json"))


def fails(code, words, *arguments):
    """Run a command that has to end with a code and with words on standard error; return these."""
    result = call(*arguments)
    assert result.exit_code == code, result.output
    assert words in plain(result.stderr)
    return result.stderr


def plain(text):
    """Return a text on one line."""
    return " ".join(text.split())


def stand_in(monkeypatch, verb, **behaviour):
    """Put a mock into the place of a verb of the package, and return it."""
    mock = Mock(**behaviour)
    monkeypatch.setattr(daskfactor, verb, mock, raising=False)
    return mock
