"""A server that answers the calls of huggingface_hub which create, fill and read repositories of models and data."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

COMMIT = "c0ffee" * 6 + "beef"


@dataclass
class Hub:
    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # by OWNER/NAME/path, data sets by datasets/OWNER/...
    cuts: list[str] = field(default_factory=list)  # files whose next answer ends in the middle, one for each time
    uploaded: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256
    created: list[tuple[str, bool]] = field(default_factory=list)  # names, and whether they are private
    refuse: int = 0  # the status of every answer, if it is not 0


class _Answers(BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.hub.refuse:
            self.answer(self.hub.refuse, {"error": "Invalid username or password."})
        elif parts[-1] == "create":
            asked = json.loads(body)
            private = asked.get("visibility", "private" if asked.get("private") else "public")  # by version
            exists = asked["name"] in [name for name, _ in self.hub.created]
            if not exists:
                self.hub.created.append((asked["name"], private == "private"))
            url = f"{self.hub.address}/{asked.get('organization', 'me')}/{asked['name']}"
            self.answer(409 if exists else 200, {"url": url})
        elif parts[-1] == "validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        elif "preupload" in parts:
            files = [{"path": f["path"], "shouldIgnore": False} for f in json.loads(body)["files"]]
            large = [f | {"uploadMode": "lfs" if f["path"].endswith("tensors") else "regular"} for f in files]
            self.answer(200, {"files": large})
        elif parts[-1] == "batch":
            objects = json.loads(body)["objects"]
            links = [{"upload": {"href": f"{self.hub.address}/put/{each['oid']}"}} for each in objects]
            answers = [each | {"actions": link} for each, link in zip(objects, links, strict=True)]
            self.answer(200, {"transfer": "basic", "objects": answers})
        elif "commit" in parts:
            self.commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()])
        else:
            self.answer(404, {"error": self.path})

    def commit(self, repository: str, lines: list[dict]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.files[f"{repository}/{value['path']}"] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.files[f"{repository}/{value['path']}"] = self.hub.uploaded[value["oid"]]
        address = f"{self.hub.address}/{repository}/commit/{COMMIT}"
        self.answer(200, {"commitUrl": address, "commitOid": COMMIT, "pullRequestUrl": None})

    def do_PUT(self) -> None:
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers["Content-Length"]))
        self.hub.uploaded[hashlib.sha256(data).hexdigest()] = data
        self.answer(200, {})

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0].strip("/"))
        name = re.sub(f"/resolve/(main|{COMMIT})/", "/", path)
        listed = re.fullmatch(r"api/(datasets/[^/]+/[^/]+)(?:/(revision|tree)/[^/]+)?/?(.*)", path)
        data = self.hub.files.get(name)
        if self.hub.refuse:
            self.answer(self.hub.refuse, {"error": "Invalid username or password."})
        elif listed and any(file.startswith(f"{listed[1]}/") for file in self.hub.files):
            self.describe(*listed.groups())
        elif data is None:
            kind = "RepoNotFound" if path.startswith("api/") else "EntryNotFound"
            self.answer(404, {"error": "not found"}, {"X-Error-Code": kind, "X-Repo-Commit": COMMIT})
        else:
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            asked, size = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")), len(data)
            if asked:
                data = data[int(asked[1]) : int(asked[2]) + 1]
                headers["Content-Range"] = f"bytes {asked[1]}-{int(asked[1]) + len(data) - 1}/{size}"
            cut = self.command == "GET" and name in self.hub.cuts
            if cut:
                self.hub.cuts.remove(name)
                self.close_connection = True
            self.send(206 if asked else 200, data, headers, sent=len(data) // 2 if cut else len(data))

    def describe(self, repository: str, what: str | None, folder: str) -> None:
        """A data set's repository, or the files in one of its folders, all of them large ones."""
        begin = f"{repository}/{folder}/" if folder else f"{repository}/"
        files = {file[len(repository) + 1 :]: data for file, data in self.hub.files.items() if file.startswith(begin)}
        if what != "tree":
            self.answer(200, {"id": repository.removeprefix("datasets/"), "sha": COMMIT, "siblings": []})
        elif not files:
            self.answer(404, {"error": "no such entry"}, {"X-Error-Code": "EntryNotFound"})
        else:
            sizes = [(path, hashlib.sha256(data).hexdigest(), len(data)) for path, data in files.items()]
            large = [(path, size, {"oid": oid, "size": size, "pointerSize": 130}) for path, oid, size in sizes]
            entry = {"type": "file", "oid": "0" * 40}
            self.answer(200, [entry | {"path": path, "size": size, "lfs": lfs} for path, size, lfs in large])

    do_HEAD = do_GET

    def answer(self, status: int, body: dict, headers: dict[str, str] | None = None) -> None:
        self.send(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, data: bytes, headers: dict[str, str], sent: int | None = None) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def serve() -> Iterator[Hub]:
    """An empty hub on a free port of this machine."""
    hub = Hub()
    handler = type("Answers", (_Answers,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield hub
        server.shutdown()
        thread.join()
