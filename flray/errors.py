"""What goes wrong because of the experiment rather than because of the code."""

MOST_SHOWN = 2000  # characters of a message, whatever it repeats


class ExperimentError(ValueError):
    """The experiment as described cannot be run: names what came, what was expected, what to do.

    The command line prints the message without a traceback and exits with 2.
    """

    def __str__(self) -> str:
        """The message, cut in the middle if a component has repeated a value of any length."""
        text, half = super().__str__(), MOST_SHOWN // 2
        return text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"


class NoRoom(ExperimentError, OSError):
    """A file could not be written because the disk is full; those that were there are intact."""


class ServerLost(RuntimeError):
    """The process that ran the rounds is gone; the run directory holds all it had done."""


class ClientFailure(RuntimeError):
    """A client's training failed and `on_client_failure` is `raise`."""


def one_line_message(error: BaseException) -> str:
    """What went wrong, on one line; flray's own errors are shown without their class."""
    text = str(error).strip().split("\n")[-1]
    known = type(error).__module__.startswith("flray.")
    return text if known and text else f"{type(error).__name__}: {text}"
