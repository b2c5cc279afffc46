#!/bin/bash
# A job of four machines under Slurm, which continues with the machines that are left if some die:
#
#     sbatch --export=ALL,OUT=/shared/runs/lm examples/cluster/slurm.sh
#
# The rendezvous is on the first machine, where Slurm runs this script. If the first machine dies, Slurm
# requeues the job, which continues from its last checkpoint. If another machine dies, the others restart
# without it.
#SBATCH --job-name=pmoe-lm
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@300
set -eu

: "${OUT:?must be a folder that all machines see: checkpoints go there}"
port=$((20000 + SLURM_JOB_ID % 10000)) # depends on the job, because jobs may share a machine
export JOB=$SLURM_JOB_ID RENDEZVOUS="$SLURMD_NODENAME:$port" NODES="1:$SLURM_JOB_NUM_NODES"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

python examples/cluster/rendezvous.py --port "$port" &
meeting=$!

# One machine.sh on each machine. The flags keep Slurm from ending all of them when one fails.
srun --no-kill --kill-on-bad-exit=0 --wait=0 sh examples/cluster/machine.sh \
    examples/train_lm.py --out "$OUT" --resume if-any --parts 32 --num-experts 32 &
machines=$!

# Five minutes before the end of its time the job writes a checkpoint. Submitting it again continues from
# there.
trap 'kill -TERM "$machines"' TERM
wait "$machines" || wait "$machines"
kill "$meeting"
