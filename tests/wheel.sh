#!/usr/bin/env bash
# bash tests/wheel.sh [PYTHON]: builds a wheel without CUDA kernels into dist/, and uses it where nothing else is.
# The environment .venv-wheel is made anew, and has the wheel and what pip installs with it. TORCH, TORCH_INDEX: as
# in the Makefile.
set -eu
cd "$(dirname "$0")/.."
home=$PWD/.venv-wheel
rm -rf "$home" build/lib # setuptools would put files into the wheel that an earlier build left there
"${1:-python3}" -m venv "$home"
pip=("$home/bin/python" -m pip -q --disable-pip-version-check)
PMOE_CUDA=0 "${pip[@]}" wheel . --no-deps -w dist
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' pmoe/__init__.py)
wheel=dist/pmoe-$version-py3-none-any.whl
"${pip[@]}" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch==2.13.0}"
"${pip[@]}" install "$wheel"
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
awk '/^```python$/ { on = 1; next } /^```$/ { if (on) exit } on' docs/start.md > "$empty/first.py"
cd "$empty" # so that pmoe is the installed one
unset PYTHONPATH
"$home/bin/python" first.py
"$home/bin/pmoe" memory --d-model 64 --d-hidden 256 --num-experts 8 --tokens 512 --dtype bf16 | tail -n 1
"$home/bin/pmoe" kernels | grep "not built"
echo "make wheel: $wheel was installed into an empty environment, and works"
