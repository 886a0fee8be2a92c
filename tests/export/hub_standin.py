"""A local substitute for the Hub's API: repositories, commits and large files, as huggingface_hub requests them."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """The stand-in's contents: files by repository, and a record of the requests.

    Attributes:
        files: repository id -> path -> bytes.
        private: repository id -> whether the repository was created private.
        commits: (repository id, message) in order.
        uploads: number of large files that were really sent.
        refuse_commits: number of further commits to answer with status 500.
    """

    def __init__(self):
        self.files, self.private, self.commits = {}, {}, []
        self.objects, self.uploads, self.refuse_commits = {}, 0, 0
        self.url = ""

    def post(self, path, body, handler):
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'someone'}/{given['name']}"
            known = name in self.files
            self.files.setdefault(name, {})
            self.private.setdefault(name, given.get("private", given.get("visibility") == "private"))
            answer = {"url": f"{self.url}/{name}", "name": name}
            return (409, {"error": "exists", **answer}) if known else (200, answer)
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._lfs(one) for one in json.loads(body)["objects"]]}
        repo, _, action = path.removeprefix("/api/models/").partition("/preupload/")
        if action:
            return 200, {"files": [self._mode(one) for one in json.loads(body)["files"]]}
        repo, _, action = path.removeprefix("/api/models/").partition("/commit/")
        if action:
            return self._commit(repo, body)
        return 404, {"error": path}

    def _mode(self, file):
        mode = "lfs" if file["path"].endswith((".safetensors", ".distcp")) else "regular"
        return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _lfs(self, wanted):
        if wanted["oid"] in self.objects:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.url}/objects/{wanted['oid']}"}}}

    def _commit(self, repo, body):
        if self.refuse_commits > 0:
            self.refuse_commits -= 1
            return 500, {"error": "the stand-in is out of order"}
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.commits.append((repo, value["summary"]))
            elif entry["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                del self.files[repo][value["path"]]
            elif entry["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.url}/{repo}/commit/{'0' * 40}"}

    def put(self, path, body):
        digest = hashlib.sha256(body).hexdigest()
        if path != f"/objects/{digest}":
            return 400, {"error": "checksum"}
        self.objects[digest] = body
        self.uploads += 1
        return 200, {}

    def get(self, path):
        if path.startswith("/api/models/"):
            repo = path.removeprefix("/api/models/").split("/revision/")[0].split("/tree/")[0]
            if "/tree/" in path and repo in self.files:
                content = self.files[repo].items()
                return 200, [{"type": "file", "path": f, "size": len(body), "oid": "0"} for f, body in content]
            if repo in self.files:
                return 200, {"id": repo, "sha": "0" * 40, "siblings": [{"rfilename": f} for f in self.files[repo]]}
        return 404, {"error": "Repository not found"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def _answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self):
        self._answer(*self.hub.post(self.path.split("?")[0], self._body(), self))

    def do_PUT(self):
        self._answer(*self.hub.put(self.path, self._body()))

    def do_GET(self):
        self._answer(*self.hub.get(self.path.split("?")[0]))

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def serve():
    """Run the stand-in on a free port of loopback; yields the Hub, with its `url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
