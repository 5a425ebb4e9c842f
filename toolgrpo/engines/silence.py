"""How long a server has owed an answer, as a line for the person who waits.

Pure bookkeeping: it knows no clock and no HTTP. Any answer ends a silence, so a busy server that
answers now and then is not complained about.
"""

from __future__ import annotations


class Silence:
    """The silence of one server. Times are seconds of one clock."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._since_s: float | None = None
        self._said = 0  # lines of this silence
        self._problem: str | None = None

    def asked(self, now_s: float) -> None:
        """Note a request that was sent; its answer is owed from now on, if none was before."""
        if self._since_s is None:
            self._since_s = now_s

    def left(self, still_open: int) -> None:
        """Note a cancelled request, for which nothing is owed."""
        if not still_open and self._problem is None:
            self._since_s = None

    def failed(self, problem: str) -> None:
        """Note a failed request, whose answer is still owed."""
        self._problem = problem

    def answered(self, now_s: float, still_open: int) -> None:
        """Note a good answer; what is still open is owed from now on."""
        self._since_s = now_s if still_open else None
        self._said, self._problem = 0, None

    def due(self, now_s: float, every_s: float) -> str | None:
        """Return the line to say now, or None until another `every_s` of silence have passed."""
        if self._since_s is None or now_s - self._since_s < (self._said + 1) * every_s:
            return None
        silent_s = now_s - self._since_s
        self._said = int(silent_s / every_s)
        problem = f" ({self._problem})" if self._problem else ""
        return (
            f"the vLLM server at {self._url} has not answered for {silent_s:.0f} s{problem}; a request is given "
            f"{self._timeout_s:g} s"
        )
