"""examples/cluster: shell files pass shellcheck, the manifest fits its schema, and the programs exist."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "cluster"
MANIFEST = CLUSTER / "kubernetes.yaml"

sys.path.insert(0, str(ROOT / "examples"))
from lm_arguments import check_arguments, parse_arguments  # noqa: E402

SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "time"),
    *("no-kill", "requeue", "open-mode", "output", "signal"),
}
"""Options of sbatch that may be used, from Slurm's own list (slurm.schedmd.com/sbatch.html, 24.05)."""


def manifests() -> list[dict]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


@pytest.mark.parametrize("name", ["machine.sh", "slurm.sh"])
def test_shell_files_pass_their_checker(name: str) -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([checker, CLUSTER / name], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_the_manifest_is_of_the_kinds_that_kubernetes_knows() -> None:
    for each in manifests():
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_slurms_lines_are_options_of_sbatch() -> None:
    lines = re.findall(r"^#SBATCH --([a-z-]+)", (CLUSTER / "slurm.sh").read_text(), re.M)
    assert lines and set(lines) <= SBATCH


def test_the_runs_of_both_launchers_fit_any_number_of_their_machines() -> None:
    (job,) = (each for each in manifests() if each["kind"] == "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    slurm = (CLUSTER / "slurm.sh").read_text().replace("\\\n", " ")
    (line,) = (each for each in slurm.splitlines() if "train_lm.py" in each and "srun" in each)
    of_slurm = shlex.split(line.split("train_lm.py")[1].rstrip("& "))
    for given in (container["args"], of_slurm):
        arguments = parse_arguments(given)
        assert arguments.resume == "if-any"
        for machines in (1, 2, 4):
            check_arguments(arguments, 8 * machines)
            assert arguments.num_experts % (8 * machines) == 0


def test_variables_are_those_that_machine_sh_reads() -> None:
    script = (CLUSTER / "machine.sh").read_text()
    known = set(re.findall(r"\$\{([A-Z]+)", script))
    (job,) = (each for each in manifests() if each["kind"] == "Job")
    given = {each["name"] for each in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert given - {"POD_ADDRESS", "OMP_NUM_THREADS"} <= known
    told = set(re.findall(r"^# ([A-Z]+)  ", script, re.M))
    assert told == known - {"TORCHRUN", "RDZV"}


@pytest.mark.slow
def test_machine_sh_starts_again_what_failed_and_stops_when_told(tmp_path: Path) -> None:
    failing = tmp_path / "torchrun"
    failing.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\n[ $(wc -l < {tmp_path}/calls) -ge 3 ]\n")
    failing.chmod(0o755)
    variables = {**os.environ, "RENDEZVOUS": "here:1", "JOB": "j", "TORCHRUN": str(failing)}
    run = ["sh", str(CLUSTER / "machine.sh"), "train.py"]
    assert subprocess.run(run, env=variables, check=False).returncode == 0
    assert len((tmp_path / "calls").read_text().split()) == 3
    (tmp_path / "calls").unlink()
    assert subprocess.run(run, env=variables | {"TRIES": "2"}, check=False).returncode == 1
    del variables["JOB"]
    refused = subprocess.run(run, env=variables, check=False, capture_output=True, text=True)
    assert refused.returncode and "JOB: must be the name of this job" in refused.stderr
