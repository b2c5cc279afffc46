"""Runs fairseq's training command once for each list of options, in this process, and prints one JSON list:
of each the message of the ValueError that refused it, or "trained". Started by test_refusals.py, on two
ranks.

    python -m tests.fairseq.refusals CASES.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pmoe.integrations.fairseq import USER_DIR
from pmoe.integrations.fairseq.shim import allow_fairseq_defaults

allow_fairseq_defaults()

from fairseq_cli.train import cli_main  # noqa: E402


def outcome(arguments: list[str]) -> str:
    sys.argv = ["fairseq-train", "--user-dir", str(USER_DIR), *arguments]
    try:
        cli_main()
    except ValueError as error:
        return str(error)
    return "trained"


found = [outcome(arguments) for arguments in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]
if os.environ.get("RANK", "0") == "0":
    print("OUTCOMES " + json.dumps(found))
