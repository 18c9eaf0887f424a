"""As much of the Hugging Face Hub as its client needs to share a model, on this machine and in memory."""

import base64
import hashlib
import json
import re
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import patch
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants


class HubServer(ThreadingHTTPServer):
    """A Hub with one user, "you". Writing, and all that concerns private repositories, needs the user's token.

    Example:
        >>> with HubServer(token="hf_secret") as hub:
        ...     HfApi(endpoint=hub.url, token="hf_secret").create_repo("you/name")
    """

    daemon_threads = True

    def __init__(self, token):
        super().__init__(("127.0.0.1", 0), Handler)
        self.token = token
        self.private = {}  # repository -> whether it is private
        self.commits = {}  # repository -> list of (commit id, message, {path: content})
        self.objects = {}  # SHA-256 -> content of a large file
        self.requests = []  # ("GET", "/you/name/resolve/main/config.json", status)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @contextmanager
    def in_use(self, token):
        """In this process this is the Hub, and the user is logged in with the token."""
        settings = {"ENDPOINT": self.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
        with ExitStack() as stack:
            for name, value in settings.items():
                stack.enter_context(patch.object(constants, name, value))
            stack.enter_context(patch.dict("os.environ", HF_TOKEN=token))
            yield self

    def files(self, repo):
        """Path -> content in the newest commit."""
        return self.commits[repo][-1][2]

    def commit(self, repo, message, files):
        description = json.dumps([repo, message, len(self.commits[repo])]).encode()
        self.commits[repo].append((hashlib.sha1(description).hexdigest(), message, files))
        return self.commits[repo][-1][0]


def is_large(path):
    return path.endswith(".safetensors")


def etag(path, content):
    """What identifies a content: its SHA-256 for large files, else its git blob id."""
    if is_large(path):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Refusal(Exception):
    """An answer with an error status; `code` goes into the header by which the client knows what is missing."""

    def __init__(self, status, code):
        super().__init__(code)
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ROUTES = {
        ("POST", r"/api/repos/create"): "create",
        ("POST", r"/api/validate-yaml"): "validate",
        ("GET", r"/api/whoami-v2"): "whoami",
        ("GET", r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?"): "info",
        ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)"): "tree",
        ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)"): "preupload",
        ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)"): "accept_commit",
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch"): "batch",
        ("PUT", r"/objects/(\w+)"): "store",
        ("GET", r"/objects/(\w+)"): "fetch",
        ("GET", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)"): "resolve",
    }

    def handle_request(self):
        self.body = self.read_body()
        path = urlsplit(self.path).path
        method = "GET" if self.command == "HEAD" else self.command
        try:
            for (verb, pattern), name in self.ROUTES.items():
                match = re.fullmatch(pattern, path)
                if match and verb == method:
                    return getattr(self, name)(*(part and unquote(part) for part in match.groups()))
            raise Refusal(404, "EntryNotFound")
        except Refusal as refusal:
            self.answer(refusal.status, {"error": refusal.code}, {"X-Error-Code": refusal.code})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def answer(self, status, content, headers=None):
        """Send a dict or list as JSON, or bytes, of which a Range header asks for a part."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        headers = {"Content-Type": "application/octet-stream" if body is content else "application/json"} | (
            headers or {}
        )
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if status == 200 and wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or len(body) - 1), len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        self.server.requests.append((self.command, self.path, status))
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass

    # -- Who may do what ----------------------------------------------------------------------------------------------

    def is_user(self):
        return self.headers.get("Authorization") == f"Bearer {self.server.token}"

    def need_user(self):
        if not self.is_user():
            raise Refusal(401, "Unauthorized")

    def open(self, repo, revision="main"):
        """Commit id and files of a repository at a revision."""
        if repo not in self.server.commits or self.server.private[repo] and not self.is_user():
            raise Refusal(404 if self.is_user() else 401, "RepoNotFound")
        for commit, _, files in reversed(self.server.commits[repo]):
            if revision in ("main", commit):
                return commit, files
        raise Refusal(404, "RevisionNotFound")

    # -- Repositories -------------------------------------------------------------------------------------------------

    def whoami(self):
        self.need_user()
        self.answer(200, {"type": "user", "name": "you", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self):
        self.need_user()
        request = json.loads(self.body)
        repo = f"{request.get('organization') or 'you'}/{request['name']}"
        if not repo.startswith("you/"):
            raise Refusal(403, "Forbidden")
        known = repo in self.server.commits
        if not known:
            self.server.private[repo] = request.get("private") or request.get("visibility") == "private"
            self.server.commits[repo] = []
            self.server.commit(repo, "initial commit", {})
        self.answer(409 if known else 200, {"url": f"{self.server.url}/{repo}", "name": repo})

    def info(self, repo, revision):
        commit, files = self.open(repo, revision or "main")
        siblings = [{"rfilename": path} for path in sorted(files)]
        private = self.server.private[repo]
        self.answer(200, {"id": repo, "modelId": repo, "sha": commit, "private": private, "siblings": siblings})

    def tree(self, repo, revision):
        _, files = self.open(repo, revision)
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": etag("", content)}
            | (
                {"lfs": {"oid": etag(path, content), "size": len(content), "pointerSize": 130}}
                if is_large(path)
                else {}
            )
            for path, content in sorted(files.items())
        ]
        self.answer(200, entries)

    # -- Uploads ------------------------------------------------------------------------------------------------------

    def validate(self):
        front = re.match(r"---\n(.*?)\n---", json.loads(self.body)["content"], flags=re.S)
        warnings = [] if front else [{"message": "empty or missing yaml metadata in repo card"}]
        self.answer(200, {"errors": [], "warnings": warnings})

    def preupload(self, repo, revision):
        self.need_user()
        _, files = self.open(repo, revision)
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        answers = [
            {"path": path, "uploadMode": "lfs" if is_large(path) else "regular", "shouldIgnore": False}
            | ({"oid": etag(path, files[path])} if path in files else {})
            for path in paths
        ]
        self.answer(200, {"files": answers})

    def batch(self, repo):
        self.need_user()
        self.open(repo)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.server.objects:
                wanted["actions"] = {"upload": {"href": f"{self.server.url}/objects/{wanted['oid']}"}}
        self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise Refusal(400, "BadDigest")
        self.server.objects[oid] = self.body
        self.answer(200, b"")

    def accept_commit(self, repo, revision):
        self.need_user()
        _, files = self.open(repo, revision)
        files, message = dict(files), ""
        for line in map(json.loads, self.body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise Refusal(400, f"unknown operation {line['key']}")
        commit = self.server.commit(repo, message, files)
        self.answer(200, {"commitOid": commit, "commitUrl": f"{self.server.url}/{repo}/commit/{commit}"})

    # -- Downloads ----------------------------------------------------------------------------------------------------

    def resolve(self, repo, revision, path):
        commit, files = self.open(repo, revision)
        if path not in files:
            raise Refusal(404, "EntryNotFound")
        content = files[path]
        tag = f'"{etag(path, content)}"'
        headers = {"X-Repo-Commit": commit, "ETag": tag, "Accept-Ranges": "bytes"}
        if is_large(path):  # on another host, or the client would look for a commit in the headers there
            headers |= {"X-Linked-ETag": tag, "X-Linked-Size": len(content)}
            headers["Location"] = f"http://localhost:{self.server.server_port}/objects/{tag.strip(chr(34))}"
            self.answer(302, b"", headers)
        else:
            self.answer(200, content, headers)

    def fetch(self, oid):
        if oid not in self.server.objects:
            raise Refusal(404, "EntryNotFound")
        self.answer(200, self.server.objects[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})
