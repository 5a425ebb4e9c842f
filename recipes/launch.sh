#!/usr/bin/env bash
# Start a training run; every argument goes to recipes/train.py.
#
#   bash recipes/launch.sh                                                          # the financial example
#   bash recipes/launch.sh --config recipes/configs/nano.yaml                       # what this machine has: CPU, one GPU, or all
#   bash recipes/launch.sh --config recipes/configs/nano.yaml --max_steps 20        # flags win over the file
#   LAUNCH=cpu        bash recipes/launch.sh --config ...                           # the CPU
#   LAUNCH=single_gpu bash recipes/launch.sh --config ...                           # one GPU (the first of CUDA_VISIBLE_DEVICES)
#   LAUNCH=multi_gpu  bash recipes/launch.sh --config ...                           # all GPUs, a copy of the model on each
#   LAUNCH=zero3      bash recipes/launch.sh --config ...                           # DeepSpeed (zero2, zero3_offload, ...)
#   LAUNCH=multi_gpu PROCESSES=4 bash recipes/launch.sh --config ...                # four processes
#   SCRIPT=recipes/evaluate.py bash recipes/launch.sh --config ...                  # another recipe
#
# LAUNCH names a file in recipes/accelerate/. Everything runs in the folder above recipes/, as the paths in the configs want
# it: give paths of your own files from there, or absolute ones.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ -d .venv/bin ] && PATH="$PWD/.venv/bin:$PATH"

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l); fi
case "$gpus" in
    0) found=cpu ;;
    1) found=single_gpu ;;
    *) found=multi_gpu ;;
esac
launch="recipes/accelerate/${LAUNCH:-$found}.yaml"
if [ ! -f "$launch" ]; then
    echo "LAUNCH=${LAUNCH}: there is no $launch; there are: $(cd recipes/accelerate && echo *.yaml | sed 's/\.yaml//g')" >&2
    exit 2
fi
if [ "${LAUNCH:-$found}" = single_gpu ]; then # the others are hidden, or the model would be spread over them
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
    export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES%%,*}
fi
processes=()
if [ -n "${PROCESSES:-}" ]; then
    processes=(--num_processes "$PROCESSES")
elif [ "$gpus" -ge 1 ]; then
    case "${LAUNCH:-$found}" in
        cpu* | single_gpu | multi_node) ;; # these files say it themselves
        *) processes=(--num_processes "$gpus") ;;
    esac
fi
case "${LAUNCH:-$found}" in
    cpu*) # the threads that the launcher would take by itself, and would tell of in four lines
        if [ -z "${OMP_NUM_THREADS:-}" ] && command -v lscpu >/dev/null 2>&1; then
            cores=$(lscpu -b -p=Core,Socket | grep -v '^#' | sort -u | wc -l)
            share=$((cores / ${PROCESSES:-$(sed -n 's/^num_processes: *//p' "$launch")}))
            export OMP_NUM_THREADS=$((share > 1 ? share : 1))
        fi
        ;;
esac
start=(accelerate launch --quiet --config_file "$launch") # --quiet: an error of the run is said once, by the run
if [ $# -eq 0 ] && [ -z "${SCRIPT:-}" ]; then
    case "${LAUNCH:-$found}" in
        cpu*) example=financial_nano ;;
        *) example=financial_qwen2.5_0.5b ;;
    esac
    echo "no arguments: training the financial example (eight tools, accuracy) with recipes/configs/$example.yaml"
    echo "your own:     bash recipes/launch.sh --model_name_or_path MODEL --tools_script my_tools.py --reward_fn my_reward.py --dataset_id_or_path data.jsonl"
    if [ "$example" = financial_nano ] && [ ! -f outputs/financial_nano_shown/model.safetensors ]; then
        echo "first:        nano is shown worked questions, the last of them with a bad habit that the training is to remove"
        "${start[@]}" recipes/sft.py --config recipes/configs/sft/financial_nano.yaml
    fi
    set -- --config "recipes/configs/$example.yaml"
fi
exec "${start[@]}" ${processes[@]+"${processes[@]}"} "${SCRIPT:-recipes/train.py}" "$@"
