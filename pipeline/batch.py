"""A batch: many requests in one file, answered when there is room, and the states that it goes through.

Line n of its input makes jobs whose ids follow from the batch and n, so whoever goes on with a batch finds the jobs that
were begun. Progress is a prefix: so many lines of the input are answered, in so many bytes of the two files of results.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

MAX_LINES = 50_000  # as OpenAI has it
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


class BatchStatus(str, Enum):
    """OpenAI's names. Each is also the beginning of a stamp, as in `cancelled_at`."""

    VALIDATING = "validating"  # nobody has read the whole file yet
    IN_PROGRESS = "in_progress"  # its lines become jobs
    FINALIZING = "finalizing"  # every line has its answer
    COMPLETED = "completed"  # the files of results can be read
    FAILED = "failed"  # the input is no batch, or what was there is gone
    EXPIRED = "expired"  # its window was over; what was done can be read
    CANCELLING = "cancelling"  # somebody asked for it
    CANCELLED = "cancelled"  # what was done can be read

    __str__ = str.__str__


BATCH_OVER = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Times in seconds of Unix time, 0: not yet. metadata, errors: JSON. lease: whose it is to work on it."""

    id: str = ""
    owner: str = ""
    owner_waiting: int = 0  # how many jobs of his may wait; 0 for any number
    endpoint: str = ""
    completion_window: str = ""
    metadata: str = ""
    input_file_id: str = ""
    result_seconds: int = 0  # how long its results are kept

    status: BatchStatus = BatchStatus.VALIDATING
    errors: str = ""
    created_at: int = 0
    expires_at: int = 0
    in_progress_at: int = 0
    finalizing_at: int = 0
    completed_at: int = 0
    failed_at: int = 0
    expired_at: int = 0
    cancelling_at: int = 0
    cancelled_at: int = 0
    output_file_id: str = ""
    error_file_id: str = ""

    lease: str = ""
    lease_until: int = 0  # milliseconds
    total: int = 0  # lines; 0 until they are counted
    line: int = 0  # lines that are answered
    offset: int = 0  # where the next one begins
    output: str = ""  # the file that its holder writes answers into
    output_bytes: int = 0  # of it that count
    error_output: str = ""
    error_bytes: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    @classmethod
    def decode(cls, stored: Mapping[str, str]) -> "Batch":
        """Of a hash; a field that is not there has its default."""
        values: dict[str, Any] = {}
        for known in fields(cls):
            kind: Any = type(known.default)
            if known.name in stored:
                values[known.name] = kind(stored[known.name])
        return cls(**values)


def job_id_of(batch_id: str, line: int, choice: int = 0) -> str:
    """Of the job for a choice of line number `line`, from 1."""
    return hashlib.blake2b(f"{batch_id}/{line}/{choice}".encode(), digest_size=16).hexdigest()
