"""`torchrun -m real ...`."""

import os
import sys
import traceback

from real.cli import main

if __name__ == "__main__":
    try:
        status = main()
    except Exception:  # noqa: BLE001 - said, then the process ends with it
        rank = os.environ.get("RANK", "0")
        # Ranks share standard error: one write each, so that they do not mix.
        sys.stderr.write(f"real: rank {rank} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        # Without the usual end, in which communicators wait for ranks that do not come.
        os._exit(1)
    raise SystemExit(status)
