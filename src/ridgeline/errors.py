"""Every error that a user can cause, by kind. The command line prints one as a single line and exits with 2."""

from __future__ import annotations


class RidgelineError(Exception):
    """Base of all errors below: the message is one line that names the value, the limit and the remedy."""


class ConfigError(RidgelineError):
    """config.json: an unknown architecture, a field that is not understood, a value out of range."""


class CheckpointError(RidgelineError):
    """A missing folder or file; weights that are truncated, mis-shaped, missing or unknown."""


class TokenizerError(RidgelineError):
    """A tokenizer or chat template that is absent, unreadable, or does not fit the model."""


class RequestError(RidgelineError, ValueError):
    """A prompt or a parameter that cannot be served; the request fails, nothing else does."""


class DeviceError(RidgelineError):
    """A device, data type or kernel that this machine cannot provide."""


class DataError(RidgelineError):
    """Training data that is missing, empty, binary or damaged, or not what was pinned."""


class BoundExceeded(RidgelineError):
    """Work in a helper process needed more time, memory or stack than its limit, which the message names."""


class HelpersBusy(RidgelineError):
    """All helper processes are busy, and enough work waits for them: to be tried again."""
