"""A small stand-in for Google Cloud Storage on 127.0.0.1: the part of its JSON API that a run uses, objects in memory.

Three clients of one run use it: gcsfs (the run's files), tensorstore (arrays of a checkpoint) and google-cloud-storage (leases, orbax
and the check of permissions). As in the service, an object is complete or missing, cannot be appended to, and has the server's time
of writing and a generation that rises with every write. Writes and deletions respect preconditions on the generation. Names are one
flat list, in which a folder is a common prefix.
"""

import base64
import contextlib
import email
import email.policy
import hashlib
import itertools
import json
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

PERMISSIONS = ("buckets.get", "objects.create", "objects.delete", "objects.get", "objects.list")
PAGE = 7
"""Names per page of a listing: so few that every reader must fetch several pages."""


@dataclass
class Storage:
    """The stored objects and the requests."""

    address: str = ""
    buckets: dict = field(default_factory=dict)
    """Bucket -> name -> (bytes, generation)."""
    granted: set = field(default_factory=lambda: {f"storage.{name}" for name in PERMISSIONS})
    busy: int = 0
    """Number of the next requests that are answered 503."""
    requests: list = field(default_factory=list)
    """(method, path, query) of each, in order."""
    handed_out: list = field(default_factory=list)
    """(gs://... name, bytes) of each answer with the content of an object or a range."""
    uploads: dict = field(default_factory=dict)
    """Identity of an upload in pieces -> [bucket, name, query, bytes so far]; gone once it is complete."""
    generations: itertools.count = field(default_factory=lambda: itertools.count(1))
    written: dict = field(default_factory=dict)
    """Generation -> time of writing in seconds, by this server's clock."""
    ahead_s: float = 0.0
    """Seconds that its clock is ahead of this machine's."""
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def environment(self):
        """Environment variables that redirect the three clients to this server, without credentials."""
        return {
            "STORAGE_EMULATOR_HOST": self.address,
            "TENSORSTORE_GCS_HTTP_URL": self.address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GOOGLE_CLOUD_PROJECT": "nothing",
            "FSSPEC_GCS_TOKEN": "anon",
            "NO_GCE_CHECK": "true",
        }

    def store(self, folder, place):
        """Stores the files of a local folder below `place`, gs://BUCKET/NAME."""
        bucket, _, name = place.removeprefix("gs://").partition("/")
        with self.lock:
            for path in folder.iterdir():
                self.buckets[bucket][f"{name}/{path.name}"] = (path.read_bytes(), next(self.generations))

    def files(self, prefix=""):
        """Returns gs://... name -> bytes of all objects below `prefix`."""
        with self.lock:
            found = {f"gs://{bucket}/{name}": data for bucket, names in self.buckets.items()
                     for name, (data, _) in names.items()}  # fmt: skip
        return {name: data for name, data in sorted(found.items()) if name.startswith(prefix)}


class RefusedError(Exception):
    """HTTP status and reason of a refused request."""


@contextlib.contextmanager
def serve_storage(*buckets):
    """Serves empty buckets of these names; yields the `Storage`."""
    storage = Storage(buckets={name: {} for name in buckets})
    server = _Server(("127.0.0.1", 0), type("Bound", (_Handler,), {"storage": storage}))
    storage.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield storage
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Ignores clients that end before their connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    storage: Storage

    def log_message(self, *_):
        pass

    def respond(self):
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        self.query = {key: values[-1] for key, values in query.items()}
        self.body = self._read_body()
        try:
            with self.storage.lock:
                self.storage.requests.append((self.command, unquote(parts.path), self.query))
                if self.storage.busy:
                    self.storage.busy -= 1
                    raise RefusedError(503, "try again")
                self._route(parts.path)
        except RefusedError as refusal:
            code, reason = refusal.args
            self._json({"error": {"code": code, "message": reason}}, status=code)

    do_GET = do_POST = do_PUT = do_DELETE = respond  # noqa: N815 - http.server's names

    def _route(self, path):
        found = re.fullmatch(r"(/upload|/download)?(/resumable/.*)?/storage/v1/b/([^/]+)(/.*)?", path)
        if not found:
            raise RefusedError(404, f"no such method: {path}")
        kind, _, bucket, rest = found.groups()
        names = self.storage.buckets.get(bucket)
        if names is None:
            raise RefusedError(404, "The specified bucket does not exist.")
        copied = re.fullmatch(r"/o/([^/]+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)", rest or "")
        if rest == "/iam/testPermissions":
            asked = parse_qs(urlsplit(self.path).query)["permissions"]
            self._json({"permissions": sorted(self.storage.granted & set(asked))})
        elif not rest:
            self._need("buckets.get")
            self._json({"kind": "storage#bucket", "name": bucket, "id": bucket})
        elif kind == "/upload":
            self._upload(bucket)
        elif rest == "/o":
            self._need("objects.list")
            self._list(bucket, names)
        elif copied:
            self._copy(names, *map(unquote, copied.groups()))
        elif self.command == "DELETE":
            self._delete(bucket, names, unquote(rest.removeprefix("/o/")))
        else:
            self._get(bucket, names, unquote(rest.removeprefix("/o/")), media=kind == "/download")

    def _list(self, bucket, names):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        entries = {}
        for name in sorted(names, key=str.encode):
            tail = name.removeprefix(prefix)
            if not name.startswith(prefix) or name < self.query.get("startOffset", ""):
                continue
            if self.query.get("endOffset") and name >= self.query["endOffset"]:
                continue
            cut = tail.find(delimiter) if delimiter else -1
            folder = prefix + tail[: cut + len(delimiter)] if cut >= 0 else None
            entries.setdefault(folder or name, folder)
        left = [entry for entry in entries.items() if entry[0] > self.query.get("pageToken", "")]
        page = left[: min(PAGE, int(self.query.get("maxResults", PAGE)))]
        answer = {"kind": "storage#objects"}
        if items := [self._described(bucket, name, names) for name, folder in page if folder is None]:
            answer["items"] = items
        if folders := [folder for _, folder in page if folder is not None]:
            answer["prefixes"] = folders
        if len(left) > len(page):
            answer["nextPageToken"] = page[-1][0]
        self._json(answer)

    def _get(self, bucket, names, name, *, media):
        self._need("objects.get")
        if name not in names:
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        data, generation = names[name]
        if self.query.get("generation", str(generation)) != str(generation):
            raise RefusedError(404, f"No such object: {bucket}/{name}#{self.query['generation']}")
        self._check_generation(generation, unchanged=304)
        if not (media or self.query.get("alt") == "media"):
            return self._json(self._described(bucket, name, names))
        headers = {"x-goog-generation": str(generation), "x-goog-hash": f"md5={_md5(data)}"}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        place = f"gs://{bucket}/{name}"
        if not wanted:
            self.storage.handed_out.append((place, len(data)))
            return self._answer(200, data, headers)
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= len(data):
            return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.storage.handed_out.append((place, stop - start))
        return self._answer(206, data[start:stop], headers)

    def _delete(self, bucket, names, name):
        self._need("objects.delete")
        if name not in names:
            raise RefusedError(404, f"No such object: {bucket}/{name}")
        self._check_generation(names[name][1])
        del names[name]
        self._answer(204, b"")

    def _copy(self, names, name, to_bucket, to_name):
        self._need("objects.create")
        if name not in names:
            raise RefusedError(404, f"No such object: {name}")
        data = names[name][0]
        described = self._write(to_bucket, to_name, data, self.query)
        self._json(
            {"done": True, "objectSize": len(data), "totalBytesRewritten": len(data), "resource": described}
        )

    def _upload(self, bucket):
        self._need("objects.create")
        if identity := self.query.get("upload_id"):
            return self._piece(identity)
        kind, name, data = self.query["uploadType"], self.query.get("name"), self.body
        if kind == "resumable":
            name = name or json.loads(self.body)["name"]
            identity = f"upload-{next(self.storage.generations)}"
            self.storage.uploads[identity] = [bucket, name, self.query, b""]
            where = f"{self.storage.address}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id="
            return self._answer(200, b"", {"Location": where + identity})
        if kind == "multipart":
            about, data = _two_parts(self.headers["Content-Type"], self.body)
            name = name or about["name"]
        return self._json(self._write(bucket, name, data, self.query))

    def _piece(self, identity):
        """Handles a piece of an upload: answers 308 with the range so far, until a piece gives the total length."""
        if identity not in self.storage.uploads:
            raise RefusedError(404, f"No such upload: {identity}")
        if self.command == "DELETE":
            del self.storage.uploads[identity]
            return self._answer(499, b"")
        bucket, name, query, sofar = upload = self.storage.uploads[identity]
        place = self.headers["Content-Range"]
        first, total = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", place).groups()
        if first is not None and int(first) != len(sofar):
            raise RefusedError(400, f"piece begins at {first}, {len(sofar)} bytes are here")
        if total == "*" and len(self.body) % 2**18:
            raise RefusedError(400, f"{len(self.body)} bytes, not a multiple of 262144, are not the last")
        upload[3] = sofar = sofar + self.body
        if total == "*" or len(sofar) < int(total):
            return self._answer(308, b"", {"Range": f"bytes=0-{len(sofar) - 1}"} if sofar else {})
        del self.storage.uploads[identity]
        return self._json(self._write(bucket, name, sofar, query))

    def _write(self, bucket, name, data, query):
        names = self.storage.buckets[bucket]
        self.query = query
        self._check_generation(names[name][1] if name in names else 0)
        names[name] = (bytes(data), next(self.storage.generations))
        self.storage.written[names[name][1]] = time.time() + self.storage.ahead_s
        return self._described(bucket, name, names)

    def _described(self, bucket, name, names):
        data, generation = names[name]
        written = datetime.fromtimestamp(self.storage.written.get(generation, 0.0), UTC)
        when = written.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "kind": "storage#object", "bucket": bucket, "name": name, "size": str(len(data)), "md5Hash": _md5(data),
            "generation": str(generation), "metageneration": "1", "storageClass": "STANDARD", "timeCreated": when,
            "updated": when, "contentType": "application/octet-stream", "etag": str(generation),
            "selfLink": f"{self.storage.address}/storage/v1/b/{bucket}/o/{quote(name, safe='')}",
        }  # fmt: skip

    def _check_generation(self, generation, *, unchanged=412):
        wanted, unwanted = (self.query.get(f"ifGeneration{kind}Match") for kind in ("", "Not"))
        if wanted is not None and int(wanted) != generation:
            raise RefusedError(412, f"the generation is {generation} and not {wanted}")
        if unwanted is not None and int(unwanted) == generation:
            raise RefusedError(unchanged, f"generation is {generation}")

    def _need(self, permission):
        if f"storage.{permission}" not in self.storage.granted:
            raise RefusedError(403, f"the user lacks storage.{permission} access")

    def _read_body(self):
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _json(self, content, *, status=200):
        self._answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            if status not in (204, 304) or name != "Content-Length":
                self.send_header(name, value)
        with contextlib.suppress(ConnectionError):  # the client has read enough
            self.end_headers()
            if status not in (204, 304):
                self.wfile.write(body)


def _md5(data):
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def _two_parts(content_type, body):
    """Returns the JSON that describes an object, and its bytes, from a multipart/related body."""
    boundary = email.message_from_string(f"Content-Type: {content_type}\n\n").get_boundary().encode()
    _, about, rest = body.split(b"--" + boundary, 2)
    # Clients end lines with "\r\n" or "\n". An object may itself end with "\r", which stays.
    line_end = b"\r\n" if rest.startswith(b"\r\n") else b"\n"
    data = rest.split(2 * line_end, 1)[1]
    ending = data.rindex(line_end + b"--" + boundary + b"--")
    return json.loads(about.split(2 * line_end, 1)[1]), data[:ending]
