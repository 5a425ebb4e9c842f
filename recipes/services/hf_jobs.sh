#!/usr/bin/env bash
# One training on one machine of Hugging Face Jobs. Not run on the service: tests/recipes/test_services.py has it read by
# the service's own command line without sending it, and runs what it would send.
#
#   bash recipes/services/hf_jobs.sh shop YOU/shop --config shop.yaml   # shop/ after steps 1 to 3 of docs/tutorials/half_an_hour.md
#
# The first argument is the folder with your files, of which the job gets a copy; the second the model on the hub that the
# run pushes; the others are those of `toolgrpo train`. From the environment: FLAVOR (a100-large; `hf jobs hardware` has
# all), TIMEOUT (8h, after which the job is stopped), TOOLGRPO (toolgrpo[cuda]; wheels of toolgrpo and
# confined-python in the folder come first).
set -euo pipefail
folder=${1:?give the folder with your files first, then the model to push, then the arguments of toolgrpo train}
model=${2:?give the model to push after the folder: YOU/NAME}
shift 2
# shellcheck disable=SC2016
exec hf jobs run --detach --flavor "${FLAVOR:-a100-large}" --timeout "${TIMEOUT:-8h}" --secrets HF_TOKEN \
    --env "TOOLGRPO=${TOOLGRPO:-toolgrpo[cuda]}" --volume "$folder:/files" python:3.12 bash -c '
    set -e
    cp -r /files ~/job && cd ~/job # /files can only be read
    pip install --quiet --find-links . "$TOOLGRPO"
    exec toolgrpo train --num_processes "$(nvidia-smi --list-gpus | wc -l)" "$@"' \
    train "$@" --push_to_hub --hub_model_id "$model" --hub_strategy checkpoint
