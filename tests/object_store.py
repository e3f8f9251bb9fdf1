"""An S3 server that fails when it is told to; on loopback one for all tests of a process."""

import logging
import os
import socket
import time
import urllib.request
from contextlib import contextmanager
from threading import Thread

BUCKET = "runs"
SECRETS = {"AWS_ACCESS_KEY_ID": "AKIAVERYSECRETID", "AWS_SECRET_ACCESS_KEY": "averysecretkey/0+1"}
ANSWER = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code} {key}</Message></Error>"

Fault = tuple[int, str] | None
"""Status and code of an answer that is an error; None: as usual."""


class ObjectStore:
    """A real S3 server; ``fault`` gives status and code of an error for a request, or None."""

    def __init__(self, host="127.0.0.1"):
        from moto.server import DomainDispatcherApplication, create_backend_app

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self.fault = None
        self.requests, self.host, self.port = 0, host, 0
        self._server = None
        self.start()
        request = urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(request):
            pass

    @property
    def endpoint(self):
        return f"http://{self.host}:{self.port}"

    @property
    def environment(self):
        return {
            **SECRETS,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",  # nobody else is asked for credentials
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_CONFIG_FILE": os.devnull,
            "DASKFACTOR_STORE_PATIENCE": "20",
        }

    def start(self):
        from werkzeug.serving import make_server

        self._down = False
        self._server = make_server(self.host, self.port, self._answer, threaded=True)
        self.port = self._server.port
        Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self):
        """Take the server away; what it holds is there again when it starts."""
        self._down = True  # connections that are open would be served to their end
        self._server.shutdown()
        self._server.server_close()

    def away(self, seconds):
        """Take the server away for a while; join what this returns."""
        self.stop()

        def back():
            time.sleep(seconds)
            self.start()

        thread = Thread(target=back)
        thread.start()
        return thread

    def url(self, name):
        return f"s3://{BUCKET}/{name}/run"

    def _answer(self, environ, start_response):
        self.requests += 1
        if self._down:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionResetError
        found = self.fault(environ) if self.fault is not None else None
        if found is None:
            return self._app(environ, start_response)
        status, code = found
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        answer = ANSWER.format(code=code, key=SECRETS["AWS_SECRET_ACCESS_KEY"]).encode()
        answer = b"" if environ["REQUEST_METHOD"] == "HEAD" else answer
        length = "Content-Length", str(len(answer))
        start_response(f"{status} {code}", [("Content-Type", "application/xml"), length])
        return [answer]

    @contextmanager
    def failing(self, fault):
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None

    def objects(self, url):
        """All that is stored at a URL, as the server has it."""
        prefix = url.removeprefix(f"s3://{BUCKET}/")
        from moto.s3.models import s3_backends

        for backends in s3_backends.values():
            for backend in backends.values():
                if BUCKET in backend.buckets:
                    keys = backend.buckets[BUCKET].keys
                    return {
                        name: b"".join(one.value for one in keys.getlist(name))
                        for name in keys
                        if name.startswith(prefix)
                    }
        return {}


def slow(seconds):
    return lambda environ: time.sleep(seconds)
