"""Look at everything that a training needs, before it costs an hour: one line each, with what to do.

    python recipes/check.py --config recipes/configs/nano.yaml
    python recipes/check.py --config my.yaml --questions 32 --samples 8 --json

The config file is the one of the training. Plugins, chat format, lengths and rewards are checked, the untrained model is
asked some questions, and one training step is done, of which nothing is kept. The exit code is 1 if something failed.
"""

import sys

from toolgrpo.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["check", *sys.argv[1:]]))
