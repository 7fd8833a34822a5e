#!/bin/bash
# A run on all machines of a SLURM job, which stops and keeps all before the job's end: sbatch slurm.sh run.toml
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --signal=B:USR1@120
#
# What is behind the run file is passed to `agentrl train`; the layout is the run file's. The same command goes on
# with a run that was stopped. Beforehand: the same Python and agentrl on each machine, and a shared file system.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000)) # not that of another job on the node
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(openssl rand -hex 32)
srun --nodes=1 --ntasks=1 --nodelist="$head" ray start --head --port=$port --block &
until ray status --address "$head:$port" &> /dev/null; do sleep 1; done
others=$((SLURM_NNODES - 1))
if ((others > 0)); then
    srun --nodes=$others --ntasks=$others --exclude="$head" ray start --address="$head:$port" --block &
fi
# SLURM takes all machines at once: a while before, the run is told to stop.
trap 'kill -TERM $run' USR1
agentrl train "$@" --resume --cluster ray --ray-address "$head:$port" &
run=$!
while kill -0 $run 2> /dev/null; do wait $run; done
wait $run
