#!/bin/bash
# Makes the environment of the fairseq tests: environment.sh FOLDER [PYTHON], which is what "make .venv-fairseq" runs.
# It is one of its own because fairseq wants numpy below 2. TORCH and TORCH_INDEX are as in the Makefile.
# FOLDER/requirements.txt, what was installed, is written last.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
python=${2:-python3}

rm -rf "$folder"
"$python" -m venv "$folder" || { rm -rf "$folder"; virtualenv -q -p "$python" "$folder"; }
echo "*" > "$folder/.gitignore"
pip="$folder/bin/python -m pip --disable-pip-version-check install -q"
$pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch==2.13.0}"
$pip -r "$here/requirements.txt"
$pip --no-deps fairseq==0.12.2
cp "$here/requirements.txt" "$folder/requirements.txt"
