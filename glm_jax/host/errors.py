"""The errors of a run that a person has to act on: each says what was wrong, the value seen, and what to change."""


class RunError(RuntimeError):
    """A run cannot start or go on."""


class LedgerError(RunError):
    """The accounting of rollouts does not add up: an event contradicts what was recorded before it."""


class StallError(RunError):
    """Nothing happened for as long as the run was told to wait; the message names what it waited for."""


class DivergedError(RunError):
    """A loss or a gradient norm is not finite."""


class PreemptedError(RunError):
    """The machine is about to be taken away. The same command goes on where this run stopped."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h, which launchers start again
