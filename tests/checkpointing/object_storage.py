"""An S3 server on the loopback interface, and what is in it."""

import contextlib
import json

import boto3
import requests
from moto.server import ThreadedMotoServer

BUCKET = "training"


class ObjectStorage:
    """moto's HTTP server with one bucket; `environment` is what s3fs needs to find it."""

    def __init__(self):
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }
        self.client = boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        requests.post(
            f"http://{host}:{port}/moto-api/reset", timeout=30
        )  # its buckets outlive a server of this process
        self.client.create_bucket(Bucket=BUCKET)

    def keys(self, prefix=""):
        """Return the names of all objects below a prefix, without it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(entry["Key"].removeprefix(prefix) for page in pages for entry in page.get("Contents", ()))

    def read(self, key):
        return self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def complete(self, prefix):
        """Return the names of the checkpoints with a manifest, after comparing their files with it."""
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
