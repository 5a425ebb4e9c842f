"""Teach a chat model the form of tool calls from a file of conversations, before reinforcement learning.

    python recipes/sft.py --model_name_or_path MODEL --dataset_id_or_path conversations.jsonl \
        --tools_script my_tools.py --output_dir outputs/sft --max_steps 200
    python recipes/sft.py --model_name_or_path nano --dataset_id_or_path nano --output_dir outputs/nano-base

The loss is on what the assistant says, nothing else. The second command makes `nano` from its own demonstrations.
"""

from __future__ import annotations

from toolgrpo.startup import prepare

prepare()  # before anything imports PyTorch

import sys  # noqa: E402

from rich.console import Console  # noqa: E402

from toolgrpo.commands.config_files import parse_args  # noqa: E402
from toolgrpo.commands.sft import SFTArguments, run_sft  # noqa: E402
from toolgrpo.errors import ToolGRPOError  # noqa: E402
from toolgrpo.plain_text import plain  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    try:
        (arguments,) = parse_args((SFTArguments,), sys.argv[1:] if argv is None else argv)
        run_sft(arguments, Console(stderr=True, soft_wrap=True))
    except ToolGRPOError as error:
        print(plain(f"{type(error).__name__}: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
