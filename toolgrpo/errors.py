"""The one error tree.

Three kinds of failure take three roads (see DESIGN in the docs):

* what the *model* did wrong is data on the trajectory, never an exception;
* what the *infrastructure* did wrong is an `InfrastructureError`: retried where that can help, then training stops;
* what *we or a plugin* did wrong is a `UserError`: raised at once.

    ToolGRPOError
    ├── UserError                  (also ValueError)
    │   ├── ConfigError            a flag, a YAML key, a field
    │   ├── PluginError            a tools, reward or environment file that cannot be used
    │   ├── RewardError            a reward function that raised or returned the wrong thing
    │   ├── DataError              a dataset that is missing, empty or has a bad row
    │   ├── ModelError             a model or tokenizer that cannot be loaded or does not fit
    │   └── ChatFormatError        a chat template that cannot be used for tool episodes
    └── InfrastructureError        (also RuntimeError)
        ├── EngineError            the generation engine or its server failed
        │   └── FinalEngineError   and another try would not help, or was made already
        ├── ToolExecutorError      the tool workers cannot be started or kept alive
        ├── SandboxError           the sandbox cannot be started or kept alive
        │   └── WorkerLostError    one of its workers ended in the middle of a run; others may do
        ├── TooManyDroppedError    too many episodes of a batch could not be scored
        ├── StorageError           a checkpoint or a log cannot be written: the disk is full or failed
        └── PeerError              another process of the same run failed first

Every message says what failed, what was got, and what to do.

The sandbox is a distribution of its own (`confined-python`) and raises its own classes. The root and the two branches here
are the ones that it brings along, so that `except ToolGRPOError` catches what it raises.
"""

from __future__ import annotations

from confined_python.errors import ConfinedPythonError as ToolGRPOError
from confined_python.errors import InfrastructureError, SandboxError, UserError, WorkerLostError

__all__ = [
    "ChatFormatError",
    "ConfigError",
    "DataError",
    "EngineError",
    "FinalEngineError",
    "InfrastructureError",
    "ModelError",
    "PeerError",
    "PluginError",
    "RewardError",
    "SandboxError",
    "StorageError",
    "TooManyDroppedError",
    "ToolExecutorError",
    "ToolGRPOError",
    "UserError",
    "WorkerLostError",
]


class ConfigError(UserError):
    """A flag, a YAML key or a config field has an impossible value."""


class PluginError(UserError):
    """A tools, reward or environment file cannot be loaded or does not export what it should."""


class RewardError(UserError):
    """A reward function raised, or returned other than one finite number per completion."""


class DataError(UserError):
    """A dataset is missing, empty, or has a row that cannot be used."""


class ModelError(UserError):
    """A model or tokenizer cannot be loaded, or the two do not fit each other."""


class ChatFormatError(UserError):
    """A chat template cannot carry tool episodes token-exactly."""


class EngineError(InfrastructureError):
    """The generation engine or its server failed."""


class FinalEngineError(EngineError):
    """An engine's failure that nobody tries again: the engine did, or the request itself cannot be
    answered.
    """


class ToolExecutorError(InfrastructureError):
    """The tool workers could not be started or kept alive."""


class TooManyDroppedError(InfrastructureError):
    """Too many episodes of a batch could not be scored: tools, environments or rewards dropped them."""


class StorageError(InfrastructureError):
    """A checkpoint or a log could not be written."""


class PeerError(InfrastructureError):
    """Another process of the same run failed, so this one cannot go on."""
