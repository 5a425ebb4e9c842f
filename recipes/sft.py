"""Teach a chat model the form of tool calls from a file of conversations, before reinforcement learning.

    python recipes/sft.py --model_name_or_path MODEL --dataset_id_or_path conversations.jsonl \
        --tools_script my_tools.py --output_dir outputs/sft --max_steps 200
    python recipes/sft.py --model_name_or_path nano --dataset_id_or_path nano --output_dir outputs/nano-base

The loss is on what the assistant says, nothing else. The second command makes `nano` from its own demonstrations.
"""

import sys

from toolgrpo.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["sft", *sys.argv[1:]]))
