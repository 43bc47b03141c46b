"""The one error that reading a model raises."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be served: one line that names file, tensor or trait, and the way out."""

    def __init__(self, message: str):
        # Names come from files and may hold anything.
        super().__init__(" ".join(message.split()))
