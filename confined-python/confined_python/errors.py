"""The errors that this package raises on purpose.

    ConfinedPythonError
    ├── UserError                (also ValueError)    what the caller gave is wrong: a setting, the tests of a task
    └── InfrastructureError      (also RuntimeError)  something outside the program failed
        └── SandboxError         the sandbox cannot be started or kept alive
            └── WorkerLostError  one of its workers ended in the middle of a run; others may do

What the confined code does wrong is no error but its result. The first three are bases that a package which builds on
this one may make its own, so that who catches them catches the sandbox's errors too.
"""


class ConfinedPythonError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(ConfinedPythonError, ValueError):
    """Wrong input of the caller; the message says where it is and what to do."""


class InfrastructureError(ConfinedPythonError, RuntimeError):
    """Something outside the program failed and retrying did not help."""


class SandboxError(InfrastructureError):
    """The sandbox could not be started or kept alive."""


class WorkerLostError(SandboxError):
    """A worker of the sandbox ended in the middle of a run; the sandbox itself may be well."""
