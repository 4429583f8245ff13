"""Every error that llm-assets raises on purpose.

    LlmAssetsError
    ├── UserError (also ValueError)   what the user wrote is wrong
    │   ├── RecipeError               the recipe file
    │   ├── DataError                 a data file or row
    │   └── ModelError                a model, tokenizer or checkpoint folder
    ├── StoreError                    the artifact store
    │   ├── NotFoundError             no such object, record or ref
    │   ├── DamagedError              stored bytes do not have their hash
    │   ├── RefusedError              an entry or a value that the store does not take
    │   ├── ConflictError             a ref or lease was moved by somebody else
    │   ├── StoreFullError            no space left
    │   └── StoreUnreachableError     transient errors outlasted the retries
    ├── GuardError                    a guard refused to start a stage
    │   ├── BudgetError               over budget
    │   ├── GateFailedError           an upstream gate failed
    │   └── HeldError                 an expensive stage waits for an approval
    ├── NonFiniteLossError            training produced NaN or infinity
    ├── SaveError                     an in-training save cannot be written, or none gone on from


    ├── DisagreementError             reward model and judge agree too rarely in training
    ├── WorkerError                   the worker ended without a record
    │   └── LostWorkerError           it was killed or preempted, or lost its store: worth a retry
    └── ServerError                   an inference server did not start, answer or stay up

A message says where (file and place in it), what was found, which rule it breaks and what to do
next. `message()` builds one in that order.
"""

from __future__ import annotations


def message(*, where: str, found: str, rule: str, remedy: str) -> str:
    """One error text: place, finding, rule, next step."""
    return f"{where}: {found}\n  rule: {rule}\n  next: {remedy}"


class LlmAssetsError(Exception):
    """Base of all errors that llm-assets raises on purpose."""


class UserError(LlmAssetsError, ValueError):
    """What the user wrote is wrong: `where`, `found`, `rule`, `remedy`, joined by `message()`."""

    def __init__(self, *, where: str, found: str, rule: str, remedy: str) -> None:
        super().__init__(message(where=where, found=found, rule=rule, remedy=remedy))
        self.where = where
        self.found = found
        self.rule = rule
        self.remedy = remedy


class RecipeError(UserError):
    """The recipe file is wrong."""


class DataError(UserError):
    """A data file or row is wrong."""


class ModelError(UserError):
    """A model, tokenizer or checkpoint folder is not what the stage can take."""


class StoreError(LlmAssetsError):
    """The artifact store could not do what was asked."""


class NotFoundError(StoreError):
    """No such object, record or ref in the store."""


class DamagedError(StoreError):
    """Stored bytes do not have the hash under which they are stored."""


class RefusedError(StoreError, ValueError):
    """An entry (path, link, device, name clash) or a value that the store does not take."""


class ConflictError(StoreError):
    """A ref or a lease was moved by somebody else."""


class StoreFullError(StoreError):
    """No space left on the device that holds the store."""


class StoreUnreachableError(StoreError):
    """Transient errors of the store's server outlasted the retries."""


class GuardError(LlmAssetsError):
    """A guard refused to start a stage, before any money was spent."""


class BudgetError(GuardError):
    """The estimate is over what is left of the budget."""


class GateFailedError(GuardError):
    """A gate of an upstream artifact failed and was not overridden."""


class HeldError(GuardError):
    """An expensive stage that is stale only because code changed waits for an approval."""


class NonFiniteLossError(LlmAssetsError):
    """Training produced a NaN or infinite loss."""


class SaveError(LlmAssetsError):
    """An in-training save could not be written, or there is none that a training may go on from."""


class DisagreementError(LlmAssetsError):
    """Training was stopped: the reward model and its judge agree too rarely."""


class WorkerError(LlmAssetsError):
    """The worker process ended without committing a record."""


class LostWorkerError(WorkerError):
    """The worker was killed or preempted, or its store was away: another attempt may end well."""


class ServerError(LlmAssetsError):
    """An inference server did not start, did not answer, or ended."""
