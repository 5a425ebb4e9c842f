"""`python -m toolgrpo COMMAND ...`, and `accelerate launch -m toolgrpo COMMAND ...`."""

import sys

from toolgrpo.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
