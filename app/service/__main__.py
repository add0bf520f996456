"""`python -m chatkv.app.service`: one service for this home. A second start says who serves already, and exits 0."""

from __future__ import annotations

import argparse
import logging
import os
import sys

from chatkv.app.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 served or attached, 1 refused with a message, 3 the asked-for port is taken, 130 Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m chatkv.app.service")
    parser.add_argument("--detached", action="store_true", help="no terminal: log to the file only")
    parser.add_argument("--port", type=int, help="TCP port; must be free")
    parser.add_argument("--model", help="an installed model to load")
    options = parser.parse_args(arguments)
    try:
        from .process import PortTakenError, run
    except KeyboardInterrupt:
        return 130
    try:
        return run(is_detached=options.detached, port=options.port, model=options.model)
    except KeyboardInterrupt:  # Ctrl-C before the loop took it over.
        return 130
    except PortTakenError as error:
        print(error, file=sys.stderr)
        return 3
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed. A load that was abandoned may still run in native code, which a normal exit would tear down
    # under it.
    os._exit(status)
