"""Running one function over many items on a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from llm_assets.store.hashing import num_workers

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int | None = None
) -> list[Result]:
    """`[function(item) for item in items]` on threads (one a core by default).

    The first error cancels what has not begun and is raised when nothing runs any more.
    """
    todo = list(items)
    if len(todo) < 2:
        return [function(item) for item in todo]
    with ThreadPoolExecutor(min(workers or num_workers(), len(todo))) as pool:
        futures = [pool.submit(function, item) for item in todo]
        _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]
