#!/bin/sh
# Runs one machine of a job that continues when machines die or join. Run it on each machine, with the same
# arguments:
#
#     RENDEZVOUS=login1:29400 JOB=lm NODES=2:16 sh examples/cluster/machine.sh examples/train_lm.py --resume if-any
#
# RENDEZVOUS  host:port of `python examples/cluster/rendezvous.py`, on a machine that does not train
# JOB         name of this job; no other job at the same rendezvous may have it
# NODES       fewest:most machines; the job runs on the machines that have joined, and grows when others join
# RANKS       processes a machine: a number, or "gpu" (the default) for one a GPU
# RESTARTS    how often torchrun may start the ranks again; 1000 by default
# TRIES       how often torchrun may fail on this machine; 100 by default
# FLAGS       more flags for torchrun
#
# torchrun starts its processes again when a process of any machine dies. But torchrun itself fails if a
# machine dies between joining and starting, so this script starts torchrun again too.
: "${RENDEZVOUS:?must be host:port of rendezvous.py}" "${JOB:?must be the name of this job}"
# Without this, torchrun keeps using the first machine's store after that machine has died.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
tries=${TRIES:-100} stopped='' child=''
trap 'stopped=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' INT TERM
while :; do
    # shellcheck disable=SC2086
    ${TORCHRUN:-torchrun} --nnodes "${NODES:-1:1024}" --nproc-per-node "${RANKS:-gpu}" --max-restarts "${RESTARTS:-1000}" \
        --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$JOB" \
        --rdzv-conf "is_host=0,${RDZV:-last_call_timeout=10,read_timeout=30}" ${FLAGS:-} "$@" &
    child=$!
    wait "$child"
    code=$?
    if [ -n "$stopped" ]; then
        wait "$child"
        exit $?
    fi
    tries=$((tries - 1))
    if [ "$code" -eq 0 ] || [ "$tries" -le 0 ]; then
        exit "$code"
    fi
    sleep 1
done
