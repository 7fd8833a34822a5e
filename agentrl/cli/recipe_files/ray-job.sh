#!/bin/bash
# A run as a job of a Ray cluster that is there already, on the machine of its head: bash ray-job.sh /shared/run.toml
#
# What is behind the run file is passed to `agentrl train`; name files in full, for a job begins elsewhere. The same
# command goes on with a run that was stopped. RAY_API_SERVER_ADDRESS: of the cluster's job server.
ray job submit --address="${RAY_API_SERVER_ADDRESS:-http://127.0.0.1:8265}" -- agentrl train "$@" --resume --cluster ray
