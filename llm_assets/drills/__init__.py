"""Disruptions of a scratch pipeline, with real processes that are really killed."""
