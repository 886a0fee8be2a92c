"""Starts one process per local rank to describe its device and measure bandwidth.

Workers are separate processes, so that the preflight can report one that crashes and kill one that hangs in a collective.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import IO, Any

from hf_fsdp_recipes.errors import PreflightError
from hf_fsdp_recipes.tools.preflight import addresses
from hf_fsdp_recipes.tools.preflight.rendezvous import Rendezvous

_POLL_SECONDS = 0.1


class Workers:
    """The workers of one node. They report through the shared store."""

    def __init__(self, rendezvous: Rendezvous, on_cpu: bool) -> None:
        self._rendezvous, info = rendezvous, rendezvous.info
        self._started: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []  # processes and their output
        command = [sys.executable, "-m", "hf_fsdp_recipes.tools.preflight.bandwidth", json.dumps(asdict(info))]
        environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        for local_rank in range(info.ranks_per_node):
            log = tempfile.TemporaryFile()  # noqa: SIM115, closed in close()
            arguments = [f"{rendezvous.prefix}/workers", str(local_rank), str(int(on_cpu))]
            process = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
            self._started.append((process, log))

    def close(self) -> None:
        """Kill the workers."""
        for process, log in self._started:
            process.kill()
            process.wait()
            log.close()

    def start_measuring(self, timeout_seconds: float) -> None:
        """Have the workers of all nodes measure bandwidth. Node 0 calls this."""
        self._rendezvous.store.set("workers/measure", str(timeout_seconds))

    def wait_for_reports(self, key: str, stage: str, deadline: float) -> list[Any]:
        """Return what each worker reported under `key` before the deadline, or [] if `stage` failed on another node."""
        reports = []
        info, store = self._rendezvous.info, self._rendezvous.store
        for local_rank, (process, log) in enumerate(self._started):
            store_key = f"workers/{key}/{info.node_rank * info.ranks_per_node + local_rank}"
            while True:
                exit_status = process.poll()  # read before the store: a worker may report and exit in between
                if store.check([store_key]):
                    break
                if exit_status is not None:
                    raise self._error(local_rank, f"died with exit status {exit_status} while {stage}{_last_line(log)}")
                if time.monotonic() > deadline:
                    raise self._error(local_rank, f"hung while {stage}{_last_line(log)}")
                if self._rendezvous.has_failed(stage):
                    return []
                time.sleep(_POLL_SECONDS)
            report = json.loads(store.get(store_key))
            if "error" in report:
                raise self._error(local_rank, f"failed while {stage}: {report['error'].rstrip('.')}")
            reports.append(report["value"])
        return reports

    def _error(self, local_rank: int, problem: str) -> PreflightError:
        interface = addresses.find_interface_to(self._rendezvous.info.master_address)
        return PreflightError(
            f"local rank {local_rank} {problem}. If it used the wrong network interface, export "
            f"GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}, the interface that leads to the master address."
        )


def _last_line(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return f" (last output: {lines[-1].strip()[:200]})" if lines else ""
