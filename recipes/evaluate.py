"""Measure a model, or two side by side, on held-out questions: pass@1, pass@k, maj@k with intervals, and how tools were used.

    accelerate launch recipes/evaluate.py --config recipes/configs/nano.yaml --model_name_or_path outputs/nano --baseline nano
    accelerate launch recipes/evaluate.py --config recipes/configs/gsm8k_qwen3_1.7b.yaml \
        --model_name_or_path outputs/gsm8k_qwen3_1.7b --baseline Qwen/Qwen3-1.7B --eval_questions 200 --samples 8 --ks 1 4 8

The config file is the one of the training: same episodes, tools, limits and rewards, no gradients. Prints tables and writes
OUTPUT_DIR/evaluation.json (or `--report FILE`), and every episode to OUTPUT_DIR/model/episodes.jsonl.
"""

import sys

from toolgrpo.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
