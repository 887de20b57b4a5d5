"""Define every error that a user can cause. The command line prints it as a single line and exits with status 2."""

from __future__ import annotations


class RidgelineError(Exception):
    """The base of all errors below. The message is one line that names the value, the limit and the remedy."""


class ConfigError(RidgelineError):
    """config.json has an unknown architecture, an unknown field, or a value out of range."""


class CheckpointError(RidgelineError):
    """A folder or file is missing, or weights are truncated, missing, unknown or of another shape."""


class TokenizerError(RidgelineError):
    """A tokenizer or chat template is missing or unreadable, or does not fit the model."""


class RequestError(RidgelineError, ValueError):
    """A prompt or a parameter cannot be served. Only the request fails."""


class DeviceError(RidgelineError):
    """This machine does not have the device, data type or kernel."""


class DeviceMemoryError(DeviceError):
    """The device has too little memory. A smaller plan of pages, or smaller steps, may fit."""


class RankError(RidgelineError):
    """One of the ranks that compute a model together was lost. The others cannot go on without it."""


class DataError(RidgelineError):
    """Training data is missing, empty, binary or damaged, or differs from its checksum."""


class BoundExceeded(RidgelineError):
    """Work in a helper process exceeded its limit of time, memory or stack, which the message names."""


class HelpersBusy(RidgelineError):
    """All helper processes are busy, and the queue is full. The caller may try again."""
