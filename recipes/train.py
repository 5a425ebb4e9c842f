"""Teach a model to use tools, with one command.

    accelerate launch recipes/train.py --config recipes/configs/nano.yaml
    accelerate launch recipes/train.py --model_name_or_path MODEL --tools_script my_tools.py --reward_fn my_reward.py \
        --dataset_id_or_path data.jsonl

Every field of ToolGRPOConfig (TRL's GRPOConfig and more) and of TRL's ModelConfig is a flag and a YAML key; a flag wins.
`--dry_run` loads and checks everything, and stops before the first step.
"""

from __future__ import annotations

from toolgrpo.startup import prepare

prepare()  # before anything imports PyTorch

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

from toolgrpo.commands.terminal import Terminal  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    started = time.monotonic()
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        from toolgrpo.commands.train import parse_arguments

        parse_arguments(arguments)
    terminal = Terminal.of_command("train")
    from toolgrpo.commands.train import TrainingRun, parse_arguments
    from toolgrpo.storage import storage_errors

    script, config, model = parse_arguments(arguments)
    terminal.log_into(Path(config.output_dir))
    run = TrainingRun(script, config, model, terminal, started=started)
    summary = run.run()
    if summary is not None and terminal.is_main_process():
        path = Path(config.output_dir) / "summary.json"
        with storage_errors(f"the summary {path}", path.parent):
            path.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
