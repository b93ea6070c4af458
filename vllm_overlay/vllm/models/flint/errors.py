# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is wrong with a checkpoint, for the person who serves it."""


class FlintCheckpointError(ValueError):
    """A checkpoint that cannot be served; the message, one line, says what to do."""


def checkpoint_problem(error: BaseException) -> str | None:
    """Find the message for the user in an error that ended a command.

    Args:
        error: The error; pydantic wraps what is raised while it makes a config.

    Returns:
        The message of the `FlintCheckpointError` in it, or None if there is none.

    """
    if isinstance(error, FlintCheckpointError):
        return str(error)
    details = getattr(error, "errors", None)
    for detail in details() if callable(details) else ():
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, FlintCheckpointError):
            return str(cause)
    return None
