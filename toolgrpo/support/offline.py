"""Is the hub there? Asked once, before anything of it is loaded.

Its client tries each file six times over 23 seconds where there is no network, also for a model
that is wholly kept on this machine, and for a folder whose name was mistyped. So where it does not
answer, this process and those that it starts take only what is kept.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_SAID_IN = {
    "huggingface_hub.constants": ("HF_HUB_OFFLINE",),
    "datasets.config": ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
}
"""Where these libraries keep what the environment said when they were imported."""
_ATTEMPTS, _PAUSE_S, _TIMEOUT_S = 2, 2.0, 10.0


def settle_hub(name: str | Path) -> None:
    """Go on without the hub if this is not here and the hub cannot be reached; said once."""
    if not Path(name).exists():
        _settle()


@functools.cache
def _settle() -> None:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return
    reason = None
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt * _PAUSE_S)
        reason = _why_not(constants.ENDPOINT)
        if reason is None:
            return
    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that begin later
    for module, names in _SAID_IN.items():
        for name in names if module in sys.modules else ():
            setattr(sys.modules[module], name, True)
    kept = constants.HF_HUB_CACHE
    logger.warning("the hub at %s cannot be reached (%s): only what %s holds is used", constants.ENDPOINT, reason, kept)


def _why_not(endpoint: str) -> str | None:
    """Return what hinders a request to the hub; any answer of it will do."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_TIMEOUT_S)
    except Exception as error:  # of the network, of a proxy, of certificates
        return f"{type(error).__name__}: {error}"
    return None
