""".github: its files fit GitHub's schemas, CI runs what a commit must pass, and forms ask for what helps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"
FORMS = GITHUB / "ISSUE_TEMPLATE"
SCHEMAS = {
    GITHUB / "workflows" / "tests.yml": "github-workflows",
    FORMS / "bug.yml": "github-issue-forms",
    FORMS / "feature.yml": "github-issue-forms",
    FORMS / "config.yml": "github-issue-config",
}
"""Schemas by file. They come with check-jsonschema, so that nothing is downloaded."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def validated(path: Path, schema: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", str(path)]
    return subprocess.run(words, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_a_file_fits_the_schema_of_github(path: Path) -> None:
    done = validated(path, SCHEMAS[path])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_held_to_a_schema() -> None:
    assert set(GITHUB.rglob("*.y*ml")) == set(SCHEMAS)


def test_a_mistake_in_a_form_is_noticed(tmp_path: Path) -> None:
    text = (FORMS / "bug.yml").read_text(encoding="utf-8")
    wrong = tmp_path / "bug.yml"
    wrong.write_text(text.replace("type: dropdown", "type: menu"), encoding="utf-8")
    done = validated(wrong, "github-issue-forms")
    assert done.returncode == 1
    assert "'menu'" in done.stdout


def test_the_workflow_runs_what_a_change_must_pass() -> None:
    (job,) = read(GITHUB / "workflows" / "tests.yml")["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == "bash .ci/run"
    assert (ROOT / ".ci" / "run").is_file()


def required(form: str) -> set[str]:
    """Returns the ids of the questions of a form that must be answered."""
    body = read(FORMS / form)["body"]
    return {field["id"] for field in body if field.get("validations", {}).get("required")}


def test_a_bug_report_asks_for_versions_ranks_backend_and_a_script() -> None:
    assert required("bug.yml") >= {"what", "script", "command", "versions", "ranks", "backend"}


def test_a_pull_request_is_asked_for_tests_and_hardware() -> None:
    text = (GITHUB / "PULL_REQUEST_TEMPLATE.md").read_text(encoding="utf-8")
    for words in ("\n## Testing done\n", "\n## Hardware\n", "`make lint test`", "`CHANGELOG.md`", "float64"):
        assert words in text, words
