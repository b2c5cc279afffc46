#!/bin/bash
# Makes the packages of tests/convert: environment.sh FOLDER PYTHON, which is what "make .venv-convert" runs. FOLDER goes
# before PYTHON's own packages, which have torch and stay as they are. FOLDER/requirements.txt is written last.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$1
python=$2

rm -rf "$folder"
mkdir -p "$folder"
echo "*" > "$folder/.gitignore"
"$python" -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation --target "$folder" \
    -r "$here/requirements.txt"
cp "$here/requirements.txt" "$folder/requirements.txt"
