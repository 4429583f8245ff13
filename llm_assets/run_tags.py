"""Tags of a Dagster run by which its steps learn what the run command knows."""

RESERVATION_TAG = "llm_assets/reservation"
"""The money that was set aside for the run."""

REPLAY_TAG = "llm_assets/replay"
"""The replay that the run belongs to."""

FAILED_TAG = "llm_assets/failed"
ROLLED_BACK_TAG = "llm_assets/rolled_back"
LOST_TAG = "llm_assets/lost_usd"
"""What a failed run leaves behind; see sensors/failures.py."""
