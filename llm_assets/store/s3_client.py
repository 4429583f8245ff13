"""Calls to S3: what is retried, what is said plainly. Over any boto3 client.

Throttling and transient errors are retried with exponential backoff and full jitter, capped (as in
the AWS Architecture Blog, "Exponential Backoff And Jitter"). What waiting can't mend is not.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from llm_assets.errors import (
    DamagedError,
    NotFoundError,
    StoreError,
    StoreUnreachableError,
    message,
)

Result = TypeVar("Result")

_TRANSIENT = frozenset(
    (
        "SlowDown", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
        "TooManyRequests", "RequestLimitExceeded", "BandwidthLimitExceeded", "RequestTimeout",
        "RequestTimeoutException", "InternalError", "InternalFailure", "ServiceUnavailable",
        "OperationAborted", "ConditionalRequestConflict", "500", "502", "503", "504", "429",
        "BadDigest", "XAmzContentSHA256Mismatch", "IncompleteBody",
    )
)  # fmt: skip
_ABSENT = frozenset(
    ("NoSuchKey", "NoSuchUpload", "NoSuchLifecycleConfiguration", "404", "NotFound")
)
_REGION = frozenset(
    (
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "301",
        "IllegalLocationConstraintException",
    )
)
_DENIED = frozenset(
    ("AccessDenied", "403", "Forbidden", "InvalidAccessKeyId", "SignatureDoesNotMatch",
     "ExpiredToken", "InvalidToken", "AllAccessDisabled", "AccountProblem")
)  # fmt: skip


class PreconditionFailed(Exception):
    """If-None-Match: the key is taken. Never leaves the store's modules."""


class TransferDamagedError(DamagedError):
    """Bytes came over the wire with the wrong digest: worth another try."""


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Attempt n waits a random time of at most `base_s` * 2**n, never more than `cap_s`."""

    attempts: int = 8
    base_s: float = 0.2
    cap_s: float = 20.0

    def pause_s(self, attempt: int) -> float:
        """Seconds before the attempt after `attempt` (counted from 0)."""
        return random.uniform(0, min(self.cap_s, self.base_s * 2**attempt))


class S3Client:
    """A bucket and a prefix, through one boto3 client."""

    def __init__(
        self, client: Any, bucket: str, prefix: str, retry: RetryPolicy | None = None
    ) -> None:
        self.client = client
        self.bucket = bucket
        self.prefix = prefix
        self.retry = retry or RetryPolicy()
        self.where = f"s3://{bucket}/{prefix}".rstrip("/")
        self._clock_guard = threading.Lock()
        self._clock_ahead_s = 0.0

    def key(self, key: str) -> str:
        """The key in the bucket of a key in the store."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """One request on the bucket. PreconditionFailed, NotFoundError, or a plain StoreError."""
        return self.attempt(operation, lambda: self.request(operation, arguments))

    def call_counted(self, operation: str, **arguments: Any) -> tuple[dict[str, Any], int]:
        """Like `call`, and the number of tries: after more than one, the first may have worked."""
        tries = 0

        def request() -> dict[str, Any]:
            nonlocal tries
            tries += 1
            return self.request(operation, arguments)

        try:
            return self.attempt(operation, request), tries
        except PreconditionFailed as error:
            raise PreconditionFailed(tries) from error

    def request(self, operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One try of one request on the bucket; boto3's own errors. For use inside `attempt`."""
        response: dict[str, Any] = getattr(self.client, operation)(Bucket=self.bucket, **arguments)
        self._note_clock(response)
        return response

    def read_object(self, key: str) -> bytes:
        """One try to read a whole small object. For use inside `attempt`."""
        response = self.request("get_object", {"Key": self.key(key)})
        with contextlib.closing(response["Body"]) as body:
            content: bytes = body.read()
        return content

    def attempt(self, what: str, request: Callable[[], Result]) -> Result:
        """Run `request`, again after transient errors; it may be run many times."""
        for attempt in range(self.retry.attempts):
            try:
                return request()
            except (PreconditionFailed, NotFoundError, StoreError, KeyboardInterrupt) as error:
                if not isinstance(error, TransferDamagedError):
                    raise
                last: Exception = error
            except Exception as error:
                last = self._judge(what, error)
            if attempt + 1 < self.retry.attempts:
                time.sleep(self.retry.pause_s(attempt))
        if isinstance(last, TransferDamagedError):
            raise last
        raise StoreUnreachableError(
            message(
                where=f"{self.where}, {what}",
                found=f"{self.retry.attempts} tries failed; the last: {last}",
                rule="transient errors are retried with growing pauses, then given up",
                remedy="look at the server and the network, and run it again",
            )
        ) from last

    def _judge(self, what: str, error: Exception) -> Exception:
        """The error when another try is worth it; raises otherwise."""
        from botocore import exceptions as boto
        from botocore.parsers import ResponseParserError
        from urllib3.exceptions import HTTPError

        if isinstance(error, boto.ClientError):
            return self._judge_answer(what, error, error.response)
        if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
            remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise self._plain(what, str(error), remedy) from error
        if isinstance(error, boto.SSLError):
            raise self._plain(what, str(error), "look at the server's certificate") from error
        # Refused or reset connections, timeouts, bodies cut short, answers garbled on the way.
        transient = (
            boto.HTTPClientError,
            boto.ConnectionError,
            boto.FlexibleChecksumError,
            boto.IncompleteReadError,
            ResponseParserError,
            HTTPError,
            ConnectionError,
        )
        if isinstance(error, transient):
            return error
        if isinstance(error, boto.BotoCoreError):
            raise self._plain(what, str(error), "look at the store's URL and settings") from error
        raise error

    def _judge_answer(self, what: str, error: Exception, response: dict[str, Any]) -> Exception:
        code = str(response.get("Error", {}).get("Code", ""))
        metadata = response.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        if code in ("PreconditionFailed", "412") or status == 412:
            raise PreconditionFailed from error
        if code == "NoSuchBucket":
            found = f"there is no bucket {self.bucket!r}"
            raise self._plain(what, found, "create the bucket, or give its right name") from error
        if code in _REGION or status == 301:
            region = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region")
            raise self._plain(
                what,
                f"the bucket is in another region{f': {region}' if region else ''} ({code})",
                f"add ?region={region or 'REGION'} to the store's URL, or set AWS_REGION",
            ) from error
        if code in _ABSENT or status == 404:
            raise NotFoundError(f"{self.where}: {what}: there is no such object") from error
        if code in _TRANSIENT or status >= 500 or status == 429:
            return error
        if code in _DENIED or status == 403:
            remedy = "give the credentials rights on the bucket and prefix"
            raise self._plain(what, f"access is denied ({code})", remedy) from error
        raise self._plain(what, str(error), "look at the server's answer") from error

    def _plain(self, what: str, found: str, remedy: str) -> StoreError:
        return StoreError(
            message(
                where=f"{self.where}, {what}",
                found=found,
                rule="this is not retried: waiting does not mend it",
                remedy=remedy,
            )
        )

    # The server's clock, told by the Date of its answers

    def _note_clock(self, response: dict[str, Any]) -> None:
        date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date:
            try:
                ahead = parsedate_to_datetime(date).timestamp() - time.time()
            except ValueError:
                return
            with self._clock_guard:
                self._clock_ahead_s = ahead

    def now(self) -> float:
        """The server's time, at most two seconds late and never early: dates have whole seconds."""
        with self._clock_guard:
            return time.time() + self._clock_ahead_s - 1.0
