"""Each argument of each command is given wrong texts. The command must exit with code 2 and name the
argument.

A table says which of the texts are right for an argument. An argument that the table lacks fails the test.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pmoe import cli

TEXTS = ("", " ", "nan", "inf", "-inf", "-1", "0", "0.5", "1e400", "9" * 30, "no such", "True", " S4", "\0")
"""The texts that are tried. One is the path of a file that does not exist."""

LAYER = ["--d-model=16", "--d-hidden=64", "--num-experts=8", "--tokens=512"]
GIVEN = {
    "memory": LAYER,
    "plan": LAYER,
    "profile": [],
    "simulate": ["fsmoe"],
    "kernels": [],
    "report": ["."],
}
"""The other arguments of each command, which are right."""

SIZES = (
    "--d-model",
    "--d-latent",
    "--d-hidden",
    "--num-experts",
    "--tokens",
    "--ranks",
    "--top-k",
    "--expert",
    "--dtype",
)
WIRES = ("--wire", "--wire-backward", "--wire-combine", "--allow")
NAMES = {"", "nan", "inf", "-inf", "-1", "0", "0.5", "1e400", "9" * 30, "no such", "True", " S4", " "}
"""Texts that are right as names of files and folders."""
TAKEN: dict[str, dict[str, set[str]]] = {
    "memory": {
        **dict.fromkeys((*SIZES, *WIRES, "--slack", "--n", "--n-backward", "--memory-reuse"), set()),
        "--device": set(),
        "--balance": {"0"},
        "--shard-experts": {"0"},
    },
    "plan": {
        **dict.fromkeys((*SIZES, *WIRES, "--slack", "--budget", "--profile", "--cluster"), set()),
        "--balance": set(),
        "--folder": set(),  # where nothing is stored
        "--html": set(),
    },
    "profile": {
        **dict.fromkeys(
            ("--inside", "--dtype", "--device", "--d-model", "--d-hidden", "--num-experts"), set()
        ),
        **dict.fromkeys(("--top-k", "--tokens", "--expert", "--virtual-ranks"), set()),
        "--folder": NAMES,  # "" is the folder of the process
        "--out": NAMES,
    },
    "simulate": {"experiment": set(), "--contention": set(), "--draw": set()},  # which is for comet
    "kernels": {"--capability": {"0.5"}, "--archs": set()},  # which needs --capability
    "report": {"run_dir": set(), "--out": set()},  # of no run
}

ALSO = {"plan": "no profile fits", "report": "RUN_DIR"}
"""Another error that a command may report: something that it needs before it looks at the argument."""


def parser_of(command: str) -> argparse.ArgumentParser:
    (commands,) = (each for each in cli.build_parser()._actions if isinstance(each.choices, dict))
    return commands.choices[command]  # type: ignore[index, return-value]


def test_every_argument_that_has_a_value_is_in_the_table() -> None:
    found = {
        command: {
            (*each.option_strings, each.dest)[0] for each in parser_of(command)._actions if each.nargs != 0
        }
        for command in cli.COMMANDS
    }
    assert found == {command: set(options) for command, options in TAKEN.items()}


def told(capsys: pytest.CaptureFixture[str], command: str, option: str, text: str) -> str:
    """Runs a command with a text for one argument. Returns its error message; "" if it accepts the text."""
    given = GIVEN[command] if option.startswith("--") else []
    try:
        cli.main([command, *given, f"{option}={text}" if option.startswith("--") else text])
    except SystemExit as stopped:
        assert stopped.code == 2
        return capsys.readouterr().err
    return ""


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.slow if command == "profile" else ())  # has most of them
        for command, options in TAKEN.items()
        if options
    ],
)
def test_what_is_no_value_is_refused_by_name(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PMOE_CACHE", str(tmp_path / "cache"))
    wrong = []
    for option, taken in TAKEN[command].items():
        names = {option, option.strip("-").replace("-", "_"), option.upper(), ALSO.get(command, option)}
        for text in TEXTS:
            if command == "profile" and text in taken:
                continue  # it would measure
            found = told(capsys, command, option, text)
            if (text in taken) != (found == "") or (found and not any(name in found for name in names)):
                wrong.append(f"{option}={text!r}: {found[-200:]!r}")
    assert not wrong, "\n".join(wrong)
