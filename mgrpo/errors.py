"""Every failure, by the boundary it crossed.

::

    MgrpoError
    |-- UserError                 the user can mend it: one line, exit code 2, nothing lost
    |   |-- ConfigError           a key, a value or a combination in a recipe
    |   |-- DataError             a task file, a model folder, an empty data set
    |   |-- RunFolderError        a used folder without --resume, a run that is not there
    |   |-- CheckpointError       a damaged or missing checkpoint
    |   `-- NonFiniteGradients    too many NaN or infinite gradients in a row; weights are as before them
    |-- InfrastructureError       nobody's fault here: typed, counted, retried, excluded from loss and statistics
    |   |-- EngineError           an engine refused or broke
    |   |   |-- EngineTimeout     ... or did not answer before its deadline
    |   |   `-- SamplingEvidenceError   fewer log-probabilities than tokens, or values that are none
    |   |-- ToolError             a tool's backend broke
    |   |   `-- ToolTimeout
    |   |-- GraderError           a judge or grader broke
    |   |-- EngineLost            no server of an agent's weights is left: an outage of its own, not a rollout's failure
    |   |-- StoreTimeout          nothing arrived in the store before the deadline
    |   |-- StoreUnavailable      the database could not be reached, or could not write, for too long
    |   `-- LeaseLost             another process was given what this one held; what it meant to write is not written
    `-- (anything else)           a bug of ours: raised, with a traceback

The model's own mistakes are none of these: they are data (`Reply.error`, `ToolResult.error`).
"""

from __future__ import annotations

from mgrpo.types import Failure


class MgrpoError(Exception):
    """Base of everything this package raises on purpose."""


class UserError(MgrpoError):
    """The message is one line that names the key or file and says what to do."""


class ConfigError(UserError): ...


class DataError(UserError): ...


class RunFolderError(UserError): ...


class CheckpointError(UserError): ...


class NonFiniteGradients(UserError): ...


class InfrastructureError(MgrpoError):
    """Becomes a `Failure` value at the boundary where it is caught."""

    def as_failure(self) -> Failure:
        return Failure(type(self).__name__, str(self))


class EngineError(InfrastructureError): ...


class EngineTimeout(EngineError): ...


class SamplingEvidenceError(EngineError): ...


class ToolError(InfrastructureError): ...


class ToolTimeout(ToolError): ...


class GraderError(InfrastructureError): ...


class EngineLost(InfrastructureError): ...


class StoreTimeout(InfrastructureError): ...


class StoreUnavailable(InfrastructureError): ...


class LeaseLost(InfrastructureError): ...
