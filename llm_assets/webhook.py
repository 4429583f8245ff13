"""A text to a Slack-compatible webhook, when `$LLM_ASSETS_WEBHOOK` is set."""

from __future__ import annotations

import json
import os
import urllib.request
from urllib.parse import urlsplit

VARIABLE = "LLM_ASSETS_WEBHOOK"
_TIMEOUT_S = 10.0


def post(text: str) -> str:
    """Send `text`; what went wrong, "" when it was sent or no webhook is set."""
    target = os.environ.get(VARIABLE, "").strip()
    if not target:
        return ""
    # The address is a secret: messages name the variable and the host only.
    parts = urlsplit(target)
    if parts.scheme not in ("http", "https"):
        return f"{VARIABLE} is no http(s) address"
    request = urllib.request.Request(
        target,
        data=json.dumps({"text": text}).encode(),
        headers={"Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return ""
    except (OSError, ValueError) as error:
        return f"{VARIABLE} ({parts.hostname}): {type(error).__name__}: {error}"
