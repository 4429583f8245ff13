"""The recipe's retries as a Dagster retry policy."""

from dagster import Backoff, Jitter, RetryPolicy

from llm_assets.recipe import RetrySettings
from llm_assets.retrying import wait_s


class CappedRetryPolicy(RetryPolicy):
    """Exponential backoff with jitter and a cap; Dagster's own policy has no cap."""

    settings: RetrySettings

    def calculate_delay(self, attempt_num: int) -> float:
        """Seconds before retry `attempt_num`, from 1."""
        return wait_s(self.settings, attempt_num)


def build_retry_policy(settings: RetrySettings) -> CappedRetryPolicy:
    """The policy of an asset. What is not transient is raised as a Failure that allows none."""
    policy = CappedRetryPolicy(
        max_retries=settings.max_retries,
        delay=settings.delay_s,
        backoff=Backoff.EXPONENTIAL,
        jitter=Jitter.PLUS_MINUS,
    )
    policy.settings = settings
    return policy
