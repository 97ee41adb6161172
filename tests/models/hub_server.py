"""A small stand-in for the Hugging Face hub on 127.0.0.1: the endpoints that a download uses, and a log of requests."""

import contextlib
import hashlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def serve_hub(repositories, *, token=None, delay_s=0.0):
    """Serves {name: {path: bytes}}; yields the address and the requests as (method, path).

    A repository called "gated/..." needs the header of `token`. A file takes `delay_s`, so that simultaneous requests
    overlap.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def respond(self):
            path = unquote(urlsplit(self.path).path)
            requests.append((self.command, path))
            api = path.startswith("/api/models/")
            name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            if name not in repositories:
                return self.answer(404, X_Error_Code="RepoNotFound")
            if name.startswith("gated/") and self.headers.get("Authorization") != f"Bearer {token}":
                return self.answer(401 if token is None else 403, X_Error_Code="GatedRepo")
            files = repositories[name]
            parts = path.split(name, 1)[1].strip("/").split("/")
            if len(parts) > 1 and parts[1] not in ("main", COMMIT):
                return self.answer(404, X_Error_Code="RevisionNotFound")
            if not api:
                return self.answer_file(files, "/".join(parts[2:]))
            if parts[0] == "tree":
                body = [
                    {
                        "type": "file",
                        "path": file,
                        "size": len(content),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for file, content in files.items()
                ]
            else:
                siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
                body = {"id": name, "sha": COMMIT, "siblings": siblings}
            return self.answer(200, json.dumps(body).encode(), Content_Type="application/json")

        def answer_file(self, files, file):
            if file not in files:
                return self.answer(404, X_Error_Code="EntryNotFound")
            content = files[file]
            if self.command == "GET":
                time.sleep(delay_s)
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.answer(200, content, ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

        do_GET = do_HEAD = respond  # noqa: N815 (the names that http.server calls)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
