"""``GET /``: the built-in web page, one document that loads nothing from elsewhere."""

from importlib.resources import files

from .status import Get

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; " \
         "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # fmt: skip


class Page(Get):
    """The resource."""

    def __init__(self):
        self._html = (files(__package__) / "page.html").read_bytes()

    def on_get(self, req, resp):
        resp.content_type = "text/html; charset=utf-8"
        resp.set_header("Content-Security-Policy", POLICY)
        resp.data = self._html
