"""The `hf-fsdp preflight` command. The checks are imported only when it runs, so `--help` is fast."""

import os
from pathlib import Path
from typing import Annotated, Optional

import typer


def preflight(
    num_nodes: Annotated[Optional[int], typer.Option(min=1, help="Number of nodes in the job.")] = None,
    node_rank: Annotated[Optional[int], typer.Option(help="Index of this node, from 0.")] = None,
    nproc_per_node: Annotated[int, typer.Option(min=1, help="Number of ranks per node.")] = 1,
    master_addr: Annotated[Optional[str], typer.Option(help="Host name or IP address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(help="Port on node 0 that the job will use.")] = 29500,
    template: Annotated[Optional[Path], typer.Option(help="The job's Accelerate config: a name or a file.")] = None,
    config: Annotated[Optional[Path], typer.Option(help="The job's recipe: a name or a file.")] = None,
    output_dir: Annotated[
        Optional[Path], typer.Option(help="The run's output directory. Default: the recipe's.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for all nodes to join.")] = 60.0,
) -> None:
    """Check that the nodes of a job can work together.

    Run it on each node with --num-nodes, --node-rank and --master-addr. Under a launcher, leave these out.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # before importing torch, to suppress C++ stack traces
    from hf_fsdp_recipes.tools.preflight.preflight import Job, check_node, find_node

    node = find_node(num_nodes, node_rank, nproc_per_node, master_addr, master_port)
    if node is not None:
        check_node(node, Job(template, config, output_dir), timeout)
