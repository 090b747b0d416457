"""What can go wrong with a box, apart from what a command in it does."""

from __future__ import annotations


class SandboxUnavailable(RuntimeError):
    """This machine cannot isolate commands as required; nothing was run. The message names the remedy."""


class BoxDied(RuntimeError):
    """A box ended or stopped answering. What ran in it is gone; nothing is known of the last command."""


class BoxError(RuntimeError):
    """A request that a living box refused, such as reading a file that is not there."""
