"""The one error of this package that a request or a template can cause."""


class ChatError(ValueError):
    """A conversation cannot be rendered. The text is one sentence for the user: what, where, and what is accepted.

    field: the request's field with its path, where one is to blame."""

    def __init__(self, message: str, field: str | None = None):
        super().__init__(message)
        self.field = field
