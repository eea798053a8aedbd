"""Adding a model in a process of its own, which tells how far it is: `python -m server.adding < REQUEST`.

Checking and packing need torch and a processor, and may need much memory; the daemon has better things to do with all
three. Every line of standard output is JSON, for what libraries print goes to standard error: `{"done": bytes, "total":
bytes}`, and at the end `{"added": name}` or `{"error": sentence, "kind": class}`.
"""

from __future__ import annotations

import json
import os
import sys

NICENESS = 10


def main() -> None:
    os.nice(NICENESS)
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(**what: object) -> None:
        print(json.dumps(what), file=lines, flush=True)

    request = json.load(sys.stdin)
    from swapper.errors import GswapdError
    from swapper.store import Store
    from worker.add import add_model

    try:
        add_model(
            Store(request["store"]),
            request["source"],
            request["name"],
            dtype=request["dtype"],
            tp=request["tp"],
            pp=request["pp"],
            progress=lambda done, total: tell(done=done, total=total),
        )
        tell(added=request["name"])
    except GswapdError as error:
        tell(error=str(error), kind=type(error).__name__)
    os._exit(0)  # torch takes a second to put its things away


if __name__ == "__main__":
    main()
