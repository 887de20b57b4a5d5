"""Serve an application of Ray Serve on this machine until the standard input ends. It prints its address."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import yaml


def main() -> None:
    """Serve the first application of the file that the first argument names, with `args.serve` from the second one."""
    from ridgeline.cli.ray_serve import build
    from ridgeline.dist.ray_cluster import LOCAL, connect

    leave = connect(LOCAL)
    from ray import serve  # it reads the environment that `connect` sets

    try:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        (given,) = yaml.safe_load(Path(sys.argv[1]).read_text())["applications"]
        serve.run(build({"serve": sys.argv[2]}), name=given["name"], route_prefix=given["route_prefix"])
        print(f"http://127.0.0.1:{port}", flush=True)
        sys.stdin.read()
        serve.shutdown()
    finally:
        leave()


if __name__ == "__main__":
    main()
