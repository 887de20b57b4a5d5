"""Run one rank of a model that is cut: load its part, and do what rank 0 says. Started by runtime/ranks.py."""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys

from ridgeline.errors import RankError, RidgelineError
from ridgeline.runtime.follow import follow
from ridgeline.runtime.load import load_model
from ridgeline.runtime.rank_group import RankGroup, shared_bytes
from ridgeline.runtime.ranks import READY


def main() -> None:
    """Run a rank. Arguments: the rank, the number of ranks, and file numbers of the memory and of each socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # for rank 0, which ends this process when it is done
        signal.signal(number, signal.SIG_IGN)
    rank, size, file = map(int, sys.argv[1:4])
    logging.basicConfig(format=f"rank {rank}: %(message)s")
    memory = mmap.mmap(file, shared_bytes(size))
    os.close(file)
    named = (each.split(":") for each in sys.argv[4:])
    group = RankGroup(rank, size, memory, {int(other): socket.socket(fileno=int(each)) for other, each in named})
    try:
        name, options = group.broadcast()
        loaded = load_model(name, options, group=group)
        group.gather(READY)
        follow(loaded)
    except RankError:
        return  # rank 0 has closed the group, or says what happened
    except RidgelineError as e:
        group.close(f"rank {rank} of {size}: {e}")
    except Exception as e:  # a bug here: the others wait for this rank, and have to hear of it
        logging.getLogger(__name__).exception("the rank could not go on")
        group.close(f"rank {rank} of {size} could not go on ({type(e).__name__}: {e})")


if __name__ == "__main__":
    main()
