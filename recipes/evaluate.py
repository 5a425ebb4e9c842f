"""Measure a model, or two side by side, on held-out questions: pass@1, pass@k, maj@k with intervals, and how tools were used.

    accelerate launch recipes/evaluate.py --config recipes/configs/nano.yaml --model_name_or_path outputs/nano --baseline nano
    accelerate launch recipes/evaluate.py --config recipes/configs/gsm8k_qwen3_1.7b.yaml \
        --model_name_or_path outputs/gsm8k_qwen3_1.7b --baseline Qwen/Qwen3-1.7B --eval_questions 200 --samples 8 --ks 1 4 8

The config file is the one of the training: same episodes, tools, limits and rewards, no gradients. Prints tables and writes
OUTPUT_DIR/evaluation.json (or `--report FILE`), and every episode to OUTPUT_DIR/model/episodes.jsonl.
"""

from __future__ import annotations

from toolgrpo.startup import prepare

prepare()  # before anything imports PyTorch

import sys  # noqa: E402
from pathlib import Path  # noqa: E402

from toolgrpo.commands.terminal import Terminal  # noqa: E402


def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        from toolgrpo.commands.evaluate import parse_evaluation_arguments

        parse_evaluation_arguments(arguments)
    terminal = Terminal.of_command("evaluate")
    from toolgrpo.commands.evaluate import EvaluationRun, parse_evaluation_arguments

    evaluation, script, config, model = parse_evaluation_arguments(arguments)
    terminal.log_into(Path(config.output_dir))
    EvaluationRun(evaluation, script, config, model, terminal).run()


if __name__ == "__main__":
    main()
