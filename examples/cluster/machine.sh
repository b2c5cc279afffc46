#!/bin/sh
# One machine's part of a job that outlives its machines. Run it on each of them, with the same arguments:
#
#     RENDEZVOUS=login1:29400 JOB=lm NODES=2:16 sh examples/cluster/machine.sh examples/train_lm.py --resume if-any
#
# RENDEZVOUS  host:port of `python examples/cluster/rendezvous.py`, on a machine that does not train
# JOB         a name that only this job has there
# NODES       fewest:most machines; the job runs on those that are there, and grows when others come
# RANKS       processes a machine: a number, or "gpu" (the default) for one a GPU
# RESTARTS    how often torchrun may start the ranks again; 1000 by default
# TRIES       how often torchrun itself may fail here; 100 by default
# FLAGS       more flags of torchrun
#
# torchrun starts its processes again when one dies, here or elsewhere. But it ends itself where a machine dies
# between joining and starting, so here it is started again too.
: "${RENDEZVOUS:?must be host:port of rendezvous.py}" "${JOB:?must be the name of this job}"
# torchrun remembers the address of the first machine's store after that machine has died, unless told not to.
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
