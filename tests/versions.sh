# bash tests/versions.sh PYTHON,TORCH,TRANSFORMERS ...: what users rely on, and transformers, with each of these.
# Each has an environment of its own in .venv-versions/. PYTHON: 3.10 is `python3.10` on PATH. torch comes from
# TORCH_INDEX where that is set. A version that cannot be had is a failure, told at the end beside the others.
set -u
cd "$(dirname "$0")/.."
told=()
for each in "$@"; do
    IFS=, read -r python torch transformers <<< "$each"
    home=.venv-versions/$each
    if [ ! -e "$home/done" ]; then
        rm -rf "$home"
        "python$python" -m venv "$home" &&
            "$home/bin/pip" install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$torch" &&
            "$home/bin/pip" install -q "torch==$torch" "transformers==$transformers" numpy scipy sortedcontainers \
                'tomli; python_version < "3.11"' matplotlib pytest pytest-timeout pytest-xdist && touch "$home/done"
    fi
    if [ ! -e "$home/done" ]; then
        told+=("$each: not run, it could not be set up")
        continue
    fi
    PYTHONPATH=$PWD OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$home/bin/python" -m pytest -q -n "${WORKERS:-2}" \
        -m "not slow and not nightly and not gpu" tests/spec tests/unit/test_layer.py tests/unit/test_transformers.py \
        tests/unit/test_borrowed.py && told+=("$each: passed") || told+=("$each: FAILED")
done
printf '%s\n' "${told[@]}"
! printf '%s\n' "${told[@]}" | grep -qv ": passed$"
