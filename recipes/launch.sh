#!/usr/bin/env bash
# Start a training run; every argument goes to recipes/train.py.
#
#   bash recipes/launch.sh                                                          # the financial example, recipes/configs/financial.yaml
#   bash recipes/launch.sh --tools_script my_tools.py --dataset_id_or_path data.jsonl # model and reward have defaults
#   bash recipes/launch.sh --config recipes/configs/nano.yaml                       # what this machine has: CPU, one GPU, or all
#   bash recipes/launch.sh --config recipes/configs/nano.yaml --max_steps 20        # flags win over the file
#   LAUNCH=cpu        bash recipes/launch.sh --config ...                           # the CPU
#   LAUNCH=single_gpu bash recipes/launch.sh --config ...                           # one GPU (the first of CUDA_VISIBLE_DEVICES)
#   LAUNCH=multi_gpu  bash recipes/launch.sh --config ...                           # all GPUs, a copy of the model on each
#   LAUNCH=zero3      bash recipes/launch.sh --config ...                           # DeepSpeed (zero2, zero3_offload, ...)
#   LAUNCH=multi_gpu PROCESSES=4 bash recipes/launch.sh --config ...                # four processes
#   SCRIPT=recipes/evaluate.py bash recipes/launch.sh --config ...                  # another recipe
#
# LAUNCH names a file in recipes/accelerate/. Everything runs in your folder: a file of yours comes before one of this
# repository that has the same path, and outputs/ is made there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ -d "$root/.venv/bin" ] && PATH="$root/.venv/bin:$PATH"

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true); fi
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then # the others are hidden
    gpus=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true) # -1 hides all
fi
case "$gpus" in
    0) found=cpu ;;
    1) found=single_gpu ;;
    *) found=multi_gpu ;;
esac
launch="$root/recipes/accelerate/${LAUNCH:-$found}.yaml"
if [ ! -f "$launch" ]; then
    echo "LAUNCH=${LAUNCH}: there is no $launch; there are: $(cd "$root/recipes/accelerate" && echo *.yaml | sed 's/\.yaml//g')" >&2
    exit 2
fi
if [ "${LAUNCH:-$found}" = single_gpu ]; then # the others are hidden, or the model would be spread over them
    CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0}
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

script=${SCRIPT:-recipes/train.py}
if [ "$script" = recipes/train.py ] || [ ! -f "$script" ]; then script="$root/$script"; fi

words=("$@")
given() { # whether one of these flags is among the arguments
    local word
    for word in ${words[@]+"${words[@]}"}; do
        word=${word%%=*}
        if [[ $word == --* && " $* " == *" $(tr - _ <<<"${word#--}") "* ]]; then return 0; fi
    done
    return 1
}
flags=()
from_example() { # add these keys of the example as flags, and say the first with how to give another
    local say=$1 yours=$2 key value
    shift 2
    for key in "$@"; do
        value=$(sed -n "s/^  $key: *//p" "$example" | sed 's/ *#.*//; s/[]["'\'',]//g')
        if [ -z "$value" ]; then continue; fi
        # shellcheck disable=SC2206 # a list is several words
        flags+=("--$key" $value)
        if [ -n "$say" ]; then printf '%-9s %s, the default (yours: %s)\n' "$say" "$value" "$yours"; fi
        say=
    done
}
if [ "$script" = "$root/recipes/train.py" ] && ! given config help && [[ " ${words[*]-} " != *" -h "* ]]; then
    model_keys="model_name_or_path"
    tools_keys="tools_script tool_functions_module environment mcp_config agent"
    reward_keys="reward reward_fn reward_function_name reward_weights"
    data_keys="dataset_id_or_path"
    if ! given eval_share eval_dataset_id_or_path eval_split; then data_keys+=" eval_share eval_questions"; fi
    if given $tools_keys && ! given dataset_id_or_path; then # the example's questions are for its own tools
        echo "launch.sh: tools of your own want rows of your own: --dataset_id_or_path data.jsonl" >&2
        exit 2
    fi
    example="$root/recipes/configs/financial.yaml"
    if ! given $model_keys model; then
        from_example model "--model_name_or_path MODEL" $model_keys
        settings=$(sed -n 's/^  \([a-z0-9_]*\):.*/\1/p' "$example" | grep -vxE "$(tr ' ' '|' <<<"$model_keys $tools_keys $reward_keys $data_keys eval_.*")")
        from_example "" "" $settings
        echo "settings  of $example, the default (yours: --learning_rate 1e-5 and so on)"
    fi
    if ! given $tools_keys; then from_example tools "--tools_script my_tools.py" $tools_keys; fi
    if given dataset_id_or_path && ! given $reward_keys environment agent; then # the example's reward reads columns of its rows
        flags+=(--reward accuracy)
        echo "reward    accuracy, the default (yours: --reward_fn my_reward.py)"
    elif ! given $reward_keys environment agent; then from_example reward "--reward_fn my_reward.py" $reward_keys; fi
    if ! given dataset_id_or_path; then from_example data "--dataset_id_or_path data.jsonl" $data_keys; fi
fi
exec "${start[@]}" ${processes[@]+"${processes[@]}"} "$script" ${flags[@]+"${flags[@]}"} "$@"
