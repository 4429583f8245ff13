"""Tags of a Dagster run by which its steps learn what the run command knows."""

RESERVATION_TAG = "llm_assets/reservation"
"""The money that was set aside for the run."""

REPLAY_TAG = "llm_assets/replay"
"""The replay that the run belongs to."""
