"""Teach a model to use tools, with one command.

    accelerate launch recipes/train.py --config recipes/configs/nano.yaml
    accelerate launch recipes/train.py --model_name_or_path MODEL --tools_script my_tools.py --reward_fn my_reward.py \
        --dataset_id_or_path data.jsonl

Every field of ToolGRPOConfig (TRL's GRPOConfig and more) and of TRL's ModelConfig is a flag and a YAML key; a flag wins.
`--dry_run` loads and checks everything, and stops before the first step.
"""

import sys

from toolgrpo.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
