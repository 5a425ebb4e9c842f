#!/usr/bin/env bash
# What each machine of a SageMaker training job runs. Not run on the service: tests/recipes/test_services.py runs it with
# stand-ins and the variables that SageMaker's container sets.
#
#   from sagemaker.core.training.configs import CheckpointConfig, Compute, SourceCode
#   from sagemaker.train import ModelTrainer
#   ModelTrainer(
#       training_image=IMAGE,  # with Python 3.11 or newer, and its headers
#       source_code=SourceCode(source_dir="shop", command="bash sagemaker.sh", args=["--config", "shop.yaml"]),
#       compute=Compute(instance_type="ml.p4d.24xlarge", instance_count=1),
#       checkpoint_config=CheckpointConfig(s3_uri="s3://BUCKET/shop"),  # gets the output; the next job goes on from it
#       environment={"TOOLGRPO": "toolgrpo[cuda]"},
#   ).train()
#
# Put a copy of this file into the source folder. Several machines need one disk that all see (FSx): give its place in OUTPUT.
set -euo pipefail
read -r machines rank first < <(python3 -c '
import json, os
hosts = sorted(json.loads(os.environ["SM_HOSTS"]))
print(len(hosts), hosts.index(os.environ["SM_CURRENT_HOST"]), hosts[0])')
export NCCL_SOCKET_IFNAME=$SM_NETWORK_INTERFACE_NAME GLOO_SOCKET_IFNAME=$SM_NETWORK_INTERFACE_NAME
python3 -m pip install --quiet --find-links . "${TOOLGRPO:-toolgrpo[cuda]}"
exec toolgrpo train --accelerate_config "${LAUNCH:-multi_node}" --num_machines "$machines" --machine_rank "$rank" \
    --num_processes $((machines * SM_NUM_GPUS)) --main_process_ip "$first" \
    --output_dir "${OUTPUT:-/opt/ml/checkpoints}" --resume_from_checkpoint auto "$@"
